"""The block-sparse GEMM: the dense kernels with a BSR source of K-tiles."""
