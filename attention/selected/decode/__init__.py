"""Decode of selected_attention: a few query tokens, each with its own list of blocks of a KV cache."""
