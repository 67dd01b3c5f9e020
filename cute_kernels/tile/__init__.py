"""What all kernels are made of, below any one kernel."""
