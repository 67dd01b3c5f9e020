"""What stands between a call and a kernel: compiling, caching, inspecting."""
