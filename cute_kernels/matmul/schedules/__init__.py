"""Schedules of the GEMM kernels: which warps load, compute and store, and in what order."""
