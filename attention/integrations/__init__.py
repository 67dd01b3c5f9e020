"""The kernels inside of other libraries. Each module here needs the library whose name it has."""
