"""The sweep kernel's plan, and the op through it: the same product, whichever kernel is chosen.

Without a GPU the plan is walked as the kernel walks it (emulate.swept); with one the kernel runs.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels import explain
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import candidates
from cute_kernels.matmul import cost as heuristics
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.families import unsupported
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul
from sparse_collective.small_blocks.tables import sweep_plan, table_shapes
from sparse_collective.small_blocks.tile import CONSUMERS, ROWS, Geometry

from . import cases
from .reference import assert_as_good_as_torch, dense_of, exact_and_torch, normal, poisoned

BLOCKS = ((16, 16), (32, 32), (64, 64), (16, 32), (32, 16), (64, 16), (16, 64), (32, 64))
BLOCKS += ((16, 128), (64, 128), (32, 192))  # wider than a chunk
SWEEPS = candidates.sweeps(ARCHS["sm_90"])


def matrix(mask, block, dtype=torch.bfloat16, index_dtype=torch.int32, device="cpu"):
    crow, col = cases.mask_to_indices(mask, index_dtype)
    shape = mask.shape[0] * block[0], mask.shape[1] * block[1]
    values = normal(len(col), *block, k=shape[1], dtype=dtype)
    W = BsrMatrix(crow.to(device), col.to(device), values.to(device), shape)
    return W, dense_of(crow, col, values, shape)


@pytest.fixture(params=range(len(SWEEPS)), ids=lambda i: f"{SWEEPS[i]}")
def swept(request, monkeypatch):
    """Ops take this configuration of the sweep kernel, with more columns than it bears its narrower neighbour."""
    chosen = SWEEPS[request.param]
    narrow = next(c for c in SWEEPS if c.tile_n == 128 and c.cluster_m == chosen.cluster_m)
    monkeypatch.setattr(candidates, "candidates_sm90", lambda block, spec: [chosen, narrow])
    for module in ("cute_kernels.ops", "sparse_collective.ops"):
        monkeypatch.setattr(f"{module}._PLANS", {})
    monkeypatch.setenv("CUTE_KERNELS_TUNED", "0")
    return chosen


@pytest.mark.sm_90
@pytest.mark.parametrize("pattern", cases.PATTERNS)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")
def test_patterns(swept, device, pattern, block):
    """Groups and chunks of every filling, with a last group and a last chunk that are not full, and rings that wrap."""
    if swept is not SWEEPS[0] and block not in BLOCKS[:3]:
        pytest.skip("the first configuration takes every block shape, the others three")
    rows, cols = 800 // block[0] + 1, 700 // block[1] + 2
    W, dense = matrix(cases.PATTERNS[pattern](rows, cols), block, device=device)
    b = normal(W.shape[1], 520 if pattern == "power_law" else 264)
    exact, by_torch = exact_and_torch(dense, b, torch.bfloat16)
    out, b = poisoned(*exact.shape, device=device), b.to(device)
    assert explain(bsr_matmul, W, b, out=out).facts.config.sweep
    bsr_matmul(W, b, out=out)
    assert_as_good_as_torch(out.cpu(), exact, by_torch, k=W.shape[1])


@pytest.mark.sm_90
@pytest.mark.gpu
def test_many_tiles_a_worker(swept):
    """Every cluster does two tiles or three, so that rings and phases go on from one to the next."""
    W, dense = matrix(cases.power_law(100, 66), (16, 16), device="cuda")
    b = normal(W.shape[1], 10_000, device="cuda")
    exact, by_torch = exact_and_torch(dense.cuda(), b, torch.bfloat16)
    out = poisoned(*exact.shape, device="cuda")
    bsr_matmul(W, b, out=out)
    assert_as_good_as_torch(out, exact, by_torch, k=W.shape[1])


@pytest.mark.sm_90
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(swept, device, activation, biased):
    W, dense = matrix(cases.power_law(26, 9), (16, 32), device=device)
    x, bias = normal(300, W.shape[1]), normal(W.shape[0]) if biased else None
    exact, by_torch = exact_and_torch(x, dense.t(), torch.bfloat16, bias=bias, activation=activation)
    out = poisoned(*exact.shape, device=device)
    terms = {"bias": None if bias is None else bias.to(device), "activation": activation}
    assert explain(bsr_linear, x.to(device), W, out=out, **terms).facts.config.sweep
    bsr_linear(x.to(device), W, out=out, **terms)
    assert_as_good_as_torch(out.cpu(), exact, by_torch, k=W.shape[1])


@pytest.mark.sm_90
@pytest.mark.parametrize("layout", ["nn", "nt", "batch"])
def test_operands(swept, device, layout):
    """B of either major and in batches, fp16, 64-bit indices, a column bias and a residual."""
    W, dense = matrix(cases.bernoulli(13, 5, 0.3), (32, 64), torch.float16, torch.int64, device)
    K = W.shape[1]
    shape = (3, K, 136) if layout == "batch" else (K, 136)
    b = normal(*shape, dtype=torch.float16) if layout != "nt" else normal(136, K, dtype=torch.float16).t()
    bias = normal(136)
    residual = normal(*shape[:-2], W.shape[0], 136, dtype=torch.float16)
    exact, by_torch = exact_and_torch(dense, b, torch.float16, bias=bias, residual=residual)
    out = poisoned(*exact.shape, dtype=torch.float16, device=device)
    b = b.to(device) if layout != "nt" else b.t().to(device).t()
    bsr_matmul(W, b, bias=bias.to(device), residual=residual.to(device), out=out)
    assert_as_good_as_torch(out.cpu(), exact, by_torch, k=K)


@pytest.mark.sm_90
def test_the_same_bits_each_time(swept, device):
    W, _ = matrix(cases.power_law(40, 30), (16, 16), device=device)
    b = normal(W.shape[1], 512, device=device)
    first = bsr_matmul(W, b)
    assert all(torch.equal(bsr_matmul(W, b), first) for _ in range(5))


# -- the plan -------------------------------------------------------------------------------------------------


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
    plan = sweep_plan(crow, col, (rows * block[0], cols * block[1]), block, cluster, k_major)
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
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_the_kernel_plans_as_torch_does(pattern, block, cluster, k_major, index_dtype):
    from sparse_collective.small_blocks.tables_kernel import sweep_plan_on_gpu

    mask = cases.PATTERNS[pattern](1700 // block[0] + 1, 2500 // block[1] + 1)
    crow, col = (t.cuda() for t in cases.mask_to_indices(mask, index_dtype))
    shape = mask.shape[0] * block[0], mask.shape[1] * block[1]
    ours, by_torch = (plan(crow, col, shape, block, cluster, k_major) for plan in (sweep_plan_on_gpu, sweep_plan))
    assert torch.equal(ours.counts, by_torch.counts)
    segments, per_chunk = CONSUMERS * cluster, Geometry.of_block(*block, k_major).slices
    for group, count in enumerate(ours.counts.tolist()):
        assert torch.equal(ours.slices[group, :count], by_torch.slices[group, :count])
        words = slice(-(-count // per_chunk)), slice(segments)
        assert torch.equal(ours.words[group][words], by_torch.words[group][words])
    if len(col):
        assert torch.equal(ours.order, by_torch.order)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (16, 128)])
def test_the_plan_kernel_compiles(arch, block):
    from cute_kernels.runtime import inspect
    from cute_kernels.runtime.compile import cubin_of
    from sparse_collective.small_blocks.tables_kernel import PlanFacts, compile_planner

    for cluster, index_dtype, k_major in ((1, "int64", True), (2, "int32", False)):
        compiled = compile_planner(PlanFacts(arch, *block, index_dtype, cluster, k_major), keep_cubin=True)
        found = inspect.resources(cubin_of(compiled), arch)
        assert found.stack == found.stl == found.ldl == 0


@pytest.mark.parametrize("block", [(16, 16), (64, 64), (16, 128), (256, 32)])
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_a_check_tells_which_share_of_the_columns_is_listed(pattern, block):
    mask = cases.PATTERNS[pattern](1000 // block[0] + 1, 900 // block[1] + 1)
    W, _ = matrix(mask, block)
    assert W.shares.listed is None, "not known yet"
    before = W.key
    W.check_indices()
    groups = [part.any(0) for part in mask.split(max(1, 192 // block[0]))]
    assert W.shares.listed == round(sum(int(group.sum()) for group in groups) / (len(groups) * mask.shape[1]), 2)
    assert W.key != before and W.to(torch.float16).shares == W.shares


def test_rows_that_share_columns_are_swept():
    """At 8192 cubed and 12.5 %: 64x64 blocks at random are not, as a band they are; 16x16 blocks always."""

    def pick(block, listed, **layout):
        facts, cube = BlockFacts(block, block, "int32"), heuristics.Extents(8192, 8192, 8192)
        costs = {
            c: heuristics.cost(c, cube, facts, 0.125, 132, shares=heuristics.Shares(listed), **layout)
            for c in candidates.candidates_sm90(facts, ARCHS["sm_90"])
        }
        return min(costs, key=costs.get)

    assert not pick(64, None).sweep and not pick(64, 0.33).sweep
    assert pick(64, 0.15).sweep and pick(64, 0.15).chunks == 4
    assert pick(16, None).sweep and pick(16, None).stages == 5
    assert pick(16, None).cluster_m == 1 and pick(16, None, b_k_major=True).cluster_m == 2, "slices are wider then"


def test_a_plan_is_kept_until_the_indices_change():
    W, _ = matrix(cases.bernoulli(30, 20, 0.3), (16, 16))
    first = W.sweep_plan(2, False)
    assert W.sweep_plan(2, False) is first and W.sweep_plan(1, False) is not first
    W.col_indices.copy_(W.col_indices.clone())
    assert W.sweep_plan(2, False) is not first


@pytest.mark.parametrize("block", [(48, 16), (128, 16), (16, 48), (16, 112)])
def test_blocks_that_are_refused(block):
    assert Geometry.refuse(*block)
    with pytest.raises(ValueError, match="a sweep takes"):
        Geometry.of_block(*block)


def test_a_table_too_large_is_refused():
    crow, col = torch.zeros(2**16 + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    shape, g = (2**20, 2**22), Geometry.of_block(16, 16)
    for refused in (lambda: table_shapes(shape, g, 2), lambda: sweep_plan(crow, col, shape, (16, 16), 2, False)):
        with pytest.raises(ValueError, match="table of"):
            refused()


def test_what_the_predicate_refuses():
    from cute_kernels.matmul.catalogue import COL, bsr, dense

    spec = ARCHS["sm_90"]
    wide, narrow = (next(c for c in SWEEPS if c.tile_n == columns) for columns in (256, 128))
    assert unsupported(bsr(spec, "sm_90", wide, (16, 16))) == ""
    assert "128 columns" in unsupported(bsr(spec, "sm_90", wide, (16, 16), epilogue=COL))
    assert unsupported(bsr(spec, "sm_90", narrow, (16, 16), epilogue=COL)) == ""
    assert "heights" in unsupported(bsr(spec, "sm_90", wide, (128, 128)))
    assert "dense" in unsupported(dense(spec, "sm_90", wide))


def test_tiles_with_slabs_beyond_the_block_are_refused():
    """Rows 64 and up of a tile would be stored over those of the block: the tuner found that results are wrong."""
    from cute_kernels.matmul.catalogue import bsr

    spec = ARCHS["sm_90"]
    tall = candidates.sm90(192, 128, 64, 1, 2, spec=spec)
    assert "slabs" in unsupported(bsr(spec, "sm_90", tall, (64, 64)))
    assert "slabs" in unsupported(bsr(spec, "sm_90", tall, (128, 64)))
    assert unsupported(bsr(spec, "sm_90", tall, (144, 64))) == ""
