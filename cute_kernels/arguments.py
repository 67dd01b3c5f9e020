"""GemmArgs, the arguments of gemm."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runtime.arguments import splitter, terms_of


class GemmArgs(NamedTuple):
    """The arguments of a call, as gemm documents them. Optional tensors are in the order of the kernels' arguments."""

    a: Any  # a tensor or a Sparse24
    b: Tensor
    out: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    scale_out: Tensor | None = None
    amax: Tensor | None = None  # memory for it, written by the call
    activation: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    out_dtype: torch.dtype | None = None
    epilogue: Callable | str | None = None  # a string: the name of a function in a graph
    accumulation_dtype: torch.dtype | None = None
    precision: str | None = None
    use_fast_accum: bool = False
    source: Any = None  # KTileSource

    @property
    def gated(self) -> bool:
        """See EpilogueSpec."""
        return False

    @property
    def tensors(self) -> tuple:
        """All arguments that are tensors or None, operands first."""
        return self[:9]

    @property
    def inputs(self) -> tuple:
        """The tensors that the call reads."""
        return *self[:2], *self[3:8]


RETURNS = "a, b, out, amax, alpha, beta"
KEY = {"a": "a.numel()", "b": "b.numel()", "alpha": "type(alpha), alpha == 1.0", "beta": "type(beta), beta == 0"}
split = splitter(GemmArgs, RETURNS, operands="a, b", **KEY)
OP_TERMS = tuple(name for name in GemmArgs._fields if name not in ("a", "b", "out", "amax", "source"))
TERMS = terms_of(GemmArgs, OP_TERMS)  # of the registered ops, in schema syntax
