"""A package for Hugging Face's kernels hub, made of the sources of the three packages: `python -m hub OUT`."""
