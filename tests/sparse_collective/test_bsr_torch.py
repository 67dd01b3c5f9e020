"""BsrMatrix at home in torch: operators, conversions, storage, any address, torch.compile."""

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from cute_kernels import explain
from cute_kernels.testing.reference import assert_as_good_as_torch, exact_and_torch, normal
from sparse_collective import (
    BsrMatrix,
    bsr_linear,
    bsr_matmul,
    sddmm,
)
from sparse_collective import dispatch as sparse_ops

from .bsr_parts import assert_same, batches, leaf, matrix

BF16, FP64 = torch.bfloat16, torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def near(found, expected):
    """Within two bf16 roundings of the tensor's size."""
    assert (found.double() - expected.double()).abs().max() <= 2**-7 * expected.double().abs().max()


# Operators

PRODUCTS = {  # of W (M, K), b (K, N), x (N, K), y (N, M): what is computed, and the same of a dense W
    "W @ b": (lambda W, b, x, y: W @ b, lambda W, b, x, y: (W, b)),
    "matmul(W, b)": (lambda W, b, x, y: torch.matmul(W, b), lambda W, b, x, y: (W, b)),
    "W.t() @ b": (lambda W, b, x, y: W.t() @ y.mT, lambda W, b, x, y: (W.mT, y.mT)),
    "x @ W.T": (lambda W, b, x, y: x @ W.T, lambda W, b, x, y: (x, W.mT)),
    "x @ W.t()": (lambda W, b, x, y: x @ W.t(), lambda W, b, x, y: (x, W.mT)),
    "x @ W.mT": (lambda W, b, x, y: x @ W.mT, lambda W, b, x, y: (x, W.mT)),
    "matmul(x, W.T)": (lambda W, b, x, y: torch.matmul(x, W.T), lambda W, b, x, y: (x, W.mT)),
    "x.matmul(W.T)": (lambda W, b, x, y: x.matmul(W.T), lambda W, b, x, y: (x, W.mT)),
    "y @ W": (lambda W, b, x, y: y @ W, lambda W, b, x, y: (y, W)),
    "linear": (lambda W, b, x, y: linear(x, W), lambda W, b, x, y: (x, W.mT)),
    "linear of a view": (lambda W, b, x, y: linear(y, W.t()), lambda W, b, x, y: (y, W)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("kind", ["one", "one pattern", "patterns"])
def test_products(place, name, kind):
    """Against the truth, with the gradients of the same product of dense matrices."""
    of_matrix, of_dense = PRODUCTS[name]
    W = matrix(place) if kind == "one" else list(batches(place))[kind == "patterns"]
    batch = W.shape[:-2]
    b, x, y = (normal(*batch, *shape, device=place) for shape in ((96, 24), (24, 96), (24, 64)))
    dense = W.to_dense()
    left, right = of_dense(dense, b, x, y)
    assert_as_good_as_torch(of_matrix(W, b, x, y), *exact_and_torch(left, right, BF16), k=96)
    values, tensors = leaf(W.values), [leaf(t) for t in (b, x, y)]
    out = of_matrix(W.with_values(values), *tensors)
    out.backward(dy := normal(*out.shape, device=place))
    truth = [leaf(t.double()) for t in (dense, b, x, y)]
    (torch.matmul(*of_dense(*truth))).backward(dy.double())
    mask = W.with_values(torch.ones_like(W.values)).to_dense()
    found = [W.with_values(values.grad).to_dense(), *(t.grad for t in tensors)]
    for mine, exact in zip(found, [truth[0].grad * mask, *(t.grad for t in truth[1:])], strict=True):
        assert (mine is None) == (exact is None)
        if exact is not None:
            assert (mine.double() - exact).abs().max() <= 0.02 * exact.abs().max()


def test_vectors_and_out_and_bias(place):
    W = matrix(place)
    dense, v, x, bias = W.to_dense(), normal(96, device=place), normal(5, 3, 96, device=place), normal(64, device=place)
    for y in (W @ v, torch.matmul(W, v), v @ W.t()):
        assert_as_good_as_torch(y[:, None], *exact_and_torch(dense, v[:, None], BF16), k=96)
    out = torch.empty(5, 3, 64, dtype=torch.float32, device=place)
    assert torch.matmul(x, W.T, out=out) is out
    assert_as_good_as_torch(out, *exact_and_torch(x, dense.t(), torch.float32), k=96)
    for y in (linear(x, W, bias), linear(input=x, weight=W, bias=bias)):
        assert_as_good_as_torch(y, *exact_and_torch(x, dense.t(), BF16, bias=bias), k=96)


REFUSED = {
    "W @ W2": (lambda W, x: W @ W.t(), r"a BsrMatrix times a BsrMatrix has no kernel; .*W @ W2.to_dense\(\)"),
    "matmul": (lambda W, x: torch.matmul(W, W.t()), "a BsrMatrix times a BsrMatrix has no kernel"),
    "add": (lambda W, x: torch.add(W, 1), r"add does not take a BsrMatrix; .* these work: W @ b, x @ W.T and .*linear"),
    "relu": (lambda W, x: torch.relu(W), r"relu does not take a BsrMatrix.*W.to_dense\(\)"),
    "method": (lambda W, x: x.mul(W), "mul does not take a BsrMatrix"),
    "to": (lambda W, x: x.to(W), "to does not take a BsrMatrix"),
    "plus": (lambda W, x: x + W, "unsupported operand"),
    "times": (lambda W, x: W * 2, "unsupported operand"),
    "input": (lambda W, x: linear(W, x), "linear takes a BsrMatrix as its weight alone; with a BsrMatrix W these work"),
    "bias": (lambda W, x: linear(x, x, W), "linear takes a BsrMatrix as its weight alone"),
    "list": (lambda W, x: W @ [1.0], "b must be a torch.Tensor, got list"),
    "array": (lambda W, x: np.ones((4, 96), np.float32) @ W.T, "x must be a torch.Tensor, got ndarray"),
    "array, right": (lambda W, x: W @ np.ones((96, 4), np.float32), "b must be a torch.Tensor, got ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_says_what_does(name):
    call, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        call(matrix(), normal(4, 96))


# Conversions and what else a tensor has


def test_to_in_all_forms():
    W, x = matrix(dtype=torch.float32), torch.zeros(1, dtype=torch.float16)
    half = [
        W.to(torch.float16), W.to(dtype=torch.float16), W.to("cpu", torch.float16), W.to(x), W.to(other=x),
        W.to(torch.device("cpu"), dtype=torch.float16, non_blocking=True), W.to(W.half()), W.to(torch.float16, True),
        W.to(device="cpu", dtype=torch.float16, copy=True), W.to(torch.float16, memory_format=torch.preserve_format),
    ]  # fmt: skip
    for V in half:
        assert_same(V, W.with_values(W.values.half()))
        assert V.crow_indices is W.crow_indices and V.checked and V.pattern is W.pattern
    for V in (W.to(), W.to("cpu"), W.to(torch.float32), W.to(W), W.cpu(), W.float(), W.contiguous(), W.to(x.float())):
        assert V is W
    other = W.to("cpu", torch.float32, False, True)
    assert_same(other, W)
    assert other.values.data_ptr() != W.values.data_ptr()
    meta = W.to(device="meta")
    assert meta.device.type == meta.col_indices.device.type == meta.t().device.type == "meta"
    for V, dtype in (
        (W.half(), torch.float16),
        (W.bfloat16(), BF16),
        (W.double(), FP64),
        (W.double().float(), W.dtype),
    ):
        assert V.dtype is dtype and torch.equal(V.values, W.values.to(dtype))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((3.5,), {}), ((torch.float16, "cpu"), {}), (("cpu", torch.float16, False, False, 1), {}), ((), {"dtyp": None}),
        (("cpu",), {"device": "cpu"}), ((), {"dtype": "float16"}), ((torch.int8,), {}), ((), {"other": 1}),
        ((torch.zeros(1),), {"dtype": torch.float16}), ((), {"memory_format": torch.channels_last}),
    ],
)  # fmt: skip
def test_to_refuses(args, kwargs):
    with pytest.raises((TypeError, RuntimeError), match="BsrMatrix.to|values cannot be|[Dd]evice|dtype"):
        matrix(dtype=torch.float32).to(*args, **kwargs)


@pytest.mark.gpu
def test_to_a_gpu_and_back():
    W = matrix(dtype=torch.float32)
    pinned = W.pin_memory()
    assert all(t.is_pinned() for t in (pinned.crow_indices, pinned.col_indices, pinned.values)) and pinned.checked
    assert W.t().pin_memory().base.values.is_pinned() and pinned.pin_memory() is pinned
    for V in (W.cuda(), W.cuda(0), W.to("cuda"), W.to(0), pinned.to("cuda", non_blocking=True), W.to(W.cuda())):
        assert V.is_cuda and V.crow_indices.is_cuda and V.col_indices.is_cuda and not W.is_cuda
        assert V.to("cuda") is V and V.checked
        assert_same(V.cpu(), W)
    half = W.t().to("cuda", torch.float16)
    assert half.base is not None and half.is_cuda and torch.equal(half.cpu().to_dense(), W.to_dense().t().half())
    with pytest.raises(TypeError, match="values cannot be torch.float64 on cuda.*only on the CPU"):
        W.cuda().double()
    with pytest.raises(TypeError, match="values cannot be torch.float64 on cuda"):
        W.double().cuda()


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("device", DEVICES)
def test_methods(device, view):
    W = matrix(device, torch.float32)
    W = W.t() if view else W
    M, K = W.shape
    assert W.size() == torch.Size((M, K)) and type(W.size()) is torch.Size and W.size(0) == M and W.size(-1) == K
    assert (W.dim(), W.ndim, W.numel(), W.element_size(), W.is_cuda) == (2, 2, M * K, 4, device == "cuda")
    with pytest.raises(IndexError):
        W.size(2)
    assert [b.size() for b in batches(device)] == [torch.Size((3, 64, 96))] * 2
    for V in (W.clone(), W.detach(), W.to(torch.float32, copy=True), copy.copy(W), copy.deepcopy(W)):
        assert_same(V, W)
        assert (V.base is None) == (W.base is None)
    shared = W.stored.data_ptr()
    assert W.detach().stored.data_ptr() == copy.copy(W).stored.data_ptr() == shared != W.clone().stored.data_ptr()
    own = W.contiguous()
    assert own.base is None and torch.equal(own.to_dense(), W.to_dense())
    assert W.half().dtype is torch.float16 and (W.half().base is None) == (W.base is None)
    if device == "cpu" and not torch.cuda.is_available():
        with pytest.raises(RuntimeError) as of_torch:  # its words depend on the build, and on whether there is a driver
            torch.empty(1).pin_memory()
        with pytest.raises(RuntimeError, match=re.escape(str(of_torch.value))):
            W.pin_memory()


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("device", DEVICES)
def test_grad_of_the_values(device, view):
    W = matrix(device, torch.float32)
    W = W.t() if view else W
    assert not W.requires_grad and W.grad is None
    assert W.requires_grad_() is W and W.requires_grad and not W.detach().requires_grad
    weight = torch.randn(W.shape, device=device)
    (W.clone().to_dense() * weight).sum().backward()
    mask = torch.ones_like(W.values)
    with torch.no_grad():
        expected = W.with_values(mask).to_dense() * weight
        assert torch.equal(W.with_values(W.grad).to_dense(), expected)
    assert W.requires_grad_(False) is W and not W.requires_grad


# Storage


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("device", DEVICES)
def test_save_load_copy_and_pickle(device, view):
    """The state has only tensors and numbers, so that weights_only=True suffices. It is validated when loaded."""
    for W in (matrix(device), *batches(device), matrix(device).requires_grad_()):
        W = W.t() if view else W
        stream = io.BytesIO()
        torch.save({"weight": W, "step": 3}, stream)
        stream.seek(0)
        loaded = [torch.load(stream, weights_only=True)["weight"], pickle.loads(pickle.dumps(W)), copy.deepcopy(W)]
        if not view:
            assert [V.checked for V in loaded] == [False, False, W.checked]
        for V in loaded:
            assert_same(V, W)
            assert (V.requires_grad, V.base is None) == (W.requires_grad, W.base is None)
            assert V.stored.data_ptr() != W.stored.data_ptr() and V.crow_indices.data_ptr() != W.crow_indices.data_ptr()
            x = normal(4, W.shape[-1], device=device)
            near(bsr_linear(x, V), bsr_linear(x, W))  # what a check learns of a pattern may choose another kernel
    elsewhere = io.BytesIO()
    torch.save(matrix(device), elsewhere)
    elsewhere.seek(0)
    assert torch.load(elsewhere, weights_only=True, map_location="cpu").device.type == "cpu"


def stored(crow, col, values, shape, check) -> io.BytesIO:
    """A file with this state, whether it is right or not."""
    stream, W = io.BytesIO(), matrix()
    W._set(crow_indices=crow, col_indices=col, stored=values, shape=shape, check=check)
    torch.save(W, stream)
    stream.seek(0)
    return stream


def test_state_is_checked_again():
    W = matrix()
    right = W.crow_indices, W.col_indices, W.values, W.shape
    assert_same(torch.load(stored(*right, True), weights_only=True), W)
    wrong = W.col_indices.clone()
    wrong[0] = 77
    for change, message in (
        ({0: W.crow_indices[:-1].clone()}, "crow_indices has 4 entries"),
        ({2: W.values.int()}, "values cannot be torch.int32"),
        ({3: (64, 32)}, "blocks, but shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            torch.load(stored(*[change.get(i, t) for i, t in enumerate(right)], True), weights_only=True)
    loaded = torch.load(stored(W.crow_indices, wrong, *right[2:], True), weights_only=True)
    with pytest.raises(ValueError, match=r"col_indices\[0\] is 77"):
        loaded @ normal(96, 8)
    with pytest.raises(ValueError, match=r"col_indices\[0\] is 77"):  # no use of it would check
        torch.load(stored(W.crow_indices, wrong, *right[2:], False), weights_only=True)


# Any address


def off(t, by=2):
    """A copy `by` elements past an aligned address."""
    buffer = torch.empty(t.numel() + 16, dtype=t.dtype, device=t.device)
    found = buffer[by : by + t.numel()].view(t.shape)
    assert found.data_ptr() % 16
    return found.copy_(t)


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("kind", ["one", "one pattern", "patterns"])
def test_values_at_any_address(place, kind, view):
    W = matrix(place) if kind == "one" else list(batches(place))[kind == "patterns"]
    A = W.with_values(off(W.values))
    x = normal(24, W.shape[-2 if view else -1], device=place)
    for _ in range(2):
        mine, theirs = (M.t() if view else M for M in (A, W))
        assert torch.equal(bsr_linear(x, mine), bsr_linear(x, theirs))
        assert torch.equal(bsr_matmul(mine, x.t()), bsr_matmul(theirs, x.t()))
        A.stored.mul_(2)
        W.stored.mul_(2)
    values = off(W.values).requires_grad_()
    bsr_linear(x, A.with_values(values).t() if view else A.with_values(values)).sum().backward()
    assert values.grad.shape == values.shape


def test_only_what_is_not_aligned_is_copied_and_in_each_call(device, monkeypatch):
    W = matrix(device)
    met, launch = [], sparse_ops._launch
    monkeypatch.setattr(sparse_ops, "_launch", lambda plan, W, v, *rest: met.append(v) or launch(plan, W, v, *rest))
    x, right = normal(24, 96, device=device), W.values
    bsr_linear(x, W)
    assert met.pop() is right, "no copy of what is aligned"
    W = W.with_values(off(W.values))
    for write in (lambda v: v, lambda v: v.add_(1), lambda v: v.data.add_(1)):
        write(W.values)
        bsr_linear(x, W)
        assert met[-1].data_ptr() % 16 == 0 and torch.equal(met[-1], W.values)


def test_explain_tells_of_the_copy(device):
    W, x = matrix(device), normal(24, 96, device=device)
    note = "W.values begins 4 bytes off 16-byte alignment: copied to an aligned buffer in each call"
    assert note in str(explain(bsr_linear, x, W.with_values(off(W.values))))
    assert "alignment:" not in str(explain(bsr_linear, x, W))
    out, right = off(torch.zeros_like(W.values)), torch.zeros_like(W.values)
    assert "out begins 4 bytes off 16-byte alignment: written through" in str(explain(sddmm, x.t()[:64], x, W, out=out))
    assert "alignment:" not in str(explain(sddmm, x.t()[:64], x, W, out=right))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sddmm_into_any_address(place, dtype):
    W, dy, x = matrix(place), normal(24, 64, device=place), normal(24, 96, device=place)
    expected = torch.zeros(W.values.shape, dtype=dtype, device=place)
    sddmm(dy.t(), x, W, out=expected)
    for by in (1, 2, 3):
        out = off(torch.full_like(expected, float("nan")), by)
        assert sddmm(dy.t(), x, W, out=out) is out and torch.equal(out, expected)
        twice = sddmm(dy.t(), x, W, out=expected.clone(), accumulate=True)
        assert torch.equal(sddmm(dy.t(), x, W, out=out, accumulate=True), twice)


def test_values_of_a_file(place, tmp_path):
    """A safetensors file's tensors lie wherever its header ends; load_state_dict(assign=True) keeps them there."""
    safetensors = pytest.importorskip("safetensors.torch")
    W, x = matrix(place), normal(24, 96, device=place)
    state = {"crow": W.crow_indices, "col": W.col_indices, "values": W.values, "odd": torch.ones(3, device=place)}
    safetensors.save_file(state, tmp_path / "weights.safetensors")
    loaded = safetensors.load_file(tmp_path / "weights.safetensors", device=place)
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.empty_like(W.values))])
    module.load_state_dict({"0": off(loaded["values"], 3)}, assign=True)
    for values in (loaded["values"], module[0].detach()):
        V = BsrMatrix(loaded["crow"], loaded["col"], values, W.shape)
        assert V.values is values
        near(bsr_linear(x, V), bsr_linear(x, W))


@pytest.mark.gpu
def test_a_replay_reads_the_values_of_its_time():
    W, x = matrix("cuda"), normal(24, 96, device="cuda")
    A = W.with_values(off(W.values))
    bsr_linear(x, A)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bsr_linear(x, A)
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, bsr_linear(x, W.with_values(A.values.clone())))
        A.values.mul_(2)


