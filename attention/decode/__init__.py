"""The decode kernels: short Q against long K and V, which may be paged."""
