"""Calls in CUDA graphs: what a graph reads stays as it was; and training with torch.compile(mode="reduce-overhead").

Where there is no GPU, what would be replayed runs eagerly: that checks the tests themselves.
"""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from attention import attention, block_sparse_attention
from attention.masks.patterns import sliding_window
from cute_kernels import gemm
from cute_kernels.runtime import derived, graphs, workspace
from cute_kernels.runtime.derived import MOST, Derived
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix
from sparse_collective.bsr_gemm.tile_order import Tiles, order_of
from sparse_collective.nn import BsrGroupedLinear, BsrLinear

SHAPES = 140  # other shapes that are called between a capture and its replay; more than a cache has entries
SIDE = 512


class Case(NamedTuple):
    """A call: `run` of tensors that require gradients; `other(i)` is the same op on other shapes."""

    tensors: list[Tensor]
    run: Callable
    other: Callable[[int], None]


def mask_of_blocks(rows: int = SIDE // 64) -> Tensor:
    """Block rows of 1 to 8 blocks."""
    return torch.ones(rows, rows, dtype=torch.bool).tril()


def attention_case(device, **terms) -> Case:
    tensors = [normal(2, 4, 192, 64, device=device).requires_grad_() for _ in range(3)]

    def other(i: int) -> None:
        q, k, v = (normal(1, 2, 8 + i, 64, device=device) for _ in range(3))
        attention(q, k, v, causal=True)

    return Case(tensors, lambda q, k, v: attention(q, k, v, causal=True, **terms), other)


def block_sparse_case(device) -> Case:
    mask = sliding_window((384, 384), (100, 0), device=device)
    tensors = [normal(2, 4, 384, 64, device=device).requires_grad_() for _ in range(3)]

    def other(i: int) -> None:
        q, k, v = (normal(i + 1, 2, 384, 64, device=device) for _ in range(3))
        block_sparse_attention(q, k, v, mask)

    return Case(tensors, lambda q, k, v: block_sparse_attention(q, k, v, mask), other)


def bsr_case(device) -> Case:
    """A weight whose block rows differ in length, so that tables order the work tiles."""
    layer = BsrLinear(SIDE, SIDE, True, (64, 64), mask=mask_of_blocks(), device=device, dtype=torch.bfloat16)
    assert not layer.weight.even
    x = normal(256, SIDE, device=device).requires_grad_()

    def other(i: int) -> None:
        with torch.no_grad():
            if i % 20 == 0:
                layer(normal(64 * (i + 1), SIDE, device=device))
            order_of(layer.weight.pattern, Tiles(1, 1, i + 1, 1, 1, 132))
            order_of(layer.weight.t().pattern, Tiles(1, 1, i + 1, 1, 1, 132))

    return Case([x, layer.values, layer.bias], lambda x, values, bias: layer(x), other)


def grouped_case(device) -> Case:
    layer = BsrGroupedLinear(4, SIDE, SIDE, False, (64, 64), density=0.5, device=device, dtype=torch.bfloat16)
    x = normal(256, SIDE, device=device).requires_grad_()
    offsets = torch.tensor([64, 128, 192, 256], dtype=torch.int32, device=device)

    def other(i: int) -> None:
        if i % 20 == 0:
            ends = torch.tensor([0, 64, 64, 64 * (i + 1)], dtype=torch.int32, device=device)
            with torch.no_grad():
                layer(normal(64 * (i + 1), SIDE, device=device), ends, group_rows=64)
        layer.weight.pattern.derived(("test", i), lambda: (torch.zeros(64, device=device),))

    return Case([x, layer.values], lambda x, values: layer(x, offsets, group_rows=64), other)


def bend(z: Tensor) -> Tensor:
    return torch.where(z > 0.5, z, 0.25 * z)


def gemm_case(device) -> Case:
    tensors = [normal(192, 256, device=device), normal(256, 128, device=device), normal(128, device=device)]

    def other(i: int) -> None:
        with torch.no_grad():
            gemm(normal(i + 1, 256, device=device), tensors[1])

    return Case([t.requires_grad_() for t in tensors], lambda a, b, bias: gemm(a, b, bias=bias, epilogue=bend), other)


def gemm_by_torch_case(device) -> Case:
    """For fp32, for which torch computes the derivative of an epilogue function."""
    case = gemm_case(device)
    a, b, bias = (t.detach().float().requires_grad_() for t in case.tensors)
    return Case([a, b, bias], lambda a, b, bias: gemm(a, b, bias=bias, epilogue=bend, precision="tf32"), case.other)


CASES = {
    "attention": attention_case,
    "block_sparse": block_sparse_case,
    "uneven": bsr_case,
    "grouped": grouped_case,
    "gemm": gemm_case,
    "gemm_by_torch": gemm_by_torch_case,
}


def with_gradients(case: Case, dout: Tensor) -> list[Tensor]:
    out = case.run(*case.tensors)
    return [out, *torch.autograd.grad(out, case.tensors, dout)]


def captured(step: Callable[[], list[Tensor]], is_cuda: bool) -> tuple[Callable, list[Tensor]]:
    """(replay, its static outputs), after a warm-up beside the default stream."""
    if not is_cuda:
        outputs = step()

        def replay() -> None:
            for to, new in zip(outputs, step(), strict=True):
                to.data.copy_(new)

        return replay, outputs
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph.replay, outputs


def overwrite_free_memory(device) -> None:
    """Freed memory is allocated again, and filled."""
    if device != "cuda":
        return
    torch.cuda.synchronize()
    sizes = [2**n for n in range(7, 20) for _ in range(40)]
    filled = [torch.full((size,), 0x7F7F7F7F, dtype=torch.int32, device=device) for size in sizes]
    torch.cuda.synchronize()
    del filled


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        scale = theirs.float().abs().max().item()
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.02, atol=0.01 * scale + 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_replay_after_other_shapes(device, name):
    """Forward and backward in a graph, which is replayed after many other shapes, on other data."""
    case = CASES[name](device)
    dout = torch.empty_like(case.run(*case.tensors)).normal_()
    replay, outputs = captured(lambda: with_gradients(case, dout), device == "cuda")
    for i in range(SHAPES if device == "cuda" else 3):
        case.other(i)
    overwrite_free_memory(device)
    for _ in range(2):
        with torch.no_grad():
            case.tensors[0].copy_(torch.empty_like(case.tensors[0]).normal_())
            dout.normal_()
        for t in outputs:
            t.data.fill_(float("nan"))
        replay()
        assert_near([t.detach() for t in outputs], [t.detach() for t in with_gradients(case, dout)])


@pytest.mark.gpu
def test_tables_of_a_graph_are_not_rewritten():
    """A pattern is written in place, its tables are made again, and the pattern is restored: the graph replays it."""
    layer = BsrLinear(SIDE, SIDE, False, (64, 64), mask=mask_of_blocks(), device="cuda", dtype=torch.bfloat16)
    x, dout = (normal(256, SIDE, device="cuda") for _ in range(2))
    x.requires_grad_()

    def step() -> list[Tensor]:
        out = layer(x)
        return [out, *torch.autograd.grad(out, [x, layer.values], dout)]

    stream = torch.cuda.Stream()  # the capture is on the stream that the tables were made on
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [t.detach().clone() for t in step()]
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = step()
        indices = layer.crow_indices.clone(), layer.col_indices.clone()
        flipped = BsrLinear(SIDE, SIDE, False, (64, 64), mask=mask_of_blocks().flip(0), device="cuda")
        layer.crow_indices.copy_(flipped.crow_indices)
        layer.col_indices.copy_(flipped.col_indices)
        step()
        layer.crow_indices.copy_(indices[0])
        layer.col_indices.copy_(indices[1])
        graph.replay()
        stream.synchronize()
    assert_near([t.detach() for t in outputs], expected)


@pytest.mark.parametrize("name", CASES)
def test_training_with_reduced_overhead(device, name):
    """Steps of a compiled op, followed by a second compiled function, have the gradients of eager ones."""
    torch._dynamo.reset()
    counters.clear()
    case = CASES[name](device)
    options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}
    first = torch.compile(case.run, fullgraph=True, **options)
    second = torch.compile(lambda y: (y.float() * 0.5).sin() + y.float(), fullgraph=True, **options)
    for turn in range(5):
        with torch.no_grad():
            case.tensors[0].copy_(torch.empty_like(case.tensors[0]).normal_())
        torch.compiler.cudagraph_mark_step_begin()
        out = second(first(*case.tensors))
        dout = torch.empty_like(out).normal_()
        found = [t.clone() for t in torch.autograd.grad(out, case.tensors, dout)]
        y = case.run(*case.tensors)
        eager = (y.float() * 0.5).sin() + y.float()
        assert_near(found, [t.detach() for t in torch.autograd.grad(eager, case.tensors, dout)])
        if turn == 2:
            for i in range(SHAPES if device == "cuda" else 2):
                case.other(i)
            overwrite_free_memory(device)
    assert not counters["inductor"]["cudagraph_skips"]


