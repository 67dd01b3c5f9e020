"""Tiles of two block rows: their plan, and the op through them: the same product, whichever kernel is chosen.

Without a GPU the source is walked as the kernel walks it (emulate.paired); with one the kernel runs.
"""

import math

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
from sparse_collective.row_pairs.tables import pair_plan, starts_of
from sparse_collective.tile_order import reference as balance

from . import cases
from .reference import assert_as_good_as_torch, dense_of, exact_and_torch, normal, poisoned

SPEC = ARCHS["sm_90"]
PAIRS = candidates.pairs(SPEC)
PATTERNS = cases.PATTERNS | {
    "neighbours_share_nothing": lambda rows, cols: (torch.arange(rows)[:, None] + torch.arange(cols)) % 2 == 0,
    "neighbours_share_all": lambda rows, cols: cases.bernoulli(rows // 2 + 1, cols, 0.4).repeat_interleave(2, 0)[:rows],
    "upper_rows_alone": lambda rows, cols: cases.bernoulli(rows, cols, 0.4) & (torch.arange(rows)[:, None] % 2 == 0),
}


def matrix(mask, block=(64, 64), dtype=torch.bfloat16, index_dtype=torch.int32, device="cpu"):
    crow, col = cases.mask_to_indices(mask, index_dtype)
    shape = mask.shape[0] * block[0], mask.shape[1] * block[1]
    values = normal(len(col), *block, k=shape[1], dtype=dtype)
    W = BsrMatrix(crow.to(device), col.to(device), values.to(device), shape)
    return W, dense_of(crow, col, values, shape)


@pytest.fixture(params=range(len(PAIRS)), ids=lambda i: f"{PAIRS[i]}")
def paired(request, monkeypatch):
    """Ops take this configuration, with more columns than it bears its narrower neighbour."""
    chosen = PAIRS[request.param]
    monkeypatch.setattr(candidates, "candidates_sm90", lambda block, spec: [chosen, PAIRS[1]])
    for module in ("cute_kernels.ops", "sparse_collective.ops"):
        monkeypatch.setattr(f"{module}._PLANS", {})
    monkeypatch.setenv("CUTE_KERNELS_TUNED", "0")
    cost = heuristics.cost
    monkeypatch.setattr(
        heuristics, "cost", lambda cfg, *args, **known: cost(cfg, *args, **known) + 1e9 * (cfg != chosen)
    )
    return chosen


@pytest.mark.sm_90
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("rows", "block"), [(9, (64, 64)), (8, (64, 64)), (5, (64, 192)), (1, (64, 64))], ids=str)
def test_patterns(paired, device, monkeypatch, rows, block, pattern, balanced):
    """An even and an odd number of block rows, a single one; blocks of several K-tiles; with and without an order."""
    monkeypatch.setattr(balance, "ENABLED", balanced)
    W, dense = matrix(PATTERNS[pattern](rows, 7), block, device=device)
    b = normal(W.shape[1], 520)
    exact, by_torch = exact_and_torch(dense, b, torch.bfloat16)
    out, b = poisoned(*exact.shape, device=device), b.to(device)
    assert explain(bsr_matmul, W, b, out=out).facts.config == paired
    bsr_matmul(W, b, out=out)
    assert_as_good_as_torch(out.cpu(), exact, by_torch, k=W.shape[1])


@pytest.mark.sm_90
@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["bernoulli", "power_law", "empty_rows", "banded"])
def test_many_tiles_a_worker(paired, pattern):
    """Every cluster does several tiles, so that the ring and its phases go on from one to the next."""
    W, dense = matrix(PATTERNS[pattern](41, 30), device="cuda")
    b = normal(W.shape[1], 8200, device="cuda")
    exact, by_torch = exact_and_torch(dense.cuda(), b, torch.bfloat16)
    for _ in range(3):
        out = poisoned(*exact.shape, device="cuda")
        bsr_matmul(W, b, out=out)
        assert_as_good_as_torch(out, exact, by_torch, k=W.shape[1])


@pytest.mark.sm_90
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(paired, device, activation, biased):
    W, dense = matrix(cases.power_law(7, 9), (64, 128), device=device)
    x, bias = normal(300, W.shape[1]), normal(W.shape[0]) if biased else None
    exact, by_torch = exact_and_torch(x, dense.t(), torch.bfloat16, bias=bias, activation=activation)
    out = poisoned(*exact.shape, device=device)
    terms = {"bias": None if bias is None else bias.to(device), "activation": activation}
    assert explain(bsr_linear, x.to(device), W, out=out, **terms).facts.config == paired
    bsr_linear(x.to(device), W, out=out, **terms)
    assert_as_good_as_torch(out.cpu(), exact, by_torch, k=W.shape[1])


