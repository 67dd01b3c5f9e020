"""Block-sparse matrices whose stored blocks are 2:4 sparse, and their GEMM kernels.

matrix   Bsr24, the compressed form of a BsrMatrix
config   configurations, their legality and cost; family registers the kernels
gemm     the source of K-tiles with metadata, and the GEMM around it
"""