# torch.compile


@pytest.fixture
def backend(place):
    torch._dynamo.reset()
    yield "inductor" if place == "cuda" else "aot_eager"
    torch._dynamo.reset()


def compiled(fn, backend):
    return torch.compile(fn, fullgraph=True, backend=backend)


STEPS = {
    "constructor": lambda W, x, crow, col, values: linear(x, BsrMatrix(crow, col, values, (64, 96))),
    "constructor, view": lambda W, x, crow, col, values: torch.matmul(BsrMatrix(crow, col, values, (64, 96)), x.mT).mT,
    "with_values": lambda W, x, crow, col, values: torch.matmul(x, W.with_values(values).T),
    "conversions": lambda W, x, crow, col, values: linear(x, W.with_values(values).float().to(BF16).clone()),
    "a matrix": lambda W, x, crow, col, values: torch.matmul(W.detach(), x.mT).mT * values.sum(),
    "from_dense": lambda W, x, crow, col, values: linear(
        x, BsrMatrix.from_dense(x.mT @ x, (32, 32), density=0.5)
    ) * values.sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("made", [False, True], ids=["", "view made before"])
def test_in_one_graph(place, backend, name, made):
    W, x = matrix(place), normal(24, 96, device=place)
    if made:
        W.t()
    step, results = STEPS[name], []
    for run in (compiled(step, backend), step):
        inputs = [leaf(x), W.crow_indices, W.col_indices, leaf(W.values)]
        for _ in range(2):
            y = run(W, *inputs)
        y.sum().backward()
        results.append((y, inputs[0].grad, inputs[3].grad))
    for mine, eager in zip(*results, strict=True):
        torch.testing.assert_close(mine, eager, rtol=0.02, atol=0.02 * eager.abs().max().item())


def test_a_constructor_in_a_graph_checks_each_call(backend, place):
    W, x = matrix(place), normal(24, 96, device=place)
    step = compiled(lambda crow, col, values, x: linear(x, BsrMatrix(crow, col, values, (64, 96))), backend)
    step(W.crow_indices, W.col_indices, W.values, x)
    wrong = W.col_indices.clone()
    wrong[0] = 77
    with pytest.raises(ValueError, match=r"col_indices\[0\] is 77"):
        step(W.crow_indices, wrong, W.values, x)


def test_what_a_graph_refuses():
    torch._dynamo.reset()
    dense, mask = torch.ones(32, 64), torch.ones(2, 4, dtype=torch.bool)
    for options in ({"mask": mask}, {}):
        with pytest.raises(Exception, match="from_dense synchronizes without density=, so torch.compile cannot trace"):
            compiled(lambda d: BsrMatrix.from_dense(d, (16, 16), **options).values, "eager")(dense)


def test_operators_in_one_graph(place, backend):
    """W @ b and b @ W, which Dynamo does not tell apart by itself, of shapes that fit both."""
    W, x = matrix(place, shape=(64, 64)), normal(64, 64, device=place)
    for product in (lambda W, x: W @ x, lambda W, x: x @ W, lambda W, x: x @ W.T, lambda W, x: W @ x[0] - x[0] @ W.T):
        torch._dynamo.reset()
        inputs = [leaf(W.values), leaf(x)]
        y = compiled(lambda values, x: product(W.with_values(values), x), backend)(*inputs)  # noqa: B023
        wanted = product(W.with_values(inputs[0]), inputs[1])
        torch.testing.assert_close(y, wanted, rtol=0.02, atol=0.02)
        found, right = (torch.autograd.grad(t.sum(), inputs) for t in (y, wanted))
        torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)
    assert torch.equal(x.__rmatmul__(W), W @ x)