@pytest.mark.sm_90
@pytest.mark.parametrize("bias", ["col", "row", None])
@pytest.mark.parametrize("layout", ["nn", "nt", "batch"])
def test_operands(paired, device, layout, bias):
    """B of either major and in batches, fp16, 64-bit indices, either bias."""
    W, dense = matrix(cases.bernoulli(5, 6, 0.3), (64, 64), torch.float16, torch.int64, device)
    M, K = W.shape
    shape = (3, K, 136) if layout == "batch" else (K, 136)
    b = normal(*shape, dtype=torch.float16) if layout != "nt" else normal(136, K, dtype=torch.float16).t()
    terms = {"bias": {"col": normal(136), "row": normal(M, 1), None: None}[bias], "activation": "silu"}
    exact, by_torch = exact_and_torch(dense, b, torch.float16, **terms)
    out = poisoned(*exact.shape, dtype=torch.float16, device=device)
    b = b.to(device) if layout != "nt" else b.t().to(device).t()
    terms["bias"] = None if bias is None else terms["bias"].to(device)
    assert explain(bsr_matmul, W, b, out=out, **terms).facts.config.pairs
    bsr_matmul(W, b, out=out, **terms)
    assert_as_good_as_torch(out.cpu(), exact, by_torch, k=K)


@pytest.mark.sm_90
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_what_a_neighbour_multiplies_never_shows(paired, device, junk):
    """Columns of one row hold junk in b: the other row, which has no block there, is exact."""
    mask = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1], [0, 1, 1, 1, 0]]).bool()
    W, dense = matrix(mask, device=device)
    b = normal(W.shape[1], 264)
    for column in range(5):
        clean, spoilt = b.clone(), b.clone()
        part = slice(column * 64, (column + 1) * 64)
        clean[part], spoilt[part] = 0, junk
        exact, by_torch = exact_and_torch(dense, clean, torch.bfloat16)
        out = bsr_matmul(W, spoilt.to(device), out=poisoned(*exact.shape, device=device)).cpu()
        for row in range(5):
            rows = slice(row * 64, (row + 1) * 64)
            if mask[row, column]:
                assert not out[rows].isfinite().any()
            else:
                assert_as_good_as_torch(out[rows], exact[rows], by_torch[rows], k=W.shape[1])


@pytest.mark.sm_90
def test_output_in_a_larger_buffer(paired, device):
    """The last tile of an odd number of block rows writes nothing below the matrix."""
    W, dense = matrix(cases.bernoulli(3, 5, 0.5), device=device)
    for transposed in (False, True):
        buffer = torch.full((400, 400), 7.0, dtype=torch.bfloat16, device=device)
        part = buffer[8:272, 16 : 16 + W.shape[0]].t() if transposed else buffer[8 : 8 + W.shape[0], 16:280]
        out = part.fill_(float("nan"))
        b = normal(W.shape[1], 264)
        exact, by_torch = exact_and_torch(dense, b, torch.bfloat16)
        bsr_matmul(W, b.to(device), out=out)
        assert_as_good_as_torch(out.cpu(), exact, by_torch, k=W.shape[1])
        out.fill_(7.0)
        assert (buffer == 7.0).all(), "memory around the output was written"


@pytest.mark.sm_90
def test_the_same_bits_each_time(paired, device):
    W, _ = matrix(cases.power_law(21, 30), device=device)
    b = normal(W.shape[1], 1032, device=device)
    first = bsr_matmul(W, b)
    assert all(torch.equal(bsr_matmul(W, b), first) for _ in range(5))


# -- the plan -------------------------------------------------------------------------------------------------


def lists(plan, crow) -> list[list[list[tuple]]]:
    """For each pair the three parts of its entries (column, upper, lower)."""
    ends, entries = plan.ends.tolist(), plan.entries.t().tolist()
    found = []
    for g, (both, upper, count) in enumerate(ends):
        first = int(crow[2 * g])
        listed = [tuple(entry) for entry in entries[first : first + count]]
        found.append([listed[:both], listed[both:upper], listed[upper:]])
    return found


def by_brute_force(mask, crow, col) -> list[list[list[tuple]]]:
    number = torch.full(mask.shape, len(col))
    number[mask] = torch.arange(len(col))
    found = []
    for r in range(0, len(mask), 2):
        upper, lower = number[r].tolist(), number[r + 1].tolist() if r + 1 < len(mask) else [len(col)] * mask.shape[1]
        entries = [(c, *pair) for c, pair in enumerate(zip(upper, lower, strict=True))]
        has = [(u < len(col), v < len(col)) for _, u, v in entries]
        kinds = (True, True), (True, False), (False, True)
        found.append([[e for e, h in zip(entries, has, strict=True) if h == kind] for kind in kinds])
    return found


