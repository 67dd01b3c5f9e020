"""Types of public arguments, for type checkers, and keyword arguments of functions whose return type depends on
return_lse."""

from collections.abc import Callable, Sequence
from typing import TypedDict

from torch import Tensor

Window = Sequence[int | None] | None  # (left, right)


class BlockSparseOptions(TypedDict, total=False):
    """Keyword arguments of block_sparse_attention, besides return_lse."""

    causal: bool
    softcap: float | None
    scale: float | None
    out: Tensor | None
    sinks: Tensor | None
    deterministic: bool | None
    score_mod: Callable | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    use_fast_accum: bool
    q_offset: int | None
    k_offset: int | None


class AttentionOptions(BlockSparseOptions, total=False):
    """Keyword arguments of attention, besides return_lse."""

    window_size: Window
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None


class SelectedOptions(TypedDict, total=False):
    """Keyword arguments of selected_attention, besides return_lse."""

    causal: bool
    softcap: float | None
    scale: float | None
    sinks: Tensor | None
    deterministic: bool | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
