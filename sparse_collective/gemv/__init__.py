"""Block-sparse GEMM with at most 16 columns (GEMV and small batches), bound by reading W."""
