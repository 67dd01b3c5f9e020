"""Patterns that change: the kernels that choose and move blocks and make tables anew, beside torch's; how many
operations a change takes.

Without a GPU the kernels run on the emulator, where there is one.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_collective.bsr
from cute_kernels.runtime import device
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.derived import Again, Derived
from sparse_collective import BsrMatrix
from sparse_collective.nn import BsrLinear, change_pattern_, pruning
from sparse_collective.nn.pattern import indices_of, moved, random_keys, regrown_by_torch
from sparse_collective.regrowth import choose_kernel, move_kernel
from sparse_collective.sampled import tables_family, tables_kernel
from sparse_collective.sampled.tables import box_groups, rows_of
from sparse_collective.tile_order.family import order_of
from sparse_collective.tile_order.reference import Tiles
from sparse_collective.transposed import kernel as transposed_kernel
from sparse_collective.transposed.tables import transposed_index

from . import cases
from .bsr_parts import INDEX_DTYPES, bsr
from .reference import normal

GRIDS = [(1, 1), (3, 5), (33, 7), (70, 40), (5, 300)]


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request) -> Iterator[str]:
    """Where kernels run; on the emulator tensors are on the CPU."""
    if request.param == "cuda":
        yield "cuda"
        return
    ops = pytest.importorskip("tests.emulator.ops", reason="there is no emulator here")
    with ops.on_emulator("sm_90"):
        yield "cpu"


def scores(n: int, kind: str, where: str) -> Tensor:
    """Random ones, many equal ones with both zeros, or numbers that are compared in a way of their own."""
    if kind == "random":
        return torch.randn(n, device=where)
    least = torch.finfo(torch.float32).min
    some = {
        "ties": [-1.0, -0.0, 0.0, 1.0, 2.0],
        "special": [math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, least, 1e-45, -1e-45],
    }[kind]
    return torch.tensor(some)[torch.randint(len(some), (n,))].to(where)


# The kernels


@pytest.mark.parametrize("kind", ["random", "ties", "special"])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize(("rows", "cols"), [*GRIDS, (64, 64)], ids=str)
def test_blocks_are_chosen_as_by_sorts(place, rows, cols, even, kind):
    """The same pattern and origins, of equal scores too; written in place, which torch is told."""
    for stored in sorted({1, cols // 3, cols} - {0}):
        keys = random_keys(rows, cols, rows * stored)
        if not even:
            keys = torch.randperm(rows * cols)[: len(keys)].sort().values
        crow, col = (t.to(place) for t in indices_of(keys, rows, cols))
        lane = stored if even else len(col)
        for dropped in sorted({0, lane // 3, lane}):
            given = scores(len(col), kind, place), scores(rows * cols, kind, place)
            ours, theirs = ((crow.clone(), col.clone()) for _ in range(2))
            origin = choose_kernel.regrown_on_gpu(*given, *ours, cols, dropped, even)
            for where in sorted({"cpu", place}):
                there, (starts, columns) = ([t.to(where, copy=True) for t in ts] for ts in (given, theirs))
                expected = regrown_by_torch(*there, starts, columns, cols, dropped, even)
                for found, wanted in zip((*ours, origin), (starts, columns, expected), strict=True):
                    assert found.dtype == wanted.dtype and torch.equal(found.to(where), wanted)
                assert [t._version for t in ours] == [t._version for t in (starts, columns)] == [0 if even else 1, 1]


@pytest.mark.parametrize("lane", [1, 3, 8, 21, 150])
@pytest.mark.parametrize("shape", [(16, 16), (4,), (3, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_moved_in_place(place, dtype, shape, lane):
    """Within lanes, and as one lane by way of another tensor: each from its origin, zeros where one has grown."""
    if math.prod(shape) * dtype.itemsize % 16:
        pytest.skip("whole vectors of 16 bytes")
    lanes = 150 // lane
    for _ in range(4):
        kept = [torch.randperm(lane)[: torch.randint(lane + 1, ()).item()].sort().values for _ in range(lanes)]
        origin = torch.full((lanes, lane), -1, dtype=torch.int32)
        for row, (mine, old) in enumerate(zip(origin, kept, strict=True)):
            mine[torch.randperm(lane)[: len(old)].sort().values] = old.int() + row * lane
        origin = origin.flatten().to(place)
        before = torch.randn(len(origin), *shape, device=place).to(dtype)
        for by in (lane, None):
            several = [before.clone(), before.flip(0), before.neg(), before.clone(), before.abs()][: 1 + lane % 5]
            expected = [moved(t, origin.clamp(min=0), origin >= 0) for t in several]
            move_kernel.move_blocks_on_gpu(several, origin, by)
            for t, wanted in zip(several, expected, strict=True):
                assert torch.equal(t, wanted) and t._version == 1


def test_which_blocks_are_moved_by_the_kernel():
    assert move_kernel.fits(torch.zeros(3, 16, 16)) and move_kernel.fits(torch.zeros(3, 4))
    assert not move_kernel.fits(torch.zeros(3)) and not move_kernel.fits(torch.zeros(0, 16, 16))
    assert not move_kernel.fits(torch.zeros(3 * 256 + 1)[1:].view(3, 16, 16)), "not at a multiple of 16 bytes"
    assert choose_kernel.fits(512, 512, False) and not choose_kernel.fits(512, 513, False)
    assert choose_kernel.fits(10**6, 65_536, True) and not choose_kernel.fits(1, 65_537, True)


def patterns(rows: int, cols: int, index_dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """(crow, col) of single patterns, and of three items of which the second is empty."""
    for density in (0.05, 0.4, 1.0):
        crow, col = cases.mask_to_indices(cases.bernoulli(rows, cols, density), index_dtype)
        if len(col):
            yield crow, col
            items = torch.stack([crow, crow[-1:].expand_as(crow), crow + crow[-1]])
            yield items, torch.cat([col, col])


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [*GRIDS, (600, 20)], ids=str)
def test_tables_are_made_as_by_torch(place, monkeypatch, rows, cols, index_dtype):
    for crow, col in patterns(rows, cols, index_dtype):
        crow, col = crow.to(place), col.to(place)
        for width in {transposed_kernel.columns_of_a_cta(rows, cols), min(7, cols), cols}:
            monkeypatch.setattr(transposed_kernel, "columns_of_a_cta", lambda *_, width=width: width)
            found = transposed_kernel.transposed_index_on_gpu(crow, col, cols)[0]
            for ours, theirs in zip(found, transposed_index(crow, col, cols), strict=True):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        every = crow if crow.dim() == 1 else torch.cat([crow[:, :-1].flatten(), crow[-1, -1:]])
        for parts, boxes in ((1, 1), (1, 2), (2, 2), (3, 4), (1, 32)):
            found = tables_kernel.box_groups_on_gpu(crow, len(col), parts, boxes)[0]
            assert torch.equal(found, box_groups(every, len(col), parts, boxes))


@given(rows=st.integers(1, transposed_kernel.MOST_ROWS), cols=st.integers(1, 10**6))
@settings(max_examples=200)
def test_a_ctas_columns_fit_its_bitmaps(rows, cols):
    width = transposed_kernel.columns_of_a_cta(rows, cols)
    assert width >= 1 and width * -(-rows // 32) <= transposed_kernel.MOST_WORDS


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols", "density"), [(4096, 4096, 0.1), (512, 512, 0.125), (9, 100_000, 0.3)])
def test_large_patterns(rows, cols, density):
    crow, col = (t.cuda() for t in cases.mask_to_indices(cases.bernoulli(rows, cols, density), torch.int32))
    found = transposed_kernel.transposed_index_on_gpu(crow, col, cols)[0]
    assert all(map(torch.equal, found, transposed_index(crow, col, cols)))
    found = tables_kernel.box_groups_on_gpu(crow, len(col), 1, 16)[0]
    assert torch.equal(found, box_groups(crow, len(col), 1, 16))
    if choose_kernel.fits(rows, cols, False):
        given = torch.randn(len(col), device="cuda"), torch.randn(rows * cols, device="cuda")
        ours, theirs = ((crow.clone(), col.clone()) for _ in range(2))
        origin = choose_kernel.regrown_on_gpu(*given, *ours, cols, len(col) // 3, False)
        assert torch.equal(origin, regrown_by_torch(*given, *theirs, cols, len(col) // 3, False))
        assert all(map(torch.equal, ours, theirs))


# What a change costs


class OnGpu(Tensor):
    """A CPU tensor that says to be on a GPU; what is made of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


