"""attention() of 8-bit floats: q, k and v of float8_e4m3fn with scales of their heads, in kernels of sm_90.

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
import re
from dataclasses import replace

import cutlass
import cutlass.cute as cute
import pytest
import torch

import cute_kernels
from attention import BlockMask, attention, block_sparse_attention, eager, float8, scaled_dot_product_attention
from attention.forward import choose
from attention.forward.config import SCALE_TOKENS, Float8Facts
from attention.forward.mainloop_float8 import HEADROOM, KEYS, LARGEST
from attention.forward.transposed_values import first_column, place_of, tiles_of
from attention.score_mods import Alibi
from cute_kernels import explain, quantize
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.device import assume
from cute_kernels.runtime.families import family_named, unsupported
from cute_kernels.tile.hopper import smem_layout

from . import emulate
from .attention_parts import BF16, CAUSAL, FP16, FP32, FP64, packed, qkv, starts, truth
from .emulator.emulate import machine
from .emulator.ops import on_emulator
from .reference import poisoned, poisoned_empty

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = ("q_scale", "k_scale", "v_scale")
PLACES = [
    pytest.param("cpu", id="reference"),
    pytest.param("emulated", id="emulated", marks=pytest.mark.sm_90),
    pytest.param("cuda", id="cuda", marks=[pytest.mark.gpu, pytest.mark.sm_90]),
]


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    """The device of the tensors: the CPU's reference runs, the host side of a GPU's calls, or kernels."""
    with contextlib.ExitStack() as stack:
        if request.param == "emulated":
            stack.enter_context(emulate.without_gpu(request, monkeypatch))
        if request.param != "cpu":
            stack.enter_context(cute_kernels.path("sm_90"))
        yield "cuda" if request.param == "cuda" else "cpu"


# Operands, and what they must give


def narrow(call: dict, scales: tuple | None = ()) -> dict:
    """A call with q, k and v of 8 bits; scales: of that shape, of (items, heads) each if it is (), none for None."""
    found = call | {name: call[name].to(E4M3) for name in "qkv"}
    if scales is None:
        return found
    items = len(call["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in call else call["q"].shape[0]
    for name, t in zip(SCALES, "qkv", strict=True):
        found[name] = (torch.rand(scales or (items, call[t].shape[1])) + 0.5).to(call[t].device)
    return found


def case(device="cpu", scales: tuple | None = (), **operands) -> dict:
    return narrow(dict(zip("qkv", qkv(device=device, **operands), strict=True)), scales)


def wide(call: dict) -> dict:
    """The call in fp64, dequantised."""
    found = {n: v for n, v in call.items() if n not in (*SCALES, "fast_accumulation")}
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
    largest, fast = wide(call)["v"].abs().max(), bool(call.get("fast_accumulation")) and not exact
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


# Results

CALLS = [  # operands, scales, terms
    *(({"D": D}, (), terms) for D in (64, 96, 128, 192, 256) for terms in ({}, CAUSAL)),
    *(({"D": 128}, shape, {}) for shape in (None, (1,), (1, 1), (2, 1))),
    ({"D": 128, "H": 4, "heads": 4}, (4,), CAUSAL),
    ({"D": 192, "Dv": 128, "Sq": 70, "Sk": 333}, (), CAUSAL),
    ({"D": 64, "Dv": 256, "Sq": 333, "Sk": 70}, (), CAUSAL),  # rows that see nothing
    ({"D": 128, "Sq": 300, "Sk": 513}, (), {"window": (100, 7)}),
    ({"D": 64}, (), {"window": (40, None), "softcap": 2.0}),
    ({"D": 128, "Sq": 1}, (), {"scale": 0.3}),
    ({"D": 128, "Sq": 17, "Sk": 1}, (), {}),
]


FAST = {"fast_accumulation": True}
BOTH = pytest.mark.parametrize("fast", [{}, FAST], ids=["", "fast"])


@BOTH
@pytest.mark.parametrize(("operands", "scales", "terms"), CALLS, ids=str)
def test_calls(place, operands, scales, terms, fast):
    plan = check(case(place, scales, **operands) | terms | fast)
    assert plan.facts is None or isinstance(plan.facts, Float8Facts) and plan.facts.fast == bool(fast)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("terms", [{}, CAUSAL], ids=str)
def test_values_of_16_bits(place, dtype, terms):
    """No kernel runs before, and no number of V is rounded."""
    for call in (case(place, D=128, Sq=300, Sk=500), narrow(packed(ROWS, COLS, D=64, device=place))):
        call["v"] = torch.randn(call["v"].shape, device=place).to(dtype)
        plan = check(call | terms)
        assert plan.facts is None or plan.facts.values_dtype == str(dtype)[6:] and "converted" not in str(plan)
    blocks = torch.ones(3, 4, dtype=torch.bool, device=place).tril()
    check(case(place, D=64, Sq=300, Sk=500) | {"v": torch.randn(2, 2, 500, 64, device=place).to(dtype)}
          | {"block_mask": BlockMask.from_blocks(blocks, lengths=(300, 500))})  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_outputs(place, dtype):
    check(case(place, D=128, Sq=70) | CAUSAL, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_sinks(place, dtype):
    sinks = torch.randn(4, device=place).to(dtype)
    sinks[2] = 30.0
    check(case(place, D=64) | {"sinks": sinks})


ROWS, COLS = [70, 0, 200, 5, 129], [90, 17, 333, 0, 129]


@BOTH
@pytest.mark.parametrize("scales", [None, (), (2,)], ids=str)
@pytest.mark.parametrize("terms", [{}, CAUSAL, {"window": (30, 3)}], ids=str)
def test_packed(place, scales, terms, fast):
    heads = {"H": 2, "heads": 2} if scales else {}
    check(narrow(packed(ROWS, COLS, D=128, device=place, **heads), scales) | terms | fast)


@BOTH
def test_packed_rows_of_no_sequence(place, fast):
    call = narrow(packed([70, 9], [33, 80], D=64, device=place, more=(5, 7)), None) | fast
    call |= {name: torch.full((1,), 0.7, device=place) for name in SCALES}
    out, lse = attention(**call, return_lse=True)
    assert not out[79:].count_nonzero() and lse[:, 79:].isneginf().all()
    whole = call | {"q": call["q"][:79], "k": call["k"][:113], "v": call["v"][:113]}
    assert torch.equal(out[:79], attention(**whole))


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("terms", [{}, CAUSAL], ids=str)
@BOTH
def test_block_masks(place, block, terms, fast):
    call = case(place, D=128, Sq=300, Sk=500) | fast
    blocks = torch.rand(2, 4, -(-300 // block[0]), -(-500 // block[1])) < 0.5
    blocks[0, 1] = False
    mask = BlockMask.from_blocks(blocks.to(place), block, lengths=(300, 500), **terms)
    check(call | {"block_mask": mask})


@BOTH
def test_views_and_copies(place, fast):
    """Heads last in memory; and addresses that are no multiples of 16 bytes."""
    call = case(place, D=64) | fast
    expected = attention(**call)
    rows_first = {n: call[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    assert torch.equal(attention(**call | rows_first), expected)
    for name in "qkv":
        whole = torch.zeros(call[name].numel() + 4, dtype=torch.uint8, device=place)
        whole[4:] = call[name].view(torch.uint8).flatten()
        moved = whole[4:].view(E4M3).view(call[name].shape)
        assert torch.equal(attention(**call | {name: moved}), expected)


def test_scales_do_what_they_say(place):
    """Powers of two move from operands to scales, and from V to the result, without rounding."""
    call = case(place, None, D=64)
    two, half = (torch.full((1,), x, device=place) for x in (2.0, 0.5))
    plain, lse = attention(**call, return_lse=True)
    found, again = attention(**call, q_scale=two, k_scale=half, v_scale=two, return_lse=True)
    assert torch.equal(found, plain * 2) and torch.equal(again, lse)
    found, again = attention(**call, q_scale=two, scale=64**-0.5 / 2, return_lse=True)
    assert torch.equal(found, plain) and torch.equal(again, lse)


def test_calls_have_plans_of_their_own(place):
    base = case(place, None, D=64)
    scale = torch.full((1, 1), 0.5, device=place)
    calls = [base, *({**base, name: scale} for name in SCALES), base | CAUSAL]
    plans = [explain(attention, **call) for call in (base, base | FAST)]
    assert plans[0].facts is None or [plan.facts.fast for plan in plans] == [False, True]
    first = [attention(**call) for call in calls]
    for call, expected in zip(calls * 2, first * 2, strict=True):
        assert torch.equal(attention(**call), expected)
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i] if i != 2)


def test_quantised_heads(place):
    """quantize(per="head") makes what attention takes."""
    tensors = qkv(D=128, device=place)
    call = {}
    for name, t in zip("qkv", tensors, strict=True):
        call[name], call[f"{name}_scale"] = quantize(t * 3, per="head")
        assert call[f"{name}_scale"].shape == t.shape[:2]
        assert (call[name].float().abs().amax((2, 3)) == LARGEST).all()
    check(call)


def test_nothing_to_see(place):
    call = case(place, D=64, Sk=0)
    out, lse = attention(**call, return_lse=True)
    assert out.dtype is BF16 and not out.count_nonzero() and lse.isneginf().all()


# Kernels on the emulator: timing at random

EMULATED = [  # operands, scales, terms, dtype of out
    ({"D": 128, "Sq": 330, "Sk": 400, "B": 1, "H": 2, "heads": 1}, (), CAUSAL, FP32),
    ({"D": 128, "Sq": 330, "Sk": 400, "B": 1, "H": 2, "heads": 1}, (), CAUSAL | FAST, FP32),
    ({"D": 192, "Dv": 96, "Sq": 70, "Sk": 300, "B": 2, "H": 1, "heads": 1}, None,
     {"window": (90, 3), "softcap": 2.0}, FP16),
    ({"D": 64, "Sq": 70, "Sk": 300, "B": 1, "H": 1, "heads": 1}, None, FAST | {"window": (90, 3)}, BF16),
    ({"D": 256, "Sq": 70, "Sk": 200, "B": 1, "H": 1, "heads": 1}, (), {"sinks": torch.tensor([2.0])} | FAST, BF16),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("operands", "scales", "terms", "dtype"), EMULATED, ids=str)
def test_on_the_emulator(operands, scales, terms, dtype):
    with on_emulator("sm_90", sms=3, seed=1):
        check(case(scales=scales, **operands) | terms, dtype, exact=False)


@pytest.mark.slow
def test_values_of_16_bits_on_the_emulator():
    call = case(D=96, Sq=70, Sk=200, B=1, H=2, heads=1)
    with on_emulator("sm_90", sms=3, seed=1):
        check(call | {"v": torch.randn(call["v"].shape).to(BF16)} | CAUSAL, exact=False)


@contextlib.contextmanager
def tiles(monkeypatch, dim: int, *wanted):
    """Inside, such tiles alone, and plans of their own."""
    with monkeypatch.context() as patch:
        for table in (choose.FLOAT8, choose.SM_90, choose.TOKENS):
            patch.setitem(table, dim, tuple((each, 1.0) for each in wanted))
        for name in ("FLOAT8_UNMASKED_ONLY", "UNMASKED_ONLY"):
            patch.setattr(choose, name, set())
        patch.setattr(eager, "_PLANS", PlanCache(operands=3))
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "terms"), [((192, 80, 4, 3), {}), ((192, 96, 4, 3), FAST), ((128, 192, 2, 2), CAUSAL | FAST)], ids=str
)
def test_large_tiles_on_the_emulator(monkeypatch, tile, terms):
    with tiles(monkeypatch, 128, tile), on_emulator("sm_90", sms=2, seed=2):
        plan = check(case(D=128, Sq=250, Sk=700, B=1, H=2, heads=1) | terms, exact=False)
    assert (plan.facts.config.tile_m, plan.facts.config.tile_n) == tile[:2]


def growing(**operands) -> dict:
    """Scores of the tiles that are visited last are far above the others, by factors of which some need O rescaled, and
    some new scores by mma.sync."""
    q, k, v = (t.float() for t in qkv(B=1, H=1, heads=1, **operands))
    n = k.shape[2]
    k[:, :, : n // 3] *= 6
    k[:, :, n // 2 : n * 2 // 3] *= 2
    call = {}
    for name, t in zip("qkv", (q, k, v), strict=True):
        call[name], call[f"{name}_scale"] = quantize(t, per="head")
    return call


@pytest.mark.slow
@BOTH
def test_scores_that_grow_on_the_emulator(fast):
    with on_emulator("sm_90", sms=2, seed=3):
        check(growing(D=64, Sq=64, Sk=1500) | fast, exact=False)


def test_no_scores_are_computed_twice():
    """The first row has one score in the tile that is visited first, a low one. So sums of the next tile are too large
    for e4m3, though no score is above what the threshold lets be: they are finite, and their p are multiplied."""
    D, tile_n = 64, 128
    call = case(D=D, Sq=64, Sk=8 * tile_n + 64, B=1, H=1, heads=1, scales=None) | CAUSAL | FAST
    q, k = call["q"].float() / 2, call["k"].float()
    k[..., 8 * tile_n, :] = -1.5 * D**0.5 * q[..., 0, :] / q[..., 0, :].square().sum(-1)  # a score of -1.5
    call |= {"q": q.to(E4M3), "k": k.to(E4M3)}
    before = machine().emu_mmas()  # mma.sync; all others are wgmma
    with on_emulator("sm_90", sms=1, seed=2):
        plan = check(call, exact=False)
    assert plan.facts.config.tile_n == tile_n and machine().emu_mmas() == before


@pytest.mark.slow
@BOTH
def test_packed_on_the_emulator(fast):
    call = narrow(packed([70, 0, 130, 5], [90, 17, 260, 33], D=64, more=(3, 4))) | fast
    call["v"].view(torch.uint8)[400:] = 0x7F  # NaN, which belongs to no sequence
    with on_emulator("sm_90", sms=3, seed=2):
        found, lse = attention(**call, **CAUSAL, return_lse=True)
    whole = call | {n: call[n][: call[f"cu_seqlens_{'q' if n == 'q' else 'k'}"][-1]] for n in "qkv"}
    assert_right(found[:205], lse[:, :205], whole | CAUSAL, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize(("block", "fast"), [((128, 128), {}), ((128, 128), FAST), ((64, 64), FAST)], ids=str)
def test_block_masks_on_the_emulator(block, fast):
    call = case(D=128, Sq=300, Sk=500, B=1, H=2, heads=1) | fast
    blocks = torch.rand(1, 2, -(-300 // block[0]), -(-500 // block[1])) < 0.6
    mask = BlockMask.from_blocks(blocks, block, lengths=(300, 500), causal=True)
    with on_emulator("sm_90", sms=3, seed=1):
        check(call | {"block_mask": mask}, exact=False)


@pytest.mark.slow
def test_score_mod_on_the_emulator():
    call = case(D=64, Sq=100, Sk=200, B=1, H=2, heads=1)
    mod = Alibi(torch.rand(2))
    expected, lse = attention(**call, score_mod=mod, return_lse=True)
    with on_emulator("sm_90", sms=3), poisoned_empty():
        found, again = attention(**call, score_mod=mod, return_lse=True)
    torch.testing.assert_close(again, lse, rtol=1e-5, atol=1e-5)
    assert (found - expected).float().norm() <= 0.05 * expected.float().norm()


@pytest.mark.slow
@BOTH
def test_every_value_is_read(fast):
    """All bytes of V in all columns, by rows that see one key each."""
    k = torch.eye(128)[None, None].mul(64).to(E4M3)
    for turn in (0, 5, 130):
        v = torch.arange(128 * 64).view(1, 1, 128, 64).add(turn).to(torch.uint8).view(E4M3)
        v = torch.where(v.float().isnan(), 0.0, v.float()).to(E4M3)
        with on_emulator("sm_90", sms=1):
            out = attention(k, k, v, scale=1.0, **fast)
        torch.testing.assert_close(out, v.to(BF16), rtol=0, atol=0)


@pytest.mark.slow
@BOTH
def test_nan_stays_in_its_row_and_head(fast):
    call = case(scales=None, D=64, Sq=70, Sk=200, B=1, H=2, heads=2) | fast
    with on_emulator("sm_90", sms=2):
        expected = attention(**call)
        q, v = call["q"].clone(), call["v"].clone()
        q.view(torch.uint8)[0, 1, 9, 3] = 0x7F
        found = attention(**call | {"q": q})
        keep = torch.ones(2, 70, dtype=torch.bool)
        keep[1, 9] = False
        assert found[0, 1, 9].isnan().all() and torch.equal(found[0][keep], expected[0][keep])
        v.view(torch.uint8)[0, 0, 150, 7] = 0xFF
        found = attention(**call | {"v": v})
        columns = torch.arange(64) != 7
        assert found[0, 0, :, 7].isnan().all() and torch.equal(found[0, 1], expected[0, 1])
        assert torch.equal(found[0, 0][:, columns], expected[0, 0][:, columns])


# Plans


def test_keys_are_where_scores_are():
    """Lane t of a quad has columns 2t, 2t + 1 of each 8; of P it must have 4t to 4t + 3 of each 16."""
    for t in range(4):
        assert list(KEYS[4 * t : 4 * t + 4]) == [2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t]
    assert sorted(KEYS) == list(range(16))


@pytest.mark.parametrize("tile", [64, 96, 128, 160, 192])
def test_packed_sequences_have_tiles_of_their_own(tile):
    torch.manual_seed(tile)
    for lengths in ([0], [1, tile, 0, 0, tile + 1, 3 * tile - 1], torch.randint(0, 400, (40,)).tolist()):
        cu = starts(lengths).tolist()
        begins = [first_column(c, b, tile) for b, c in enumerate(cu)]
        for b, length in enumerate(lengths):
            assert begins[b] % tile == 0 and begins[b] + -(-length // tile) * tile <= begins[b + 1]
        assert begins[-1] <= tiles_of(cu[-1], tile, len(lengths)) * tile


@pytest.mark.parametrize("tile", [32, 64, 96, 128, 160, 192])
def test_values_lie_as_in_shared_memory(tile):
    """16 keys are in one piece, and no two at one place."""
    found = {}

    @cute.jit
    def trace():
        layouts = {dim: smem_layout(cutlass.Float8E4M3FN, dim, tile, 1, True) for dim in dims}
        found["swizzles"] = {dim: str(layout.inner) for dim, layout in layouts.items()}
        found["places"] = [cute.crd2idx((d, column, 0), layouts[dim].outer) for dim, d, column in elements]

    dims = 64, 96
    elements = [(dim, d, column) for dim in dims for d in range(dim) for column in range(0, tile, 16)]
    compile_for("sm_90a", trace)
    for (dim, d, column), at in zip(elements, found["places"], strict=True):
        bits, base, shift = map(int, re.findall(r"\d+", found["swizzles"][dim]))
        assert base == 4 and at ^ (at >> shift & (1 << bits) - 1 << base) == place_of(column, d, dim, tile)
    for dim in choose.HEAD_DIMS:
        places = {place_of(column, d, dim, tile) for d in range(dim) for column in range(0, tile, 16)}
        assert places == set(range(0, dim * tile, 16))


def test_p_fits():
    facts = Float8Facts("sm_90a", "sm_90", None, fast=True)
    assert 2 ** (HEADROOM + facts.rescale_threshold) <= LARGEST == torch.finfo(E4M3).max


def test_measured_tiles():
    """2 x 16 heads of 128, 8192 queries and keys; fast 128x192 would spill with a cap or a score_mod."""
    facts = Float8Facts("sm_90a", "sm_90", None, fast=True)

    def tile_of(right: int | None, **more) -> tuple:
        config = choose.pick(replace(facts, **more), choose.Extents(32, 8192, 8192, None, right, 132)).config
        return config.tile_m, config.tile_n

    assert tile_of(None) == (192, 96) and tile_of(0) == (128, 192) and tile_of(0, packed=True) == (128, 192)
    assert tile_of(0, softcap=True) == (128, 128)
    assert tile_of(None, fast=False) == (192, 80) and tile_of(0, fast=False) == (128, 128)


def test_rings_fit():
    family = family_named("flash forward")
    found = [f for f in family.catalogue("sm_90") if isinstance(f, Float8Facts)]
    assert {f.head_dim for f in found} == set(choose.HEAD_DIMS)
    for facts in found:
        assert not unsupported(facts) and facts.smem_bytes <= family.smem_limit(facts)
        assert facts.config.tile_n % (32 if facts.fast else 16) == 0


def test_a_plan_knows_how_scales_are_taken():
    """A call expands no scale that each item's head has."""
    with assume("sm_90"):
        for scales, shapes in (((), ()), ((1,), ((2, 4), (2, 2), (2, 2))), ((2,), ((2, 4), (2, 2), (2, 2)))):
            call = narrow(dict(zip("qkv", qkv(100, 200), strict=True)), scales)
            if scales == (2,):
                call["q_scale"] = torch.rand(4)
            plan = eager.plan_attention(**call)
            assert plan.scale_shapes == shapes
            given = [call[name] for name in SCALES]
            taken = float8.as_planned(plan, tuple(given))
            assert [t.shape for t in taken] == [(2, 4), (2, 2), (2, 2)]
            assert shapes or all(a is b for a, b in zip(taken, given, strict=True))


