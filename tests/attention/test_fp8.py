"""FP8 attention with scales per head and per block of tokens: the reference, kernels on the emulator and on a GPU.

Error bounds are those of fp8_parts.
"""

import contextlib

import pytest
import torch

import cute_kernels
from attention import BlockMask, attention, dispatch
from attention.forward import heuristics
from attention.forward.config import SCALE_TOKENS, Float8Facts
from attention.forward.fp8.softmax import LARGEST
from attention.masks.score_mods import Alibi
from cute_kernels import explain, quantize
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.testing.reference import poisoned_empty

from .. import host_emulation
from ..emulator.emulate import machine
from ..emulator.ops import on_emulator
from .fp8_parts import BOTH, E4M3, FAST, SCALES, assert_right, case, check, narrow, wide
from .parts import BF16, CAUSAL, FP16, FP32, packed, qkv, truth

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
            stack.enter_context(host_emulation.without_gpu(request, monkeypatch))
        if request.param != "cpu":
            stack.enter_context(cute_kernels.path("sm_90"))
        yield "cuda" if request.param == "cuda" else "cpu"


# Results

CALLS = [  # operands, scales, terms
    *(({"D": D}, (), terms) for D in (64, 96, 128, 192, 256) for terms in ({}, CAUSAL)),
    *(({"D": 128}, shape, {}) for shape in (None, (1,), (1, 1), (2, 1))),
    ({"D": 128, "H": 4, "heads": 4}, (4,), CAUSAL),
    ({"D": 192, "Dv": 128, "Sq": 70, "Sk": 333}, (), CAUSAL),
    ({"D": 64, "Dv": 256, "Sq": 333, "Sk": 70}, (), CAUSAL),  # rows that see nothing
    ({"D": 128, "Sq": 300, "Sk": 513}, (), {"window_size": (100, 7)}),
    ({"D": 64}, (), {"window_size": (40, None), "softcap": 2.0}),
    ({"D": 128, "Sq": 1}, (), {"scale": 0.3}),
    ({"D": 128, "Sq": 17, "Sk": 1}, (), {}),
    *(({"D": D, "Sq": 300, "Sk": 513}, "tokens", terms) for D in heuristics.HEAD_DIMS for terms in ({}, CAUSAL)),
    ({"D": 192, "Dv": 128, "Sq": 70, "Sk": 333}, "tokens", CAUSAL),
    ({"D": 64, "Sq": 333, "Sk": 70}, "tokens", CAUSAL),  # rows that see nothing
    ({"D": 128, "Sq": 300, "Sk": 513}, "tokens", {"window_size": (100, 7)}),
    ({"D": 64, "Sk": 300}, "tokens", {"window_size": (140, None), "softcap": 2.0}),
    ({"D": 128, "Sq": 1}, "tokens", {"scale": 0.3}),
    ({"D": 128, "Sq": 17, "Sk": 1}, "tokens", {}),
]
KINDS = pytest.mark.parametrize("scales", [(), "tokens"], ids=["heads", "tokens"])


@BOTH
@pytest.mark.parametrize(("operands", "scales", "terms"), CALLS, ids=str)
def test_calls(place, operands, scales, terms, fast):
    plan = check(case(place, scales, **operands) | terms | fast)
    if (facts := plan.facts) is not None:
        assert isinstance(facts, Float8Facts) and (facts.fast, facts.tokens) == (bool(fast), scales == "tokens")
        assert not facts.tokens or SCALE_TOKENS % facts.config.tile_n == 0


@KINDS
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("terms", [{}, CAUSAL], ids=str)
def test_values_of_16_bits(place, dtype, terms, scales):
    """No kernel runs before, and no number of V is rounded."""
    for call in (case(place, scales, D=128, Sq=300, Sk=500), narrow(packed(ROWS, COLS, D=64, device=place))):
        call["v"] = torch.randn(call["v"].shape, device=place).to(dtype)
        plan = check(call | terms)
        assert plan.facts is None or plan.facts.values_dtype == str(dtype)[6:] and "converted" not in str(plan)
    blocks = torch.ones(3, 4, dtype=torch.bool, device=place).tril()
    check(case(place, D=64, Sq=300, Sk=500) | {"v": torch.randn(2, 2, 500, 64, device=place).to(dtype)}
          | {"block_mask": BlockMask.from_blocks(blocks, lengths=(300, 500))})  # fmt: skip


@KINDS
@pytest.mark.parametrize(("dtype", "of_sinks"), [(BF16, BF16), (FP16, None), (FP32, FP32)], ids=str)
def test_outputs_and_sinks(place, dtype, of_sinks, scales):
    call = case(place, scales, D=128, Sq=70, Sk=300) | CAUSAL
    if of_sinks is not None:
        call["sinks"] = torch.randn(4, device=place).to(of_sinks)
        call["sinks"][2] = 30.0
    check(call, dtype)


ROWS, COLS = [70, 0, 200, 5, 129], [90, 17, 333, 0, 129]


@BOTH
@pytest.mark.parametrize("scales", [None, (), (2,)], ids=str)
@pytest.mark.parametrize("terms", [{}, CAUSAL, {"window_size": (30, 3)}], ids=str)
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
@KINDS
@BOTH
def test_block_masks(place, block, terms, fast, scales):
    call = case(place, scales, D=128, Sq=300, Sk=500) | fast
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
    found, again = attention(**call, q_descale=two, k_descale=half, v_descale=two, return_lse=True)
    assert torch.equal(found, plain * 2) and torch.equal(again, lse)
    found, again = attention(**call, q_descale=two, scale=64**-0.5 / 2, return_lse=True)
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
        call[name], call[f"{name}_descale"] = quantize(t * 3, per="head")
        assert call[f"{name}_descale"].shape == t.shape[:2]
        assert (call[name].float().abs().amax((2, 3)) == LARGEST).all()
    check(call)


