"""The decoding kernels: few queries against long keys and values, which may lie in pages."""
