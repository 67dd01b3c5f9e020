"""Copies of FP32 operands for TF32 GEMMs, contiguous along K: unchanged, or as TF32 parts side by side."""
