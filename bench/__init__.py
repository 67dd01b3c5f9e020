"""Benchmarks: ours and the best peers side by side, in one interleaved run."""