# ---------------------------------------------------------------------- the caches


@pytest.fixture
def stream(monkeypatch):
    """A CUDA stream, as far as Derived sees: its number, and whether it is captured."""
    state = SimpleNamespace(number=7, capturing=False)

    def current(device):
        done = SimpleNamespace(record=lambda on: None)
        return SimpleNamespace(cuda_stream=state.number, record_event=lambda: done, wait_event=lambda event: None)

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(derived, "raw_stream", lambda index: state.number)
    monkeypatch.setattr(graphs, "compiled_with_cuda_graphs", lambda: False)
    return state


SOURCE = SimpleNamespace(is_cuda=True, get_device=lambda: 0, device=None)


@pytest.mark.parametrize("other", [False, True], ids=["the same stream", "another stream"])
def test_values_handed_out_in_a_capture_are_not_evicted(stream, other):
    memo = Derived()

    def get(key) -> list:
        return memo.get(key, SOURCE, lambda: [key], lambda value: ())

    first = get("graph")
    stream.capturing, stream.number = True, 8 if other else 7
    assert get("graph") is first
    stream.capturing, stream.number = False, 7
    for n in range(SHAPES):
        get(n)
    assert get("graph") is first and get(SHAPES - 1) is not None
    assert len(memo.kept) == MOST + 1 and 0 not in memo.kept


