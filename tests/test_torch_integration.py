"""The registered ops: their schemas, torch.compile without graph breaks, matrices, epilogues and changing shapes."""

import gc

import pytest
import torch
import torch._dynamo.testing

from attention import attention
from bench import host
from cute_kernels import functions as F
from cute_kernels import gemm, quantize, torch_op
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr, sddmm
from sparse_collective import torch_op as sparse_torch_op
from sparse_collective.nn import BsrLinear

from .gemm_calls import assert_right
from .gemm_errors import numbers
from .sparse_collective.bsr_parts import DEVICES, FORMS, batch, bsr, operands

pytestmark = pytest.mark.filterwarnings("ignore:.*TF32:UserWarning")

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SAME = object()  # an operand that is the first one
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


def counting(fn, backend):
    """(the compiled function, what counts its graphs)"""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return compiled(fn, graphs), graphs


def weights(device="cpu", pattern="power_law") -> BsrMatrix:
    return bsr(pattern, (16, 32), device, grid=(4, 5))


def batches(device):
    """A batch of either form."""
    names = ("power_law", "no_blocks", "banded")
    return [batch(form, (16, 32), device, grid=(4, 5), names=names)[0] for form in FORMS]


def dense_operands(device="cpu"):
    return normal(24, 40, device=device), normal(40, 16, device=device, k=40)


# torch.autocast


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operands_in_the_dtype_of_autocast(place):
    """Every op and gradient gives the same bits as outside of it: the references are not rounded once more."""
    x, w, heads = (normal(*shape, device=place) for shape in ((128, 160), (160, 128), (1, 2, 64, 64)))
    W, grouped = weights(place), batches(place)[0]
    groups = torch.tensor([1, 0], dtype=torch.int32, device=place)
    (q, scale), narrow = quantize(x, per="row"), W.quantize()

    def gradient(op, t, *args, **terms):
        t = t.clone().requires_grad_()
        y = op(t, *(t if other is SAME else other for other in args), **terms)
        return torch.autograd.grad(y, t, torch.ones_like(y))[0]

    calls = [
        lambda: gemm(x, w, out_dtype=FP32, activation="gelu"),
        lambda: bsr_linear(x, W, out_dtype=FP32),
        lambda: bsr_matmul(W, x.t()),
        lambda: bsr_linear(x[:, : W.shape[0]], W.t()),
        lambda: bsr_grouped_linear(x, grouped, expert_ids=groups),
        lambda: sddmm(x[: W.shape[0]].contiguous(), w.repeat(1, 2)[:, : W.shape[1]], W),
        lambda: attention(heads, heads, heads, causal=True),
        lambda: gradient(gemm, x, w),
        lambda: gradient(bsr_linear, x, W),
        lambda: gradient(attention, heads, SAME, SAME, deterministic=True),
    ]
    if place == "cpu":
        calls.append(lambda: bsr_linear(q, narrow, scale_x=scale))
    for call in calls:
        right = call()
        with torch.autocast(place, BF16):
            assert torch.equal(call(), right)


# The schemas


def gemm_calls(device):
    op, into = torch.ops.cute_kernels.gemm.default, torch.ops.cute_kernels.gemm_out.default
    a, b = dense_operands(device)
    yield op, (a, b), {}
    yield op, (a, b), {"bias": normal(16, device=device), "activation": "gelu", "out_dtype": FP32}
    terms = {"activation": "relu", "alpha": 0.5, "beta": -2.0}
    yield op, (a, b, normal(24, 1, device=device), normal(24, 16, device=device)), terms
    yield op, (normal(3, 24, 40, device=device), b), {}
    yield op, (a.expand(2, 24, 40), normal(16, 40, device=device).t()), {}
    yield op, (a, b), {"epilogue": torch_op.register_function(lambda x: x * 2.0)}
    for precision in ("tf32", "3xtf32"):
        yield op, (a.float().requires_grad_(), b.float()), {"precision": precision, "activation": "gelu"}
    yield op, (a.half().requires_grad_(), b.half()), {"accumulation_dtype": FP16, "activation": "gelu"}
    for out in (torch.zeros(24, 16, dtype=BF16, device=device), torch.zeros(16, 24, device=device).t()):
        yield into, (a, b, out), {"activation": "relu"}


