"""Attention to an FP8 KV cache: K and V in E4M3 or E5M2 with scales, 16-bit q."""

import contextlib
import math

import pytest
import torch

from attention import attention, block_sparse_attention, scaled_dot_product_attention
from attention.decode import heuristics
from attention.masks.score_mods import Alibi
from cute_kernels import explain
from cute_kernels.arch import ARCHS
from cute_kernels.dtypes import FLOAT8
from cute_kernels.runtime.device import assume
from cute_kernels.testing.reference import poisoned_empty

from ..emulator.ops import on_emulator
from .parts import BF16, CAUSAL, FP16, FP32, FP64, cache, check, qkv, starts, truth, where_fixture  # noqa: F401

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = [0, 1, 127, 128, 300, 512]
BOTH = [E4M3, E5M2]


def narrow(call: dict, dtype=E4M3, shape: tuple | None = None) -> dict:
    """The call with K and V of 8 bits, and scales of that shape, (B, Hkv) if it is ()."""
    call = call | {name: call[name].to(dtype) for name in "kv"}
    if shape is not None:
        shape = shape or (call["q"].shape[0], call["k"].shape[1])
        for name in ("k_descale", "v_descale"):
            call[name] = (torch.rand(shape) * 2 + 0.25).to(call["q"].device)
    return call


def case(kind=E4M3, shape: tuple | None = (), lengths=LENGTHS, capacity=512, **operands) -> dict:
    """kind: dtype of K and V; the others are cache's and narrow's."""
    return narrow(cache(lengths, capacity, **{"D": 128, "H": 8} | operands), kind, shape)


# Results

CALLS = [  # of a cache, terms, splits
    *(({"D": D, "rows": 3, "dtype": q, "kind": kv}, CAUSAL, (1, 3)) for D in (64, 96, 128, 192, 256)
      for q, kv in ((BF16, E4M3), (FP16, E5M2))),
    *(({"H": H, "rows": n}, CAUSAL, (1, 2, 7)) for H in (2, 8, 16) for n in (1, 5)),  # groups of 1, 4 and 8
    *(({"D": 128, "rows": 2, "page_size": size, "shape": shape}, {}, (1, 3))
      for size, shape in ((16, ()), (32, (2,)), (64, (1,)), (128, (6, 1)), (256, None))),
    ({"D": 64, "page_size": 16, "kind": E5M2}, {}, (3,)),
    ({"D": 256, "page_size": 16}, {}, (2,)),
    ({"D": 192, "Dv": 128, "heads": 1, "page_size": 32}, {}, (2,)),
    ({"D": 64, "Dv": 256}, {"window_size": (70, 3)}, (2,)),
    ({"D": 96, "rows": 7}, {"window_size": (200, 9), "softcap": 3.0}, (1, 4)),
    ({"rows": 5}, {"window_size": (None, 2)}, (3,)),
    ({"rows": 5}, {"scale": 0.3, "softcap": 2.0}, (3,)),
    ({"rows": 5, "before": 41, "kind": E5M2}, CAUSAL, (1, 3)),
    ({"rows": 40, "page_size": 64}, CAUSAL, (1, 2)),  # several tiles of rows
]  # fmt: skip


