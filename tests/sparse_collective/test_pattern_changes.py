"""Patterns that change: blocks are chosen and moved, and tables made, as by a loop; how many operations that takes."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.testing import patterns as cases
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_linear
from sparse_collective.bsr_gemm.tile_order import Tiles, order_of
from sparse_collective.csc import csc_index
from sparse_collective.nn import BsrLinear, change_pattern_
from sparse_collective.pattern import indices_of, random_keys
from sparse_collective.pattern_update import moved, update_pattern_
from sparse_collective.sddmm_kernel.tables import box_groups, groups_of, rows_of
from sparse_collective.small_blocks.tables import tables_of

from .bsr_parts import INDEX_DTYPES, bsr

GRIDS = [(1, 1), (3, 5), (33, 7), (5, 300)]
OF_CHANGE = 60  # operations of torch, at most
OF_TABLES = {
    "CSC index": 10,
    "tile order": 105,  # of 32 rounds and more, for the workers of a persistent kernel
    "tile order of the view": 105,
    "groups of boxes": 35,
    "small blocks": 55,
}


def scores(n: int, kind: str) -> Tensor:
    """Random ones, many equal ones with both zeros, or numbers that are compared in a way of their own."""
    if kind == "random":
        return torch.randn(n)
    least = torch.finfo(torch.float32).min
    some = {
        "ties": [-1.0, -0.0, 0.0, 1.0, 2.0],
        "special": [math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, least, 1e-45, -1e-45],
    }[kind]
    return torch.tensor(some)[torch.randint(len(some), (n,))]


# What a change does


def changed_by_hand(stored: Tensor, candidates: Tensor, keys: list[int], cols: int, dropped: int, even: bool) -> list:
    """(key, position before or -1) of each block that is stored next."""

    def best(score: float) -> tuple[bool, float]:
        return not math.isnan(score), 0.0 if math.isnan(score) else -score

    lowest, before = torch.finfo(torch.float32).min, {key: p for p, key in enumerate(keys)}
    stored, candidates = stored.tolist(), candidates.clamp(min=lowest).tolist()  # NaN stays NaN
    new = []
    for lane in range(len(candidates) // cols) if even else [None]:
        here = [p for p, key in enumerate(keys) if lane in (None, key // cols)]
        kept = {keys[p] for p in sorted(here, key=lambda p: best(stored[p]))[: len(here) - dropped]}
        cells = [c for c in range(len(candidates)) if lane in (None, c // cols) and c not in kept]
        new += sorted(kept | set(sorted(cells, key=lambda c: best(candidates[c]))[:dropped]))
    return [(key, before.get(key, -1)) for key in new]


@pytest.mark.parametrize("kind", ["random", "ties", "special"])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize(("rows", "cols"), GRIDS, ids=str)
def test_which_blocks_are_stored_next(device, rows, cols, even, kind):
    """Among equal scores the earlier block, NaN of either sign first; indices are written in place."""
    for stored in sorted({1, cols // 3, cols} - {0}):
        keys = random_keys(rows, cols, rows * stored)
        if not even:
            keys = torch.randperm(rows * cols)[: len(keys)].sort().values
        lane = stored if even else len(keys)
        for dropped in sorted({0, lane // 3, lane}):
            crow, col = (t.to(device) for t in indices_of(keys, rows, cols))
            given = scores(len(keys), kind), scores(rows * cols, kind)
            versions = crow._version, col._version
            origin = update_pattern_(*(t.to(device) for t in given), crow, col, cols, dropped, even)
            assert (crow._version, col._version) == (versions[0] + (not even), versions[1] + 1)
            new, before = zip(*changed_by_hand(*given, keys.tolist(), cols, dropped, even), strict=True)
            starts, columns = indices_of(torch.tensor(new), rows, cols)
            assert torch.equal(crow.cpu(), starts) and torch.equal(col.cpu(), columns)
            assert origin.tolist() == list(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shape", [(16, 16), (3,), ()], ids=str)
def test_blocks_are_moved(device, dtype, shape):
    """Each from its origin, zeros where there is none."""
    t, origin = (torch.rand(9, *shape, device=device) * 100).to(dtype), torch.tensor([3, -1, 0, 8, 8, -1])
    found = moved(t, origin.to(device))
    expected = [t[p].double() if p >= 0 else torch.zeros(shape, dtype=torch.float64) for p in origin.tolist()]
    assert found.dtype == dtype and torch.equal(found.double().cpu(), torch.stack([e.cpu() for e in expected]))


# The tables of a pattern


def patterns(rows: int, cols: int, index_dtype: torch.dtype):
    """(crow, col) of single patterns, and of three items of which the second is empty."""
    for density in (0.05, 0.4, 1.0):
        crow, col = cases.mask_to_indices(cases.bernoulli(rows, cols, density), index_dtype)
        if len(col):
            yield crow, col
            yield torch.stack([crow, crow[-1:].expand_as(crow), crow + crow[-1]]), torch.cat([col, col])


def groups_by_hand(crow: list[int], nnz: int, parts: int, boxes: int) -> list:
    """box_groups, one row after the other."""
    full, left = [], []
    for row, (begin, end) in enumerate(zip(crow, crow[1:], strict=False)):
        box, end = begin * parts, end * parts
        while end - box >= boxes:
            full.append([row, box, boxes])
            box += boxes
        left.append([row, box if end > box else 0, end - box])
    left = sorted(left, key=lambda group: -group[2]) if boxes > 1 else []
    return full + [[len(crow) - 2, 0, 0]] * (nnz * parts // boxes - len(full)) + left


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize(("rows", "cols"), GRIDS, ids=str)
def test_tables(device, rows, cols, index_dtype):
    for crow, col in patterns(rows, cols, index_dtype):
        starts, of_rows, numbers = csc_index(crow.to(device), col.to(device), cols)
        assert (starts.dtype, of_rows.dtype, numbers.dtype) == (index_dtype, index_dtype, torch.int32)
        assert starts.shape == (*crow.shape[:-1], cols + 1)
        of_items = crow.view(-1, rows + 1).tolist()
        blocks = sorted(
            (item, int(col[p]), row, p)
            for item, begins in enumerate(of_items)
            for row in range(rows)
            for p in range(begins[row], begins[row + 1])
        )
        assert of_rows.tolist() == [block[2] for block in blocks] and numbers.tolist() == [block[3] for block in blocks]
        before = [[sum(b[:2] < (i, c) for b in blocks) for c in range(cols + 1)] for i in range(len(of_items))]
        assert starts.view(-1, cols + 1).tolist() == before
        every = rows_of(type("Pattern", (), {"crow_indices": crow}))
        for parts, boxes in ((1, 1), (1, 2), (2, 2), (3, 4), (1, 32)):
            found = box_groups(every.to(device), len(col), parts, boxes)
            assert found.dtype == torch.int32 and found.tolist() == groups_by_hand(
                every.tolist(), len(col), parts, boxes
            )


# What a change costs


class Launches(TorchDispatchMode):
    """The operations that a GPU would run: all but those that only look at memory or ask for it."""

    FREE = {"view", "_unsafe_view", "detach", "alias", "slice", "select", "unsqueeze", "expand", "t", "transpose"}
    FREE |= {"empty", "empty_like", "as_strided", "unbind"}
    WAIT = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "bincount", "_unique2", "item"}

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.WAIT, "it would wait for the GPU, and could not be captured"
        if name not in self.FREE:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def trained(even: bool) -> tuple[BsrLinear, torch.optim.Optimizer]:
    layer = BsrLinear(256, 256, False, (16, 16), density=0.25, dtype=torch.bfloat16)
    if not even:
        change_pattern_(layer, 0.5, grow="random")
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(normal(9, 256)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return layer, optimizer


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_how_many_operations_a_change_takes(even):
    """Each is 5 to 10 us of the host's time; docs/notes/training.md has the numbers.

    A change draws scores, takes norms, chooses blocks, and moves values and AdamW's two moments. Rows that stay even
    are not written, so that tables which depend on rows' lengths alone are kept.
    """
    layer, optimizer = trained(even)
    tiles = Tiles(row_tiles=1, steps=2, tiles_n=43, batch=1, group=8, workers=13)
    tables = [  # in the order of OF_TABLES
        lambda: layer.weight.t(),
        lambda: order_of(layer.weight.pattern, tiles),
        lambda: order_of(layer.weight.t().pattern, tiles),
        lambda: groups_of(layer.pattern, 1, 2),
        lambda: tables_of(layer.pattern, 1, False),
    ]

    def taken(*made) -> list[int]:
        counts = []
        for make in made:
            with Launches() as launches:
                make()
            counts.append(len(launches.names))
        return counts

    taken(*tables)
    assert not any(taken(*tables)), "kept until the pattern changes"
    (of_change,) = taken(lambda: change_pattern_(layer, 0.3, grow="random", even_rows=even, optimizer=optimizer))
    counts = dict(zip(OF_TABLES, taken(*tables), strict=True))
    assert of_change <= OF_CHANGE and all(counts[name] <= OF_TABLES[name] for name in counts), (of_change, counts)
    rows_alone = "tile order", "groups of boxes"
    assert all((count == 0) == (even and name in rows_alone) for name, count in counts.items())


@pytest.mark.gpu
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_a_change_on_a_gpu_is_that_of_the_cpu(even):
    """The same blocks, values and moments, given the same scores."""
    ours, optimizer = trained(even)
    there = BsrLinear(256, 256, False, (16, 16), density=0.25, dtype=torch.bfloat16)
    there.load_state_dict(ours.state_dict())
    there = there.cuda()
    other = torch.optim.AdamW(there.parameters())
    other.load_state_dict(optimizer.state_dict())
    for layer in (ours, there):
        layer.values.grad = torch.ones_like(layer.values)
    for _ in range(3):
        grow, drop = torch.rand(ours.grid), torch.rand(ours.nnz)
        for layer, adam in ((ours, optimizer), (there, other)):
            where = layer.values.device
            change = {"grow": grow.to(where), "drop": drop.to(where), "even_rows": even, "optimizer": adam}
            change_pattern_(layer, 0.3, **change)
        mine, theirs = (
            [m.crow_indices, m.col_indices, m.values, m.values.grad, *o.state[m.values].values()]
            for m, o in ((ours, optimizer), (there, other))
        )
        assert all(torch.equal(a, b.cpu()) for a, b in zip(mine, theirs, strict=True))
        groups = groups_of(there.pattern, 1, 2)
        assert torch.equal(groups.cpu(), box_groups(rows_of(ours.weight), ours.nnz, 1, 2))
        assert torch.equal(there.weight.t().numbers.cpu(), ours.weight.t().numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_a_change_in_a_cuda_graph(even):
    """Captured once and replayed with other scores, it has the outcome of the change itself."""
    one, other = (BsrLinear(256, 256, False, (16, 16), density=0.25, device="cuda") for _ in range(2))
    other.load_state_dict(one.state_dict())
    grow, drop = torch.rand(one.grid, device="cuda"), torch.rand(one.nnz, device="cuda")

    def change(layer: BsrLinear) -> None:
        change_pattern_(layer, 0.3, grow=grow, drop=drop, even_rows=even)

    if not even:
        change(one)
        change(other)
    state = [t.clone() for t in (one.crow_indices, one.col_indices, one.values.detach())]
    change(one)  # before the capture, as torch asks for
    for t, value in zip((one.crow_indices, one.col_indices, one.values.detach()), state, strict=True):
        t.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        change(one)
    for _ in range(3):
        grow.uniform_()
        drop.uniform_()
        graph.replay()
        change(other)
        for mine, theirs in ((one.crow_indices, other.crow_indices), (one.col_indices, other.col_indices)):
            assert torch.equal(mine, theirs)
        assert torch.equal(one.values, other.values)


def test_views_follow_the_change():
    """The cache of the transposed view is made again after a write in place."""
    W = bsr(cases.bernoulli(5, 7, 0.5), (16, 16))
    before = W.t()
    W.col_indices.add_(0)
    assert W.t().numbers is not before.numbers and torch.equal(W.t().numbers, before.numbers)


@pytest.mark.parametrize("check", [True, False])
def test_tables_of_matrices_in_compiled_functions_are_kept(device, check):
    """Also of one that no eager call has seen: a graph's op makes a matrix of the index tensors in each call."""
    matrix = bsr(cases.bernoulli(5, 7, 0.5), (16, 16), device)
    W = BsrMatrix(matrix.crow_indices, matrix.col_indices, matrix.values, matrix.shape, check=check)
    x = normal(9, 80, device=device)
    call = torch.compile(lambda x: bsr_linear(x, W.t()), backend="aot_eager")
    call(x)
    kept = dict(W.pattern.tables.kept)
    call(x)
    again = W.pattern.tables.kept
    assert again and all(again[key] is kept[key] for key in again)
