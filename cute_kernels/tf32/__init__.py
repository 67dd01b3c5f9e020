"""fp32 operands as products of TF32 want them: contiguous along K, as they are or in parts side by side, by kernels."""