def test_a_plan():
    q = torch.empty(2, 16, 8192, 128, dtype=E4M3, device="meta")
    scale = torch.empty(2, 16, device="meta")
    plan = explain(attention, q, q, q, q_scale=scale, arch="sm_90")
    assert plan.facts.q_scale and not plan.facts.k_scale and plan.facts.config.groups == 3
    assert "v is converted to float16 by a kernel before it" in str(plan) and plan.out_dtype is BF16
    assert "v is transposed by a kernel before it" in str(explain(attention, q, q, q, arch="sm_90", **FAST))
    assert explain(attention, q, q, q, causal=True, arch="sm_90").facts.config.dynamic


# Errors

SCALE = torch.ones(1)
WRONG = [
    ({"q": BF16}, TypeError, "k and v are of q's dtype|not few|cast"),
    ({"k": BF16}, TypeError, "k is torch.bfloat16; with q of 8 bits q and k are torch.float8_e4m3fn"),
    ({"v": FP32}, TypeError, "v is torch.float32; with q of 8 bits .* v is, too, or has 16 bits"),
    ({"v": BF16} | FAST, TypeError, "fast_accumulation is of q, k and v of torch.float8_e4m3fn, all three, and these"),
    ({"fast_accumulation": 1}, TypeError, "fast_accumulation must be True or False, got 1"),
    ({"q": E5M2, "k": E5M2, "v": E5M2}, TypeError, "q is torch.float8_e5m2; .* decoding reads caches of 8 bits"),
    ({"q": BF16, "k": BF16, "v": BF16, "q_scale": SCALE}, TypeError, "q is torch.bfloat16 and has a q_scale"),
    ({"q_scale": 2.0}, TypeError, "q_scale must be a torch.Tensor"),
    ({"k_scale": SCALE.double()}, TypeError, "k_scale is torch.float64; it must be torch.float32"),
    ({"q_scale": torch.ones(3)}, ValueError, "q_scale has shape .3,.; it must be .1,., .4,. or .2, 4.,"),
    ({"k_scale": torch.ones(2, 4)}, ValueError, "k_scale has shape .2, 4.; it must be .1,., .2,. or .2, 2."),
    ({"v_scale": torch.ones(2, 2, 3)}, ValueError, "or .2, 2, 2. of blocks of 128 tokens"),
    ({"v_scale": torch.ones(1, device="meta")}, ValueError, "v_scale is on meta"),
    ({"out": torch.empty(2, 4, 200, 64, dtype=FP64)}, TypeError, "out is torch.float64; of a q of 8 bits it is"),
    ({"out": torch.empty(2, 4, 200, 64, dtype=E4M3)}, TypeError, "out is torch.float8_e4m3fn; of a q of 8 bits it is"),
    ({"seqlens_k": torch.ones(2, dtype=torch.int32)}, TypeError, "q is torch.float8_e4m3fn; with k and v of 8 bits"),
    ({"q": BF16, "seqlens_k": torch.ones(2, dtype=torch.int32), "q_scale": SCALE}, TypeError, "has no q_scale"),
]


