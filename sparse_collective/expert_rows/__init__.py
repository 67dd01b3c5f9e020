"""Rows of a mixture of experts, read from the memory of all ranks: to the layout of experts, and back to tokens."""
