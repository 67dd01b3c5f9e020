"""The forward kernels for the sm_80 and sm_90 paths."""
