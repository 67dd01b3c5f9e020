"""Operands of 1 and of 4 bytes an element take the way of a product, from facts alone.

Of the ops gemm alone has some of them (test_fp8.py). What is checked here is that nothing on the way takes an
element for 16 bits: layouts, copies, K-tiles, configurations, costs; and that kernels of fp8 compile, on both paths,
and are right on the emulator.
"""

import shutil
from dataclasses import replace

import cutlass
import cutlass.cute as cute
import pytest
import torch

from cute_kernels.arch import ARCHS
from cute_kernels.matmul import candidates, catalogue, cost, legality
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec, GemmFacts
from cute_kernels.matmul.family import DENSE
from cute_kernels.runtime.compile import compile_for
from cute_kernels.runtime.families import family_of
from cute_kernels.testing.reference import assert_as_good_as_torch, exact_and_torch, poisoned
from cute_kernels.tile.ampere import OperandTile
from cute_kernels.tile.element import BYTES, Element, element_of
from cute_kernels.tile.hopper import smem_layout
from sparse_collective.bsr_gemm import catalogue as sparse
from sparse_collective.bsr_gemm.family import BSR
from sparse_collective.gemv.family import SKINNY
from sparse_collective.sddmm_kernel.family import SAMPLED, facts_of
from sparse_collective.small_blocks.family import SMALL_BLOCKS
from sparse_collective.small_blocks.tables import block_tables

from ..compiled import inspect_compiled
from ..emulator import emulate

FP8, TF32 = "float8_e4m3fn", "float32"  # the second as tensor cores would read it
DTYPES = {FP8: cutlass.Float8E4M3FN, "bfloat16": cutlass.BFloat16, TF32: cutlass.Float32}
SPARSE = {BSR: (128, 128), SMALL_BLOCKS: (32, 64), SAMPLED: (64, 64)}
on_paths = pytest.mark.parametrize("arch", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ("sm_89", "sm_90")])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def operands_of_any_width(monkeypatch):
    monkeypatch.setattr(legality, "OPERANDS", tuple(BYTES))


def facts_for(family, arch: str, dtype: str) -> list[GemmFacts]:
    """For every configuration of a family; operands contiguous along K, and aligned."""
    spec, element = ARCHS[arch], element_of(dtype)
    more = {"dtype": dtype, "aligns": (element.vector, element.vector, 8), "use_fast_accum": dtype == FP8}
    if family is DENSE:
        configs = DENSE.candidates(spec.path, None, spec, element)
        return [catalogue.dense(spec, spec.path, config, majors=("k", "k", "n"), **more) for config in configs]
    block = SPARSE[family]
    given = BlockFacts(*block, "int32", operand="d" if family is SAMPLED else "a")
    configs = family.candidates(spec.path, given, spec, element)
    if family is SAMPLED:
        return [facts_of(spec, spec.path, config, block, majors=("k", "k", "n"), **more) for config in configs]
    return [sparse.linear(spec, spec.path, config, block, majors=("k", "k", "m"), **more) for config in configs]


# Layouts


