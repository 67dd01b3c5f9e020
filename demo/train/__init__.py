"""Training with block-sparse layers: a byte-level transformer from scratch, and a pruned MiniLM that recovers."""
