"""Blocks 16 to 64 high: a group of 192 rows walks over the columns that any of its blocks needs."""