@pytest.mark.parametrize(("change", "error", "words"), [pytest.param(*each, id=each[2]) for each in WRONG])
@pytest.mark.parametrize("on", [None, "sm_90"])
def test_errors(change, error, words, on):
    call = case(scales=None)
    for name, value in change.items():
        call[name] = call[name].to(value) if isinstance(value, torch.dtype) else value
    if call["q"].dtype is BF16 and call["k"].dtype is E4M3:
        call |= {n: torch.zeros(2, 64, 2000, 64).to(call[n].dtype) for n in "qkv"}  # many queries
        if on is None:
            return  # the CPU's reference decodes any number
    with assume(on, 132) if on else contextlib.nullcontext():
        with pytest.raises(error, match=words):
            explain(attention, **call)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_other_architectures(arch):
    with assume(arch, 100), pytest.raises(TypeError, match=f"sm_90's WGMMA alone, and not on {arch}.*bfloat16"):
        explain(attention, **case(scales=None))
    with assume("sm_90", 132), cute_kernels.path("sm_80"), pytest.raises(TypeError, match="path sm_80"):
        explain(attention, **case(scales=None))


def test_what_has_no_kernel():
    with assume("sm_90", 132):
        wide_head = torch.zeros(1, 1, 70, 512).to(E4M3)
        with pytest.raises(TypeError, match="head_dim 512 and 512 of 8 bits have no kernel; there are 64"):
            explain(attention, wide_head, wide_head, wide_head)
    call = case(scales=None)
    with pytest.raises(TypeError, match="with q of 8 bits q and k are torch.float8_e4m3fn"):
        block_sparse_attention(**call | {"k": call["k"].to(BF16)}, block_mask=torch.ones(2, 2, dtype=torch.bool))
    call = packed([5, 6], [5, 6])
    with pytest.raises(TypeError, match="with packed sequences k and v are of q's dtype"):
        attention(**call | {n: call[n].to(E4M3) for n in "kv"})
    with pytest.raises((TypeError, ValueError)):
        scaled_dot_product_attention(*(t.to(E5M2) for t in qkv()))


