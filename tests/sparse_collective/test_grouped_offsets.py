"""bsr_grouped_linear with any offsets: against dense GEMMs in FP64, eager, compiled, under torch.func and in graphs."""

import pytest
import torch
import torch._dynamo.testing
from torch.func import grad, vmap

from cute_kernels import explain, quantize
from cute_kernels.testing.reference import normal, poisoned
from sparse_collective import BsrMatrix, bsr_grouped_linear, random_bsr
from sparse_collective.padded_rows import padding_of

from .bsr_parts import DEVICES, FORMS, batch
from .nn_parts import near

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of a loop over items, under vmap

E, T = 4, 290
ENDS = {
    "multiples of nothing": [3, 101, 167, 290],
    "empty experts": [0, 65, 65, 290],
    "tail": [7, 64, 130, 200],
    "no tokens": [0, 0, 0, 0],
    "one expert": [290, 290, 290, 290],
    "one token each": [1, 2, 3, 4],
    "beyond T and descending": [-5, 120, 80, 1000],
}
ROUTINGS = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
GROUP_ROWS = pytest.mark.parametrize("group_rows", [None, 64, 256])
BOTH_FORMS = pytest.mark.parametrize("form", FORMS)
COMPILED = pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)


def offsets_of(ends, device, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype, device=device)


def truth(x, dense, ends, bias=None):
    """y in FP64, differentiable. dense: (E, M, K)."""
    runs, begin = [], 0
    for e, end in enumerate([*ends, len(x)]):
        end = min(max(end, begin), len(x))
        w = dense[min(e, E - 1)] * (e < E)  # rows after the last offset are not multiplied
        y = x[begin:end].double() @ w.t().double()
        runs.append(y if bias is None else y + bias[min(e, E - 1)].double())
        begin = end
    return torch.cat(runs)


@BOTH_FORMS
@ROUTINGS
@GROUP_ROWS
def test_any_offsets(device, path, form, ends, group_rows):
    W, _ = batch(form, device=device)
    x, bias = normal(T, W.shape[-1], device=device), normal(E, W.shape[1], device=device)
    exact = truth(x, W.to_dense(), ends, bias)
    for dtype in (torch.int32, torch.int64):
        more = {"offs": offsets_of(ends, device, dtype), "group_rows": group_rows}
        near(bsr_grouped_linear(x, W, bias=bias, activation="relu", **more), exact.relu())
        out = poisoned(T, W.shape[1], dtype=torch.float32, device=device)
        assert bsr_grouped_linear(x, W, bias=bias, out=out, **more) is out
        near(out, exact)


@BOTH_FORMS
def test_no_tokens_at_all(place, form):
    W, _ = batch(form, device=place)
    x, bias = normal(0, W.shape[-1], device=place), normal(E, W.shape[1], device=place)
    offsets, groups = offsets_of([0] * E, place), offsets_of([], place)
    for routing in ({"offs": offsets}, {"expert_ids": groups}):
        y, dx, *others = gradients_of(
            lambda x, W, bias, routing=routing: bsr_grouped_linear(x, W, bias=bias, activation="silu", **routing),
            *(W, x, bias, normal(0, W.shape[1], device=place)),
        )
        assert y.shape == (0, W.shape[1]) and dx.shape == x.shape and not any(t.any() for t in others)


def test_explain(device):
    W, _ = batch("values", device=device)
    x = normal(T, W.shape[-1], device=device)
    plan = explain(bsr_grouped_linear, x, W, offs=offsets_of(ENDS["tail"], device), group_rows=64)
    assert plan.out_shape == (T, W.shape[1]) and plan.facts.block.run == 64
    assert any("padded layout of 576 rows" in note for note in plan.notes)


def leaves(W, x, bias):
    return [t.detach().clone().requires_grad_() for t in (x, W.stored, bias)]


def gradients_of(f, W, x, bias, dy):
    """(y, gradients of x, W's values and bias)"""
    inputs = leaves(W, x, bias)
    y = f(inputs[0], W.with_values(inputs[1]), inputs[2])
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def exact_gradients(W, x, bias, dy, ends):
    dense = W.to_dense().detach()
    inputs = [t.double().requires_grad_() for t in (x, dense, bias)]
    y = torch.nn.functional.silu(truth(inputs[0], inputs[1], ends, inputs[2]))
    dx, dW, dbias = torch.autograd.grad(y, inputs, dy.double())
    return y.detach(), dx, dW, dbias


def compare(W, found, exact):
    y, dx, dvalues, dbias = found
    near(y, exact[0], 2)
    near(dx, exact[1], 3)
    mask = W.with_values(torch.ones_like(W.stored)).to_dense()
    near(W.with_values(dvalues).to_dense(), exact[2] * mask, 3)
    near(dbias, exact[3], 3)