class MatrixOnGpu:
    """A BsrMatrix that says to be on a GPU."""

    device = torch.device("cuda")

    def __init__(self, W: BsrMatrix):
        self.matrix = W

    def __getattr__(self, name):
        return getattr(self.matrix, name)


class Launches(TorchDispatchMode):
    """The operations that a GPU would run: torch's, but for those that only look at memory or ask for it; and ours."""

    FREE = {"view", "_unsafe_view", "detach", "alias", "slice", "select", "unsqueeze", "expand", "t", "transpose"}
    FREE |= {"empty", "empty_like", "as_strided", "unbind"}

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in self.FREE:
            self.names.append(name)
        return function(*args, **(kwargs or {}))

    def kernel(self, facts) -> Callable:
        """What stands for the compiled kernel of these facts; no test below reads what it would write."""
        return lambda *arguments: self.names.append(facts.family)


@contextlib.contextmanager
def counted() -> Iterator[Launches]:
    """Inside of it, CPU tensors take the way of a GPU's through a change and its tables, and no kernel runs."""

    def on_gpu(t):
        return [on_gpu(each) for each in t] if isinstance(t, list) else t.detach().as_subclass(OnGpu)

    def called_on_gpu(module, name: str, tensors: int) -> contextlib.AbstractContextManager:
        """Its first so many arguments are on a GPU."""
        called = getattr(module, name)
        return mock.patch.object(module, name, lambda *a: called(*map(on_gpu, a[:tensors]), *a[tensors:]))

    launches = Launches()
    with contextlib.ExitStack() as stack:
        stack.enter_context(device.assume("sm_90"))
        stack.enter_context(mock.patch.object(KernelCache, "get", lambda _, facts, build: launches.kernel(facts)))
        for module, name, tensors in (
            (sparse_collective.bsr, "index_of", 1),
            (pruning, "regrown", 1),
            (pruning, "blocks_moved", 2),
        ):
            stack.enter_context(called_on_gpu(module, name, tensors))
        stack.enter_context(launches)
        yield launches


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
    """Each is some 5 to 10 us of the host's time, and a training step of one layer 1.1 ms: more of them show.

    A change draws scores, takes norms, chooses blocks, and moves values and AdamW's two moments; uneven rows move by
    way of another tensor. Tables are those of the transposed view and the order of its tiles; of uneven rows also the
    order of forward's tiles and the boxes of sddmm, which depend on the rows' lengths alone.
    """
    layer, optimizer = trained(even)

    def make_tables(W: BsrMatrix) -> None:
        tiles = Tiles(row_tiles=1, steps=2, tiles_n=4, batch=1, group=2, workers=132)
        for matrix in (W.t(),) if even else (W, W.t()):
            order_of(MatrixOnGpu(matrix), tiles)
        tables_family.groups_of(MatrixOnGpu(W), 1, 2)

    with counted() as launches:
        make_tables(layer.weight)
        launches.names.clear()
        change_pattern_(layer, 0.3, grow="random", even_rows=even, optimizer=optimizer)
        of_change, launches.names = launches.names, []
        make_tables(layer.weight)
        rows, columns = ["tile order", "box groups"], ["transposed index", "tile order"]
    assert of_change == ["rand", "linalg_vector_norm", "regrowth", "block moves", *([] if even else ["_foreach_copy_"])]
    assert sorted(launches.names) == sorted(columns if even else rows + columns)


