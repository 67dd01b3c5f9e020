"""attention of 8-bit floats: q, k and v of float8_e4m3fn, with scales of their heads. Checks, and the kernel of a plan.

A call has two kernels: one converts v to fp16, or transposes it for fast sums, in memory of the call's own, the other
is the forward kernel on sm_90. Their function takes v as it is. v of 16 bits needs no other kernel. CPU tensors run the
reference of the dequantised operands, in fp32.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from cute_kernels import checks as common
from cute_kernels.dtypes import FLOAT8, NAMES, NAMES_OF_OPERANDS, OPERANDS, default_out_dtype
from cute_kernels.runtime import families

from . import checks, reference
from .forward.choose import Extents, pick
from .forward.config import FlashFacts, Float8Facts, ValuesFacts

E4M3 = torch.float8_e4m3fn
SCALES = ("q_scale", "k_scale", "v_scale")


def serves(q, q_scale) -> bool:
    """Whether a call is one of q of 8-bit floats, or would be one; False of what is no tensor."""
    return getattr(q, "dtype", None) in FLOAT8 or q_scale is not None


def check_operands(op: str, q, k, v) -> None:
    """q and k of float8_e4m3fn, and v of it or of 16 bits."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        common.check_tensor(f"{op}: {name}", tensor)
    if q.dtype not in FLOAT8:
        raise TypeError(f"{op}: q is {q.dtype} and has a q_scale; only a q of {E4M3} has one")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != E4M3 and not (name == "v" and tensor.dtype in OPERANDS):
            others = ", ".join(str(t.dtype) for t in (q, k, v))
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}; with q of 8 bits q and k are {E4M3}, and v is, too, or has 16 bits "
                f"(here {others}); cast them, or give q in torch.bfloat16: decoding reads caches of 8 bits "
                "(seqlens_k), e5m2, too"
            )


def alike(v) -> dict:
    """What checks.check_qkv is to know: v of 16 bits is of another dtype."""
    return {"also": (E4M3,), "alike": "kv" if v.dtype == E4M3 else "k"}


def check(op: str, q, k, v, scales: tuple) -> None:
    """q (B, H, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv) with their scales."""
    check_operands(op, q, k, v)
    checks.check_qkv(op, q, k, v, **alike(v))
    check_scales(op, q, scales, q.shape[0], (q.shape[1], k.shape[1], k.shape[1]))


def check_scales(op: str, q, scales: tuple, batch: int, heads: tuple) -> None:
    """Scales of q, k and v, float32: one for all, for each head, or for each item's; heads: how many each has."""
    for name, scale, count in zip(SCALES, scales, heads, strict=True):
        if scale is None:
            continue
        common.check_tensor(f"{op}: {name}", scale)
        if scale.dtype != torch.float32:
            raise TypeError(f"{op}: {name} is {scale.dtype}; it must be torch.float32")
        common.check_device(op, q.device, **{name: scale})
        shapes = f"(1,), ({count},) or ({batch}, {count})"
        if scale.dim() > 2:
            raise ValueError(
                f"{op}: {name} has shape {tuple(scale.shape)}; it must be {shapes}: scales of blocks of tokens have no "
                "kernel yet"
            )
        if any(n not in (1, m) for n, m in zip(scale.shape[::-1], (count, batch), strict=False)):
            raise ValueError(f"{op}: {name} has shape {tuple(scale.shape)}; it must be {shapes}")


def of_heads(scales: tuple, batch: int, heads: tuple) -> tuple:
    """Scales as (B, H) and (B, Hkv), of any strides."""
    return tuple(None if s is None else s.expand(batch, n) for s, n in zip(scales, heads, strict=True))


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


def choose_kernel(v, scales: tuple, out_dtype: torch.dtype, fast: bool) -> Callable:
    """What plan.plan_kernel asks for a kernel: the forward kernel of 8-bit floats, and that which makes its v."""

    def choose(plan, facts: FlashFacts, extents: Extents) -> bool:
        known = {field.name: getattr(facts, field.name) for field in fields(FlashFacts)}
        has = dict(zip(SCALES, (s is not None for s in scales), strict=True))
        kinds = {"given_v": NAMES_OF_OPERANDS[v.dtype], "fast": fast, "out_dtype": NAMES[out_dtype]}
        narrow = Float8Facts(**known, **kinds, **has)
        if reason := families.unsupported(narrow):
            raise TypeError(f"{plan.op}: {reason}")
        plan.facts = pick(narrow, extents)
        plan.more = *plan.more, None, None, None  # scales
        values, attend = ValuesFacts(facts.arch, facts.head_dim_v), families.function_for(plan.facts)
        if v.dtype != E4M3:
            plan.function = attend
        elif fast:
            values = replace(values, tile=plan.facts.config.tile_n, packed=facts.packed)
            plan.function = with_transposed_values(attend, families.function_for(values), values)
            plan.notes.append("v is transposed by a kernel before it")
            plan.notes.append("fast_accumulation: O's sums are the tensor cores', of some 14 bits, and P has 8 bits")
        else:
            plan.function = with_converted_values(attend, families.function_for(values))
            plan.notes.append("v is converted to float16 by a kernel before it")
        return True

    return choose


def with_converted_values(attend: Callable, convert: Callable) -> Callable:
    """The forward kernel's function, with v as it is."""

    def function(q, k, v, out, lse, sinks, cu_q, cu_k, *more):
        values = torch.empty(v.shape, dtype=torch.float16, device=v.device)
        four = (v, values) if v.dim() == 4 else (t.transpose(0, 1)[None] for t in (v, values))
        convert(*four, None)
        attend(q, k, values, out, lse, sinks, cu_q, cu_k, *more)

    return function


def with_transposed_values(attend: Callable, transpose: Callable, facts: ValuesFacts) -> Callable:
    """The same of the fast kernel."""
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
