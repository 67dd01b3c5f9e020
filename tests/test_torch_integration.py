"""The registered ops: their schemas, torch.compile without graph breaks, matrices, epilogues and changing shapes."""

import gc

import pytest
import torch
import torch._dynamo.testing

from cute_kernels import functions as F
from cute_kernels import gemm, torch_op
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul
from sparse_collective import torch_op as sparse_torch_op

from .cases import PATTERNS, mask_to_indices
from .reference import assert_as_good_as_torch, dense_of, exact_and_torch, normal, poisoned

pytestmark = pytest.mark.filterwarnings("ignore:.*TF32:UserWarning")

BF16, FP32 = torch.bfloat16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON = pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "eager"), ("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)],
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, backend, **options):
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


def weights(device, block=(16, 32), pattern="power_law") -> BsrMatrix:
    crow, col = (t.to(device) for t in mask_to_indices(PATTERNS[pattern](4, 5)))
    shape = (4 * block[0], 5 * block[1])
    return BsrMatrix(crow, col, normal(len(col), *block, device=device, k=shape[1]), shape)


def dense(W):
    return dense_of(W)


def batches(device):
    """A batch of either form."""
    items = [weights(device, pattern=name) for name in ("power_law", "no_blocks", "banded")]
    yield BsrMatrix.stack(items)
    one = items[0]
    values = torch.stack([normal(*one.values.shape, device=device, k=one.shape[1]) for _ in items])
    yield BsrMatrix(one.crow_indices, one.col_indices, values, (3, *one.shape))


# The schemas


def gemm_calls(device):
    op, into = torch.ops.cute_kernels.gemm.default, torch.ops.cute_kernels.gemm_out.default
    a, b = normal(24, 40, device=device), normal(40, 16, device=device)
    yield op, (a, b), {}
    yield op, (a, b), {"bias": normal(16, device=device), "activation": "gelu", "out_dtype": FP32}
    yield op, (a, b, normal(24, 1, device=device), "relu", normal(24, 16, device=device), 0.5, -2.0), {}
    yield op, (normal(3, 24, 40, device=device), b), {}
    yield op, (a.expand(2, 24, 40), normal(16, 40, device=device).t()), {}
    yield op, (a, b), {"epilogue": torch_op.register_function(lambda x: x * 2.0)}
    for out in (torch.zeros(24, 16, dtype=BF16, device=device), torch.zeros(16, 24, device=device).t()):
        yield into, (a, b, out), {"activation": "relu"}


def parts_of(W):
    return W.crow_indices, W.col_indices, W.values, W.shape[-1], True


def bsr_calls(device):
    op, into = torch.ops.sparse_collective.bsr.default, torch.ops.sparse_collective.bsr_out.default
    W = weights(device)
    for name, b in (("bsr_matmul", normal(160, 24, device=device)), ("bsr_linear", normal(24, 160, device=device))):
        bias = normal(*((64, 1) if name == "bsr_matmul" else (64,)), device=device)
        for kwargs in ({}, {"bias": bias, "activation": "silu"}, {"out_dtype": FP32}):
            yield op, (name, *parts_of(W), b), kwargs
        shape = (64, 24) if name == "bsr_matmul" else (24, 64)
        yield into, (name, *parts_of(W), b, torch.zeros(shape, dtype=BF16, device=device)), {}
    for W in batches(device):
        x, groups = normal(3, 128, 160, device=device), torch.tensor([2, 0], dtype=torch.int32, device=device)
        bias, out = normal(3, 64, device=device), torch.zeros(3, 128, 64, dtype=BF16, device=device)
        yield op, ("bsr_matmul", *parts_of(W), x.mT), {"activation": "relu"}
        yield op, ("bsr_matmul", *parts_of(W), x[0].t()), {}
        yield op, ("bsr_linear", *parts_of(W), x), {"bias": bias}
        yield into, ("bsr_linear", *parts_of(W), x[0], out), {}
        yield op, ("bsr_grouped_linear", *parts_of(W), x[0]), {"bias": bias, "groups": groups}
        yield into, ("bsr_grouped_linear", *parts_of(W), x[0], out[0]), {"groups": groups}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("calls", [gemm_calls, bsr_calls])
def test_opcheck(device, calls):
    for op, args, kwargs in calls(device):
        torch.library.opcheck(op, args, kwargs)


# torch.compile


def squared_relu(x):
    return F.relu(x) * F.relu(x)


SLOPE = 0.25
TERMS = {
    "bias": {"bias": (16,), "activation": "gelu", "alpha": 0.5},
    "residual": {"residual": (24, 16), "beta": -2.0},
    "a function": {"epilogue": lambda x: F.where(x > 0.0, x, x * SLOPE)},
    "a named function": {"epilogue": squared_relu},
}


