"""Block masks of shards: kernels that deal the tiles of a mask to processes, and list what each of them needs."""
