"""Second derivatives of every op: each raises or is right, whichever inputs require a gradient.

Ops are differentiable once. Autograd must find a way from each gradient to every input that the gradient depends on, or
a term of the second derivative is left out without an error.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.func import grad as func_grad
from torch.nn import functional as nnf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attention import attention, block_sparse_attention, scaled_dot_product_attention, selected_attention
from cute_kernels import gemm
from cute_kernels.reference import GATE
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, random_bsr
from sparse_collective.nn import GatedBsrLinear
from sparse_collective.padded_rows import padding_of, spread, taken

RAISED = "differentiable once|no autograd formula was registered"
BLOCK = (32, 32)


def swish(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


EPILOGUES = {
    "linear": ({}, lambda z: z),
    "relu": ({"activation": "relu"}, torch.relu),
    "gelu": ({"activation": "gelu"}, nnf.gelu),
    "gelu_tanh": ({"activation": "gelu_tanh"}, lambda z: nnf.gelu(z, approximate="tanh")),
    "silu": ({"activation": "silu"}, nnf.silu),
    "function": ({"epilogue": swish}, swish),
}


def dense(values: Tensor, rows: int) -> Tensor:
    """The matrix of blocks (..., nnz, bm, bk) of which each is stored."""
    return values.unflatten(-3, (rows, -1)).transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def full(shape: tuple, block: tuple, place: str, items: int = 0) -> Callable[[Tensor], BsrMatrix]:
    """A function of values, which returns the matrix of a pattern with all blocks."""
    W = random_bsr(shape, block, density=1.0, device=place)
    shape = (items, *shape) if items else shape
    return lambda values: BsrMatrix(W.crow_indices, W.col_indices, values, shape)


def softmax(q, k, v, sinks=None, score=None, seen=None) -> tuple[Tensor, Tensor]:
    """(attention, LSE) by torch."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if score is None else score(scores)
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp()[..., : k.shape[2]] @ v, lse[..., 0]


def products(tensor: Callable, place: str, epilogue: str) -> dict[str, tuple]:
    """name -> (an op, the same by torch, inputs)"""
    terms, f = EPILOGUES[epilogue]
    matrix, experts = full((64, 96), BLOCK, place), full((64, 96), BLOCK, place, 2)
    gated, groups = full((256, 64), (128, 32), place), torch.tensor([1, 0], dtype=torch.int32, device=place)
    ends, items = torch.tensor([37, 90], device=place), torch.tensor([0] * 37 + [1] * 53)
    scale = 96**-0.5
    x, values, bias = tensor(128, 96), tensor(6, *BLOCK) * scale, tensor(64)
    of_experts, biases = tensor(2, 6, *BLOCK) * scale, tensor(2, 64)
    sparse = {"x": x[:40], "values": values}

    def by_experts(x, values, bias, numbers):
        return f((x[:, None] @ dense(values, 2)[numbers].mT)[:, 0] + bias[numbers])

    found = {
        "gemm": (
            lambda a, b, bias, residual: gemm(a, b, bias=bias, residual=residual, alpha=0.5, beta=2.0, **terms),
            lambda a, b, bias, residual: f(0.5 * a @ b + bias + 2.0 * residual),
            {"a": tensor(24, 32), "b": tensor(32, 16) / 6, "bias": tensor(16), "residual": tensor(24, 16)},
        ),
        "bsr_matmul": (
            lambda values, b, bias, residual: bsr_matmul(matrix(values), b, bias=bias, residual=residual, **terms),
            lambda values, b, bias, residual: f(dense(values, 2) @ b + bias + residual),
            {"values": values, "b": tensor(96, 24), "bias": tensor(64, 1), "residual": tensor(64, 24)},
        ),
        "bsr_linear": (
            lambda x, values, bias: bsr_linear(x, matrix(values), bias=bias, **terms),
            lambda x, values, bias: f(x @ dense(values, 2).mT + bias),
            sparse | {"bias": bias},
        ),
        "bsr_linear of a batch": (
            lambda x, values, bias: bsr_linear(x, experts(values), bias=bias, **terms),
            lambda x, values, bias: f(x @ dense(values, 2).mT + bias[:, None]),
            {"x": tensor(2, 40, 96), "values": of_experts, "bias": biases},
        ),
        "bsr_grouped_linear": (
            lambda x, values, bias: bsr_grouped_linear(x, experts(values), expert_ids=groups, bias=bias, **terms),
            lambda x, values, bias: by_experts(x, values, bias, torch.tensor([1] * 64 + [0] * 64)),
            {"x": x, "values": of_experts, "bias": biases},
        ),
        "bsr_grouped_linear, offsets": (
            lambda x, values, bias: bsr_grouped_linear(x, experts(values), bias=bias, offs=ends, **terms),
            lambda x, values, bias: by_experts(x, values, bias, items),
            {"x": x[:90], "values": of_experts, "bias": biases},
        ),
    }  # fmt: skip
    if "epilogue" in terms:
        return found
    activation = terms.get("activation")
    layer = GatedBsrLinear(64, 256, True, (128, 32), density=1.0, activation=activation, device=place)

    def gate_of(z):
        g, u = z.unflatten(-1, (-1, 2, GATE)).unbind(-2)
        return (f(g) * u).flatten(-2)

    narrow = {"x": tensor(40, 64), "values": tensor(4, 128, 32) / 8}
    found["bsr_gated_linear"] = (
        lambda x, values: bsr_gated_linear(x, gated(values), activation=activation),
        lambda x, values: gate_of(x @ dense(values, 2).mT),
        narrow,
    )
    found["GatedBsrLinear"] = (
        lambda x, values, bias: functional_call(layer, {"values": values, "bias": bias}, (x,)),
        lambda x, values, bias: gate_of(x @ dense(values, 2).mT + bias),
        narrow | {"bias": tensor(256)},
    )
    return found


