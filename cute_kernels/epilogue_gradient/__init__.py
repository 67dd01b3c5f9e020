"""The gradient of what a product's epilogue does to its accumulators: dz = dy f'(z), and the sums of dz's columns."""