def test_a_change_by_given_scores_moves_the_gradient_too():
    layer, optimizer = trained(True)
    layer(normal(9, 256)).float().square().sum().backward()
    given = {"grow": torch.rand(layer.grid), "drop": torch.rand(layer.nnz)}
    with counted() as launches:
        change_pattern_(layer, 0.3, **given, optimizer=optimizer)
    assert launches.names == ["regrowth", "block moves", "_foreach_copy_"]


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
        groups = tables_family.groups_of(there.weight, 1, 2)
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
    change(one)  # compiles
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
    """What is kept of the transposed view is made again after a write in place."""
    W = bsr(cases.bernoulli(5, 7, 0.5), (16, 16))
    before = W.t()
    W.col_indices.add_(0)
    assert W.t().numbers is not before.numbers and torch.equal(W.t().numbers, before.numbers)


def test_made_again_in_its_own_tensors(monkeypatch):
    """An Again is, on the stream that it was made on; on another one, and in a capture, it is made anew."""
    recorded, state = [], SimpleNamespace(stream=7, capturing=False)

    def stream(device):
        done = SimpleNamespace(record=lambda on: recorded.append(on.cuda_stream))
        return SimpleNamespace(cuda_stream=state.stream, record_event=lambda: done, wait_event=recorded.append)

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr("cute_kernels.runtime.derived.raw_stream", lambda index: state.stream)
    source = SimpleNamespace(is_cuda=True, get_device=lambda: 0, device=torch.device("cpu"))
    memo, owners = Derived(), []

    def get(version: int, owner: str) -> list:
        return memo.get("key", source, lambda: Again([owner], owners.append), lambda value: (), version, owner)

    first = get(0, "a")
    assert get(0, "b") is first == ["a"] and not owners
    assert get(1, "c") is first and get(1, "d") is first and owners == ["c"] and recorded == [7]
    state.capturing = True
    assert get(1, "e") is first and get(2, "f") == ["f"] and get(1, "g") is first
    state.capturing, state.stream = False, 8
    assert get(2, "h") == ["h"] and get(3, "i") == ["h"] and owners == ["c", "i"] and recorded == [7, 8]