def attentions(tensor: Callable, place: str) -> dict[str, tuple]:
    """name -> (an op, the same by torch, inputs)"""
    q = {"q": tensor(1, 2, 16, 64), "k": tensor(1, 2, 32, 64), "v": tensor(1, 2, 32, 64)}
    long = {name: tensor(1, 2, 128, 64) for name in "qkv"}
    sinks, table = tensor(2), tensor(2).float()
    blocks = torch.ones(1, 1, dtype=torch.bool, device=place)
    indices = torch.zeros(1, 128, 1, dtype=torch.int32, device=place)
    causal = torch.ones(16, 32, dtype=torch.bool).tril(16)
    starts = torch.tensor([0, 32], dtype=torch.int32, device=place)

    def scored(op, *mask):
        def run(q, k, v, table):
            return op(q, k, v, *mask, score_mod=lambda score, b, h, i, j: score * table[h], deterministic=False)

        return run

    def with_lse(out, lse):
        return torch.cat([out.flatten(), lse.flatten().to(out.dtype)])

    def by_torch(q, k, v, table):
        return softmax(q, k, v, score=lambda scores: scores * table[:, None, None])[0]

    def packed(q, k, v):
        rows = (t[0].transpose(0, 1) for t in (q, k, v))
        return attention(*rows, cu_seqlens_q=starts, cu_seqlens_k=starts).transpose(0, 1)[None]

    square = q | {"q": tensor(1, 2, 32, 64)}
    return {
        "attention": (lambda **t: attention(**t, causal=True), lambda **t: softmax(**t, seen=causal)[0], q),
        "attention, LSE": (
            lambda **t: with_lse(*attention(**t, return_lse=True)), lambda **t: with_lse(*softmax(**t)), q
        ),
        "attention, sinks": (lambda **t: attention(**t), lambda **t: softmax(**t)[0], q | {"sinks": sinks}),
        "attention, score_mod": (scored(attention), by_torch, q | {"table": table}),
        "attention, packed": (packed, lambda **t: softmax(**t)[0], square),
        "scaled_dot_product_attention": (
            lambda q, k, v: scaled_dot_product_attention(q, k, v), lambda **t: softmax(**t)[0], q
        ),
        "block_sparse_attention": (
            lambda q, k, v, sinks: block_sparse_attention(q, k, v, blocks, sinks=sinks), lambda **t: softmax(**t)[0],
            long | {"sinks": sinks},
        ),
        "selected_attention": (
            lambda q, k, v, sinks: selected_attention(q, k, v, indices, 128, sinks=sinks),
            lambda **t: softmax(**t)[0], long | {"sinks": sinks},
        ),
        "block_sparse_attention, score_mod": (
            scored(block_sparse_attention, blocks), by_torch, long | {"table": table}
        ),
    }  # fmt: skip


