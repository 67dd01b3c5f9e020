"""SDDMM: a dense GEMM of which only the stored blocks of a pattern are computed."""
