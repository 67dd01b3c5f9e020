"""In which order work tiles of different lengths come, so that all workers finish together."""
