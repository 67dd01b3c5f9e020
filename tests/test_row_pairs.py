"""Row pairs, tiles of two block rows: their plan, and products of neighbours of every kind.

Without a GPU the source is walked as the kernel walks it (emulate.paired); with one the kernel runs.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.arch import ARCHS
from cute_kernels.matmul.catalogue import COL, ROW
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.families import unsupported
from sparse_collective import BsrMatrix, bsr_matmul
from sparse_collective import catalogue as sparse_catalogue
from sparse_collective.row_pairs.family import ROW_PAIRS
from sparse_collective.row_pairs.tables import pair_tables, starts_of
from sparse_collective.row_pairs.tables_kernel import pair_tables_on_gpu
from sparse_collective.tile_order import reference

from . import cases
from .bsr_parts import INDEX_DTYPES, bsr, operands, parts
from .conformance import FAMILIES
from .products import check

SPEC = ARCHS["sm_90"]
PAIRS = ROW_PAIRS.candidates("sm_90", BlockFacts(64, 64, "int32"), SPEC)
PATTERNS = cases.PATTERNS | {
    "neighbours_share_nothing": lambda rows, cols: (torch.arange(rows)[:, None] + torch.arange(cols)) % 2 == 0,
    "neighbours_share_all": lambda rows, cols: cases.bernoulli(rows // 2 + 1, cols, 0.4).repeat_interleave(2, 0)[:rows],
    "upper_rows_alone": lambda rows, cols: cases.bernoulli(rows, cols, 0.4) & (torch.arange(rows)[:, None] % 2 == 0),
}
EVERY_PATTERN = pytest.mark.parametrize("pattern", PATTERNS)


@pytest.mark.sm_90
@pytest.mark.parametrize("config", PAIRS, ids=str)
@EVERY_PATTERN
@pytest.mark.parametrize(("rows", "block"), [(9, (64, 64)), (8, (64, 64)), (5, (64, 192)), (1, (64, 64))], ids=str)
def test_patterns(device, monkeypatch, config, rows, block, pattern):
    """An even and an odd number of block rows, a single one; blocks of several K-tiles; with and without an order."""
    FAMILIES["row pairs sm_90"].force(monkeypatch, config)
    W = bsr(PATTERNS[pattern](rows, 7), block, device)
    for ordered in (True, False):
        monkeypatch.setattr(reference, "ENABLED", ordered)
        assert check(bsr_matmul, *operands(bsr_matmul, W, 264)).facts.config == config


# The plan


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
    pattern=st.sampled_from((None, None, *PATTERNS)),
    rows=st.integers(1, 9),
    cols=st.integers(1, 70),
    density=st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0)),
    index_dtype=st.sampled_from(INDEX_DTYPES),
    seed=st.integers(0, 99),
)
def test_a_plan_is_the_union_of_two_rows(pattern, rows, cols, density, index_dtype, seed):
    mask = PATTERNS[pattern](rows, cols) if pattern else cases.bernoulli(rows, cols, density, seed)
    crow, col = cases.mask_to_indices(mask, index_dtype)
    plan = pair_tables(crow, col, cols)
    assert plan.ends.dtype == plan.entries.dtype == torch.int32 and plan.entries.is_contiguous()
    assert plan.entries.shape == (3, max(1, len(col)))
    assert lists(plan, crow) == by_brute_force(mask, crow, col)
    assert starts_of(plan).tolist() == [0, *plan.ends[:, 2].cumsum(0).tolist()]


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 128), (33, 1100), (2, 40_000)], ids=str)
@EVERY_PATTERN
def test_the_kernel_plans_as_torch_does(pattern, shape, index_dtype):
    crow, col = (t.cuda() for t in cases.mask_to_indices(PATTERNS[pattern](*shape), index_dtype))
    ours, by_torch = (plan(crow, col, shape[1]) for plan in (pair_tables_on_gpu, pair_tables))
    assert torch.equal(ours.ends, by_torch.ends)
    assert lists(ours, crow.cpu()) == lists(by_torch, crow.cpu())


@EVERY_PATTERN
def test_a_check_tells_which_share_of_the_columns_a_pair_needs(pattern):
    mask = PATTERNS[pattern](9, 20)
    W = bsr(mask, (64, 64))
    before = W.key
    assert W.stats.paired is None, "not known yet"
    W.check_indices()
    unions = [rows.any(0) for rows in mask.split(2)]
    assert W.stats.paired == round(sum(int(u.sum()) for u in unions) / (len(unions) * 20), 3)
    assert W.key != before and W.to(torch.float16).stats == W.stats
    other = BsrMatrix(**parts(W))
    other.recall()
    assert other.stats == W.stats and other.key == W.key
    W = bsr(mask, (128, 64))
    W.check_indices()
    assert W.stats.paired is None


def test_what_the_predicate_refuses():
    wide, narrow = PAIRS[:2]

    def reason(config, block=(64, 64), path="sm_90", **changes):
        return unsupported(sparse_catalogue.bsr(SPEC, path, config, block, **changes))

    assert all(reason(c) == reason(c, (64, 192)) == reason(replace(c, cluster_n=1)) == "" for c in PAIRS)
    assert all("64 high" in reason(wide, block) for block in ((32, 64), (128, 64), (48, 64)))
    assert all("wide" in reason(wide, (64, width)) for width in (16, 48, 112))
    assert "residual" in reason(narrow, epilogue=COL) and "residual" in reason(narrow, epilogue=ROW)
    row = replace(ROW, residual=None)
    assert "bias" in reason(wide, epilogue=row) and reason(narrow, epilogue=row) == ""
    assert unsupported(sparse_catalogue.linear(SPEC, "sm_90", wide, (64, 64), epilogue=row)) == ""
    for change in ({"cluster_m": 2, "cluster_n": 1}, {"tile_m": 64}, {"warps_m": 2, "consumer_groups": 1}):
        assert "a pair is 128 rows" in reason(replace(wide, **change))
    one, several = ({"batch": form, "ranks": ranks} for form, ranks in (("values", (4, 3, 3)), ("patterns", (3, 3, 3))))
    assert reason(wide, **one) == "" and "one pattern" in reason(wide, **several)
    assert "one pattern" in reason(narrow, **one, run=256)
    assert "sm_90 path only" in reason(replace(wide, cluster_n=1, consumer_groups=1, tile_n=128), path="sm_80")
