"""FP8 attention with a scale per block of 128 tokens, beyond the cases of test_fp8: forms of scales, extremes, plans.

Error bounds are those of fp8_parts.
"""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention, create_block_mask, scaled_dot_product_attention
from attention.forward import heuristics
from attention.forward.catalogue import EXTENTS, of_tokens
from attention.forward.config import SCALE_TOKENS, Float8Facts
from attention.masks.mask_mods import RowRange
from cute_kernels import explain, quantize
from cute_kernels.arch import arch_named
from cute_kernels.runtime.device import assume
from cute_kernels.runtime.families import unsupported

from ..emulator.emulate import machine
from ..emulator.ops import on_emulator
from .fp8_parts import BOTH, E4M3, FAST, SCALES, check, narrow, wide
from .fp8_parts import case_of_tokens as case
from .parts import CAUSAL, FP32, packed, qkv, truth
from .test_fp8 import place, tiles  # noqa: F401 (place is a fixture)


def quantised(*tensors, per=("tokens",) * 3) -> dict:
    """A call of these q, k and v, quantised."""
    call = {}
    for name, t, kind in zip("qkv", tensors, per, strict=True):
        call[name], call[f"{name}_descale"] = quantize(t, per=kind)
    return call


# Results


@pytest.mark.parametrize("names", [SCALES[:1], SCALES[1:2], SCALES[2:], SCALES[1:]], ids=str)
def test_some_scales(place, names):  # noqa: F811
    plan = check(case(place, names, D=64, Sk=300) | CAUSAL)
    assert plan.facts is None or [getattr(plan.facts, name) for name in SCALES] == [n in names for n in SCALES]


@pytest.mark.parametrize("which", SCALES)
@pytest.mark.parametrize("shape", [(1,), "heads", "items", "one"], ids=str)
def test_mixed_scales(place, which, shape):  # noqa: F811
    """One of them for all, for heads, or the same for all items and heads."""
    call = case(place, D=64, Sk=300)
    heads, blocks = call[which[0]].shape[1], call[which].shape[2]
    shape = {"heads": (heads,), "items": (2, heads), "one": (1, 1, blocks)}.get(shape, shape)
    check(call | {which: torch.rand(shape, device=place) + 0.5})