def test_values_handed_out_in_a_capture_stay_alive(stream):
    memo = Derived()

    def get(state: int) -> list:
        return memo.get("key", SOURCE, lambda: [state], lambda value: (), state)

    first = get(0)
    stream.capturing = True
    assert get(0) is first and get(1) == [1] and get(1) is not get(1), "what a graph makes is not kept"
    stream.capturing = False
    second = get(1)
    assert second == [1] and memo.replaced == (first,)
    assert get(2) == [2] and memo.replaced == (first,), "no graph has the second"


def test_tensors_that_a_mask_computes_stay_with_its_graph(stream, monkeypatch):
    """They are computed again when what they are made of is written to; a graph goes on reading the old ones."""
    from cute_kernels.traced import memo

    lengths = torch.tensor([3, 5], dtype=torch.int32)

    def mask_mod(b, h, q, kv):
        return kv < lengths.cumsum(0)[b]

    def trace():
        return memo.traced(mask_mod, "mask_mod", ("int32",) * 4, (), torch.device("cpu"))

    first = trace()
    monkeypatch.setattr(memo, "in_capture", lambda tensor: True)
    assert trace() is first
    monkeypatch.undo()
    lengths.add_(1)
    assert trace() is not first
    (pinned,) = getattr(mask_mod, memo.ATTRIBUTE).pinned
    assert pinned is first.tensors and pinned[0].tolist() == [3, 8]


def test_a_second_matrix_of_the_same_indices_shares_its_tables():
    """Checking it must not drop those that a compiled graph looks up by the index tensors."""
    layer = BsrLinear(256, 256, False, (64, 64), mask=mask_of_blocks(4), dtype=torch.bfloat16)
    W = layer.weight
    again = BsrMatrix(W.crow_indices, W.col_indices, W.values.detach(), W.shape)
    assert again.pattern is W.pattern and again.checked
    wider = BsrMatrix(W.crow_indices, W.col_indices, W.values.detach(), (256, 512))
    wider.check_indices()
    assert wider.pattern is not W.pattern and wider.t().shape == (512, 256) and len(wider.t().crow_indices) == 9


def test_shapes_share_the_lists_of_a_mask(device):
    mask = sliding_window((384, 384), (100, 0), device=device)
    for batch in range(1, 6):
        q, k, v = (normal(batch, 2, 384, 64, device=device) for _ in range(3))
        block_sparse_attention(q, k, v, mask)
    values = [entry.value for entry in mask.derived.kept.values()]
    largest = mask.kv_indices.nbytes + mask.full_kv_indices.nbytes
    lists = {id(t): t for value in values for t in value if isinstance(t, torch.Tensor) and t.dim() == 4}
    assert sum(t.nbytes for t in lists.values()) <= largest
    assert len(values) == 6  # the columns, and a table for each batch


def test_lasting_memory_is_usual_memory_before_graphs_are_compiled(monkeypatch):
    monkeypatch.setattr(graphs, "compiled_with_cuda_graphs", lambda: False)
    with graphs.lasting_memory(torch.device("cuda")):
        pass


@pytest.mark.gpu
def test_what_lasts_is_outside_of_the_pool_of_graphs(monkeypatch):
    """As torch's cudagraph trees run the first call: allocations of this thread go to a pool of graphs."""
    monkeypatch.setattr(graphs, "compiled_with_cuda_graphs", lambda: True)
    device, pool = torch.device("cuda", torch.cuda.current_device()), torch.cuda.graph_pool_handle()
    memo = Derived()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool)
    try:
        inside = torch.zeros(1000, device=device)
        buffer = workspace.zeros(device, 5000, torch.float64)
        with graphs.lasting_memory(device), graphs.lasting_memory(device):
            outside = torch.zeros(1000, device=device)
        table = memo.get("key", inside, lambda: (torch.zeros(1000, device=device),), tuple)[0]
        last = torch.zeros(1000, device=device)
    finally:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    live = {inside.untyped_storage().data_ptr(), last.untyped_storage().data_ptr()}
    assert torch._C._cuda_checkPoolLiveAllocations(device.index, pool, live)
    assert all(t.untyped_storage().data_ptr() not in live for t in (buffer, outside, table))
    segments = torch.cuda.memory_snapshot()
    addresses = {s["address"]: s for s in segments if tuple(s["segment_pool_id"]) == tuple(pool)}
    assert addresses
    torch._C._cuda_releasePool(device.index, pool)


@pytest.mark.gpu
def test_a_process_with_lasting_memory_ends_well():
    text = (
        "import torch, torch._inductor.cudagraph_trees\n"
        "from cute_kernels.runtime.graphs import lasting_memory\n"
        "with lasting_memory(torch.device('cuda')):\n    kept = torch.zeros(5, device='cuda')\n"
        "print(kept.sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "0.0", done.stderr
    assert "rror" not in done.stderr, done.stderr