def test_more_items_than_a_grid_counts():
    q = torch.empty(70_000, 1, 16, 64, dtype=E4M3, device="meta")
    with pytest.raises(ValueError, match="v of 8 bits has 70000 items.*give v in 16 bits"):
        explain(attention, q, q, q, arch="sm_90")
    assert explain(attention, q, q, q.to(BF16), arch="sm_90").facts.given_v == "bfloat16"


def test_gradients_raise():
    call = case(scales=None) | {"sinks": torch.zeros(4, requires_grad=True)}
    mask = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="it computes no gradients"):
        attention(**call)
    with pytest.raises(RuntimeError, match="it computes no gradients"):
        block_sparse_attention(**call, block_mask=mask)
    scaled = case(scales=(1,))
    scaled["v_scale"].requires_grad_()
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        attention(**scaled)
    with torch.no_grad():
        attention(**scaled)


@pytest.mark.parametrize("name", SCALES)
def test_scales_of_16_bits_raise(name):
    """Also where gradients are asked for: nothing would read the scales."""
    q, k, v = qkv()
    mask = torch.ones(2, 2, dtype=torch.bool)
    for differentiable in (False, True):
        q.requires_grad_(differentiable)
        with pytest.raises(TypeError, match="scale"):
            attention(q, k, v, **{name: SCALE})
        with pytest.raises(TypeError, match="scale"):
            block_sparse_attention(q, k, v, mask, **{name: SCALE})


