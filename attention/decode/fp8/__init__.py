"""Decode from an FP8 KV cache."""
