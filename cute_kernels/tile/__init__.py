"""Building blocks shared by the GEMM and attention kernels."""