def parts_of(W):
    return False, W.crow_indices, W.col_indices, W.values, W.shape[-1], True


def bsr_calls(device):
    op, into = torch.ops.sparse_collective.bsr.default, torch.ops.sparse_collective.bsr_out.default
    W = weights(device)
    for name, x, bias, shape in (
        ("bsr_matmul", (160, 24), (64, 1), (64, 24)),
        ("bsr_linear", (24, 160), (64,), (24, 64)),
    ):
        call = name, *parts_of(W), normal(*x, device=device)
        for kwargs in ({}, {"bias": normal(*bias, device=device), "activation": "silu"}, {"out_dtype": FP32}):
            yield op, call, kwargs
        yield into, (*call, torch.zeros(shape, dtype=BF16, device=device)), {}
    for W in batches(device):
        x, groups = normal(3, 128, 160, device=device), torch.tensor([2, 0], dtype=torch.int32, device=device)
        bias, out = normal(3, 64, device=device), torch.zeros(3, 128, 64, dtype=BF16, device=device)
        yield op, ("bsr_matmul", *parts_of(W), x.mT), {"activation": "relu"}
        yield op, ("bsr_matmul", *parts_of(W), x[0].t()), {}
        yield op, ("bsr_linear", *parts_of(W), x), {"bias": bias}
        yield into, ("bsr_linear", *parts_of(W), x[0], out), {}
        yield op, ("bsr_grouped_linear", *parts_of(W), x[0]), {"bias": bias, "expert_ids": groups}
        yield into, ("bsr_grouped_linear", *parts_of(W), x[0], out[0]), {"expert_ids": groups}


def gradient_calls(device):
    """Ops of a traced call with gradients: a product with z, and the gradient of its epilogue."""
    a, b = (t.requires_grad_() for t in dense_operands(device))
    bias = normal(16, device=device).requires_grad_()
    for kwargs in ({"activation": "gelu"}, {"epilogue": torch_op.register_function(lambda x: x * torch.tanh(x))}):
        yield torch.ops.cute_kernels.gemm_and_z.default, (a, b, bias), kwargs
        yield torch.ops.cute_kernels.gemm.default, (a, b, bias), kwargs
    W, x = weights(device), normal(24, 160, device=device).requires_grad_()
    parts = list(parts_of(W))
    parts[3] = W.values.clone().requires_grad_()
    bias = normal(64, device=device).requires_grad_()
    for activation in ("silu", "relu"):
        terms = {"bias": bias, "activation": activation}
        yield torch.ops.sparse_collective.bsr.default, ("bsr_linear", *parts, x), terms
    terms = {"bias": bias, "activation": "gelu"}
    yield torch.ops.sparse_collective.bsr_and_z.default, ("bsr_linear", *parts, x), terms
    gated = random_bsr((256, 160), (128, 32), density=0.5).to(device)
    call = "bsr_gated_linear", *parts_of(gated), x.detach()
    yield torch.ops.sparse_collective.bsr.default, call, {"activation": "silu"}
    dy, z = normal(24, 64, device=device), normal(24, 64, device=device)
    name = torch_op.register_function(lambda x: x * torch.tanh(x))
    for terms in (("gelu", None, True), (None, name, False)):
        yield torch.ops.cute_kernels.epilogue_gradient.default, (dy, z, *terms), {}


