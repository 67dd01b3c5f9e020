"""The dense product and the kernel that block-sparse ones use with a source of their own."""
