"""8-bit floats and their scales by kernels that read their numbers once, or
twice where registers do not hold what shares a scale."""
