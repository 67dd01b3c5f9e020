"""Runtime of the kernels: compilation, caches, dispatch, inspection."""
