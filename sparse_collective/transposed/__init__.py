"""The index of a transposed view."""
