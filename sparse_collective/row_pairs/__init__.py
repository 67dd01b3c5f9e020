"""Blocks 64 high: a tile is two block rows, which share the columns that both have."""