@KINDS
def test_nothing_to_see(place, scales):
    call = case(place, scales, D=64, Sk=0)
    out, lse = attention(**call, return_lse=True)
    assert out.dtype is BF16 and not out.count_nonzero() and lse.isneginf().all()


# Kernels on the emulator: timing at random

EMULATED = [  # operands, scales, terms, dtype of out
    ({"D": 128, "Sq": 330, "Sk": 400, "B": 1, "H": 2, "heads": 1}, (), CAUSAL, FP32),
    ({"D": 128, "Sq": 330, "Sk": 400, "B": 1, "H": 2, "heads": 1}, (), CAUSAL | FAST, FP32),
    ({"D": 192, "Dv": 96, "Sq": 70, "Sk": 300, "B": 2, "H": 1, "heads": 1}, None,
     {"window_size": (90, 3), "softcap": 2.0}, FP16),
    ({"D": 64, "Sq": 70, "Sk": 300, "B": 1, "H": 1, "heads": 1}, None, FAST | {"window_size": (90, 3)}, BF16),
    ({"D": 256, "Sq": 70, "Sk": 200, "B": 1, "H": 1, "heads": 1}, (), {"sinks": torch.tensor([2.0])} | FAST, BF16),
    ({"D": 128, "Sq": 330, "Sk": 400, "B": 1, "H": 2, "heads": 1}, "tokens", CAUSAL, FP32),
    ({"D": 128, "Sq": 330, "Sk": 400, "B": 1, "H": 2, "heads": 1}, "tokens", CAUSAL | FAST, FP32),
    ({"D": 64, "Sq": 190, "Sk": 600, "B": 1, "H": 1, "heads": 1}, "tokens", FAST, BF16),
    ({"D": 192, "Dv": 96, "Sq": 70, "Sk": 300, "B": 1, "H": 1, "heads": 1}, "tokens",
     {"window_size": (190, 3), "softcap": 2.0}, FP16),
    ({"D": 256, "Sq": 20, "Sk": 200, "B": 1, "H": 1, "heads": 1}, "tokens", {"sinks": torch.tensor([2.0])}, BF16),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("operands", "scales", "terms", "dtype"), EMULATED, ids=str)
def test_on_the_emulator(operands, scales, terms, dtype):
    with on_emulator("sm_90", sms=3, seed=1):
        check(case(scales=scales, **operands) | terms, dtype, exact=False)


@pytest.mark.slow
@KINDS
def test_values_of_16_bits_on_the_emulator(scales):
    call = case(scales=scales, D=96, Sq=70, Sk=200, B=1, H=2, heads=1)
    with on_emulator("sm_90", sms=3, seed=1):
        check(call | {"v": torch.randn(call["v"].shape).to(BF16)} | CAUSAL, exact=False)


@contextlib.contextmanager
def tiles(monkeypatch, dim: int, *wanted):
    """Inside, such tiles alone, and plans of their own."""
    with monkeypatch.context() as patch:
        for table in (heuristics.FLOAT8, heuristics.SM_90, heuristics.FLOAT8_SCORES, heuristics.TOKENS):
            patch.setitem(table, dim, tuple((each, 1.0) for each in wanted))
        for name in ("FLOAT8_UNMASKED_ONLY", "UNMASKED_ONLY"):
            patch.setattr(heuristics, name, set())
        patch.setattr(dispatch, "_PLANS", PlanCache(operands=3))
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
        call[name], call[f"{name}_descale"] = quantize(t, per="head")
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
@KINDS
@pytest.mark.parametrize(("block", "fast"), [((128, 128), {}), ((128, 128), FAST), ((64, 64), FAST)], ids=str)
def test_block_masks_on_the_emulator(block, fast, scales):
    call = case(scales=scales, D=128, Sq=200, Sk=400, B=1, H=2, heads=1) | fast
    blocks = torch.rand(1, 2, -(-200 // block[0]), -(-400 // block[1])) < 0.6
    mask = BlockMask.from_blocks(blocks, block, lengths=(200, 400), causal=True)
    with on_emulator("sm_90", sms=3, seed=1):
        check(call | {"block_mask": mask}, exact=False)


@pytest.mark.slow
@KINDS
def test_score_mod_on_the_emulator(scales):
    call = case(scales=scales, D=64, Sq=100, Sk=200, B=1, H=2, heads=1)
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
            for each, _ in (heuristics.FLOAT8 if fast else heuristics.SM_90 | heuristics.FLOAT8_SCORES)[dim]:
                with tiles(monkeypatch, dim, each):
                    plan = check(case("cuda", D=dim, Sq=500, Sk=700) | CAUSAL | fast)
                assert (plan.facts.config.tile_m, plan.facts.config.tile_n) == each[:2]

    @BOTH
    def test_scores_that_grow(self, fast):
        for D in (64, 128):
            call = {n: t.cuda() for n, t in growing(D=D, Sq=300, Sk=6000).items()}
            for terms in ({}, CAUSAL, {"window_size": (2000, 300)}):
                check(call | terms | fast)