# Under torch.compile


def test_compiled():
    call = case(D=64) | {"return_lse": True} | FAST
    mask = BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), lengths=(200, 200))
    for op, more in ((attention, CAUSAL), (block_sparse_attention, {"block_mask": mask})):
        compiled = torch.compile(lambda op=op, **call: op(**call), backend="eager", fullgraph=True)
        for found, expected in zip(compiled(**call, **more), op(**call, **more), strict=True):
            assert found.dtype is expected.dtype and torch.equal(found, expected)


# On a GPU


@pytest.mark.gpu
@pytest.mark.sm_90
class TestCuda:
    @pytest.mark.parametrize("terms", [{}, CAUSAL], ids=str)
    @pytest.mark.parametrize("shape", [(1, 2, 4096, 128), (2, 4, 1000, 64), (1, 2, 3000, 256)], ids=str)
    @BOTH
    def test_long(self, shape, terms, fast):
        B, H, S, D = shape
        call = case("cuda", D=D, Sq=S, Sk=S, B=B, H=H, heads=H) | terms | fast
        check(call)
        first, again = (attention(**call, return_lse=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "other bits"

    @BOTH
    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_sums_of_many_keys(self, D, fast):
        """V of one sign: what tensor cores cut off of long sums shows. P's rounding errors cancel."""
        call = case("cuda", D=D, Sq=256, Sk=2048 if fast else 32768, B=1, H=1, heads=1)
        call["v"] = call["v"].float().abs().to(E4M3)
        out = attention(**call, **fast, out=torch.empty(1, 1, 256, D, device="cuda"))
        exact = truth(**wide(call)).out
        bias = ((out.double() - exact) / exact).mean().item()
        print(f"\nD {D}: O of {call['k'].shape[2]} keys is off by {bias:.2e} on average")
        # Of 8 bits each product loses half of what its sum's 14 bits end at.
        assert abs(bias) <= (0.05 if fast else 1e-3)

    @BOTH
    def test_every_tile(self, monkeypatch, fast):
        for dim in (64, 128):
            for each, _ in (choose.FLOAT8 if fast else choose.SM_90)[dim]:
                with tiles(monkeypatch, dim, each):
                    plan = check(case("cuda", D=dim, Sq=500, Sk=700) | CAUSAL | fast)
                assert (plan.facts.config.tile_m, plan.facts.config.tile_n) == each[:2]

    @BOTH
    def test_a_graph(self, fast):
        call = case("cuda", D=128, Sq=300, Sk=700) | fast
        attention(**call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(**call)
        for _ in range(2):
            call["v"].copy_(torch.randn(call["v"].shape, device="cuda").to(E4M3))
            graph.replay()
            assert torch.equal(out, attention(**call))

    @BOTH
    def test_scores_that_grow(self, fast):
        for D in (64, 128):
            call = {n: t.cuda() for n, t in growing(D=D, Sq=300, Sk=6000).items()}
            for terms in ({}, CAUSAL, {"window": (2000, 300)}):
                check(call | terms | fast)