@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 70),
    density=st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0)),
    index_dtype=st.sampled_from((torch.int32, torch.int64)),
    seed=st.integers(0, 99),
)
def test_a_plan_is_the_union_of_two_rows(rows, cols, density, index_dtype, seed):
    mask = cases.bernoulli(rows, cols, density, seed)
    crow, col = cases.mask_to_indices(mask, index_dtype)
    plan = pair_plan(crow, col, cols)
    assert plan.ends.dtype == plan.entries.dtype == torch.int32 and plan.entries.is_contiguous()
    assert plan.entries.shape == (3, max(1, len(col)))
    assert lists(plan, crow) == by_brute_force(mask, crow, col)
    assert starts_of(plan).tolist() == [0, *plan.ends[:, 2].cumsum(0).tolist()]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_plans_of_patterns(pattern):
    for rows in (6, 7):
        mask = PATTERNS[pattern](rows, 40)
        crow, col = cases.mask_to_indices(mask)
        assert lists(pair_plan(crow, col, 40), crow) == by_brute_force(mask, crow, col)


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 128), (33, 1100), (2, 40_000)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_kernel_plans_as_torch_does(pattern, shape, index_dtype):
    from sparse_collective.row_pairs.tables_kernel import pair_plan_on_gpu

    crow, col = (t.cuda() for t in cases.mask_to_indices(PATTERNS[pattern](*shape), index_dtype))
    ours, by_torch = (plan(crow, col, shape[1]) for plan in (pair_plan_on_gpu, pair_plan))
    assert torch.equal(ours.ends, by_torch.ends)
    crow = crow.cpu()
    assert lists(ours, crow) == lists(by_torch, crow)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_the_plan_kernel_compiles(arch):
    from cute_kernels.runtime import inspect
    from cute_kernels.runtime.compile import cubin_of
    from sparse_collective.row_pairs.tables_kernel import PairPlanFacts, compile_pair_planner

    for index_dtype in ("int32", "int64"):
        compiled = compile_pair_planner(PairPlanFacts(arch, index_dtype), keep_cubin=True)
        found = inspect.resources(cubin_of(compiled), arch)
        assert found.stack == found.stl == found.ldl == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_check_tells_which_share_of_the_columns_a_pair_needs(pattern):
    mask = PATTERNS[pattern](9, 20)
    W, _ = matrix(mask)
    assert W.shares.paired is None, "not known yet"
    before = W.key
    W.check_indices()
    unions = [rows.any(0) for rows in mask.split(2)]
    assert W.shares.paired == round(sum(int(u.sum()) for u in unions) / (len(unions) * 20), 3)
    assert W.key != before and W.to(torch.float16).shares == W.shares
    other = BsrMatrix(W.crow_indices, W.col_indices, W.values, W.shape)
    other.recall()
    assert other.shares == W.shares and other.key == W.key
    W, _ = matrix(mask, (128, 64))
    W.check_indices()
    assert W.shares.paired is None


def test_rows_that_share_columns_are_paired():
    """At 8192 cubed and 12.5 %: 64x64 blocks of a band are; at random a block row a tile does as well or better."""

    def pick(paired):
        facts, cube = BlockFacts(64, 64, "int32"), heuristics.Extents(8192, 8192, 8192)
        costs = {
            c: heuristics.cost(c, cube, facts, 0.125, 132, shares=heuristics.Shares(paired=paired))
            for c in candidates.candidates_sm90(facts, SPEC)
        }
        return min(costs, key=costs.get)

    assert pick(0.133) == PAIRS[0]
    assert not pick(None).pairs and not pick(0.234).pairs


def test_a_plan_is_kept_until_the_indices_change():
    W, _ = matrix(cases.bernoulli(6, 20, 0.3))
    first = W.pair_plan()
    assert W.pair_plan() is first
    W.col_indices.copy_(W.col_indices.clone())
    assert W.pair_plan() is not first


def test_what_the_predicate_refuses():
    from dataclasses import replace

    from cute_kernels.matmul.catalogue import COL, ROW, bsr, dense, linear

    wide, narrow = PAIRS[:2]

    def reason(config, block=(64, 64), path="sm_90", **changes):
        return unsupported(bsr(SPEC, path, config, block, **changes))

    assert all(reason(c) == reason(c, (64, 192)) == reason(replace(c, cluster_n=1)) == "" for c in PAIRS)
    assert "dense" in unsupported(dense(SPEC, "sm_90", wide))
    assert all("64 high" in reason(wide, block) for block in ((32, 64), (128, 64), (48, 64)))
    assert all("wide" in reason(wide, (64, width)) for width in (16, 48, 112))
    assert "residual" in reason(narrow, epilogue=COL) and "residual" in reason(narrow, epilogue=ROW)
    row = replace(ROW, residual=None)
    assert "bias" in reason(wide, epilogue=row) and reason(narrow, epilogue=row) == ""
    assert unsupported(linear(SPEC, "sm_90", wide, (64, 64), epilogue=row)) == ""
    for change in ({"cluster_m": 2, "cluster_n": 1}, {"tile_m": 64}, {"warps_m": 2, "teams": 1}):
        assert "a pair is 128 rows" in reason(replace(wide, **change))
    older = replace(wide, cluster_n=1, teams=1, tile_n=128)
    assert "sm_90 path only" in reason(older, path="sm_80")
