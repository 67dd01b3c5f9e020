"""What the kernels of products and of attention are made of."""
