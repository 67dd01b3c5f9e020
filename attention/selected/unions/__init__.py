"""Union tiles: a kernel that makes the union of the lists of each query tile, and bits of membership."""