@ON
@pytest.mark.parametrize("name", TERMS)
def test_gemm_with_terms(device, backend, name):
    a, b = normal(24, 40, device=device), normal(40, 16, device=device, k=40)
    terms = {k: normal(*v, device=device) if isinstance(v, tuple) else v for k, v in TERMS[name].items()}
    out = compiled(lambda a, b, terms: gemm(a, b, **terms) * 1.0, backend)(a, b, terms)
    assert_as_good_as_torch(out, *exact_and_torch(a, b, BF16, **terms), k=40)


@ON
def test_gemm_with_a_lambda_of_the_graph(device, backend):
    """It captures a constant, and is written inside the compiled function."""
    slope = 0.25

    def layer(a, b):
        return gemm(a, b, epilogue=lambda x: F.where(x > 0.0, x, x * slope))

    call = normal(24, 40, device=device), normal(40, 16, device=device, k=40)
    exact, by_torch = exact_and_torch(*call, BF16, epilogue=lambda x: torch.where(x > 0, x, x * slope))
    assert_as_good_as_torch(compiled(layer, backend)(*call), exact, by_torch, k=40)


def scaled(by):
    return lambda x: x * by


@ON
@pytest.mark.parametrize("sparse", [False, True])
def test_functions_are_told_apart(device, backend, sparse):
    """Of equal code and different constants: a graph of one must not serve the other, as by its code alone it would."""
    W, b = weights(device), normal(160, 24, device=device)
    product = (lambda f: bsr_matmul(W, b, epilogue=f)) if sparse else (lambda f: gemm(b.t(), b, epilogue=f))
    step, functions = compiled(product, backend), [scaled(1.0), scaled(2.0)]
    for i in (0, 1, 0, 1):
        assert torch.equal(step(functions[i]), product(functions[i]))


def leaky(x, slope=0.5):
    return F.where(x > 0.0, x, x * slope)


def scaled_by_default(by):
    return lambda x, by=by: x * by


def scaled_inside(by):
    f = scaled(by)
    return lambda x: f(x) + 1.0


@ON
@pytest.mark.parametrize("make", [scaled, scaled_by_default, scaled_inside])
def test_functions_that_die_are_told_apart(device, backend, make):
    """Made for one call each: another one may lie where the first lay. One kept needs no other graph."""
    a, b = normal(24, 40, device=device), normal(40, 16, device=device)
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    step = torch.compile(lambda f: gemm(a, b, epilogue=f), fullgraph=True, backend=graphs)
    for by in (1.0, 2.0, 3.0, 1.0, 2.0):
        assert torch.equal(step(make(by)), gemm(a, b, epilogue=make(by)))
        gc.collect()
    before, kept = graphs.frame_count, make(4.0)
    for _ in range(3):
        assert torch.equal(step(kept), gemm(a, b, epilogue=kept))
    assert graphs.frame_count == before + 1


@ON
def test_a_module_with_a_function(device, backend):
    """Found by an attribute: two layers of one class, and one whose function is changed."""

    class Layer(torch.nn.Module):
        def __init__(self, by):
            super().__init__()
            self.epilogue = scaled(by)

        def forward(self, a, b):
            return gemm(a, b, epilogue=self.epilogue)

    call, layers = (normal(24, 40, device=device), normal(40, 16, device=device)), [Layer(2.0), Layer(3.0)]
    steps = [compiled(layer, backend) for layer in layers]
    for change in (False, True):
        if change:
            layers[0].epilogue = scaled(5.0)
        for step, layer in zip(steps, layers, strict=True):
            assert torch.equal(step(*call), layer(*call))


@ON
def test_functions_that_a_traced_function_captures(device, backend):
    """Of outside, one that its code describes; of inside, any. One that captures is refused: nothing guards it."""
    call = normal(24, 40, device=device), normal(40, 16, device=device)
    plain, of_library, capturing = leaky, F.tanh, scaled(2.0)

    def with_plain(a, b):
        return gemm(a, b, epilogue=lambda x: plain(x) + 1.0)

    def with_inner(a, b):
        inner = scaled(2.0)
        return gemm(a, b, epilogue=lambda x: inner(plain(F.tanh(x))))

    def with_capturing(a, b):
        return gemm(a, b, epilogue=lambda x: capturing(x) + 1.0)

    def with_of_library(a, b):
        return gemm(a, b, epilogue=lambda x: of_library(x) + 1.0)

    def deeper(a, b):
        inner = lambda x: capturing(x) + 1.0  # noqa: E731
        return gemm(a, b, epilogue=lambda x, f=inner: f(x))

    for layer in (with_plain, with_inner, with_of_library):
        assert torch.equal(compiled(layer, backend)(*call), layer(*call))
    for layer in (with_capturing, deeper):
        with pytest.raises(Exception, match="from outside, which captures values itself: the graph would serve"):
            compiled(layer, backend)(*call)


