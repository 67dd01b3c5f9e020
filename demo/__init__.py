"""The demonstration: a real feed-forward layer, pruned to blocks and run on the project's kernels."""
