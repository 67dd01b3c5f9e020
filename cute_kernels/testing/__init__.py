"""Reference results in FP64, error bounds and random operands, shared by tests, benchmarks and the tuner."""