def test_strides(place):  # noqa: F811
    """Scales of any strides, and heads last in memory."""
    call = case(place, D=64, Sk=300)
    expected = attention(**call)
    turned = {n: call[n].permute(2, 1, 0).contiguous().permute(2, 1, 0) for n in SCALES}
    turned |= {n: call[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    assert torch.equal(attention(**call | turned), expected)


def test_plans_of_their_own(place):  # noqa: F811
    """Scales of heads and of tokens have other kernels, and the same results where they are the same."""
    call = case(place, (), D=64, Sk=300)
    for name in SCALES:
        of_heads = torch.rand(2, call[name[0]].shape[1], device=place) + 0.5
        blocks = -(-call[name[0]].shape[2] // SCALE_TOKENS)
        each = of_heads[..., None].expand(-1, -1, blocks)
        found, wanted = (
            attention(**call, **{name: scale}, out=torch.empty(2, 4, 200, 64, device=place))
            for scale in (each, of_heads)
        )
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("per", [("tokens",) * 3, ("head", "tokens", "head"), ("tokens", "head", "tokens")], ids=str)
def test_quantised(place, per):  # noqa: F811
    """quantize(per="tokens") makes what attention takes, blocks of zeros, too."""
    q, k, v = qkv(D=128, Sq=300, Sk=520, dtype=FP32, device=place)
    k[:, :, 128:256], v[:, :, 256:384], v[:, 0, :128] = 0.0, 0.0, v[:, 0, :128] * 1e-3
    call = quantised(q, k, v, per=per)
    check(call)


# Kernels on the emulator: timing at random

ONE = {"B": 1, "H": 1, "heads": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("names", "fast"), [(SCALES[::2], {}), (SCALES[1:2], {}), (SCALES[1:2], FAST)], ids=str)
def test_some_scales_on_the_emulator(names, fast):
    with on_emulator("sm_90", sms=2, seed=1):
        check(case(names=names, D=64, Sq=70, Sk=300, **ONE) | CAUSAL | fast, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize(("D", "block", "columns"), [(64, (128, 128), 64), (256, (64, 64), 32)])
def test_masks_that_read_tensors_on_the_emulator(D, block, columns):
    """They have narrower tiles by default."""
    begin = torch.arange(130, dtype=torch.int32) % 70
    mask = create_block_mask(RowRange(begin, begin + 150), None, None, 130, 300, BLOCK_SIZE=block)
    with on_emulator("sm_90", sms=2, seed=1):
        plan = check(case(D=D, Sq=130, Sk=300, **ONE) | {"block_mask": mask}, exact=False)
    assert plan.facts.config.tile_n == columns


def growing(**operands) -> dict:
    """Scores of the tiles that are visited last are far above the others, and so are V's scales of some: O is rescaled,
    and some scores are computed twice."""
    q, k, v = (t.float() for t in qkv(**operands))
    n = k.shape[2]
    k[:, :, : n // 3] *= 6
    k[:, :, n // 2 : n * 2 // 3] *= 2
    v[:, :, n // 4 : n // 2] *= 30
    v[:, :, n * 3 // 4 :] /= 1000
    return quantised(q, k, v)


@pytest.mark.slow
@BOTH
def test_scores_and_values_that_grow_on_the_emulator(fast):
    with on_emulator("sm_90", sms=2, seed=3):
        check(growing(D=64, Sq=64, Sk=1500, **ONE) | fast, exact=False)


@pytest.mark.slow
def test_sums_that_are_too_large():
    """As test_no_scores_are_computed_twice: p are multiplied, however small V's scales are. What is kept of a row's
    maximum and of its sum goes by them."""
    D, tile_n = 64, 128
    call = case(D=D, Sq=64, Sk=8 * tile_n + 64, names=SCALES[1:], spread=0.1, **ONE) | CAUSAL | FAST
    q, k = call["q"].float() / 2, call["k"].float()
    k[..., 8 * tile_n, :] = -1.5 * D**0.5 * q[..., 0, :] / q[..., 0, :].square().sum(-1)  # a score of -1.5
    call |= {"q": q.to(E4M3), "k": k.to(E4M3), "v_descale": call["v_descale"] * 2.0**-40}
    out = torch.empty(1, 1, 64, D)
    before = machine().emu_mmas()  # mma.sync; all others are wgmma
    with on_emulator("sm_90", sms=1, seed=2):
        plan = explain(attention, **call)
        _, lse = attention(**call, out=out, return_lse=True)
    expected = truth(**wide(call))
    assert plan.facts.config.tile_n == tile_n and machine().emu_mmas() == before
    assert (out - expected.out).norm() <= 0.04 * expected.out.norm()
    torch.testing.assert_close(lse, expected.lse.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@BOTH
def test_rows_of_small_values_on_the_emulator(fast):
    """Rows that see small values alone are as exact as others, though V's other blocks are a million times as large or
    zeros."""
    q, k, v = (t.float() for t in qkv(D=64, Sq=384, Sk=384, **ONE))
    v[:, :, :128] *= 1e-6
    k[:, :, 128:256], v[:, :, 128:256] = 0.0, 0.0
    call = quantised(q, k, v) | CAUSAL | fast
    assert (call["v_descale"][0, 0, 1] == call["k_descale"][0, 0, 1]) and call["v_descale"].max() < 1
    exact = truth(**wide(call)).out
    with on_emulator("sm_90", sms=2):
        out = attention(**call, out=torch.empty(1, 1, 384, 64))
    for rows in (slice(0, 128), slice(128, 256), slice(256, 384)):
        assert (out - exact)[..., rows, :].norm() <= (0.04 if fast else 0.001) * exact[..., rows, :].norm()


@pytest.mark.slow
@BOTH
def test_scales_that_are_no_numbers_stay_with_their_rows(fast):
    """NaN in a block's scale makes the rows that see the block NaN, and no others."""
    call = case(D=64, Sq=256, Sk=256, B=1, H=2, heads=2) | CAUSAL | fast
    with on_emulator("sm_90", sms=2):
        expected = attention(**call)
        for name, rows in (
            ("q_descale", slice(128, 256)),
            ("k_descale", slice(128, 256)),
            ("v_descale", slice(128, 256)),
        ):
            scale = call[name].clone()
            scale[0, 1, 1] = float("nan")
            found = attention(**call | {name: scale})
            assert found[0, 1, rows].isnan().all() and torch.equal(found[0, 0], expected[0, 0])
            assert torch.equal(found[0, 1, :128], expected[0, 1, :128])


@pytest.mark.slow
def test_powers_of_two_on_the_emulator():
    """Scales of powers of 2 move from blocks of K to their scales without rounding. Where all of V's are 4, maxima are
    larger by 2, so that fp32 rounds others than with 1."""
    call = case(names=(), D=64, Sq=70, Sk=300, **ONE)
    powers = torch.tensor([1.0, 0.5, 0.25]).view(1, 1, 3)
    moved = call["k"].float() / powers.repeat_interleave(SCALE_TOKENS, -1)[..., :300, None]
    ones = {"v_descale": torch.ones(1, 1, 3)}
    with on_emulator("sm_90", sms=2):
        expected, lse = attention(**call, **ones, return_lse=True)
        found, again = attention(**call | {"k": moved.to(E4M3)}, k_descale=powers, **ones, return_lse=True)
        assert torch.equal(found, expected) and torch.equal(again, lse)
        found, again = attention(**call, v_descale=ones["v_descale"] * 4, return_lse=True)
    torch.testing.assert_close(found, expected * 4, rtol=2.0**-7, atol=1e-4)
    torch.testing.assert_close(again, lse, rtol=1e-6, atol=1e-6)


# Plans


def test_tiles():
    """Tiles have columns that divide a block; the catalogue has no others."""
    q = torch.empty(2, 16, 8192, 128, dtype=E4M3, device="meta")
    scale = torch.empty(2, 16, 64, device="meta")
    for fast, columns in (({}, 80), (FAST, 96)):
        heads = explain(attention, q, q, q, q_descale=scale[..., 0], arch="sm_90", **fast)
        plan = explain(attention, q, q, q, q_descale=scale, v_descale=scale[0, :, 0], arch="sm_90", **fast)
        assert heads.facts.config.tile_n == columns and plan.facts.config.tile_n == 128
        assert plan.facts.tokens and plan.facts.q_descale and plan.facts.v_descale and not plan.facts.k_descale
        assert "scales are of blocks of 128 tokens: tiles have 128 keys, which divide a block" in str(plan)
    found = list(of_tokens(arch_named("sm_90")))
    assert {(f.head_dim, f.fast) for f in found} >= set(itertools.product(heuristics.HEAD_DIMS, (False, True)))
    assert all(f.tokens and not unsupported(f) and SCALE_TOKENS % f.config.tile_n == 0 for f in found)
    facts = Float8Facts("sm_90a", "sm_90", heuristics.FlashConfig(192, 96, 4, 3), fast=True, tokens=True)
    assert "a tile of 96 keys spans several scale blocks" in unsupported(facts)


# Errors

ONES = torch.ones(2, 2, 2)
WRONG = [
    ({"q_descale": torch.ones(2, 4, 3)}, r"q_descale has shape .2, 4, 3.; .* or .2, 4, 2. of blocks of 128 tokens"),
    ({"q_descale": torch.ones(2, 4, 1)}, r"q_descale has shape .2, 4, 1.; .* or .2, 4, 2. of blocks of 128 tokens"),
    ({"k_descale": torch.ones(2, 4, 3)}, r"k_descale has shape .2, 4, 3.; .* or .2, 2, 3. of blocks of 128 tokens"),
    ({"v_descale": torch.ones(2, 2, 3, 1)}, r"v_descale has shape .2, 2, 3, 1.; it must be"),
    ({"v_descale": torch.ones(3, 2, 3)}, r"v_descale has shape .3, 2, 3.; it must be"),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(*each, id=each[1]) for each in WRONG])
@pytest.mark.parametrize("on", [None, "sm_90"])
def test_errors(change, words, on):
    call = case(names=(), Sq=200, Sk=300) | change
    mask = BlockMask.from_blocks(torch.ones(2, 3, dtype=torch.bool), lengths=(200, 300))
    with assume(on, 132) if on else contextlib.nullcontext():
        with pytest.raises(ValueError, match=words):
            explain(attention, **call)
        with pytest.raises(ValueError, match=words):
            explain(block_sparse_attention, **call, block_mask=mask)


def test_what_has_none():
    call = narrow(packed([70, 9], [33, 80], D=64), None)
    with pytest.raises(ValueError, match="a sequence being an item: packed sequences have no scales of blocks of tok"):
        attention(**call, k_descale=torch.ones(2, 2, 1))
    q, k, v = qkv(Sq=1, Sk=200)
    with pytest.raises(
        ValueError, match="k_descale must have shape .*, got .2, 2, 2.; scales per block of tokens are not supported"
    ):
        attention(q, *(t.to(E4M3) for t in (k, v)), seqused_k=torch.ones(2, dtype=torch.int32), k_descale=ONES)
    with pytest.raises(TypeError):
        scaled_dot_product_attention(q, k, v, k_descale=ONES)


# Under torch.compile


def test_compiled():
    call = case(D=64, Sk=300) | {"return_lse": True}
    mask = BlockMask.from_blocks(torch.ones(2, 3, dtype=torch.bool), lengths=(200, 300))
    for op, more in ((attention, CAUSAL), (block_sparse_attention, {"block_mask": mask})):
        compiled = torch.compile(lambda op=op, **call: op(**call), backend="eager", fullgraph=True)
        for found, expected in zip(compiled(**call, **more), op(**call, **more), strict=True):
            assert torch.equal(found, expected)


# On a GPU


@pytest.mark.gpu
@pytest.mark.sm_90
class TestCuda:
    @pytest.mark.parametrize("terms", [{}, CAUSAL], ids=str)
    @pytest.mark.parametrize("shape", [(1, 2, 4096, 128), (2, 4, 1000, 64), (1, 2, 3000, 256)], ids=str)
    @BOTH
    def test_long(self, shape, terms, fast):
        B, H, S, D = shape
        call = case("cuda", spread=3, D=D, Sq=S, Sk=S, B=B, H=H, heads=H) | terms | fast
        check(call)
        first, again = (attention(**call, return_lse=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "other bits"

    @BOTH
    def test_every_tile(self, monkeypatch, fast):
        plain = Float8Facts("sm_90a", "sm_90", None, fast=bool(fast), tokens=True)
        for dim in heuristics.HEAD_DIMS:
            for config, _ in heuristics.candidates_sm90(replace(plain, head_dim=dim, head_dim_v=dim), EXTENTS):
                with tiles(monkeypatch, dim, (config.tile_m, config.tile_n, config.stages, config.groups)):
                    plan = check(case("cuda", D=dim, Sq=500, Sk=700) | CAUSAL | fast)
                assert replace(plan.facts.config, dynamic=False) == replace(config, dynamic=False)

    @BOTH
    def test_scores_and_values_that_grow(self, fast):
        for D in (64, 128):
            call = {n: t.cuda() for n, t in growing(D=D, Sq=300, Sk=6000, **ONE).items()} | fast
            for terms in ({}, CAUSAL, {"window_size": (2000, 300)}):
                check(call | terms)