@pytest.mark.parametrize(("operands", "terms", "splits"), CALLS, ids=str)
def test_calls(where, operands, terms, splits):
    call = case(device=where, **operands) | terms
    for count in splits:
        with heuristics.splits(count):
            plan = check(**call)
            first, again = (attention(**call, return_lse=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "other bits"
        assert plan.facts is None or plan.facts.cache == FLOAT8[call["k"].dtype]


def test_few_queries_without_lengths(where):
    call = narrow(dict(zip("qkv", qkv(2, 700, 128, B=2, H=8, device=where), strict=True)), shape=(2,))
    check(**call)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("split", [1, 3])
def test_sinks(where, dtype, split):
    call = case(page_size=64, D=64, rows=2, device=where)
    sinks = torch.randn(8, device=where).to(dtype)
    sinks[3] = 40.0
    with heuristics.splits(split):
        check(**call, sinks=sinks)


def test_one_scale_is_that_of_all(where):
    call = case(shape=None, device=where)
    full = {name: torch.full((6, 2), value, device=where) for name, value in (("k_descale", 0.7), ("v_descale", 1.9))}
    expected = attention(**call, **full)
    for shape in ((), (1,), (2,), (1, 2), (6, 1)):
        assert torch.equal(attention(**call, **{name: s[0, 0].expand(shape) for name, s in full.items()}), expected)
    ones = {name: torch.ones_like(s) for name, s in full.items()}
    assert torch.equal(attention(**call), attention(**call, **ones))


def test_scales_do_what_they_say(where):
    """Powers of two move from K to the scale, and from V to the result, without rounding."""
    call = case(shape=None, D=64, device=where)
    plain, lse = attention(**call, return_lse=True)
    two, half = (torch.full((1,), x, device=where) for x in (2.0, 0.5))
    found, again = attention(**call | {"scale": 64**-0.5 / 2}, k_descale=two, v_descale=half, return_lse=True)
    torch.testing.assert_close(found, plain / 2, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(again, lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(attention(**call, v_descale=two), plain * 2)


@pytest.mark.parametrize("size", [1e-30, 1e-5, 1e5, 1e30])
def test_q_of_any_size(where, size):
    """A bf16 q beyond fp16's range, in rows of several sizes, with a scale that makes scores of them."""
    call = case(shape=None, rows=3, device=where)
    sizes = torch.tensor([1.0, 0.01, 30.0], device=where).view(3, 1) * size
    call["q"] = (call["q"].float() * sizes).to(BF16)
    call["q"][:, :, 1, 0] *= 1000  # one far above the others of its row
    check(**call, scale=0.09 / size)


def test_nan_stays_in_its_row_and_item(where):
    call = case(shape=None, lengths=[300, 300], device=where)
    expected = attention(**call)
    q = call["q"].clone()
    q[0, 3, 0, 5] = math.nan
    found = attention(**call | {"q": q})
    assert found[0, 3].isnan().all()
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[0, 3] = False
    assert torch.equal(found[keep], expected[keep])
    for name in "kv":
        changed = call[name].clone().view(torch.uint8)
        changed[1, 0, 7, 9] = 0x7F  # NaN of both dtypes
        found = attention(**call | {name: changed.view(E4M3)})
        assert found[1, :4].isnan().any() and torch.equal(found[0], expected[0])
        assert torch.equal(found[1, 4:], expected[1, 4:])


def check_every_value(where):
    """A row of q sees one row of V, which is then the result: all bytes in all columns."""
    for dtype in BOTH:
        q = torch.zeros(1, 1, 1, 256, dtype=FP16, device=where)
        bits = torch.arange(256, dtype=torch.uint8, device=where).view(1, 1, 1, 256)
        for turn in (0, 1, 2, 3, 77):
            v = bits.roll(turn, -1).view(dtype)
            k = torch.zeros(1, 1, 1, 256, device=where).to(dtype)
            with heuristics.splits(1):
                out = attention(q, k, v, seqused_k=torch.ones(1, dtype=torch.int32, device=where))
            torch.testing.assert_close(out, v.to(FP16), equal_nan=True, rtol=0, atol=0)


def test_every_value_of_8_bits(where):
    check_every_value(where)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_every_value_on_the_emulator(arch):
    with on_emulator(arch, sms=1):
        check_every_value("cpu")


def test_nothing_cached(where):
    call = case(lengths=[0, 0], capacity=0, device=where)
    out, lse = attention(**call, return_lse=True)
    assert not out.count_nonzero() and lse.isneginf().all()


def test_views_of_one_cache(where):
    """K and V of one tensor, heads last in memory, and odd strides that are multiples of 16 bytes."""
    both = torch.randn(2, 300, 2, 2, 64 + 16, device=where).to(E4M3)
    k, v = (both[:, :, i, :, :64].transpose(1, 2) for i in range(2))
    q = torch.randn(2, 8, 1, 64, device=where).to(BF16)
    plan = check(q, k, v, seqused_k=torch.tensor([300, 41], dtype=torch.int32, device=where))
    assert plan.facts is None or not plan.views
    check(q, torch.cat([k[..., :63], k[..., :1]], -1)[..., :64], v, seqused_k=starts([41, 0], where)[1:])


def test_misaligned_caches_are_copied(where):
    call = case(shape=(2,), lengths=[300, 41], device=where)
    whole = torch.zeros(call["k"].numel() + 8, dtype=torch.uint8, device=where)
    whole[8:] = call["k"].view(torch.uint8).flatten()
    call["k"] = whole[8:].view(E4M3).view(call["k"].shape)
    plan = check(**call)
    assert plan.facts is None or "k is copied" in str(plan)


def test_score_mod():
    call = case(lengths=[70, 3, 256], capacity=256, rows=2)
    mod = Alibi(torch.rand(8), call["seqused_k"] - 2)
    expected = attention(**call, **CAUSAL, score_mod=mod)
    with on_emulator("sm_90", sms=3), poisoned_empty():
        found = attention(**call, **CAUSAL, score_mod=mod)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


# Kernels on the emulator: timing at random

EMULATED = [
    ("sm_90", {"D": 128, "rows": 2, "page_size": 64}, CAUSAL, 3),
    ("sm_90", {"D": 128, "H": 16, "rows": 3, "dtype": FP16, "kind": E5M2}, {"window_size": (70, 0)}, 1),
    ("sm_90", {"D": 96, "page_size": 16}, {"softcap": 2.0}, 2),
    ("sm_90", {"D": 192, "H": 2, "rows": 2, "before": 9, "kind": E5M2}, CAUSAL, 2),
    ("sm_89", {"D": 64, "page_size": 32}, {}, 2),
    ("sm_89", {"D": 256, "rows": 5}, CAUSAL, 3),
    ("sm_80", {"D": 128, "kind": E5M2, "shape": None, "page_size": 16}, {}, 2),
    ("sm_80", {"D": 128, "page_size": 16, "rows": 3}, CAUSAL, 2),
    ("sm_86", {"D": 256, "shape": None, "dtype": FP16}, {}, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "operands", "terms", "splits"), EMULATED, ids=str)
def test_on_the_emulator(arch, operands, terms, splits):
    call = case(lengths=[0, 5, 130, 256], capacity=256, **operands) | terms
    with on_emulator(arch, sms=3, seed=1), heuristics.splits(splits):
        plan = check(**call)
    assert plan.facts.arch == ARCHS[arch].target and plan.facts.cache and plan.facts.split == (splits > 1)


# Plans


def test_scales_and_dtypes_have_plans_of_their_own(where):
    """Calls that differ in one thing, each after all others."""
    base = case(shape=None, lengths=[100, 3], capacity=128, device=where)
    scale = torch.full((2,), 0.5, device=where)
    bits = {name: base[name].view(torch.uint8).bitwise_and(0xFB).view(E5M2) for name in "kv"}
    calls = [base | more for more in ({}, {"k_descale": scale}, {"v_descale": scale}, {"k_descale": scale[:1]}, bits)]
    first = [attention(**call) for call in calls]
    for call, expected in zip(calls * 2, first * 2, strict=True):
        assert torch.equal(attention(**call), expected)
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i] if {i} != {3})


# Errors

SCALE = torch.ones(1)
WRONG = [
    ({"v": E5M2}, TypeError, "got torch.float8_e4m3fn and torch.float8_e5m2"),
    ({"v": BF16}, TypeError, "got torch.float8_e4m3fn and torch.bfloat16"),
    ({"k": BF16}, TypeError, "got torch.bfloat16 and torch.float8_e4m3fn"),
    ({"q": E4M3}, TypeError, "q must be torch.bfloat16 or torch.float16 with an FP8 cache, got torch.float8_e4m3fn"),
    ({"k": BF16, "v": BF16, "k_descale": SCALE}, TypeError, "an FP8 cache, or one with k_descale or v_descale"),
    ({"k_descale": 2.0}, TypeError, "k_descale must be a torch.Tensor"),
    ({"v_descale": SCALE.double()}, TypeError, "v_descale must be torch.float32, got torch.float64"),
    (
        {"k_descale": torch.ones(3)},
        ValueError,
        "k_descale must have shape .1,., .Hkv,. = .2,. or .B, Hkv. = .2, 2., got .3,.",
    ),
    ({"v_descale": torch.ones(2, 3)}, ValueError, "v_descale must have shape .*, got .2, 3."),
    ({"v_descale": torch.ones(1, 1, 1)}, ValueError, "v_descale must have shape .*, got .1, 1, 1."),
    ({"v_descale": torch.ones(1, device="meta")}, ValueError, "v_descale is on meta"),
    ({"cu_seqlens_q": starts([1])}, ValueError, "two forms"),
]


@pytest.mark.parametrize(("change", "error", "words"), WRONG, ids=str)
@pytest.mark.parametrize("on", [None, "sm_90"])
def test_errors(change, error, words, on):
    call = case(shape=None, lengths=[9, 5], capacity=64)
    for name, value in change.items():
        call[name] = call[name].to(value) if isinstance(value, torch.dtype) else value
    with assume(on, 132) if on else contextlib.nullcontext():
        with pytest.raises(error, match=words):
            explain(attention, **call)


def test_what_no_kernel_reads():
    q, k, v = qkv(4096, 4096, 64)
    k8, v8 = k.to(E4M3), v.to(E4M3)
    with assume("sm_90", 132):
        with pytest.raises(TypeError, match="got 4096 queries and 4 heads; pass seqused_k"):
            explain(attention, q, k8, v8)
        wide = torch.zeros(1, 1, 1, 512)
        with pytest.raises(TypeError, match="not supported at head_dim 512"):
            explain(attention, wide.to(BF16), wide.to(E4M3), wide.to(E4M3))
    packed = [t[0].transpose(0, 1) for t in (q, k8, v8)]
    with pytest.raises(TypeError, match="with packed sequences k and v are of q's dtype"):
        attention(*packed, cu_seqlens_q=starts([5, 6]), cu_seqlens_k=starts([5, 6]))
    with pytest.raises(TypeError, match="k is torch.float8_e4m3fn; the kernels support torch.bfloat16"):
        block_sparse_attention(q, k8, v8, torch.ones(32, 32, dtype=torch.bool))
    with pytest.raises((TypeError, ValueError)):
        scaled_dot_product_attention(q, k8, v8)


def test_gradients_raise():
    call = case(lengths=[9, 5], capacity=64)
    call["q"].requires_grad_()
    for form in (call, {name: t for name, t in call.items() if name != "seqused_k"}):
        with pytest.raises(RuntimeError, match="gradients are not supported with seqused_k, page_table or FP8 k and v"):
            attention(**form)
    with torch.no_grad():
        attention(**call)


def test_reference_of_fp64():
    """CPU tensors of float64 are computed in it."""
    call = case(lengths=[70, 3], capacity=128, dtype=FP64)
    out, lse = attention(**call, return_lse=True)
    expected = truth(**call)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)
