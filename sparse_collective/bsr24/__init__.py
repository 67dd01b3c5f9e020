"""Block-sparse matrices whose stored blocks are 2:4 sparse, and their products.

matrix   Bsr24, the compressed form of a BsrMatrix
config   which kernels there are, what they ask, what they cost; family registers them
gemm     the source of K-tiles with metadata, and the product around it
"""
