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

from .attention_parts import BF16, CAUSAL, FP16, FP32, packed, qkv
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

SMALL = {"B": 1, "H": 2, "heads": 1}
EMULATED = [  # operands, terms, dtype of out
    ({"D": 128, "Sq": 330, "Sk": 400} | SMALL, CAUSAL, FP32),
    ({"D": 64, "Sq": 200, "Sk": 700, "H": 1, "heads": 1, "B": 1}, {}, BF16),
    ({"D": 192, "Dv": 96, "Sq": 70, "Sk": 300} | SMALL, {"window": (190, 3), "softcap": 2.0}, FP16),
    ({"D": 256, "Sq": 70, "Sk": 330, "H": 1, "heads": 1, "B": 1}, {"sinks": torch.tensor([2.0])}, BF16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("operands", "terms", "dtype"), EMULATED, ids=str)
def test_on_the_emulator(operands, terms, dtype):
    with on_emulator("sm_90", sms=3, seed=1):
        check(case(spread=3, **operands) | terms, dtype, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SCALES[:1], SCALES[1:2], SCALES[2:]], ids=str)
def test_some_scales_on_the_emulator(names):
    with on_emulator("sm_90", sms=2, seed=1):
        check(case(names=names, D=64, Sq=70, Sk=300, **SMALL) | CAUSAL, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=str)
def test_block_masks_on_the_emulator(block):
    call = case(D=128, Sq=300, Sk=500, **SMALL)
    blocks = torch.rand(1, 2, -(-300 // block[0]), -(-500 // block[1])) < 0.6
    mask = BlockMask.from_blocks(blocks, block, lengths=(300, 500), causal=True)
    with on_emulator("sm_90", sms=3, seed=1):
        check(call | {"block_mask": mask}, exact=False)