def fp8_calls(device):
    one, double = torch.ones(1, device=device), torch_op.register_function(lambda x: x * 2.0)
    a, b, ops = numbers(3, 48, 64, device=device), numbers(80, 64, device=device).t(), torch.ops.cute_kernels
    out, narrow = (torch.zeros(*shape, 48, 80, device=device).to(t) for shape, t in (((3,), FP16), ((), E4M3)))
    yield ops.gemm.default, (a, b), {"scale_a": torch.ones(3, 48, 1, device=device), "epilogue": double}
    terms = {"out_dtype": FP32, "activation": "gelu", "use_fast_accum": True}
    yield ops.gemm.default, (a, b, None, None, one, one), terms
    yield ops.gemm_out.default, (a, b, out), {"scale_a": one, "bias": torch.ones(80, device=device)}
    yield ops.gemm_and_amax.default, (a[0], b), {"out_dtype": E4M3}
    terms = {"out_dtype": torch.float8_e5m2, "activation": "gelu", "scale_a": one, "scale_out": one}
    yield ops.gemm_and_amax.default, (a[0], b), terms
    yield ops.gemm_and_amax_out.default, (a[0], b, narrow), {"epilogue": double, "scale_out": one}
    W, sparse = weights(device).quantize(), torch.ops.sparse_collective
    op, into = sparse.bsr.default, sparse.bsr_out.default
    x, scale = numbers(24, 160, device=device), torch.ones(24, 1, device=device)
    terms = {"scales": W.scales, "scale_b": scale, "activation": "gelu", "out_dtype": FP32}
    yield op, ("bsr_linear", *parts_of(W), x), terms
    terms = {"scales": W.scales[:1].clone(), "scale_b": scale.t(), "use_fast_accum": True}
    yield op, ("bsr_matmul", *parts_of(W), x.t()), terms
    yield into, ("bsr_linear", *parts_of(W), x, x.new_zeros(24, 64, dtype=FP16)), {"scales": W.scales}
    for W in (each.quantize() for each in batches(device)):
        call = "bsr_grouped_linear", *parts_of(W), numbers(128, 160, device=device)
        groups = torch.tensor([2, 0], dtype=torch.int32, device=device)
        terms = {"scales": W.scales, "expert_ids": groups}
        yield op, call, terms | {"scale_b": torch.ones(128, 1, device=device), "out_dtype": FP32}
        yield into, (*call, x.new_zeros(128, 64, dtype=FP16)), terms


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("calls", [gemm_calls, bsr_calls, gradient_calls, fp8_calls])
def test_opcheck(device, calls):
    """FP8 without test_schema: torch compares tensors there, and CPU tensors of FP8 cannot be compared."""
    some = {"test_utils": ("test_faketensor",)} if calls is fp8_calls else {}
    for op, args, kwargs in calls(device):
        torch.library.opcheck(op, args, kwargs, **some)


# torch.compile


def squared_relu(x):
    return F.relu(x) * F.relu(x)


def scaled(by):
    return lambda x: x * by


def scaled_by_default(by):
    return lambda x, by=by: x * by


def scaled_inside(by):
    f = scaled(by)
    return lambda x: f(x) + 1.0


def leaky(x, slope=0.5):
    return F.where(x > 0.0, x, x * slope)


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
    a, b = dense_operands(device)
    terms = {k: normal(*v, device=device) if isinstance(v, tuple) else v for k, v in TERMS[name].items()}
    out = compiled(lambda a, b, terms: gemm(a, b, **terms) * 1.0, backend)(a, b, terms)
    assert_right(out, gemm, a, b, **terms)


@ON
@pytest.mark.parametrize("sparse", [False, True])
def test_functions_are_told_apart(device, backend, sparse):
    """Functions of equal code and different constants must not share a graph."""
    W, b = weights(device), normal(160, 24, device=device)
    product = (lambda f: bsr_matmul(W, b, epilogue=f)) if sparse else (lambda f: gemm(b.t(), b, epilogue=f))
    step, functions = compiled(product, backend), [scaled(1.0), scaled(2.0)]
    for i in (0, 1, 0, 1):
        assert torch.equal(step(functions[i]), product(functions[i]))


