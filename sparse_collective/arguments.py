"""BsrArgs, the arguments of the block-sparse GEMMs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.runtime.arguments import splitter, terms_of

GATED = "bsr_gated_linear"


class BsrArgs(NamedTuple):
    """The arguments of a call, as bsr_matmul documents them."""

    op: str
    W: Any  # BsrMatrix, Bsr24 or torch.sparse_bsr tensor
    b: Tensor  # of a linear layer x
    out: Tensor | None = None
    expert_ids: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    scale_b: Tensor | None = None  # of a linear layer scale_x
    scale_out: Tensor | None = None
    amax: Tensor | None = None  # memory for it, written by the call
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    epilogue: Callable | str | None = None  # a string: the name of a function in a graph
    accumulation_dtype: torch.dtype | None = None
    precision: str | None = None
    use_fast_accum: bool = False

    @property
    def alpha(self) -> float:
        return 1.0

    @property
    def beta(self) -> float:
        return 1.0

    @property
    def gated(self) -> bool:
        """True if the epilogue computes a gate; see EpilogueSpec."""
        return self.op == GATED

    @property
    def linear(self) -> bool:
        """True for a linear layer, whose b is x (..., K) and whose result is (..., M)."""
        return self.op != "bsr_matmul"

    @property
    def operand(self) -> str:
        """The public name of b."""
        return "x" if self.linear else "b"

    @property
    def tensors(self) -> tuple:
        """All arguments after W that are tensors or None."""
        return self[2:10]

    @property
    def inputs(self) -> tuple:
        """The tensors that the call reads, without W."""
        return self.b, *self[4:9]


split = splitter(
    BsrArgs,
    "op, W, b, out, expert_ids, amax",
    operands="b, W.stored",
    indices="*W.indices",
    tables=("expert_ids",),
    last="W.stored_scales",
    W="W.form, W.pattern.stats",
    b="b.numel()",
)
OP_TERMS = tuple(name for name in BsrArgs._fields if name not in ("op", "W", "b", "out", "amax"))
TERMS = terms_of(BsrArgs, OP_TERMS)  # of the registered ops, in schema syntax
