"""Flash attention, dense and block-sparse, on the iterators of `cute_kernels`: on CPU tensors so far."""

from .ops import attention

__all__ = ["attention"]
