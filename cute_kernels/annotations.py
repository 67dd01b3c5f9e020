"""Types of public arguments, for type checkers: strings that are accepted, and keyword arguments of functions whose
return type depends on one of them."""

from collections.abc import Callable
from typing import Literal, TypedDict

import torch
from torch import Tensor

from .source import KTileSource

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Precision = Literal["tf32", "3xtf32"]  # of FP32 operands
Path = Literal["sm_80", "sm_90"]
ScaleKind = Literal["tensor", "row", "column", "head", "tokens", "1x128", "128x128"]  # of quantize
BlockScaleKind = Literal["block", "tensor"]  # of BsrMatrix.quantize


class ProductOptions(TypedDict, total=False):
    """Keyword arguments of gemm, bsr_matmul and bsr_linear, besides return_amax."""

    bias: Tensor | None
    activation: Activation | None
    out: Tensor | None
    out_dtype: torch.dtype | None
    epilogue: Callable[[Tensor], Tensor] | None
    use_fast_accum: bool
    accumulation_dtype: torch.dtype | None
    scale_out: Tensor | None
    precision: Precision | None


class GemmOptions(ProductOptions, total=False):
    """Keyword arguments of gemm, besides return_amax."""

    residual: Tensor | None
    alpha: float
    beta: float
    scale_a: Tensor | None
    scale_b: Tensor | None
    source: KTileSource | None