def product(device, sparse):
    """(a step of `tokens x k` operands, k, what multiplies them)"""
    if sparse:
        W = weights(device)
        return lambda x, **terms: bsr_linear(x, W, activation="relu", **terms), dense(W).t()
    b = normal(40, 16, device=device, k=40)
    return lambda x, **terms: gemm(x, b, activation="relu", **terms), b


@ON
@pytest.mark.parametrize("sparse", [False, True])
def test_into_out(device, backend, sparse):
    """The mutation is seen outside, and between operations of the graph."""
    step, b = product(device, sparse)

    def layer(x, out):
        step(x, out=out)
        return out + 1

    x, out = normal(24, len(b), device=device), poisoned(24, b.shape[1], device=device)
    result = compiled(layer, backend)(x, out)
    assert_as_good_as_torch(out, *exact_and_torch(x, b, BF16, activation="relu"), k=len(b))
    assert torch.equal(result, out + 1)


@ON
@pytest.mark.parametrize("sparse", [False, True])
def test_changing_shapes(device, backend, sparse):
    """Extents become symbols after the first change: two graphs, not one for each shape."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    layer, b = product(device, sparse)
    step = torch.compile(lambda x: layer(x), fullgraph=True, backend=graphs)
    for rows in (24, 32, 48, 7, 56, 100, 8):
        x = normal(rows, len(b), device=device)
        assert_as_good_as_torch(step(x), *exact_and_torch(x, b, BF16, activation="relu"), k=len(b))
    assert graphs.frame_count <= 2


@ON
def test_gemm_marked_dynamic(device, backend):
    step = compiled(lambda a, b: gemm(a, b, out_dtype=FP32), backend, dynamic=True)
    for m, k, n in ((24, 40, 16), (8, 64, 72), (33, 17, 9)):
        a, b = normal(2, m, k, device=device), normal(k, n, device=device, k=k)
        assert_as_good_as_torch(step(a, b), *exact_and_torch(a, b, FP32), k=k)


@ON
@pytest.mark.parametrize("checked", [False, True])
def test_bsr_linear(device, backend, checked):
    W = weights(device)
    if checked:
        W.check_indices()

    def layer(x, bias):
        return bsr_linear(x, W, bias, "relu")

    x, bias = normal(3, 8, W.shape[1], device=device), normal(W.shape[0], device=device)
    out = compiled(layer, backend)(x, bias)
    assert_as_good_as_torch(out, *exact_and_torch(x, dense(W).t(), BF16, bias=bias, activation="relu"), k=W.shape[1])


@ON
def test_a_graph_finds_what_was_learnt_of_a_pattern(device, backend, monkeypatch):
    """Evenness and plans belong to the index tensors, so they outlive the matrix that a graph makes for each call."""
    from sparse_collective import torch_op

    met, make = [], torch_op._matrix
    monkeypatch.setattr(torch_op, "_matrix", lambda *args: met.append(make(*args)) or met[-1])
    W = weights(device, pattern="uniform")
    W.check_indices()
    x = normal(8, W.shape[1], device=device)
    compiled(lambda x: bsr_linear(x, W), backend)(x)
    found = met[-1]
    assert W.even and W.stats.listed is not None
    assert found is not W and (found.even, found.stats) == (True, W.stats) and found.plans is W.plans
    other = torch_op._matrix(W.crow_indices.clone(), W.col_indices, W.values, W.shape[1], False)
    assert not other.even and other.stats.listed is None and other.plans is None
    assert other.derived(("a",), lambda: (W.crow_indices,)) == (W.crow_indices,), "made, and not kept"


@ON
def test_bsr_matmul_with_a_matrix_argument(device, backend):
    """The matrix is an input of the graph: new values are seen, and another pattern does not get the old one's."""
    step = compiled(lambda W, b, res: bsr_matmul(W, b, residual=res, epilogue=lambda x: x * 0.5), backend)
    for pattern in ("power_law", "banded", "no_blocks"):
        W = weights(device, pattern=pattern)
        b, res = normal(W.shape[1], 24, device=device), normal(W.shape[0], 24, device=device)
        for _ in range(2):
            exact, by_torch = exact_and_torch(dense(W), b, BF16, residual=res, epilogue=lambda x: x * 0.5)
            assert_as_good_as_torch(step(W, b, res), exact, by_torch, k=W.shape[1])
            W.values.mul_(2)


