"""Keyword arguments of functions whose return type depends on return_amax, for type checkers."""

from torch import Tensor

from cute_kernels.annotations import ProductOptions


class MatmulOptions(ProductOptions, total=False):
    """Keyword arguments of bsr_matmul, besides return_amax."""

    residual: Tensor | None
    scale_b: Tensor | None


class LinearOptions(ProductOptions, total=False):
    """Keyword arguments of bsr_linear, besides return_amax."""

    scale_x: Tensor | None
