"""The gate of a feed-forward layer in training: h = act(g) * u of z, and the gradient of z, a kernel each."""
