"""FP8 quantization kernels. They read x once, or twice if a group with one scale does not fit in registers."""