@ON
@pytest.mark.parametrize("make", [scaled, scaled_by_default, scaled_inside])
def test_functions_that_die_are_told_apart(device, backend, make):
    """Made for one call each: another one may lie where the first lay. One kept needs no other graph."""
    a, b = dense_operands(device)
    step, graphs = counting(lambda f: gemm(a, b, epilogue=f), backend)
    for by in (1.0, 2.0, 3.0, 1.0, 2.0):
        assert torch.equal(step(make(by)), gemm(a, b, epilogue=make(by)))
        gc.collect()
    before, kept = graphs.frame_count, make(4.0)
    for _ in range(3):
        assert torch.equal(step(kept), gemm(a, b, epilogue=kept))
    assert graphs.frame_count == before + 1


class Layer(torch.nn.Module):
    """gemm with a function, which is found by an attribute."""

    def __init__(self, epilogue):
        super().__init__()
        self.epilogue = epilogue

    def forward(self, a, b):
        return gemm(a, b, epilogue=self.epilogue)


@ON
def test_a_module_with_a_function(device, backend):
    """Two layers of one class, and one whose function is changed."""
    call, layers = dense_operands(device), [Layer(scaled(2.0)), Layer(scaled(3.0))]
    steps = [compiled(layer, backend) for layer in layers]
    for change in (2.0, 5.0):
        layers[0].epilogue = scaled(change)
        for step, layer in zip(steps, layers, strict=True):
            assert torch.equal(step(*call), layer(*call))


@ON
def test_functions_that_a_traced_function_captures(device, backend):
    """Functions from outside and from inside, which may capture numbers themselves."""
    call = dense_operands(device)
    plain, of_library, capturing, slope = leaky, F.tanh, scaled(2.0), 0.25

    def with_plain(a, b):
        return gemm(a, b, epilogue=lambda x: plain(x) + 1.0)

    def with_constant(a, b):
        return gemm(a, b, epilogue=lambda x: F.where(x > 0.0, x, x * slope))

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

    for layer in (with_plain, with_constant, with_inner, with_of_library):
        assert torch.equal(compiled(layer, backend)(*call), layer(*call))
    for layer in (with_capturing, deeper):
        step = compiled(layer, backend)
        for by in (2.0, 3.0):
            capturing = scaled(by)
            assert torch.equal(step(*call), layer(*call))


def product(device, sparse):
    """(an op of a step of `tokens x k` operands, k)"""
    fixed = weights(device) if sparse else normal(40, 16, device=device, k=40)
    return bsr_linear if sparse else gemm, fixed, fixed.shape[1 if sparse else 0]


@ON
@pytest.mark.parametrize("sparse", [False, True])
def test_into_out(device, backend, sparse):
    """The mutation is seen outside, and between operations of the graph."""
    op, fixed, k = product(device, sparse)

    def layer(x, out):
        op(x, fixed, activation="relu", out=out)
        return out + 1

    x = normal(24, k, device=device)
    out = torch.full_like(op(x, fixed), torch.nan)
    result = compiled(layer, backend)(x, out)
    assert_right(out, op, x, fixed, activation="relu")
    assert torch.equal(result, out + 1)


@ON
@pytest.mark.parametrize("sparse", [False, True])
def test_changing_shapes(device, backend, sparse):
    """Extents become symbols after the first change: two graphs, not one for each shape."""
    op, fixed, k = product(device, sparse)
    step, graphs = counting(lambda x: op(x, fixed, activation="relu"), backend)
    for rows in (24, 32, 48, 7, 56, 100, 8):
        x = normal(rows, k, device=device)
        assert_right(step(x), op, x, fixed, activation="relu")
    assert graphs.frame_count <= 2


@ON
def test_gemm_marked_dynamic(device, backend):
    step = compiled(lambda a, b: gemm(a, b, out_dtype=FP32), backend, dynamic=True)
    for m, k, n in ((24, 40, 16), (8, 64, 72), (33, 17, 9)):
        a, b = normal(2, m, k, device=device), normal(k, n, device=device, k=k)
        assert_right(step(a, b), gemm, a, b)


