"""FP8 attention in tests: operands, error bounds, and a call that is checked.

How far O may be from fp64 of the same operands. p has v's 16 bits, or fp16's, as of operands of 16 bits. A fast p is
rounded to three bits of mantissa, so it errs by at most 2^-4 of itself, or by 2^-10 below e4m3's smallest normal
number; p of a row's largest score is 2^3 or more. So, with s the sum of |v| weighted by the softmax (assert_right's
spread),

    |error| <= 2^-4 s + 2^-13 n max |v|, rarely more than a tenth of it, for n columns
    rms of the errors <= 2^-4 / sqrt(3) of what they would be if all v had independent signs: 0.036 of O's rms

where an exact product has none. The first is a bound; the second is statistics of random operands, asked with a margin
of a half. LSE is of P before it is rounded. On a GPU it errs by d, what tensor cores drop of the scores (`dropped`): so
the weights of O do by a factor of e^2d at most, for which |error| may be (e^2d - 1) s more, and the rms d.
"""

import contextlib
import math
from unittest.mock import patch

import pytest
import torch

from attention import attention, block_sparse_attention, dispatch
from attention.forward import heuristics
from attention.forward.config import SCALE_TOKENS
from cute_kernels import explain
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.testing.reference import poisoned, poisoned_empty

from .parts import BF16, FP16, FP32, qkv, truth

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = ("q_descale", "k_descale", "v_descale")


# Operands, and what they must give


def narrow(call: dict, scales: tuple | None = ()) -> dict:
    """A call with FP8 q, k and v; scales: of that shape, of (items, heads) each if it is (), none for None."""
    found = call | {name: call[name].to(E4M3) for name in "qkv"}
    if scales is None:
        return found
    items = len(call["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in call else call["q"].shape[0]
    for name, t in zip(SCALES, "qkv", strict=True):
        found[name] = (torch.rand(scales or (items, call[t].shape[1])) + 0.5).to(call[t].device)
    return found


def case(device="cpu", scales: tuple | str | None = (), **operands) -> dict:
    """A call of FP8 q, k and v. scales: as in `narrow`, or "tokens"."""
    if scales == "tokens":
        return case_of_tokens(device, **operands)
    return narrow(dict(zip("qkv", qkv(device=device, **operands), strict=True)), scales)


def of_tokens_scales(t: torch.Tensor, spread: float) -> torch.Tensor:
    """(B, H, blocks), from 2 ** -spread to 2 ** spread."""
    shape = *t.shape[:2], -(-t.shape[2] // SCALE_TOKENS)
    return torch.exp2((torch.rand(shape, device=t.device) * 2 - 1) * spread)


def case_of_tokens(device="cpu", names=SCALES, spread=1.5, **operands) -> dict:
    """A call of FP8 q, k and v with the named scales, per block of tokens."""
    call = narrow(dict(zip("qkv", qkv(device=device, **operands), strict=True)), None)
    return call | {name: of_tokens_scales(call[name[0]], spread) for name in names}


def wide(call: dict) -> dict:
    """The call in fp64, dequantised."""
    found = {n: v for n, v in call.items() if n not in (*SCALES, "use_fast_accum")}
    starts = call.get("cu_seqlens_q")
    for name, t in zip(SCALES, "qkv", strict=True):
        value, scale = call[t].double(), call.get(name)
        if scale is not None and scale.dim() == 3:
            each = torch.arange(value.shape[2], device=value.device) // SCALE_TOKENS
            value = value * scale.double()[:, :, each, None]
        elif scale is not None and starts is None:
            value = value * scale.double().expand(value.shape[:2])[..., None, None]
        elif scale is not None:
            cu = call["cu_seqlens_q" if t == "q" else "cu_seqlens_k"].tolist()
            scale = scale.double().expand(len(cu) - 1, value.shape[1])
            for b, (first, after) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
                value[first:after] *= scale[b][:, None]
        found[t] = value
    return found


def assert_right(out, lse, call: dict, exact: bool, plan=None) -> None:
    """out and lse against fp64; exact: of a P in fp32."""
    expected = truth(**wide(call))
    if call["q"].dim() == 3:
        out, lse = out.transpose(0, 1)[None], lse[None]
    empty = expected.lse.isneginf()
    assert not out[empty].count_nonzero() and torch.equal(lse.isneginf(), empty), "empty rows"
    error, eps = (out.double() - expected.out).abs(), torch.finfo(out.dtype).eps
    largest, fast = wide(call)["v"].abs().max(), bool(call.get("use_fast_accum")) and not exact
    rounding = 2e-5 if exact else 2.0**-4 if fast else torch.finfo(BF16 if call["v"].dtype is BF16 else FP16).eps
    lost = dropped(call) if out.is_cuda else torch.zeros(())
    rounding_and_lost = rounding + (2 * lost).expm1()[..., None]
    bound = rounding_and_lost * expected.spread + 2.0**-13 * fast * expected.columns * largest
    assert (error <= bound + eps * expected.out.abs() + 1e-6).all(), f"{(error / bound).max()} of the bound\n{plan}"
    rms = error.square().mean().sqrt() / expected.out.square().mean().sqrt()
    most = eps + (2e-5 if exact else 1.5 * rounding / math.sqrt(3)) + lost.mean()
    assert rms <= most, f"rms {rms:.3g}\n{plan}"
    wrong, size = ((t.double().masked_fill(empty, 0.0)) for t in (lse - expected.lse, expected.lse))
    bound = 2e-5 * (1 + size.abs().max()) + lost
    assert lse.dtype is FP32 and (wrong.abs() <= bound).all(), f"lse {(wrong.abs() / bound).max():.3g} of the bound"


def dropped(call: dict) -> torch.Tensor:
    """(B, H, Sq): what tensor cores may drop of a row's scores, 2^-10 of the largest sum of |q k|. An H100 dropped up
    to some 2^-12 of it, by errors of other draws. Of each product 2^-13 of the largest term that is added with it may
    go, so 33 terms of each step of 32 could make 2^-9."""
    q, k = (wide(call)[name].abs() for name in "qk")
    if q.dim() == 3:
        q, k = (t.transpose(0, 1)[None] for t in (q, k))
    largest = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).amax(-1)
    return 2.0**-10 * call.get("scale", q.shape[-1] ** -0.5) * largest


def check(call: dict, out_dtype=BF16, exact=True):
    """One call into poisoned memory against fp64; returns its plan. exact: without kernels, which round P."""
    op = block_sparse_attention if "block_mask" in call else attention
    given = {"return_lse": True}
    if out_dtype is not BF16:
        shape = *call["q"].shape[:-1], call["v"].shape[-1]
        given["out"] = poisoned(*shape, dtype=out_dtype, device=call["q"].device)
    plan = explain(op, **call, **given)
    with poisoned_empty():
        out, lse = op(**call, **given)
    assert out.dtype is out_dtype and ("out" not in given or out is given["out"])
    assert_right(out, lse, call, exact and not out.is_cuda, plan)
    return plan


@contextlib.contextmanager
def converting(inside: bool):
    """Within it v of e4m3 is made fp16 inside of the forward kernel where it can be, or by a kernel before."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(heuristics, "converts_inside", lambda *_: inside))
        stack.enter_context(patch.object(dispatch, "_PLANS", PlanCache(operands=3)))
        yield


FAST = {"use_fast_accum": True}
BOTH = pytest.mark.parametrize("fast", [{}, FAST], ids=["", "fast"])