@BOTH_FORMS
@ROUTINGS
def test_gradients(place, form, ends):
    W, _ = batch(form, device=place)
    x, bias = normal(T, W.shape[-1], device=place), normal(E, W.shape[1], device=place)
    x[max(*ends, 0) :] = torch.nan  # rows of no expert reach nothing, and padding is not made of them
    offsets, dy = offsets_of(ends, place), normal(T, W.shape[1], device=place)

    def f(x, W, bias):
        return bsr_grouped_linear(x, W, bias=bias, activation="silu", offs=offsets)

    exact = exact_gradients(W, x.nan_to_num(), bias, dy, ends)
    compare(W, gradients_of(f, W, x, bias, dy), exact)

    def loss(x, values, bias):
        return (f(x, W.with_values(values), bias) * dy).sum()

    compare(W, (f(x, W, bias), *grad(loss, (0, 1, 2))(x, W.stored, bias)), exact)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", ["of each expert", "of all"])
def test_an_infinite_slope_at_padding(place, compiled, rows):
    """torch.sqrt has it at 0, which padding is; rows of tokens are positive."""
    torch._dynamo.reset()
    W, _ = batch("values", device=place)
    W.check_indices()
    W = W.with_values(W.stored.abs() + 0.1)
    x, offsets = normal(T, W.shape[-1], device=place).abs() + 0.1, offsets_of(ENDS["multiples of nothing"], place)
    bias = torch.zeros(W.shape[1] if rows == "of all" else W.shape[:2], dtype=x.dtype, device=place)

    def f(x, values, bias):
        return bsr_grouped_linear(x, W.with_values(values), bias=bias, epilogue=torch.sqrt, offs=offsets)

    inputs = leaves(W, x, bias)
    run = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
    y = run(*inputs)
    dx, dvalues, dbias = torch.autograd.grad(y, inputs, torch.ones_like(y))
    dense = W.to_dense().double().requires_grad_()
    wide, wide_bias = (t.detach().double().requires_grad_() for t in (x, bias.expand(E, -1)))
    exact = truth(wide, dense, ENDS["multiples of nothing"], wide_bias)
    stored = exact != 0  # of an empty block row nothing is
    z = torch.where(stored, exact, 1.0).sqrt()
    ex, ew, eb = torch.autograd.grad(torch.where(stored, z, 0.0).sum(), (wide, dense, wide_bias))
    near(dx, ex, 3)
    mask = W.with_values(torch.ones_like(W.stored)).to_dense()
    near(W.with_values(dvalues).to_dense(), ew * mask, 3)
    if stored.all():
        near(dbias, eb.sum(0) if rows == "of all" else eb, 3)


def test_on_the_meta_device():
    W, _ = batch("values", device="cpu")
    x, offsets = (
        torch.empty(T, W.shape[-1], device="meta", dtype=W.dtype),
        torch.empty(E, dtype=torch.int32, device="meta"),
    )
    y = bsr_grouped_linear(x, W.to("meta"), offs=offsets)
    assert y.is_meta and y.shape == (T, W.shape[1])


def test_vmap(place):
    """Several inputs with one routing, as torch.func's vmap passes them."""
    W, _ = batch("values", device=place)
    x, offsets = normal(2, T, W.shape[-1], device=place), offsets_of(ENDS["tail"], place)
    y = vmap(lambda x: bsr_grouped_linear(x, W, offs=offsets))(x)
    for one, exact in zip(y, x, strict=True):
        near(one, truth(exact, W.to_dense(), ENDS["tail"]))


@COMPILED
@BOTH_FORMS
def test_compiled(device, backend, form):
    """One graph for all routings and numbers of tokens, with gradients."""
    torch._dynamo.reset()
    W, _ = batch(form, device=device)
    W.check_indices()
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def f(x, W, bias, offsets):
        return bsr_grouped_linear(x, W, bias=bias, activation="silu", offs=offsets)

    compiled = torch.compile(f, fullgraph=True, backend=graphs, dynamic=True)
    for ends, tokens in ((ENDS["tail"], T), ([5, 5, 90, 301], 301), ([8, 9, 10, 11], 11)):
        x, bias = normal(tokens, W.shape[-1], device=device), normal(E, W.shape[1], device=device)
        offsets, dy = offsets_of(ends, device), normal(tokens, W.shape[1], device=device)
        found = gradients_of(lambda *given, offsets=offsets: compiled(*given, offsets), W, x, bias, dy)
        compare(W, found, exact_gradients(W, x, bias, dy, ends))
    assert graphs.frame_count == 1