@ON
@pytest.mark.parametrize("checked", [False, True])
def test_bsr_linear(device, backend, checked):
    """As a function, and in a module."""
    W, x, bias = weights(device), normal(3, 8, 160, device=device), normal(64, device=device)
    if checked:
        W.check_indices()

    class SparseLayer(torch.nn.Module):
        weight, bias = W, normal(64, device=device)

        def forward(self, x):
            return bsr_linear(x, self.weight, bias=self.bias, activation="gelu")

    out = compiled(lambda x, bias: bsr_linear(x, W, bias=bias, activation="relu"), backend)(x, bias)
    assert_right(out, bsr_linear, x, W, bias=bias, activation="relu")
    with torch.no_grad():
        out = compiled(SparseLayer(), backend)(x[0])
    assert_right(out, bsr_linear, x[0], W, bias=SparseLayer.bias, activation="gelu")


@ON
def test_a_graph_finds_what_was_learnt_of_a_pattern(device, backend, monkeypatch):
    """Evenness and plans belong to the index tensors, so they outlive the matrix that a graph makes for each call."""
    met, make = [], BsrMatrix._of_op
    monkeypatch.setattr(BsrMatrix, "_of_op", lambda *args: met.append(make(*args)) or met[-1])
    x, W = operands(bsr_linear, weights(device, "uniform"), 8)
    W.check_indices()
    compiled(lambda x: bsr_linear(x, W), backend)(x)
    found = met[-1]
    assert W.even and W.stats.listed is not None
    assert found is not W and (found.even, found.stats) == (True, W.stats) and found.pattern is W.pattern
    other = make(W.crow_indices.clone(), W.col_indices, W.values, W.shape[1], False, None)
    assert not other.even and other.stats.listed is None and other.pattern is not W.pattern


@ON
def test_bsr_matmul_with_a_matrix_argument(device, backend):
    """The matrix is an input of the graph: new values are seen, and another pattern does not get the old one's."""
    half = scaled(0.5)
    step = compiled(lambda W, b, res: bsr_matmul(W, b, residual=res, epilogue=lambda x: x * 0.5), backend)
    for pattern in ("power_law", "banded", "no_blocks"):
        W, b = operands(bsr_matmul, weights(device, pattern), 24)
        residual = normal(64, 24, device=device)
        for _ in range(2):
            assert_right(step(W, b, residual), bsr_matmul, W, b, residual=residual, epilogue=half)
            W.values.mul_(2)


def test_matrices_that_leave_a_graph():
    """Plans of eager calls with them are their own: that of another shape with as many blocks was taken."""
    layers = [BsrLinear(128, rows, blocksize=(32, 32), density=32 / rows) for rows in (64, 128)]
    weight_of = torch.compile(lambda layer: layer.weight, backend="eager")
    x = torch.zeros(8, 128)
    with host.launches_replaced(), torch.no_grad():
        for layer in layers:
            assert layer.nnz == 4
            W = weight_of(layer.bfloat16())
            assert bsr_linear(x.bfloat16(), W).shape == (8, layer.out_features)
            assert bsr_linear(x.bfloat16()[:, : layer.out_features], W.t()).shape == (8, 128)


@ON
def test_batches_of_bsr(device, backend):
    step = compiled(lambda W, b: bsr_matmul(W, b, activation="relu") * 1.0, backend)
    layer = compiled(lambda W, x, bias: bsr_linear(x, W, bias=bias), backend)
    for W in batches(device):
        for b in (normal(3, 160, 24, device=device), normal(160, 24, device=device)):
            assert_right(step(W, b), bsr_matmul, W, b, activation="relu")
        x, bias = normal(24, 160, device=device), normal(3, 64, device=device)
        assert_right(layer(W, x, bias), bsr_linear, x, W, bias=bias)


