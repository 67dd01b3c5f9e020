"""The forward kernels: many queries, on the sm_80 and sm_90 paths."""
