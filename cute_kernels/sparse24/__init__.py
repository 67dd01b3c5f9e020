"""Products with a left operand of which two of every four neighbours along K are zero (2:4 structured sparsity)."""
