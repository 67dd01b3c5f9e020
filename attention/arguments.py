"""The arguments of one attention call, as an object that is passed from the public functions to the kernels.

An argument is declared once, as a field of AttentionArgs. Its place among the fields says what it is: the registered
ops' schema, the key and the tensors of the plan cache, and what autograd keeps for backward derive from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .annotations import Window


class AttentionArgs(NamedTuple):
    """Arguments of attention, and with a block_mask of block_sparse_attention; see ops."""

    q: Tensor
    k: Tensor
    v: Tensor
    # Optional tensors (OPTIONAL), whose metadata is part of a plan's key
    out: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    # Functions of positions, with the tensors that they read; below ops a score_mod is a BoundScore
    block_mask: Any = None
    score_mod: Any = None
    # Values (VALUES), which are part of a plan's key
    causal: bool = False
    window_size: Window = None
    softcap: float | None = None
    scale: float | None = None
    return_lse: bool = False
    deterministic: bool | None = None
    use_fast_accum: bool = False
    # Numbers that kernels are given in each call, so that a plan serves all of them
    q_offset: int | None = None
    k_offset: int | None = None

    @property
    def op(self) -> str:
        """Name of the public function, for errors."""
        return "attention" if self.block_mask is None else "block_sparse_attention"

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None or self.cu_seqlens_k is not None

    @property
    def descales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Dequantization scales of FP8 q, k and v."""
        return self.q_descale, self.k_descale, self.v_descale

    def with_lse(self) -> AttentionArgs:
        """The same call with return_lse=True."""
        return AttentionArgs._make((*self[:_LSE], True, *self[_LSE + 1 :]))

    def given(self, function: Callable) -> dict[str, Any]:
        """The arguments that a function takes, by name, except those with their default."""
        names, defaults = function.__kwdefaults__ or {}, self._field_defaults
        return {n: x for n in names if n in defaults and (x := getattr(self, n)) is not defaults[n]}


NAMES = AttentionArgs._fields
_LSE = NAMES.index("return_lse")
OPTIONAL = slice(NAMES.index("out"), NAMES.index("block_mask"))
VALUES = slice(NAMES.index("causal"), NAMES.index("q_offset"))
ABSENT = (type(None),) * len(NAMES[OPTIONAL])  # types of the optional tensors of a call that passes none

# Arguments of the registered ops after the operands, the mask and the score_mod; and those that backward reads
TERMS = tuple(name for name in (*NAMES[OPTIONAL], *NAMES[VALUES], "q_offset", "k_offset") if name != "out")
FORWARD_ONLY = {
    "seqused_k", "page_table", "q_descale", "k_descale", "v_descale", "return_lse", "use_fast_accum",
}  # fmt: skip
BACKWARD_TERMS = tuple(name for name in TERMS if name not in FORWARD_ONLY)
