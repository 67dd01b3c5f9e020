"""Small blocks: the plan of their kernel, and products of patterns that fill it in every way.

Without a GPU the plan is walked as the kernel walks it (emulate.small_blocks); with one the kernel runs.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.arch import ARCHS
from cute_kernels.matmul import candidates
from cute_kernels.matmul.catalogue import COL
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.families import unsupported
from cute_kernels.testing import patterns as cases
from cute_kernels.testing.reference import normal
from cute_kernels.tile.element import BITS_16
from sparse_collective import bsr_linear, bsr_matmul
from sparse_collective.bsr_gemm import catalogue
from sparse_collective.small_blocks.family import SMALL_BLOCKS
from sparse_collective.small_blocks.tables import block_tables, table_shapes, tables_of
from sparse_collective.small_blocks.tile import CONSUMERS, ROWS, Geometry

from ..conformance import FAMILIES
from ..emulator.ops import needs_compiler, on_emulator
from ..gemm_calls import check
from .bsr_parts import BOTH_OPS, Operations, batch, bsr, operands

BLOCKS = ((16, 16), (32, 32), (64, 64), (16, 32), (32, 16), (64, 16), (16, 64), (32, 64))
BLOCKS += ((16, 128), (64, 128), (32, 192))  # wider than a chunk
CONFIGS = SMALL_BLOCKS.candidates("sm_90", BlockFacts(16, 16, "int32"), ARCHS["sm_90"])
# The first configuration takes every block shape, the others three.
BLOCKS_OF = [(config, block) for config in CONFIGS for block in (BLOCKS if config == CONFIGS[0] else BLOCKS[:3])]


@pytest.mark.sm_90
@pytest.mark.parametrize(("config", "block"), BLOCKS_OF, ids=str)
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_patterns(device, monkeypatch, config, pattern, block):
    """Groups and chunks of every filling, with a last group and a last chunk that are not full, and rings that wrap."""
    FAMILIES["small blocks sm_90"].force(monkeypatch, config)
    W = bsr(pattern, block, device, grid=(800 // block[0] + 1, 700 // block[1] + 2))
    assert check(bsr_matmul, *operands(bsr_matmul, W, 264)).facts.config == config


# Transposed views


def view(pattern, block, device="cpu", grid=None, **more):
    """W.t() of a matrix whose view has blocks of this shape, and `grid` of them."""
    rows, cols = grid or (800 // block[0] + 1, 700 // block[1] + 2)
    return bsr(pattern, block[::-1], device, grid=(cols, rows), **more).t()


@pytest.mark.sm_90
@BOTH_OPS
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_transposed_views(device, monkeypatch, pattern, block, op):
    """The dense operand is row-major, so its K is contiguous in one of the ops."""
    FAMILIES["small blocks sm_90"].force(monkeypatch)
    W = view(pattern, block, device)
    facts = check(op, *operands(op, W, 264)).facts
    assert (facts.family, facts.block.permuted) == ("small blocks", True)


@pytest.mark.sm_90
@BOTH_OPS
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 64), (16, 128)], ids=str)
def test_transposed_views_in_every_configuration(device, monkeypatch, block, config, op):
    """Several work tiles for each CTA on a GPU, so that rings go on between them."""
    FAMILIES["small blocks sm_90"].force(monkeypatch, config)
    rows, columns = (2600, 8200) if device == "cuda" else (400, 136)
    W = view("power_law", block, device, (rows // block[0], 600 // block[1] + 1))
    assert check(op, *operands(op, W, columns)).facts.config == config


@pytest.mark.sm_90
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 16)], ids=str)
def test_layers_of_transposed_views(device, monkeypatch, block, index_dtype, dtype):
    FAMILIES["small blocks sm_90"].force(monkeypatch)
    W = view("empty_rows", block, device, dtype=dtype, index_dtype=index_dtype)
    x = normal(136, W.shape[1], device=device, dtype=dtype)
    check(bsr_linear, x, W, bias=normal(W.shape[0], device=device, dtype=dtype), activation="gelu")


@pytest.mark.sm_90
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 64)], ids=str)
def test_batches_of_transposed_views(device, monkeypatch, block, shared):
    FAMILIES["small blocks sm_90"].force(monkeypatch)
    W = batch("values", block[::-1], device, grid=(9, 14))[0].t()
    lead = () if shared else W.shape[:1]
    x, bias = (normal(*shape, device=device) for shape in ((*lead, 72, W.shape[2]), W.shape[:2]))
    check(bsr_linear, x, W, bias=bias, activation="gelu")
    check(bsr_matmul, W, normal(*lead, W.shape[2], 136, device=device))


def test_the_plan_of_a_view_names_stored_blocks_and_waits_for_nothing():
    W = view("bernoulli", (16, 32), grid=(40, 9))
    pattern = W.crow_indices, W.col_indices, W.shape, W.blocksize
    with Operations() as operations:
        plan = tables_of(W.pattern, 1, False)
    assert not operations.asked()
    copied = block_tables(*pattern, 1, False)
    assert all(torch.equal(*pair) for pair in zip(plan[:3], copied, strict=False))
    assert plan.order.dtype == torch.int32 and torch.equal(plan.order, W.numbers[copied.order.long()])
    assert not torch.equal(plan.order, copied.order), "a pattern whose order changes"


# The plan


@given(
    block=st.sampled_from(BLOCKS),
    rows=st.integers(1, 60),
    cols=st.integers(1, 20),
    density=st.floats(0, 1),
    cluster=st.sampled_from((1, 2)),
    k_major=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_block_is_met_once_and_in_its_place(block, rows, cols, density, cluster, k_major, seed):
    mask = cases.bernoulli(rows, cols, density, seed)
    crow, col = cases.mask_to_indices(mask)
    plan = block_tables(crow, col, (rows * block[0], cols * block[1]), block, cluster, k_major)
    g, segments = Geometry.of_block(*block, k_major), CONSUMERS * cluster
    found = torch.zeros(rows, cols, g.parts, dtype=torch.int)
    for group in range(len(plan.counts)):
        needed = plan.slices[group, : int(plan.counts[group])].tolist()
        of_group = mask[group * segments * g.rows : (group + 1) * segments * g.rows].any(0)
        slices = [bool(part.any()) for part in of_group.repeat_interleave(g.parts).split(g.gather)]
        assert needed == [i for i, any_ in enumerate(slices) if any_], "ascending, and no other"
        for segment in range(segments):
            first = (group * segments + segment) * g.rows
            at = int(crow[min(first, rows)])
            for i in range(0, len(needed), g.slices):
                word = int(plan.words[group, i // g.slices, segment])
                bits = [bit for bit in range(32) if word >> bit & 1]
                assert len(bits) <= g.rows * g.steps <= ROWS // 4
                for j, bit in enumerate(bits):
                    r, s = first + bit // g.steps, bit % g.steps
                    part = needed[i + s // g.gather] * g.gather + s % g.gather
                    p = int(plan.order[at + j])
                    assert int(crow[r]) <= p < int(crow[r + 1]) and int(col[p]) == part // g.parts
                    found[r, part // g.parts, part % g.parts] += 1
                if needed[i] % g.parts == g.parts - 1:
                    at += len(bits)
    assert torch.equal(found, mask[..., None].int().expand_as(found))


@pytest.mark.gpu
@pytest.mark.parametrize(("cluster", "k_major", "index_dtype"), [(1, True, torch.int64), (2, False, torch.int32)])
@pytest.mark.parametrize("block", [(16, 16), (32, 64), (64, 16), (16, 128)], ids=lambda b: f"{b[0]}x{b[1]}")
def test_a_gpu_makes_the_tables_of_the_cpu(block, cluster, k_major, index_dtype):
    mask = cases.bernoulli(1700 // block[0] + 1, 2500 // block[1] + 1, 0.3)
    crow, col = cases.mask_to_indices(mask, index_dtype)
    shape = mask.shape[0] * block[0], mask.shape[1] * block[1]
    there = crow.cuda(), col.cuda()
    found, expected = (block_tables(*on, shape, block, cluster, k_major) for on in (there, (crow, col)))
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("block", [(16, 16), (64, 64), (16, 128), (256, 32)])
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_a_check_tells_which_share_of_the_columns_is_listed(pattern, block):
    mask = cases.PATTERNS[pattern](1000 // block[0] + 1, 900 // block[1] + 1)
    W = bsr(mask, block)
    before = W.pattern.stats
    assert W.stats.listed is None, "not known yet"
    W.check_indices()
    groups = [part.any(0) for part in mask.split(max(1, 192 // block[0]))]
    assert W.stats.listed == round(sum(int(group.sum()) for group in groups) / (len(groups) * mask.shape[1]), 2)
    assert W.stats != before and W.to(torch.float16).stats == W.stats


def test_a_plan_is_kept_until_the_indices_change():
    W = bsr(cases.bernoulli(30, 20, 0.3), (64, 64))
    first = tables_of(W.pattern, 2, False)
    assert tables_of(W.pattern, 2, False) is first and tables_of(W.pattern, 1, False) is not first
    W.col_indices.copy_(W.col_indices.clone())
    assert tables_of(W.pattern, 2, False) is not first


@pytest.mark.parametrize("block", [(48, 16), (128, 16), (16, 48), (16, 112)])
def test_blocks_that_are_refused(block):
    assert Geometry.refuse(*block)
    with pytest.raises(ValueError, match="the kernel for small blocks takes"):
        Geometry.of_block(*block)


def test_a_table_too_large_is_refused():
    crow, col = torch.zeros(2**16 + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    shape, g = (2**20, 2**22), Geometry.of_block(16, 16)
    for refused in (lambda: table_shapes(shape, g, 2), lambda: block_tables(crow, col, shape, (16, 16), 2, False)):
        with pytest.raises(ValueError, match="table of"):
            refused()


def test_what_the_predicate_refuses():
    spec = ARCHS["sm_90"]
    wide, narrow = (next(c for c in CONFIGS if c.tile_n == columns) for columns in (256, 128))
    assert unsupported(catalogue.bsr(spec, "sm_90", wide, (16, 16))) == ""
    assert "128 columns" in unsupported(catalogue.bsr(spec, "sm_90", wide, (16, 16), epilogue=COL))
    assert unsupported(catalogue.bsr(spec, "sm_90", narrow, (16, 16), epilogue=COL)) == ""
    one, several = ({"batch": form, "ranks": ranks} for form, ranks in (("values", (4, 3, 3)), ("patterns", (3, 3, 3))))
    assert unsupported(catalogue.bsr(spec, "sm_90", wide, (16, 16), **one)) == ""
    assert "one pattern" in unsupported(catalogue.bsr(spec, "sm_90", wide, (16, 16), **several))
    assert "one pattern" in unsupported(catalogue.linear(spec, "sm_90", wide, (16, 16), **one, run=256))
    assert "heights" in unsupported(catalogue.bsr(spec, "sm_90", wide, (128, 128)))


def test_tiles_with_slabs_beyond_the_block_are_refused():
    """Rows 64 and up of a tile would be stored over those of the block."""
    spec = ARCHS["sm_90"]
    tall = candidates.sm90(192, 128, 64, 1, 2, spec=spec, element=BITS_16)
    assert all("slabs" in unsupported(catalogue.bsr(spec, "sm_90", tall, block)) for block in ((64, 64), (128, 64)))
    assert unsupported(catalogue.bsr(spec, "sm_90", tall, (144, 64))) == ""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("block", [(16, 16), (32, 64)], ids=str)
def test_the_pipeline_in_any_order(monkeypatch, block, cluster):
    """Rows of no blocks, of some and of all, several chunks, whichever warp or copy is late."""
    config = next(c for c in CONFIGS if c.cluster == cluster)
    FAMILIES["small blocks sm_90"].force(monkeypatch, config)
    args, found = operands(bsr_linear, bsr("power_law", block, grid=(12, 12)), 72), []
    for seed in range(6):
        with on_emulator("sm_90", sms=4, seed=seed):
            check(bsr_linear, *args)
            found.append(bsr_linear(*args))
    assert all(torch.equal(each, found[0]) for each in found)
