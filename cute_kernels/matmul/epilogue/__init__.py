"""Epilogues of the GEMM kernels: from accumulators to stored outputs."""
