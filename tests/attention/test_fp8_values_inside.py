"""FP8 attention whose kernel converts V to FP16 (values_inside): bitwise identical to a separate conversion kernel.

That conversion is exact and all else the same code, so results are equal, and not only close.
"""

import shutil
from dataclasses import replace

import cutlass
import cutlass.cute as cute
import pytest
import torch

from attention import BlockMask, attention, block_sparse_attention, create_block_mask
from attention.forward import heuristics
from attention.forward.config import Float8Facts
from attention.forward.fp8.values_inside import PIECE, ValuesInside, swizzled
from attention.masks.mask_mods import And, Band, RowRange
from cute_kernels import explain
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.device import assume
from cute_kernels.runtime.families import family_named, unsupported
from cute_kernels.testing.reference import poisoned_empty
from cute_kernels.tile.hopper import smem_layout

from ..emulator import emulate
from ..emulator.ops import on_emulator
from .fp8_parts import E4M3, FAST, case, check, converting
from .parts import BF16, CAUSAL, FP32

FLASH = family_named("flash forward")
INSIDE = [f for f in FLASH.catalogue("sm_90") if isinstance(f, Float8Facts) and f.converts]
emulated = pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler (CXX)")


# Calls, and their results


def blocks_of(block: tuple, **terms) -> dict:
    torch.manual_seed(5)
    blocks = torch.rand(1, 2, -(-300 // block[0]), -(-500 // block[1])) < 0.6
    blocks[0, 1, 1] = False
    return {"block_mask": (blocks, block, terms)}


SMALL = {"B": 1, "H": 2, "heads": 1}
CALLS = {  # name -> operands, terms, dtype of out
    "full": ({"D": 128, "Sq": 256, "Sk": 256}, {}, BF16),
    "causal": ({"D": 128, "Sq": 330, "Sk": 400}, CAUSAL, FP32),
    "blocks": ({"D": 128, "Sq": 300, "Sk": 500}, blocks_of((128, 128)), BF16),
    "blocks 64x64": ({"D": 96, "Sq": 300, "Sk": 500}, blocks_of((64, 64), **CAUSAL), BF16),
    "one key": ({"D": 64, "Sq": 70, "Sk": 1}, {}, BF16),
}
MORE = {
    **{f"D {dim}{', causal' * bool(terms)}": ({"D": dim, "Sq": 333, "Sk": 517}, terms, BF16)
       for dim in heuristics.HEAD_DIMS for terms in ({}, CAUSAL)},
    **{f"blocks of {bq}x{bk}, D {dim}": ({"D": dim, "Sq": 300, "Sk": 500}, blocks_of((bq, bk)), BF16)
       for dim in heuristics.HEAD_DIMS for bq in (64, 128) for bk in (64, 128)},
    "two dimensions": ({"D": 192, "Dv": 128, "Sq": 70, "Sk": 333}, CAUSAL, BF16),
    "wide values": ({"D": 64, "Dv": 256, "Sq": 333, "Sk": 70}, CAUSAL, BF16),
    "window": ({"D": 128, "Sq": 300, "Sk": 513}, {"window_size": (100, 7), "softcap": 2.0}, BF16),
    "many tiles": ({"D": 128, "B": 8, "H": 16, "heads": 4, "Sq": 1100, "Sk": 1900}, CAUSAL, BF16),
    "many tiles, full": ({"D": 128, "B": 8, "H": 16, "heads": 4, "Sq": 1100, "Sk": 1900}, {}, BF16),
    "tokens": ({"D": 128, "Sq": 300, "Sk": 500, "tokens": True}, CAUSAL, BF16),
}  # fmt: skip


def call_of(name: str, device: str) -> tuple:
    """(arguments, dtype of out)."""
    operands, terms, dtype = (CALLS | MORE)[name]
    operands, terms = dict(operands), dict(terms)
    torch.manual_seed(1)
    tokens = operands.pop("tokens", False)
    call = case(device, None if tokens else (), **SMALL | operands)
    if tokens:
        for t in "qkv":
            shape = *call[t].shape[:2], -(-call[t].shape[2] // 128)
            call[f"{t}_descale"] = (torch.rand(shape) + 0.5).to(device)
    if "block_mask" in terms:
        blocks, block, more = terms["block_mask"]
        lengths = call["q"].shape[2], call["k"].shape[2]
        terms["block_mask"] = BlockMask.from_blocks(blocks.to(device), block, lengths=lengths, **more)
    return call | terms, dtype


def both(name: str, device: str, exact: bool = False) -> None:
    """Right inside, and the same bits as before."""
    call, dtype = call_of(name, device)
    op, found = block_sparse_attention if "block_mask" in call else attention, []
    for inside in (True, False):
        with converting(inside), poisoned_empty():
            plan = explain(op, **call, return_lse=True)
            assert plan.facts.converts == inside == (plan.values is None)
            if inside:
                check(call, dtype, exact=exact)
            found.append(op(**call, return_lse=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.sm_90
@pytest.mark.parametrize("name", CALLS | MORE)
def test_same_bits(name):
    both(name, "cuda")


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_on_the_emulator(name):
    call, dtype = call_of(name, "cpu")
    for seed in (1, 2):
        with converting(True), on_emulator("sm_90", sms=3, seed=seed):
            assert check(call, dtype, exact=False).facts.converts


@emulated
@pytest.mark.slow
def test_same_bits_on_the_emulator():
    with on_emulator("sm_90", sms=2, seed=3):
        both("causal", "cpu")


# Where values go


@pytest.mark.parametrize("dim", heuristics.HEAD_DIMS)
def test_values_come_to_their_places(dim):
    """Each to where V's ring has it, and no two lanes that read or write at once meet in a bank."""
    tile_n = 48
    facts = Float8Facts("sm_90a", "sm_90", heuristics.FlashConfig(128, tile_n, 2, 2), head_dim_v=dim, converts=True)
    inside, places = ValuesInside(facts), []

    @cute.jit
    def trace():
        given, made = inside.layout(), smem_layout(cutlass.Float16, dim, tile_n, 2, False)
        places.append(str(made.inner))
        places.extend([(cute.crd2idx(at, given), cute.crd2idx(at, made.outer) * 2) for at in elements])

    elements = [(d, row, 0) for row in range(tile_n) for d in range(0, dim, 16)]
    compile_for("sm_90a", trace)
    swizzle, *places = places
    bits = {128: 3, 64: 2, 32: 1}[inside.span]
    assert f"S<{bits},4,3>" in swizzle
    assert sorted(given for given, _ in places) == list(range(0, inside.size, 16))
    assert all(made == 2 * given for given, made in places)
    for lanes in (range(i, i + 8) for i in range(0, inside.size // 16, 8)):  # of which a wide load is made at once
        first = [swizzled(32 * lane, inside.span) for lane in lanes]
        assert {place ^ place >> 7 << 7 for place in first} == set(range(0, 128, 16))
    assert inside.size * 2 % 1024 == 0 and PIECE * 2 % 1024 == 0  # so a lane's swizzle is that of its first piece


# Which kernels


def test_both_kinds_are_in_the_catalogue():
    assert {f.head_dim for f in INSIDE} == set(heuristics.HEAD_DIMS)
    every = {f for f in FLASH.catalogue("sm_90") if isinstance(f, Float8Facts)}
    assert all(replace(f, converts=False) in every and f.smem_bytes <= FLASH.smem_limit(f) for f in INSIDE)
    assert {(f.tokens, f.config.dynamic, f.config.groups, f.config.ctas) for f in INSIDE} >= {
        (False, True, 2, 1), (True, True, 2, 1), (False, False, 3, 1), (False, True, 1, 2)
    }  # fmt: skip


def test_what_does_not_convert():
    facts = INSIDE[0]
    assert "a packed V is not converted" in unsupported(replace(facts, packed=True))
    assert "bfloat16 V is not converted" in unsupported(replace(facts, given_v="bfloat16"))
    assert "with fast accumulation is not converted" in unsupported(replace(facts, fast=True))
    rows = torch.zeros(500, dtype=torch.int32)
    mask = create_block_mask(And(RowRange(rows, rows + 1), Band(None, 0, 3)), None, None, 300, 500)
    call = {name: torch.zeros(1, 2, n, 128).to(E4M3) for name, n in (("q", 300), ("k", 500), ("v", 500))}
    with converting(True), assume("sm_90"):
        assert not explain(attention, **call, **FAST).facts.converts
        assert not explain(attention, **call | {"v": call["v"].to(BF16)}).facts.converts
        plan = explain(block_sparse_attention, **call, block_mask=mask)
        assert plan.facts.converts and "none runs before it" in str(plan)
        wide = replace(plan.facts, config=replace(plan.facts.config, tile_n=128, stages=3))
        assert "element masks spill with tiles of 128x128" in unsupported(wide)