@ON
def test_batches_of_bsr(device, backend):
    step = compiled(lambda W, b: bsr_matmul(W, b, activation="relu") * 1.0, backend)
    layer = compiled(lambda W, x, bias: bsr_linear(x, W, bias), backend)
    for W in batches(device):
        a, (_, M, K) = W.to_dense(), W.shape
        for b in (normal(3, K, 24, device=device), normal(K, 24, device=device)):
            assert_as_good_as_torch(step(W, b), *exact_and_torch(a, b, BF16, activation="relu"), k=K)
        x, bias = normal(24, K, device=device), normal(3, M, device=device)
        exact, by_torch = exact_and_torch(x, a.mT, BF16, bias=bias[:, None])
        assert_as_good_as_torch(layer(W, x, bias), exact, by_torch, k=K)


@ON
def test_grouped_linear(device, backend):
    """Another routing, and another number of tokens, is no other graph."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    for W in batches(device):
        torch._dynamo.reset()
        graphs.frame_count, K = 0, W.shape[-1]
        step = torch.compile(lambda x, groups: bsr_grouped_linear(x, W, groups), fullgraph=True, backend=graphs)  # noqa: B023
        ends_step = compiled(lambda x, ends: bsr_grouped_linear(x, W, offsets=ends, group_rows=64), backend)  # noqa: B023
        for routing, ends in (([1, 0], [64, 128, 128]), ([2, 2], [0, 0, 128]), ([0, 1, 2, 2], [64, 128, 256])):
            groups, ends = (torch.tensor(t, dtype=torch.int32, device=device) for t in (routing, ends))
            x = normal(64 * len(routing), K, device=device)
            a = W.to_dense()[groups.long()]
            exact, by_torch = (t.flatten(0, 1) for t in exact_and_torch(x.view(-1, 64, K), a.mT, BF16))
            assert_as_good_as_torch(step(x, groups), exact, by_torch, k=K)
            assert torch.equal(ends_step(x, ends), bsr_grouped_linear(x, W, offsets=ends, group_rows=64))
        assert graphs.frame_count <= 2


@ON
def test_a_module(device, backend):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = weights(device), normal(64, device=device)

        def forward(self, x):
            return bsr_linear(x, self.weight, self.bias, "gelu")

    layer = Layer()
    x = normal(24, 160, device=device)
    with torch.no_grad():
        out = compiled(layer, backend)(x)
    exact, by_torch = exact_and_torch(x, dense(layer.weight).t(), BF16, bias=layer.bias, activation="gelu")
    assert_as_good_as_torch(out, exact, by_torch, k=160)


# What tracing refuses


def test_wrong_shapes_fail_while_tracing():
    with pytest.raises(Exception, match="40 columns meet 16 rows"):
        compiled(lambda a, b: gemm(a, b), "eager")(normal(24, 40), normal(16, 16))
    W = weights("cpu")
    with pytest.raises(Exception, match="160 columns of W meet 40"):
        compiled(lambda x: bsr_linear(x, W), "eager")(normal(24, 40))


def test_a_torch_sparse_tensor_is_refused_while_tracing():
    t = weights("cpu").to_torch()
    with pytest.raises(Exception, match="under torch.compile W must be a BsrMatrix; make it outside|sparse"):
        compiled(lambda x: bsr_linear(x, t), "eager")(normal(24, 160))


@pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackward:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_refused_and_not_dropped(backend):
    a, b = normal(24, 40).requires_grad_(), normal(40, 16)
    step = compiled(lambda a, b: gemm(a, b), backend)
    with pytest.raises(Exception, match="gradient|autograd formula"):
        step(a, b).sum().backward()
    assert a.grad is None
    with torch.no_grad():
        assert not step(a, b).requires_grad


def test_a_graph_from_another_process_says_what_is_missing():
    with pytest.raises(RuntimeError, match="no function 0123456789ab in this process; trace the model here"):
        torch_op.function_named("0123456789abcdef")


def test_ops_can_be_called_by_name():
    """As an exported graph does."""
    a, b = normal(24, 40), normal(40, 16)
    assert torch.equal(torch.ops.cute_kernels.gemm(a, b), gemm(a, b))
    W, x = weights("cpu"), normal(24, 160)
    made = sparse_torch_op._matrix(*parts_of(W))
    assert torch.equal(torch.ops.sparse_collective.bsr("bsr_linear", *parts_of(W), x), bsr_linear(x, made))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("terms", [{"activation": "relu"}, {"epilogue": scaled(0.5)}], ids=["relu", "function"])
def test_export(strict, terms):
    """An exported graph holds the op and not what one device made of it."""

    class Layer(torch.nn.Module):
        def forward(self, a, b):
            return gemm(a, b, **terms)

    a, b = normal(24, 40), normal(40, 16)
    program = torch.export.export(Layer(), (a, b), strict=strict)
    assert torch.equal(program.module()(a, b), gemm(a, b, **terms))
    assert "cute_kernels.gemm" in str(program.graph)
