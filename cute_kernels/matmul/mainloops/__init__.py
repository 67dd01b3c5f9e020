"""Mainloops of the GEMM kernels."""