@COMPILED
def test_compiled_with_out(device, backend):
    torch._dynamo.reset()
    W, _ = batch("values", device=device)
    x, offsets = normal(T, W.shape[-1], device=device), offsets_of(ENDS["tail"], device)
    compiled = torch.compile(
        lambda x, out, offsets: bsr_grouped_linear(x, W, out=out, offs=offsets), fullgraph=True, backend=backend
    )
    out = poisoned(T, W.shape[1], device=device)
    compiled(x, out, offsets)
    near(out, truth(x, W.to_dense(), ENDS["tail"]))


@pytest.mark.parametrize("device", DEVICES)
@BOTH_FORMS
def test_float8(device, form):
    """Also with a scale for each token."""
    W, _ = batch(form, device=device)
    W8 = W.float().quantize()
    x8, scale = quantize(normal(T, W.shape[-1], device=device), per="row")
    x = x8.float() * scale
    for ends in ENDS.values():
        exact, offsets = truth(x, W8.float().to_dense(), ends), offsets_of(ends, device)
        for given in (scale, scale[:, 0]):
            near(bsr_grouped_linear(x8, W8, offs=offsets, scale_x=given), exact)
        near(
            bsr_grouped_linear(x8, W8, offs=offsets, scale_x=scale[:1, 0]),
            truth(x8.float() * scale[0], W8.float().to_dense(), ends),
        )
    with pytest.raises(ValueError, match="scale_x must have one element, or be"):
        bsr_grouped_linear(x8, W8, offs=offsets, scale_x=scale[:5])
    with pytest.raises(RuntimeError, match="float8 does not compute gradients"):
        bsr_grouped_linear(x8.requires_grad_(), W8, offs=offsets)


def test_2_4(device):
    items = [random_bsr((192, 128), (64, 64), density=0.6, device=device, dtype=torch.bfloat16) for _ in range(E)]
    W = BsrMatrix.stack(items).prune_2_4()
    x = normal(T, 128, device=device)
    for ends in ENDS.values():
        near(bsr_grouped_linear(x, W, offs=offsets_of(ends, device)), truth(x, W.to_dense(), ends))


@pytest.mark.parametrize("total", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("group_rows", [64, 128])
def test_the_padded_layout(total, group_rows):
    """Slots differ and lie inside; a run's group is the expert of its rows."""
    for _ in range(20):
        for tail in (True, False):
            ends = torch.randint(0, total + 1, (5,)).sort().values
            if not tail:
                ends[-1] = total
            rows, slots, groups = padding_of(ends, total, group_rows, tail)
            assert rows == group_rows * len(groups) and len(slots.unique()) == total
            assert groups.dtype is torch.int32
            if total:
                assert 0 <= slots.min() and slots.max() < rows
                expert = torch.searchsorted(ends, torch.arange(total), right=True)
                assert torch.equal(groups[slots // group_rows].long(), expert)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Forward and backward, without a synchronization; offsets change between replays."""
    W, _ = batch("values", device="cuda", grid=(8, 8))
    W.check_indices()  # which waits for the GPU
    x, bias = normal(T, W.shape[-1], device="cuda"), normal(E, W.shape[1], device="cuda")
    offsets, dy = offsets_of(ENDS["tail"], "cuda"), normal(T, W.shape[1], device="cuda")

    def f(x, W, bias):
        return bsr_grouped_linear(x, W, bias=bias, activation="silu", offs=offsets)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients_of(f, W, x, bias, dy)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients_of(f, W, x, bias, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients_of(f, W, x, bias, dy)
    for ends in ENDS.values():
        offsets.copy_(offsets_of(ends, "cuda"))
        graph.replay()
        compare(W, found, exact_gradients(W, x, bias, dy, ends))


def test_nested_tensors():
    W, _ = batch("values")
    x = torch.nested.nested_tensor([normal(3, W.shape[-1]), normal(5, W.shape[-1])], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"got a nested tensor; pass its packed rows, x.values\(\)"):
        bsr_grouped_linear(x, W, offs=offsets_of(ENDS["tail"], "cpu"))


def test_no_wrong_number_from_a_wrong_multiple(place):
    """The reported case: offsets that are no multiples of group_rows multiplied tokens by another expert's weight."""
    items = [random_bsr((64, 64), (32, 32), density=1.0, device=place, dtype=torch.bfloat16) for _ in range(E)]
    W, x = BsrMatrix.stack(items), normal(256, 64, device=place)
    y = bsr_grouped_linear(x, W, offs=offsets_of([70, 128, 192, 256], place), group_rows=64)
    near(y, truth(x, W.to_dense(), [70, 128, 192, 256]))
