"""attention of 8-bit floats: q, k and v of float8_e4m3fn, with scales of their heads or of blocks of tokens.

Checks, and the kernel of a plan.

A call has two kernels: one transposes v into memory of the call's own, the other is the forward kernel on sm_90. Their
function takes v as it is. CPU tensors run the reference of the dequantised operands, in fp32.
"""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from cute_kernels import checks as common
from cute_kernels.dtypes import FLOAT8, NAMES, default_out_dtype
from cute_kernels.runtime import families

from . import checks, reference
from .forward.choose import Extents, pick
from .forward.config import SCALE_TOKENS, FlashFacts, Float8Facts, ValuesFacts

E4M3 = torch.float8_e4m3fn
SCALES = ("q_scale", "k_scale", "v_scale")


def serves(q, q_scale) -> bool:
    """Whether a call is one of q of 8-bit floats, or would be one; False of what is no tensor."""
    return getattr(q, "dtype", None) in FLOAT8 or q_scale is not None


def check_operands(op: str, q, k, v) -> None:
    """q, k and v of float8_e4m3fn."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        common.check_tensor(f"{op}: {name}", tensor)
    if q.dtype not in FLOAT8:
        raise TypeError(f"{op}: q is {q.dtype} and has a q_scale; only a q of {E4M3} has one")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != E4M3:
            others = ", ".join(str(t.dtype) for t in (q, k, v))
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}; with q of 8 bits q, k and v are {E4M3}, all three (here {others}); "
                "cast them, or give q in torch.bfloat16: decoding reads caches of 8 bits (seqlens_k), e5m2, too"
            )


def check(op: str, q, k, v, scales: tuple) -> None:
    """q (B, H, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv) with their scales."""
    check_operands(op, q, k, v)
    checks.check_qkv(op, q, k, v, also=(E4M3,))
    heads, lengths = (q.shape[1], k.shape[1], k.shape[1]), (q.shape[2], k.shape[2], k.shape[2])
    check_scales(op, q, scales, q.shape[0], heads, lengths)


def check_scales(op: str, q, scales: tuple, batch: int, heads: tuple, lengths: tuple | None = None) -> None:
    """Scales of q, k and v, float32: one for all, for each head, for each item's, or for each block of its tokens.

    heads, lengths: how many heads and tokens each has; None of packed sequences, which have no scales of tokens.
    """
    for which, (name, scale, count) in enumerate(zip(SCALES, scales, heads, strict=True)):
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
    """How many blocks of tokens have a scale each."""
    return -(-length // SCALE_TOKENS)


def of_tokens(scales: tuple) -> bool:
    """Whether any of a call's scales are of blocks of tokens."""
    return any(isinstance(s, Tensor) and s.dim() == 3 for s in scales)


def for_kernel(scales: tuple, q, k) -> tuple:
    """Scales as the forward kernel takes them, of any strides: (B, H) and (B, Hkv), or if any are of blocks of tokens,
    all of them as (B, H, blocks) and (B, Hkv, blocks). Of q (B, H, Sq, D) and k (B, Hkv, Sk, D)."""
    found = of_heads(scales, q.shape[0], (q.shape[1], k.shape[1], k.shape[1]))
    if not of_tokens(scales):
        return found
    blocks = (blocks_of(t.shape[2]) for t in (q, k, k))
    each = zip(found, blocks, strict=True)
    return tuple(s if s is None or s.dim() == 3 else s[..., None].expand(*s.shape, n) for s, n in each)


def of_heads(scales: tuple, batch: int, heads: tuple) -> tuple:
    """Scales as (B, H) and (B, Hkv), of any strides; those of blocks of tokens have a third dimension."""
    return tuple(None if s is None else s.expand(batch, n, *s.shape[2:]) for s, n in zip(scales, heads, strict=True))


def given(scales: tuple) -> tuple:
    """Those that there are."""
    return tuple(s for s in scales if s is not None)


def out_dtype(op: str, q, out) -> torch.dtype:
    """bfloat16, or that of out: bfloat16, float16 or float32."""
    if not isinstance(out, Tensor):  # none, or what the checks will name
        return default_out_dtype(q.dtype)
    if out.dtype not in NAMES:
        raise TypeError(f"{op}: out is {out.dtype}; of a q of 8 bits it is {', '.join(map(str, NAMES))}")
    return out.dtype


def choose_kernel(scales: tuple, out_dtype: torch.dtype) -> Callable:
    """What plan.plan_kernel asks for a kernel: the forward kernel of 8-bit floats, and that which transposes v."""

    def choose(plan, facts: FlashFacts, extents: Extents) -> bool:
        known = {field.name: getattr(facts, field.name) for field in fields(FlashFacts)}
        has = dict(zip(SCALES, (s is not None for s in scales), strict=True))
        narrow = Float8Facts(**known, out_dtype=NAMES[out_dtype], **has, tokens=of_tokens(scales))
        if reason := families.unsupported(narrow):
            raise TypeError(f"{plan.op}: {reason}")
        plan.facts = pick(narrow, extents)
        plan.more = *plan.more, None, None, None  # scales
        values = ValuesFacts(facts.arch, facts.head_dim_v, plan.facts.config.tile_n, facts.packed)
        plan.function = with_values(families.function_for(plan.facts), families.function_for(values), values)
        plan.notes.append("v is transposed by a kernel before it")
        if not plan.facts.keeps_sums:
            plan.notes.append("O's sums are the tensor cores', of some 14 bits, however many keys there are")
        if plan.facts.tokens:
            keys = f"tiles have {plan.facts.config.tile_n} keys, which divide a block"
            plan.notes.append(f"scales are of blocks of {SCALE_TOKENS} tokens: {keys}")
        return True

    return choose


def with_values(attend: Callable, transpose: Callable, facts: ValuesFacts) -> Callable:
    """The forward kernel's function, with v as it is."""
    from .forward.transposed_values import tiles_of

    def function(q, k, v, out, lse, sinks, cu_q, cu_k, *more):
        if facts.packed:
            batch, (rows, heads, dim) = 1, v.shape
            tiles = tiles_of(rows, facts.tile, len(cu_k) - 1)
        else:
            batch, heads, rows, dim = v.shape
            tiles = tiles_of(rows, facts.tile)
        values = torch.empty((batch, heads, tiles, dim * facts.tile), dtype=v.dtype, device=v.device)
        transpose(v, values, cu_k)
        attend(q, k, values, out, lse, sinks, cu_q, cu_k, *more)

    return function


# -- without a kernel -----------------------------------------------------------------------------------------


def dequantised(q, k, v, scales: tuple) -> tuple:
    """q, k and v in fp32, times their scales."""
    scales = of_heads(scales, q.shape[0], (q.shape[1], k.shape[1], k.shape[1]))
    return tuple(reference.dequantised(t, s, torch.float32) for t, s in zip((q, k, v), scales, strict=True))


def dequantised_packed(q, k, v, scales: tuple, cu_seqlens_q, cu_seqlens_k) -> tuple:
    """The same of packed sequences (rows, heads, D), each of which has scales."""
    sequences = len(cu_seqlens_q) - 1
    scales = of_heads(scales, sequences, (q.shape[1], k.shape[1], k.shape[1]))
    found = []
    for t, scale, starts in zip((q, k, v), scales, (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k), strict=True):
        t = t.float()
        if scale is not None:
            ends = starts[1:].long()
            sequence = torch.bucketize(torch.arange(len(t), device=t.device), ends, right=True)
            t = t * scale[sequence.clamp(max=sequences - 1)][..., None]
        found.append(t)
    return tuple(found)