CASES = [(e, name) for e in EPILOGUES for name in products(lambda *shape: torch.zeros(shape), "cpu", e)]
CASES += [("", name) for name in attentions(lambda *shape: torch.zeros(shape), "cpu")]


@pytest.fixture(params=CASES, ids=lambda case: ", ".join(filter(None, reversed(case))))
def case(request, place):
    emulated = "emulated" in request.node.name
    epilogue, name = request.param
    if emulated and "score_mod" in name:
        pytest.skip("kernels with a score_mod have no emulation by torch")
    if place == "cuda" and "gelu" in epilogue:
        pytest.skip("another kernel than silu's, but the same on the host")

    def tensor(*shape):
        return normal(*shape, device=place).to(torch.float64 if place == "cpu" and not emulated else torch.bfloat16)

    return (products(tensor, place, epilogue) if epilogue else attentions(tensor, place))[name]


without_emulation = pytest.mark.parametrize(
    "place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def subsets(names, counts=None) -> Iterator[tuple[str, ...]]:
    for count in counts or range(1, len(names) + 1):
        yield from itertools.combinations(names, count)


def weighted(y: Tensor) -> Tensor:
    """A sum whose gradient is a constant, but not the same for all elements."""
    return (y * torch.linspace(0.5, 1.5, y.numel(), device=y.device).to(y.dtype).view(y.shape)).sum()


LOSSES = {"constant dy": weighted, "dy of y": lambda y: y.square().sum()}


def second(f, inputs: dict, watched: tuple, by: str, loss: Callable, to: str | None) -> list[Tensor]:
    """Derivatives of |g|^2 + the sum of all watched inputs, g the gradient of the loss by one of them: by the input
    named `to`, or by all of them through backward()."""
    leaves = {name: t.detach().clone().requires_grad_(name in watched) for name, t in inputs.items()}
    (g,) = torch.autograd.grad(loss(f(**leaves)), leaves[by], create_graph=True)
    total = g.square().sum() + sum(leaves[name].sum() for name in watched)
    if to is not None:
        return list(torch.autograd.grad(total, [leaves[to]]))
    total.backward()
    return [leaves[name].grad for name in watched]


def assert_right_or_raises(case, run: Callable = second) -> int:
    """The number of second derivatives that raised: of all subsets of inputs that require a gradient, and with another
    `run` of single ones and of all."""
    f, by_torch, inputs = case
    exact = {name: t.detach().cpu().double() for name, t in inputs.items()}
    raised = 0
    for some in subsets(inputs, None if run is second else (1, len(inputs))):
        for by, kind, to in itertools.product(some, LOSSES, (*some, None)):
            terms = some, by, LOSSES[kind], to
            try:
                found = run(f, inputs, *terms)
            except RuntimeError as error:
                assert any(text in str(error) for text in RAISED.split("|")), error
                raised += 1
                continue
            for ours, truth in zip(found, second(by_torch, exact, *terms), strict=True):
                bound = (1e-9 if ours.dtype is torch.float64 else 0.05) * truth.abs().max().clamp(min=1)
                error = (ours.cpu().double() - truth).abs().max()
                assert error <= bound, f"{some} require gradients, {kind}: d(grad by {by}) / d({to}) errs by {error}"
    return raised


def test_raise_or_are_right(case):
    assert assert_right_or_raises(case)


NO_DERIVATIVE = "not have been used in the graph|does not require grad"


def second_alone(f, inputs: dict, watched: tuple, by: str, loss: Callable, to: str) -> str:
    """The error of torch.autograd.grad for one second derivative; "" if there is none."""
    leaves = {name: t.detach().clone().requires_grad_(name in watched) for name, t in inputs.items()}
    (g,) = torch.autograd.grad(loss(f(**leaves)), leaves[by], create_graph=True)
    try:
        torch.autograd.grad(g.square().sum(), leaves[to])
    except RuntimeError as error:
        return str(error)
    return ""


def test_errors_name_the_op(case):
    """torch's error for a gradient that is a constant comes only where torch's own functions give it, too."""
    f, by_torch, inputs = case
    exact = {name: t.detach().cpu().double() for name, t in inputs.items()}
    for some in subsets(inputs, (1, len(inputs))):
        for by, kind, to in itertools.product(some, LOSSES, some):
            found = second_alone(f, inputs, some, by, LOSSES[kind], to)
            if any(text in found for text in NO_DERIVATIVE.split("|")):
                truth = second_alone(by_torch, exact, some, by, LOSSES[kind], to)
                assert any(text in truth for text in NO_DERIVATIVE.split("|")), f"{some}, {kind}, {by}, {to}: {found}"
            else:
                assert any(text in found for text in RAISED.split("|")), found


def test_a_constant_gradient(place):
    """For a GEMM in one operand: no derivative in that operand exists, and the others are right."""
    a, b = (normal(16, 16, device=place) for _ in range(2))
    a.requires_grad_()
    (g,) = torch.autograd.grad(gemm(a, b).sum(), a, create_graph=True)
    assert not g.requires_grad
    (g * a).sum().backward()
    assert torch.equal(a.grad, g)


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def of_mode(f, inputs, *terms):
    with Nothing():
        return second(f, inputs, *terms)


@without_emulation
def test_under_a_dispatch_mode(case):
    """The mode sees the registered ops; from these `gemm` is made of itself, so that it is right."""
    assert_right_or_raises(case, of_mode)


def of_checkpoint(f, inputs, *terms):
    return second(lambda **t: checkpoint(f, **t, use_reentrant=False), inputs, *terms)


@without_emulation
def test_in_a_checkpoint(case):
    assert assert_right_or_raises(case, of_checkpoint)


def of_func(f, inputs: dict, watched: tuple, by: str, loss: Callable, to: str | None) -> list[Tensor]:
    """second by transforms of torch.func."""

    def total(some: dict) -> Tensor:
        def first(t):
            return loss(f(**inputs | some | {by: t}))

        g = func_grad(first)(some[by])
        return g.square().sum() + sum(t.sum() for t in some.values())

    some = {name: inputs[name] for name in watched}
    if to is None:
        return list(func_grad(total)(some).values())
    return [func_grad(lambda t: total(some | {to: t}))(some[to])]


def func_of_autograd(f, inputs: dict, watched: tuple, by: str, loss: Callable, to: str | None) -> list[Tensor]:
    """second with the inner gradient by autograd, the outer one by torch.func."""

    def total(some: dict) -> Tensor:
        (g,) = torch.autograd.grad(loss(f(**inputs | some)), some[by], create_graph=True)
        return g.square().sum() + sum(t.sum() for t in some.values())

    found = func_grad(total)({name: inputs[name] for name in watched})
    return list(found.values()) if to is None else [found[to]]


def autograd_of_func(f, inputs: dict, watched: tuple, by: str, loss: Callable, to: str | None) -> list[Tensor]:
    """second with the inner gradient by torch.func, the outer one by autograd."""
    leaves = {name: t.detach().clone().requires_grad_(name in watched) for name, t in inputs.items()}
    g = func_grad(lambda t: loss(f(**leaves | {by: t})))(leaves[by])
    total = g.square().sum() + sum(leaves[name].sum() for name in watched)
    if to is not None:
        return list(torch.autograd.grad(total, [leaves[to]]))
    total.backward()
    return [leaves[name].grad for name in watched]


@without_emulation
@pytest.mark.parametrize("run", [of_func, func_of_autograd, autograd_of_func], ids=lambda f: f.__name__)
def test_under_torch_func(case, run):
    assert_right_or_raises(case, run)


def of_autocast(f, inputs, *terms):
    def run(**t):
        with torch.autocast(next(iter(t.values())).device.type, torch.bfloat16):
            return f(**t)

    return second(run, {name: t.float() for name, t in inputs.items()}, *terms)


@without_emulation
def test_under_autocast(case):
    """Autocast casts the operands of a GEMM, which saves the tensors that they were cast of."""
    assert_right_or_raises(case, of_autocast)


def test_padded_rows(place):
    """Copies to and from the padded layout are differentiable as often as torch's."""
    dtype = torch.float64 if place == "cpu" else torch.float32
    padding = padding_of(torch.tensor([37, 90], device=place), 90, 64, tail=False)
    x = torch.randn(90, 8, device=place, dtype=dtype).requires_grad_()

    def f(x):
        return taken(spread(x, padding).sin(), padding)

    def twice_by_autograd(f):
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    def twice_by_func(f):
        return func_grad(lambda t: func_grad(lambda t: f(t).sum())(t).sum())(x.detach())

    for twice in (twice_by_autograd, twice_by_func):
        torch.testing.assert_close(twice(f), twice(torch.sin))
