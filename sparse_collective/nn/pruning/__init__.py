"""Choose the stored blocks of layers: importance scores, pruning, pattern changes, 2:4 sparsity."""
