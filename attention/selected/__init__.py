"""Attention to selected KV blocks: every query token has its own list of blocks, and the selection of blocks."""
