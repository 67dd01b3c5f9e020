"""FP8 attention: q and k in float8_e4m3fn, v in float8_e4m3fn, BF16 or FP16, with scales per head or block of tokens.

This module has the argument checks and the kernel selection.

The sm_90 forward kernel converts v to FP16 itself, or a separate kernel converts it into a workspace first, whichever
is faster (choose.converts_inside). With fast accumulation a separate kernel transposes v. A plan holds both kernels,
the shape of the workspace, and the shapes of the scales. A 16-bit v needs no other kernel. CPU tensors are dequantized
and run the reference in FP32.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels import checks as common
from cute_kernels.dtypes import FLOAT8, NAMES_OF_OPERANDS, OPERANDS
from cute_kernels.runtime import families

from . import checks, reference
from .arguments import AttentionArgs
from .forward import heuristics
from .forward.config import SCALE_TOKENS, FlashFacts, Float8Facts, ValuesFacts
from .forward.heuristics import Extents
from .plan import FlashPlan

E4M3 = torch.float8_e4m3fn
SCALES = ("q_descale", "k_descale", "v_descale")
MOST_ITEMS = 65_535  # CUDA's limit of a grid's y and z


def serves(args: AttentionArgs) -> bool:
    """True if q is FP8 or has a q_descale; False if q is not a tensor."""
    return getattr(args.q, "dtype", None) in FLOAT8 or args.q_descale is not None


def check_operands(args: AttentionArgs) -> None:
    """Check the dtypes: q and k in float8_e4m3fn, v in float8_e4m3fn, BF16 or FP16."""
    op, (q, k, v) = args.op, args[:3]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        common.check_tensor(f"{op}: {name}", tensor)
    if q.dtype not in FLOAT8:
        raise TypeError(f"{op}: q is {q.dtype} and has a q_descale; only a q of {E4M3} has one")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != E4M3 and not (name == "v" and tensor.dtype in OPERANDS):
            others = ", ".join(str(t.dtype) for t in (q, k, v))
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}; with an FP8 q, q and k must be {E4M3}, and v {E4M3} or 16-bit "
                f"(got {others}); quantize {name} to it, or dequantize the others, as (q.float() * "
                "scale).to(torch.bfloat16). Decoding takes a BF16 q with FP8 caches (seqused_k), E5M2 too"
            )


def alike(v) -> dict:
    """Keyword arguments of checks.check_qkv, since a 16-bit v has another dtype than q."""
    return {"also": (E4M3,), "alike": "kv" if v.dtype == E4M3 else "k"}


def check(args: AttentionArgs) -> None:
    """Check q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) and their dequantization scales."""
    check_operands(args)
    q, k, v = args[:3]
    checks.check_qkv(args.op, q, k, v, **alike(v))
    check_scales(args, q.shape[0], (q.shape[2], k.shape[2], k.shape[2]))


def check_scales(args: AttentionArgs, batch: int, lengths: tuple | None = None) -> None:
    """Check the float32 dequantization scales of q, k and v: per tensor, head, batch and head, or block of tokens.

    lengths: numbers of tokens of q, k and v. None for packed sequences, which do not support scales per block of
    tokens.
    """
    op, q, heads = args.op, args.q, (args.q.shape[1], args.k.shape[1], args.k.shape[1])
    for which, (name, scale, count) in enumerate(zip(SCALES, args.descales, heads, strict=True)):
        if scale is None:
            continue
        common.check_tensor(f"{op}: {name}", scale)
        if scale.dtype != torch.float32:
            raise TypeError(f"{op}: {name} is {scale.dtype}; it must be torch.float32")
        common.check_device(op, q.device, **{name: scale})
        shapes, blocks = f"(1,), ({count},) or ({batch}, {count})", None
        if lengths is not None:
            blocks = blocks_of(lengths[which])
            shapes += f", or ({batch}, {count}, {blocks}) of blocks of {SCALE_TOKENS} tokens"
        elif scale.dim() == 3:
            shapes += ", a sequence being an item: packed sequences have no scales of blocks of tokens"
        fits = all(n in (1, m) for n, m in zip(scale.shape[:2][::-1], (count, batch), strict=False))
        if not fits or scale.dim() > 2 and tuple(scale.shape[2:]) != (blocks,):
            raise ValueError(f"{op}: {name} has shape {tuple(scale.shape)}; it must be {shapes}")


def blocks_of(length: int) -> int:
    """Number of blocks of tokens, each with its own scale."""
    return -(-length // SCALE_TOKENS)


def of_tokens(scales: tuple) -> bool:
    """True if any scale is per block of tokens."""
    return any(isinstance(s, Tensor) and s.dim() == 3 for s in scales)


def of_heads(scales: tuple, batch: int, heads: tuple) -> tuple:
    """Scales expanded to (B, H) and (B, Hkv), any strides; scales per block of tokens have a third dimension."""
    return tuple(None if s is None else s.expand(batch, n, *s.shape[2:]) for s, n in zip(scales, heads, strict=True))


def planned_shapes(q, k, scales: tuple, sequences: int = 0) -> tuple:
    """FlashPlan.scale_shapes: (B, H) and (B, Hkv), or (B, H, blocks) and (B, Hkv, blocks) if any scale is per block of
    tokens. B is `sequences` for packed q and k (rows, heads, D)."""
    shapes: list = [(sequences or q.shape[0], t.shape[1]) for t in (q, k, k)]
    if of_tokens(scales):
        shapes = [(*shape, blocks_of(t.shape[2])) for shape, t in zip(shapes, (q, k, k), strict=True)]
    shapes = [None if s is None or s.shape == shape else shape for s, shape in zip(scales, shapes, strict=True)]
    return tuple(shapes) if any(shapes) else ()


def as_planned(plan: FlashPlan, scales: tuple) -> tuple:
    """Scales in the shapes that the plan's kernel expects, any strides. Most calls already pass these shapes; expand()
    costs as much host time as the whole plan lookup."""
    if not plan.scale_shapes:
        return scales
    return tuple(
        s if shape is None else (s if s.dim() == len(shape) or len(shape) == 2 else s[..., None]).expand(shape)
        for s, shape in zip(scales, plan.scale_shapes, strict=True)
    )


def choose_kernel(args: AttentionArgs, sequences: int = 0) -> Callable:
    """Return the `choose` callback of plan.plan_kernel: it selects the FP8 forward kernel and the one that converts v.

    sequences: number of packed sequences.
    """
    (q, k, v), scales = args[:3], args.descales

    def choose_one(plan: FlashPlan, facts: FlashFacts, extents: Extents) -> bool:
        known = {field.name: getattr(facts, field.name) for field in fields(FlashFacts)}
        has: dict[str, Any] = dict(zip(SCALES, (s is not None for s in scales), strict=True))
        kinds: dict[str, Any] = {"given_v": NAMES_OF_OPERANDS[v.dtype], "fast": args.use_fast_accum}
        narrow = Float8Facts(**known, **kinds, **has, tokens=of_tokens(scales))
        if reason := families.unsupported(narrow):
            raise TypeError(f"{plan.op}: {reason}")
        plan.facts = heuristics.pick(narrow, extents)
        inside = replace(plan.facts, converts=True)
        group = q.shape[1] // k.shape[1]
        if not families.unsupported(inside) and (too_large(v) or heuristics.converts_inside(inside, extents, group)):
            plan.facts = inside
        plan.scale_shapes = planned_shapes(q, k, scales, sequences)
        plan.function = families.function_for(plan.facts)
        if v.dtype == E4M3:
            plan_values(plan, v, sequences)
        if plan.facts.tokens:
            keys = f"tiles have {plan.facts.config.tile_n} keys, which divide a block"
            plan.notes.append(f"scales are of blocks of {SCALE_TOKENS} tokens: {keys}")
        return True

    return choose_one


def plan_values(plan: FlashPlan, v, sequences: int) -> None:
    """Fill in the kernel that converts or transposes v, unless the forward kernel converts it."""
    facts = plan.facts
    if facts.converts:
        plan.notes.append("v is converted to float16 in the kernel, for each tile of queries; none runs before it")
        return
    if reason := too_large(v):
        raise ValueError(f"{plan.op}: {reason}")
    values = ValuesFacts(facts.arch, facts.head_dim_v)
    if facts.fast:
        plan.values = transposed(v, replace(values, tile=facts.config.tile_n, packed=facts.packed), sequences)
        plan.notes.append("v is transposed by a kernel before it")
        plan.notes.append("use_fast_accum: O's sums are the tensor cores', of some 14 bits, and P has 8 bits")
    else:
        plan.values = converted(v, values)
        plan.notes.append("v is converted to float16 by a kernel before it")


def too_large(v) -> str:
    """The reason why the kernels that convert v do not support its shape; "" if they do.

    They use grid z and y for batches and heads, and int32 for parts of rows.
    """
    batch, heads, rows, dim = v.shape if v.dim() == 4 else (1, v.shape[1], v.shape[0], v.shape[2])
    if max(batch, heads) > MOST_ITEMS or rows * dim >= 2**33:
        return (
            f"FP8 v has {batch} matrices, {heads} heads and {rows} rows of {dim}; at most {MOST_ITEMS} matrices "
            f"and heads, and {2**33} elements per head are supported: split it into several calls, or pass a 16-bit v"
        )
    return ""


def converted(v, facts: ValuesFacts) -> Callable:
    """Return a function that converts a v of this layout to a new FP16 tensor for the forward kernel."""
    shape, strides, dense = v.shape, v.new_empty(v.shape).stride(), v.dim() == 4
    kernel = families.function_for(facts)

    def function(v, cu_seqlens_k):
        values = v.new_empty_strided(shape, strides, dtype=torch.float16)
        kernel(*((v, values) if dense else (t.transpose(0, 1)[None] for t in (v, values))), None)
        return values

    return function


def transposed(v, facts: ValuesFacts, sequences: int) -> Callable:
    """Return a function that transposes a v of this layout into a new tensor, for fast accumulation. Packed sequences
    also pass cu_seqlens_k."""
    from .forward.fp8.transposed_values import tiles_of

    (batch, heads), (rows, dim) = ((1, v.shape[1]), v.shape[::2]) if sequences else (v.shape[:2], v.shape[2:])
    tiles, tile = tiles_of(rows, facts.tile, sequences), dim * facts.tile
    shape, strides = (batch, heads, tiles, tile), (heads * tiles * tile, tiles * tile, tile, 1)
    kernel = families.function_for(facts)

    def function(v, cu_seqlens_k):
        values = v.new_empty_strided(shape, strides)
        kernel(v, values, cu_seqlens_k)
        return values

    return function


# -- without a kernel -----------------------------------------------------------------------------------------


def dequantised(args: AttentionArgs) -> AttentionArgs:
    """The call with q, k and v dequantized to FP32, and without scales. Packed sequences have scales per sequence."""
    q, k, v = args[:3]
    cu_q: Any = args.cu_seqlens_q
    cu_k: Any = args.cu_seqlens_k
    batch = len(cu_q) - 1 if args.packed else q.shape[0]
    scales = of_heads(args.descales, batch, (q.shape[1], k.shape[1], k.shape[1]))
    if args.packed:
        tensors = _dequantised_rows((q, k, v), scales, (cu_q, cu_k, cu_k))
    else:
        tensors = [reference.dequantised(t, s, torch.float32) for t, s in zip((q, k, v), scales, strict=True)]
    q, k, v = tensors
    return args._replace(q=q, k=k, v=v, q_descale=None, k_descale=None, v_descale=None)


def _dequantised_rows(tensors: tuple, scales: tuple, cu_seqlens: tuple) -> list[Tensor]:
    """Packed q, k and v (rows, heads, D) dequantized to FP32, with scales per sequence."""
    found = []
    for t, scale, starts in zip(tensors, scales, cu_seqlens, strict=True):
        t = t.float()
        if scale is not None:
            ends = starts[1:].long()
            sequence = torch.bucketize(torch.arange(len(t), device=t.device), ends, right=True)
            t = t * scale[sequence.clamp(max=len(starts) - 2)][..., None]
        found.append(t)
    return found
