"""Dense and block-sparse attention on the mainloop of `cute_kernels`: still to come."""