@ON
def test_grouped_linear(device, backend):
    """Another routing, and another number of tokens, is no other graph."""
    for W in batches(device):
        torch._dynamo.reset()
        W.check_indices()
        step, graphs = counting(lambda x, groups: bsr_grouped_linear(x, W, expert_ids=groups), backend)
        ends_step = compiled(lambda x, ends: bsr_grouped_linear(x, W, offs=ends, group_rows=64), backend)
        for routing, ends in (([1, 0], [64, 128, 128]), ([2, 2], [0, 0, 128]), ([0, 1, 2, 2], [64, 128, 256])):
            groups, ends = (torch.tensor(t, dtype=torch.int32, device=device) for t in (routing, ends))
            x = normal(64 * len(routing), 160, device=device)
            assert_right(step(x, groups), bsr_grouped_linear, x, W, expert_ids=groups)
            assert torch.equal(ends_step(x, ends), bsr_grouped_linear(x, W, offs=ends, group_rows=64))
        assert graphs.frame_count <= 2


# What tracing refuses


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        (gemm, (normal(24, 40), normal(16, 16)), "40 columns meet 16 rows"),
        (bsr_linear, (normal(24, 40), weights()), "160 columns of W meet 40"),
        (bsr_linear, (normal(24, 160), weights().to_torch()), "W must be a BsrMatrix; make it outside|sparse"),
    ],
)
def test_wrong_calls_fail_while_tracing(op, args, message):
    with pytest.raises(Exception, match=message):
        compiled(lambda x: op(x, args[1]), "eager")(args[0])


def test_an_output_of_ones_own_has_no_gradient():
    a, b = dense_operands()
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        gemm(a.requires_grad_(), b, out=out)
    with torch.no_grad():
        assert not gemm(a, b, out=out).requires_grad


def test_ops_can_be_called_by_name():
    """As an exported graph does; of another process it says what is missing."""
    a, b = dense_operands()
    assert torch.equal(torch.ops.cute_kernels.gemm(a, b), gemm(a, b))
    x, W = operands(bsr_linear, weights(), 24)
    made = sparse_torch_op._matrix(*parts_of(W))
    assert torch.equal(torch.ops.sparse_collective.bsr("bsr_linear", *parts_of(W), x), bsr_linear(x, made))
    with pytest.raises(RuntimeError, match="no epilogue function 0123456789ab in this process; trace the model here"):
        torch_op.function_named("0123456789abcdef")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("epilogue", [None, scaled(0.5)], ids=["nothing", "function"])
def test_export(strict, epilogue):
    """An exported graph holds the op and not what one device made of it."""
    a, b = dense_operands()
    program = torch.export.export(Layer(epilogue), (a, b), strict=strict)
    assert torch.equal(program.module()(a, b), gemm(a, b, epilogue=epilogue))
    assert "cute_kernels.gemm" in str(program.graph)


@pytest.mark.parametrize("form", ["one pattern", "a batch of values", "patterns"])
def test_a_matrix_of_one_call_is_checked_once(form):
    """The second one is the same in all that a plan depends on. One of other tensors is made anew."""
    W = random_bsr((128, 192), (32, 64), density=0.5, dtype=BF16)
    if form == "a batch of values":
        W = BsrMatrix(W.crow_indices, W.col_indices, torch.stack([W.values, 2 * W.values]), (2, 128, 192))
    elif form == "patterns":
        W = BsrMatrix.stack([W, random_bsr((128, 192), (32, 64), density=0.3, dtype=BF16)])
    W.check_indices()
    crow, col, values, columns, check = W.crow_indices, W.col_indices, W.stored, 192, False
    made = sparse_torch_op._matrix
    first, second = (made(False, crow, col, values, columns, check) for _ in range(2))
    assert first is not second and vars(first).keys() == vars(second).keys()
    assert all(a is vars(second)[name] or a == vars(second)[name] for name, a in vars(first).items())
    assert (
        second.stored is values and second.shape == W.shape and second.stats == W.stats and second.pattern is W.pattern
    )
    assert second.t().shape == (*W.shape[:-2], 192, 128)
    assert made(True, crow, col, values, columns, check).shape == second.t().shape
    other = made(False, crow, col, values.float(), columns, check)
    assert other.dtype is FP32 and other.shape == W.shape
    assert made(False, crow, col.clone(), values, columns, check).pattern is not W.pattern
    with pytest.raises(ValueError, match="contiguous"):
        made(False, crow, col, values.mT.contiguous().mT, columns, check)
