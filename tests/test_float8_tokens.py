"""attention() of 8-bit floats with scales of blocks of 128 tokens: kernels of sm_90, and the reference.

Bounds are those of test_float8_attention: of all that differs P is rounded, and p w is in the middle of its range,
which is what its error is a part of.
"""

import contextlib

import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention, scaled_dot_product_attention
from attention.forward import choose
from attention.forward.catalogue import of_tokens
from attention.forward.config import SCALE_TOKENS, Float8Facts
from attention.score_mods import Alibi
from cute_kernels import explain, quantize
from cute_kernels.arch import arch_named
from cute_kernels.runtime.device import assume
from cute_kernels.runtime.families import unsupported

from .attention_parts import BF16, CAUSAL, FP16, FP32, packed, qkv, truth
from .emulator.ops import on_emulator
from .reference import poisoned_empty
from .test_float8_attention import E4M3, SCALES, check, narrow, place, tiles, wide  # noqa: F401 (place is a fixture)


def of_tokens_scales(t: torch.Tensor, spread: float) -> torch.Tensor:
    """(B, H, blocks), from 2 ** -spread to 2 ** spread."""
    shape = *t.shape[:2], -(-t.shape[2] // SCALE_TOKENS)
    return torch.exp2((torch.rand(shape, device=t.device) * 2 - 1) * spread)


def case(device="cpu", names=SCALES, spread=1.5, **operands) -> dict:
    """A call of q, k and v of 8 bits with scales of blocks of tokens, those named."""
    call = narrow(dict(zip("qkv", qkv(device=device, **operands), strict=True)), None)
    return call | {name: of_tokens_scales(call[name[0]], spread) for name in names}


def quantised(*tensors, per=("tokens",) * 3) -> dict:
    """A call of these q, k and v, quantised."""
    call = {}
    for name, t, kind in zip("qkv", tensors, per, strict=True):
        call[name], call[f"{name}_scale"] = quantize(t, per=kind)
    return call


# Results

CALLS = [  # operands, terms
    *(({"D": D, "Sq": 300, "Sk": 513}, terms) for D in choose.HEAD_DIMS for terms in ({}, CAUSAL)),
    ({"D": 192, "Dv": 128, "Sq": 70, "Sk": 333}, CAUSAL),
    ({"D": 64, "Sq": 333, "Sk": 70}, CAUSAL),  # rows that see nothing
    ({"D": 128, "Sq": 300, "Sk": 513}, {"window": (100, 7)}),
    ({"D": 64, "Sk": 300}, {"window": (140, None), "softcap": 2.0}),
    ({"D": 128, "Sq": 1}, {"scale": 0.3}),
    ({"D": 128, "Sq": 17, "Sk": 1}, {}),
]


@pytest.mark.parametrize(("operands", "terms"), CALLS, ids=str)
def test_calls(place, operands, terms):  # noqa: F811
    plan = check(case(place, **operands) | terms)
    assert plan.facts is None or plan.facts.tokens and SCALE_TOKENS % plan.facts.config.tile_n == 0


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


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_outputs_and_sinks(place, dtype):  # noqa: F811
    sinks = torch.randn(4, device=place)
    sinks[2] = 30.0
    check(case(place, D=128, Sq=70, Sk=300) | CAUSAL | {"sinks": sinks}, dtype)


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("terms", [{}, CAUSAL], ids=str)
def test_block_masks(place, block, terms):  # noqa: F811
    call = case(place, D=128, Sq=300, Sk=500)
    blocks = torch.rand(2, 4, -(-300 // block[0]), -(-500 // block[1])) < 0.5
    blocks[0, 1] = False
    mask = BlockMask.from_blocks(blocks.to(place), block, lengths=(300, 500), **terms)
    check(call | {"block_mask": mask})


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
        found = attention(**call, **{name: of_heads[..., None].expand(-1, -1, blocks)}, out=torch.empty(2, 4, 200, 64))
        wanted = attention(**call, **{name: of_heads}, out=torch.empty(2, 4, 200, 64))
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("per", [("tokens",) * 3, ("head", "tokens", "head"), ("tokens", "head", "tokens")], ids=str)
def test_quantised(place, per):  # noqa: F811
    """quantize(per="tokens") makes what attention takes, blocks of zeros, too."""
    q, k, v = qkv(D=128, Sq=300, Sk=520, dtype=FP32, device=place)
    k[:, :, 128:256], v[:, :, 256:384], v[:, 0, :128] = 0.0, 0.0, v[:, 0, :128] * 1e-3
    call = quantised(q, k, v, per=per)
    check(call)


def test_nothing_to_see(place):  # noqa: F811
    call = case(place, D=64, Sk=0)
    out, lse = attention(**call, return_lse=True)
    assert call["k_scale"].shape == (2, 2, 0) and not out.count_nonzero() and lse.isneginf().all()


# Kernels on the emulator: timing at random

SMALL, ONE = {"B": 1, "H": 2, "heads": 1}, {"B": 1, "H": 1, "heads": 1}
EMULATED = [  # operands, terms, dtype of out
    ({"D": 128, "Sq": 330, "Sk": 400} | SMALL, CAUSAL, FP32),
    ({"D": 64, "Sq": 200, "Sk": 700} | ONE, {}, BF16),
    ({"D": 192, "Dv": 96, "Sq": 70, "Sk": 300} | ONE, {"window": (190, 3), "softcap": 2.0}, FP16),
    ({"D": 256, "Sq": 40, "Sk": 300} | ONE, {"sinks": torch.tensor([2.0])}, BF16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("operands", "terms", "dtype"), EMULATED, ids=str)
def test_on_the_emulator(operands, terms, dtype):
    with on_emulator("sm_90", sms=3, seed=1):
        check(case(spread=3, **operands) | terms, dtype, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SCALES[::2], SCALES[1:2]], ids=str)
def test_some_scales_on_the_emulator(names):
    with on_emulator("sm_90", sms=2, seed=1):
        check(case(names=names, D=64, Sq=70, Sk=300, **ONE) | CAUSAL, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=str)
def test_block_masks_on_the_emulator(block):
    call = case(D=128, Sq=200, Sk=400, **SMALL)
    blocks = torch.rand(1, 2, -(-200 // block[0]), -(-400 // block[1])) < 0.6
    mask = BlockMask.from_blocks(blocks, block, lengths=(200, 400), causal=True)
    with on_emulator("sm_90", sms=3, seed=1):
        check(call | {"block_mask": mask}, exact=False)


@pytest.mark.slow
def test_score_mod_on_the_emulator():
    call = case(D=64, Sq=100, Sk=300, **SMALL)
    mod = Alibi(torch.rand(2))
    expected, lse = attention(**call, score_mod=mod, return_lse=True)
    with on_emulator("sm_90", sms=3), poisoned_empty():
        found, again = attention(**call, score_mod=mod, return_lse=True)
    torch.testing.assert_close(again, lse, rtol=1e-5, atol=1e-5)
    assert (found - expected).float().norm() <= 0.05 * expected.float().norm()


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
def test_scores_and_values_that_grow_on_the_emulator():
    """Over so many tiles that O's sums are kept in shared memory, and their rows' maxima grow."""
    with on_emulator("sm_90", sms=2, seed=3):
        plan = check(growing(D=64, Sq=64, Sk=2700, **ONE), exact=False)
    assert plan.facts.keeps_sums


@pytest.mark.slow
def test_rows_of_small_values_on_the_emulator():
    """Rows that see small values alone are as exact as others, though V's other blocks are a million times as large or
    zeros."""
    q, k, v = (t.float() for t in qkv(D=64, Sq=384, Sk=384, **ONE))
    v[:, :, :128] *= 1e-6
    k[:, :, 128:256], v[:, :, 128:256] = 0.0, 0.0
    call = quantised(q, k, v) | CAUSAL
    assert (call["v_scale"][0, 0, 1] == call["k_scale"][0, 0, 1]) and call["v_scale"].max() < 1
    exact = truth(**wide(call)).out
    with on_emulator("sm_90", sms=2):
        out = attention(**call, out=torch.empty(1, 1, 384, 64))
    for rows in (slice(0, 128), slice(128, 256), slice(256, 384)):
        assert (out - exact)[..., rows, :].norm() <= 0.04 * exact[..., rows, :].norm()


@pytest.mark.slow
def test_scales_that_are_no_numbers_stay_with_their_rows():
    """NaN in a block's scale makes the rows that see the block NaN, and no others."""
    call = case(D=64, Sq=256, Sk=256, B=1, H=2, heads=2) | CAUSAL
    with on_emulator("sm_90", sms=2):
        expected = attention(**call)
        for name, rows in (("q_scale", slice(128, 256)), ("k_scale", slice(128, 256)), ("v_scale", slice(128, 256))):
            scale = call[name].clone()
            scale[0, 1, 1] = float("nan")
            found = attention(**call | {name: scale})
            assert found[0, 1, rows].isnan().all() and torch.equal(found[0, 0], expected[0, 0])
            assert torch.equal(found[0, 1, :128], expected[0, 1, :128])


@pytest.mark.slow
def test_powers_of_two_on_the_emulator():
    """Scales of powers of 2 move from blocks of K to their scales without rounding; as much holds of all of V's."""
    call = case(names=(), D=64, Sq=70, Sk=300, **ONE)
    powers = torch.tensor([1.0, 0.5, 0.25]).view(1, 1, 3)
    moved = call["k"].float() / powers.repeat_interleave(SCALE_TOKENS, -1)[..., :300, None]
    ones = {"v_scale": torch.ones(1, 1, 3)}
    with on_emulator("sm_90", sms=2):
        expected, lse = attention(**call, **ones, return_lse=True)
        found, again = attention(**call | {"k": moved.to(E4M3)}, k_scale=powers, **ones, return_lse=True)
        assert torch.equal(found, expected) and torch.equal(again, lse)
        found, again = attention(**call, v_scale=ones["v_scale"] * 4, return_lse=True)
    assert torch.equal(found, expected * 4) and torch.allclose(again, lse, rtol=1e-6, atol=1e-6)


# Plans


def test_tiles():
    """Those whose columns divide a block; and the catalogue has no others."""
    q = torch.empty(2, 16, 8192, 128, dtype=E4M3, device="meta")
    scale = torch.empty(2, 16, 64, device="meta")
    heads = explain(attention, q, q, q, q_scale=scale[..., 0], arch="sm_90")
    plan = explain(attention, q, q, q, q_scale=scale, v_scale=scale[0, :, 0], arch="sm_90")
    assert heads.facts.config.tile_n == 96 and plan.facts.config.tile_n == 128
    assert plan.facts.tokens and plan.facts.q_scale and plan.facts.v_scale and not plan.facts.k_scale
    assert "scales are of blocks of 128 tokens: tiles have 128 keys, which divide a block" in str(plan)
    found = list(of_tokens(arch_named("sm_90")))
    assert {f.head_dim for f in found} == set(choose.HEAD_DIMS)
    assert all(f.tokens and not unsupported(f) and SCALE_TOKENS % f.config.tile_n == 0 for f in found)
    facts = Float8Facts("sm_90a", "sm_90", choose.FlashConfig(192, 96, 4, 3), tokens=True)
    assert "tiles of 96 keys have scales of several blocks" in unsupported(facts)


# Errors

ONES = torch.ones(2, 2, 2)
WRONG = [
    ({"q_scale": torch.ones(2, 4, 3)}, r"q_scale has shape .2, 4, 3.; .* or .2, 4, 2. of blocks of 128 tokens"),
    ({"q_scale": torch.ones(2, 4, 1)}, r"q_scale has shape .2, 4, 1.; .* or .2, 4, 2. of blocks of 128 tokens"),
    ({"k_scale": torch.ones(2, 4, 3)}, r"k_scale has shape .2, 4, 3.; .* or .2, 2, 3. of blocks of 128 tokens"),
    ({"v_scale": torch.ones(2, 2, 3, 1)}, r"v_scale has shape .2, 2, 3, 1.; it must be"),
    ({"v_scale": torch.ones(3, 2, 3)}, r"v_scale has shape .3, 2, 3.; it must be"),
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
        attention(**call, k_scale=torch.ones(2, 2, 1))
    q, k, v = qkv(Sq=1, Sk=200)
    with pytest.raises(ValueError, match=r"k_scale has shape .2, 2, 2.; .*caches have no scales of blocks of tokens"):
        attention(q, *(t.to(E4M3) for t in (k, v)), seqlens_k=torch.ones(2, dtype=torch.int32), k_scale=ONES)
    with pytest.raises(TypeError):
        scaled_dot_product_attention(q, k, v, k_scale=ONES)


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
    def test_long(self, shape, terms):
        B, H, S, D = shape
        call = case("cuda", spread=3, D=D, Sq=S, Sk=S, B=B, H=H, heads=H) | terms
        check(call)
        first, again = (attention(**call, return_lse=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "other bits"

    def test_every_tile(self, monkeypatch):
        for dim in choose.HEAD_DIMS:
            for each, _ in choose.FLOAT8[dim]:
                if SCALE_TOKENS % each[1] == 0 and (dim, each) not in choose.FLOAT8_HEADS:
                    with tiles(monkeypatch, dim, each):
                        plan = check(case("cuda", D=dim, Sq=500, Sk=700) | CAUSAL)
                    assert (plan.facts.config.tile_m, plan.facts.config.tile_n) == each[:2]

    def test_a_graph(self):
        call = case("cuda", D=128, Sq=300, Sk=700)
        attention(**call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(**call)
        for name in SCALES:
            call[name].mul_(1.5)
            graph.replay()
            assert torch.equal(out, attention(**call))

    def test_scores_and_values_that_grow(self):
        for D in (64, 128):
            call = {n: t.cuda() for n, t in growing(D=D, Sq=300, Sk=6000, **ONE).items()}
            for terms in ({}, CAUSAL, {"window": (2000, 300)}):
                check(call | terms)
