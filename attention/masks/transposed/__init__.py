"""Transposed lists of block masks: kernels for masks whose lists are new in each call."""
