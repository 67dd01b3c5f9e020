"""Kernels of select_blocks: the exact top k of rows of scores, and an indexer's scores of KV blocks."""