@every_dtype
def test_shared_memory_is_laid_out_by_bytes(dtype):
    """A ring of tiles has the same places, of each 16 bytes, whatever elements they are made of."""
    found = {}

    @cute.jit
    def trace():
        for name in (dtype, "bfloat16"):
            width = BYTES[name]
            for span in (32, 64, 128, 256):
                layout = smem_layout(DTYPES[name], 64, span // width, 3, True)
                places = [
                    cute.crd2idx((row, byte // width, stage), layout.outer) * width
                    for row in range(0, 64, 3)
                    for byte in range(0, span, 16)
                    for stage in range(3)
                ]
                found[name, span] = str(layout.inner), places, cute.cosize(layout) * width

    compile_for("sm_90a", trace)
    for span in (32, 64, 128, 256):
        swizzle, places, size = found[dtype, span]
        assert (swizzle, places, size) == found["bfloat16", span] and size == 3 * 64 * span
        assert len(set(places)) == len(places) and all(place % 16 == 0 for place in places)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("vector_bytes", [4, 8, 16])
@pytest.mark.parametrize("k_bytes", [64, 128])
@pytest.mark.parametrize("is_b", [False, True])
def test_operand_tiles_are_copied_once_and_read_as_they_were_copied(width, vector_bytes, k_bytes, is_b):
    element = Element(width)
    op = OperandTile(64, k_bytes // width, True, vector_bytes // width, 128, 2, is_b, element)
    assert op.bytes == 64 * k_bytes and op.vector_bytes == vector_bytes
    place_of = {}  # (row, first k) -> where the vector lies
    for index in range(op.copies * op.active):
        line, k = op.position(index)
        place_of[line, k] = op.offset(line, k * width)
    assert len(place_of) == op.bytes // vector_bytes == len(set(place_of.values()))
    assert {place // 16 * 16 for place in place_of.values()} == set(range(0, op.bytes, 16))
    for warp in range(2):
        for step in range(k_bytes // 32):
            for i in range(op.span // 16):
                x, add = op.step(i, step)
                read = {(op.lane_offset(lane, warp) ^ x) + add for lane in range(32)}
                rows, first = range(warp * op.span + 16 * i, warp * op.span + 16 * i + 16), step * element.mma_k
                halves = (first, first + element.vector)
                assert read == {place_of[row, k] for row in rows for k in halves}


def test_operands_that_ldmatrix_cannot_turn_are_refused():
    for width in (1, 4):
        with pytest.raises(AssertionError, match="does not transpose"):
            OperandTile(64, 64, False, 16 // width, 128, 2, False, Element(width))


# Facts and configurations


@every_dtype
@pytest.mark.parametrize("tile_bytes", [64, 128, 256])
def test_k_tiles_hold_as_many_steps_whatever_the_width(dtype, tile_bytes):
    """And as many stages fit. Of blocks as many bytes wide, too, also where a block's last K-tile is shorter."""

    def facts_of_width(name: str, block_bytes: int | None) -> GemmFacts:
        width, spec = BYTES[name], ARCHS["sm_90"]
        config = candidates.sm90(64, 128, tile_bytes // width, 1, 2, spec=spec, element=Element(width))
        block = block_bytes and BlockFacts(64, block_bytes // width, "int32")
        return GemmFacts("sm_90a", "sm_90", config, name, block=block)

    for block_bytes in (None, 32, 64, 96, 224, 256, 1952):
        found, known = (facts_of_width(name, block_bytes) for name in (dtype, "bfloat16"))
        for told in ("k_blocks", "clips_k", "operand_bytes"):
            assert getattr(found, told) == getattr(known, told)
        assert found.config.stages == known.config.stages
        assert block_bytes is None or found.k_tiles_per_block == known.k_tiles_per_block
    assert facts_of_width(dtype, None).k_blocks == (tile_bytes // 32,)


@on_paths
@every_dtype
@pytest.mark.parametrize("family", [DENSE, *SPARSE], ids=lambda family: family.name)
def test_configurations_of_any_width_are_legal(family, dtype, arch):
    """They fill shared memory as those of 16 bits do. What tensor cores cannot turn, or TMA not copy, is refused."""
    found, known = facts_for(family, arch, dtype), facts_for(family, arch, "bfloat16")
    if family is SMALL_BLOCKS and arch != "sm_90":
        assert not found
        return
    if family is SMALL_BLOCKS:  # its chunks have as many elements, whatever their width
        if dtype == TF32:  # wider than a swizzled row
            assert not found
            return
        assert all(facts.operand_bytes <= facts.spec.smem for facts in found)
    else:
        pairs = list(zip(found, known, strict=dtype == "bfloat16"))  # of others there may be more
        assert all(f.operand_bytes == k.operand_bytes for f, k in pairs)
        assert all(f.config.tile_k * BYTES[dtype] == k.config.tile_k * 2 for f, k in pairs)
    assert any(not family.unsupported(facts) for facts in found)
    for facts in found:
        turned = family.unsupported(replace(facts, majors=("k", "n", facts.majors[2])))
        assert ("tensor cores transpose only 16-bit" in turned) == (BYTES[dtype] != 2)
        if arch == "sm_90":
            narrow = replace(facts, aligns=(facts.aligns[0] // 2, *facts.aligns[1:]))
            assert "16 bytes" in family.unsupported(narrow)


def test_the_kernel_for_few_columns_says_what_it_takes():
    spec = ARCHS["sm_90"]
    for dtype, words in ((FP8, ""), (TF32, "supports 16-bit and FP8 operands")):
        config = SKINNY.candidates("sm_90", BlockFacts(64, 64, "int32"), spec, element_of(dtype))[0]
        facts = sparse.linear(spec, "sm_90", config, (64, 64), dtype=dtype, aligns=(16, 16, 8), majors=("k", "k", "m"))
        assert words in SKINNY.unsupported(facts) and bool(words) == bool(SKINNY.unsupported(facts))


@every_dtype
def test_a_k_tile_costs_by_its_bytes(dtype):
    """Tensor cores multiply twice as many elements of half the width in the same time, and L2 delivers bytes; more of
    them a clock where products of 8 bits make clocks slower."""
    width, spec = BYTES[dtype], ARCHS["sm_90"]
    clocks = [
        cost.k_tile_clocks(candidates.dense_sm90(spec, Element(w))[0], w, cost.L2_BYTES_PER_CLOCK) for w in (width, 2)
    ]
    faster = cost.L2_OF_8_BITS if width == 1 else 1.0
    assert clocks[0] == (clocks[1][0], clocks[1][1] / faster)


# Kernels


@pytest.mark.slow
@on_paths
@pytest.mark.parametrize("family", [DENSE, *SPARSE], ids=lambda family: family.name)
def test_kernels_of_fp8_compile_without_spills(family, arch):
    """The instruction is that of the dtype; nothing of the kernel's source names it."""
    legal = [facts for facts in facts_for(family, arch, FP8) if not family.unsupported(facts)]
    if not legal:
        assert family is SMALL_BLOCKS and arch != "sm_90"
        return
    assert family_of(legal[0]) is family
    report = inspect_compiled(legal[0])
    assert report.problems == () and "HMMA" not in report.resources.opcodes
    assert report.resources.opcodes["QGMMA" if arch == "sm_90" else "QMMA"] >= 4


# Results, on the emulator


def tables_of(family, mask, config, shape, block) -> tuple:
    """Tables of a pattern for a family's kernel (block rows, block columns), b being contiguous along K."""
    crow = torch.zeros(len(mask) + 1, dtype=torch.int32)
    crow[1:], col = mask.sum(1).cumsum(0), mask.nonzero()[:, 1].int()
    if family is BSR:
        return crow, col, None, None, None
    return crow, *block_tables(crow, col, shape, block, config.cluster_m, True)


@pytest.fixture
def emulator(monkeypatch):
    if shutil.which(emulate.COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    with emulate.emulator(sms=2):
        yield emulate.emulated


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_a_dense_product_of_fp8(emulator, arch):
    """E4M3 products are exact in FP32: what is left is the rounding of the result."""
    facts = facts_for(DENSE, arch, FP8)[3 if arch == "sm_89" else 9]  # small tiles
    a, b = (torch.randn(rows, 272).to(torch.float8_e4m3fn) for rows in (72, 136))
    d = poisoned(72, 136)
    emulator(facts)(a, b.t(), d, 1.0, 0.0, *facts.counts(1, 4))
    assert_as_good_as_torch(d, *exact_and_torch(a, b.t(), d.dtype), k=272)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "arch", "block", "which"),
    [
        pytest.param(BSR, "sm_89", (64, 224), 1, id="bsr sm_89"),
        pytest.param(BSR, "sm_90", (64, 224), 2, id="bsr sm_90"),
        pytest.param(SMALL_BLOCKS, "sm_90", (16, 32), 2, id="small blocks 16x32"),
        pytest.param(SMALL_BLOCKS, "sm_90", (64, 128), 2, id="small blocks 64x128"),
    ],
)
def test_block_sparse_products_of_fp8(emulator, monkeypatch, family, arch, block, which):
    """With blocks whose last K-tile is shorter, rows without blocks, and few columns."""
    monkeypatch.setitem(SPARSE, family, block)
    facts, (bm, bk) = facts_for(family, arch, FP8)[which], block
    facts = replace(facts, epilogue=EpilogueSpec())
    assert not family.unsupported(facts)
    mask = torch.rand(max(3, 192 // bm), max(3, 256 // bk)) < 0.5
    mask[1], mask[0, 0] = False, True
    values = torch.randn(int(mask.sum()), bm, bk).to(torch.float8_e4m3fn)
    W = torch.zeros(*mask.shape, bm, bk)
    W[mask] = values.float()
    W = W.transpose(1, 2).reshape(len(mask) * bm, -1)
    x, d = torch.randn(40, W.shape[1]).to(torch.float8_e4m3fn), poisoned(40, W.shape[0])
    tables = tables_of(family, mask, facts.config, W.shape, block)
    emulator(facts)(*tables, values, x, d, 1.0, 0.0, *facts.counts(1, 2))
    assert_as_good_as_torch(d, *exact_and_torch(x, W.t(), d.dtype), k=W.shape[1])
