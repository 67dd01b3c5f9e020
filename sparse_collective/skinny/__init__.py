"""Products with at most 16 columns, limited by the reading of W."""
