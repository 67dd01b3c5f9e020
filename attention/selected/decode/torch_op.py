"""selected_attention with a KV cache as a registered op, for torch.compile: one graph serves all lengths and lists."""

import torch
from torch import Tensor

from cute_kernels.dtypes import accumulator
from cute_kernels.runtime.library import define

from .dispatch import CacheArgs, attend

TENSORS = ("q", "k", "v", "seqused_k", "page_table", "sinks", "k_descale", "v_descale")
SCALARS = ("causal", "softcap", "scale", "return_lse")


def _run(indices, block_size, *given) -> tuple[Tensor, Tensor]:
    args = CacheArgs(**dict(zip((*TENSORS, *SCALARS), given, strict=True)))
    out, lse = attend(args, indices, block_size)
    return out, out.new_empty(0, dtype=accumulator(out.dtype)) if lse is None else lse


def _fake(indices, block_size, q, k, v, *others) -> tuple[Tensor, Tensor]:
    *_, return_lse = others
    lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=accumulator(q.dtype))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


define(
    "attention::selected_attention_cached",
    "(Tensor indices, SymInt block_size, Tensor q, Tensor k, Tensor v, Tensor? seqused_k, Tensor? page_table, "
    "Tensor? sinks, Tensor? k_descale, Tensor? v_descale, bool causal, float? softcap, float? scale, bool return_lse) "
    "-> (Tensor, Tensor)",
    _run, _fake,
)  # fmt: skip


def traced(args: CacheArgs, indices: Tensor, block_size: int) -> tuple[Tensor, Tensor | None]:
    """dispatch.attend in a torch.compile trace, and for calls that go through the dispatcher."""
    given = [getattr(args, name) for name in (*TENSORS, *SCALARS)]
    out, lse = torch.ops.attention.selected_attention_cached(indices, block_size, *given)
    return out, lse if args.return_lse else None
