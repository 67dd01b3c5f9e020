"""8-bit floats and their scales by kernels that read their numbers once."""
