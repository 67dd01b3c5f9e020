"""Variable-length attention over packed sequences (cu_seqlens) for ops.attention: its checks, plan and reference."""

from typing import Any

import torch

from cute_kernels import checks as common
from cute_kernels.dtypes import accumulator

from . import checks, fp8, reference
from . import plan as planning
from .arguments import AttentionArgs
from .masks.mask_mods import window_bounds
from .plan import FlashPlan, empty_lse
from .positions import refuse_offsets

OP = "attention"
MOST = 2**31 - 1024  # tiles and positions are int32, and a tile may begin at the last row
LEAST_TILE = 64  # rows of the smallest query tile


def plan_packed(args: AttentionArgs) -> FlashPlan:
    """dispatch.plan_attention of packed sequences."""
    refuse_offsets(args, "cu_seqlens_q and cu_seqlens_k")
    if args.seqused_k is not None or args.page_table is not None:
        raise ValueError(f"{OP}: cu_seqlens and seqused_k are two forms; give one of them")
    q, k, v = args[:3]
    narrow = fp8.serves(args)
    if narrow:
        fp8.check_operands(args)
    else:
        checks.check_wide(args, "packed sequences")
    check_packed(args)
    cu_seqlens: Any = args.cu_seqlens_q
    sequences = len(cu_seqlens) - 1
    if narrow:
        fp8.check_scales(args, sequences)
    (rows, heads, _), cols = q.shape, len(k)
    plan = planning.checked_plan(args, (rows, heads, v.shape[-1]), (heads, rows), cols)
    plan.empty |= sequences == 0
    bounds = window_bounds(args.window_size, args.causal)
    if args.score_mod is not None:
        checks.check_score(args, (sequences, heads), (1, 1))
        args = args._replace(score_mod=args.score_mod.kept_inside)
    if plan.empty or not planning.has_kernel(q):
        return plan
    if (rows // LEAST_TILE + sequences + 1) * heads > MOST or rows + cols > MOST:
        raise ValueError(
            f"{OP}: {rows} rows and {cols} columns of {sequences} sequences and {heads} heads are more than the "
            "kernels can count; split them into several calls"
        )
    extents = heads * sequences, -(-rows // sequences), -(-cols // sequences)
    choose = fp8.choose_kernel(args, sequences) if narrow else None
    planning.plan_kernel(
        plan, args, extents=extents, bounds=bounds, longest=(rows, cols), choose=choose, packed=True
    )  # fmt: skip
    plan.notes.append(
        f"packed: {sequences} sequences, whose lengths the GPU reads; at most "
        f"{rows // plan.facts.config.tile_m + sequences + 1} query tiles a head"
    )
    return plan


def check_packed(args: AttentionArgs) -> None:
    """q (total_q, H, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv); cu_seqlens (B + 1,) int32."""
    q, k, v = args[:3]
    check_sequences(OP, q, k, v, args.cu_seqlens_q, args.cu_seqlens_k)
    more = fp8.alike(v) if q.dtype == fp8.E4M3 else {}
    batched = [t.transpose(0, 1)[None] for t in (q, k, v)]
    checks.check_qkv(OP, batched[0], batched[1], batched[2], **more)


def check_sequences(op: str, q, k, v, cu_seqlens_q, cu_seqlens_k) -> None:
    """Check the ranks of q, k and v, and cu_seqlens, two contiguous int32 of one length."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError(f"{op}: cu_seqlens_q and cu_seqlens_k must both be given; pass one tensor twice if they agree")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.check_tensor(f"{op}: {name}", tensor)
        if tensor.dim() != 3:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}; with cu_seqlens it must be (total, heads, head_dim)"
            )
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.check_tensor(f"{op}: {name}", tensor)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be torch.int32")
        if tensor.dim() != 1 or len(tensor) == 0:
            raise ValueError(f"{op}: {name} must have shape (sequences + 1,), got {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} has stride {tensor.stride(0)}; call .contiguous()")
        if not q.is_meta:
            common.check_device(op, q.device, **{name: tensor})
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"{op}: cu_seqlens_q is of {len(cu_seqlens_q) - 1} sequences and cu_seqlens_k of {len(cu_seqlens_k) - 1}"
        )


def reference_of(args: AttentionArgs) -> tuple:
    """(out, lse): the reference, and in rows after the last sequence what those have that see nothing."""
    q, k, v = args[:3]
    cu_seqlens_q: Any = args.cu_seqlens_q
    cu_seqlens_k: Any = args.cu_seqlens_k
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = empty_lse((q.shape[1], q.shape[0]), accumulator(q.dtype), q.device, args.sinks)
    rows, cols = int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])
    tensors = q[:rows], k[:cols], v[:cols], cu_seqlens_q, cu_seqlens_k
    terms = args.given(reference.attention_packed) | {"return_lse": True}
    out[:rows], lse[:, :rows] = reference.attention_packed(*tensors, **terms)
    return out, lse
