"""Gradients of the products, against fp64: what autograd makes of the same product of dense matrices."""

import itertools
from functools import partial

import pytest
import torch

from cute_kernels import gemm
from cute_kernels.testing.reference import normal
from sparse_collective import (
    BsrMatrix,
    bsr_gated_linear,
    bsr_grouped_linear,
    bsr_linear,
    bsr_matmul,
    random_bsr,
    sddmm,
)

ACTIVATIONS = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


def near(found, exact, slack=1.0):
    """Within what bf16 rounds, of the operands and of dz, relative to the tensor's size."""
    assert found is not None and found.shape == exact.shape
    error = (found.double() - exact).abs().max().item()
    scale = exact.abs().max().item()
    assert error <= slack * 0.02 * scale + 1e-6, f"{error:.3g} of {scale:.3g}"


def leaf(t):
    return t.detach().clone().requires_grad_()


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("function", [None, lambda x: x * torch.sigmoid(x)], ids=["", "function"])
def test_gemm(device, activation, function):
    a, b = leaf(normal(48, 64, device=device)), leaf(normal(64, 40, device=device, k=64))
    bias, residual = leaf(normal(40, device=device)), leaf(normal(48, 40, device=device))
    dy = normal(48, 40, device=device)
    y = gemm(a, b, bias=bias, activation=activation, residual=residual, alpha=0.5, beta=2.0, epilogue=function)
    y.backward(dy)
    truth = [leaf(t.double()) for t in (a, b, bias, residual)]
    z = ACTIVATIONS[activation](0.5 * truth[0] @ truth[1] + truth[2] + 2.0 * truth[3])
    (z if function is None else function(z)).backward(dy.double())
    for t, exact in zip((a, b, bias, residual), truth, strict=True):
        near(t.grad, exact.grad, 2)


SHAPES = [((32, 64), (4, 3)), ((64, 64), (3, 4)), ((128, 128), (2, 3)), ((16, 16), (6, 9)), ((48, 112), (3, 2))]


@pytest.mark.parametrize("op", ["linear", "matmul"])
@pytest.mark.parametrize(("block", "grid"), SHAPES, ids=str)
@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
def test_bsr(device, op, block, grid, view):
    (bm, bk), (rows, cols) = block, grid
    W = random_bsr((rows * bm, cols * bk), block, density=0.6, generator=torch.Generator().manual_seed(1))
    W = W.to(device)
    values = leaf(W.values)
    A = W.with_values(values)
    exact = W.with_values(leaf(W.values.double().float()))
    dense = leaf(exact.to_dense().detach().double())
    M, K = (cols * bk, rows * bm) if view else W.shape
    x = leaf(normal(40, K, device=device) if op == "linear" else normal(K, 40, device=device))
    bias = leaf(normal(M, device=device)) if op == "linear" else None
    A, right = (A.t(), dense.t()) if view else (A, dense)
    y = bsr_linear(x, A, bias=bias, activation="gelu") if op == "linear" else bsr_matmul(A, x)
    dy = normal(*y.shape, device=device)
    y.backward(dy)
    x64 = leaf(x.double())
    if op == "linear":
        bias64 = leaf(bias.double())
        torch.nn.functional.gelu(x64 @ right.t() + bias64).backward(dy.double())
        near(bias.grad, bias64.grad, 2)
    else:
        (right @ x64).backward(dy.double())
    near(x.grad, x64.grad, 2)
    blocks = dense.grad.unflatten(0, (rows, bm)).unflatten(2, (cols, bk)).transpose(1, 2)
    near(values.grad, blocks[W.row_of_block().long(), W.col_indices.long()], 2)


@pytest.mark.parametrize("tokens", [24, 64])  # 64: items are groups of one SDDMM
@pytest.mark.parametrize("form", ["values", "patterns"])
@pytest.mark.parametrize("shared", [False, True])
def test_batches(device, form, shared, tokens):
    items, block, grid = 3, (32, 64), (3, 2)
    generator = torch.Generator().manual_seed(2)
    shape = tuple(g * s for g, s in zip(grid, block, strict=True))
    singles = [random_bsr(shape, block, density=0.6, generator=generator).to(device) for _ in range(items)]
    if form == "values":
        first = singles[0]
        values = normal(items, *first.values.shape, device=device)
        W = BsrMatrix(first.crow_indices, first.col_indices, values, (items, *first.shape))
    else:
        W = BsrMatrix.stack(singles)
    values = leaf(W.values)
    W = W.with_values(values)
    dense = leaf(W.to_dense().detach().double())
    x = leaf(normal(tokens, shape[1], device=device) if shared else normal(items, tokens, shape[1], device=device))
    bias = leaf(normal(items, shape[0], device=device))
    y = bsr_linear(x, W, bias=bias)
    dy = normal(*y.shape, device=device)
    y.backward(dy)
    x64, bias64 = leaf(x.double()), leaf(bias.double())
    (x64 @ dense.mT + bias64[:, None]).backward(dy.double())
    near(x.grad, x64.grad)
    near(bias.grad, bias64.grad)
    mask = W.with_values(torch.ones_like(W.values)).to_dense().double()
    near(W.with_values(values.grad).to_dense(), dense.grad * mask)


def test_leading_dimensions_and_one_vector(device):
    W = random_bsr((64, 96), (32, 32), density=0.7).to(device)
    for shape in ((96,), (2, 5, 96)):
        x, values = leaf(normal(*shape, device=device)), leaf(W.values)
        bsr_linear(x, W.with_values(values)).backward(torch.ones(*shape[:-1], 64, device=device, dtype=x.dtype))
        near(x.grad, W.to_dense().double().sum(0).expand(shape))
        assert values.grad.shape == values.shape
    b = leaf(normal(2, 96, 24, device=device))
    values = leaf(W.values)
    dy = normal(2, 64, 24, device=device)
    bsr_matmul(W.with_values(values), b).backward(dy)
    stored = W.with_values(torch.ones_like(W.values)).to_dense()
    truth = (dy.double() @ b.detach().double().mT).sum(0) * stored.double()
    near(W.with_values(values.grad).to_dense(), truth)


@pytest.mark.parametrize(
    ("path", "block"), list(itertools.product(["sm_90", "sm_80"], [(128, 128), (64, 64), (32, 32), (16, 32)]))
)
def test_sddmm(device, path, block):
    import cute_kernels

    if path == "sm_90" and device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("runs on sm_90")
    (bm, bk), rows, cols = block, 5, 9
    for density, T in ((0.9, 200), (0.3, 77), (0.0, 64), (1.0, 1000)):
        W = random_bsr((rows * bm, cols * bk), block, density=density, generator=torch.Generator().manual_seed(3)).to(
            device
        )
        a, b = normal(T, rows * bm, device=device).t(), normal(T, cols * bk, device=device)
        blocks = (a.double() @ b.double()).unflatten(0, (rows, bm)).unflatten(2, (cols, bk)).transpose(1, 2)
        exact = blocks[W.row_of_block().long(), W.col_indices.long()]
        with cute_kernels.path(path):
            for dtype, slack in ((torch.bfloat16, 0.2), (torch.float32, 0.001)):
                out = torch.full(exact.shape, float("nan"), dtype=dtype, device=device)
                assert sddmm(a, b, W, out=out) is out
                if W.nnz:
                    near(out, exact, slack)
                    before = out.double()
                    sddmm(a, b, W, out=out, accumulate=True)
                    near(out, exact + before, slack)


def test_a_second_derivative_is_refused(device):
    x = leaf(normal(8, 64, device=device))
    W = random_bsr((64, 64), (32, 32), density=1.0).to(device)
    (gradient,) = torch.autograd.grad(bsr_linear(x, W).float().pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.sum().backward()


class NoGradient(torch.autograd.Function):
    """The identity, whose input gets no gradient, as beside a part that a user's function leaves out."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, _):
        return None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_without_a_gradient(device, activation):
    """As for torch's functions, no input gets one either."""
    a, b, bias = (leaf(normal(*shape, device=device)) for shape in ((8, 64), (64, 64), (64,)))
    W = random_bsr((64, 64), (32, 32), density=1.0).to(device).requires_grad_()
    for y in (gemm(a, b, bias=bias, activation=activation), bsr_linear(a, W, bias=bias, activation=activation)):
        NoGradient.apply(y).sum().backward()
        assert all(t.grad is None for t in (a, b, bias, W.values))


def test_gradient_of_an_fp32_bias_of_fp64_operands():
    x, W = normal(64, 64, device="cpu").double(), random_bsr((64, 64), (32, 32), density=1.0, dtype=torch.float64)
    dy = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e3
    for y in (lambda bias: gemm(x, x, bias=bias), lambda bias: bsr_linear(x, W, bias=bias)):
        bias = torch.zeros(64, requires_grad=True)
        y(bias).backward(dy)
        assert torch.equal(bias.grad, dy.sum(0).float())


def test_a_torch_tensor_as_weight(device):
    """Gradients of what a torch.sparse_bsr weight is multiplied with; those of its values need a BsrMatrix."""
    W, x, bias = (
        random_bsr((64, 96), (32, 32), density=0.5).to(device),
        normal(8, 96, device=device),
        normal(64, device=device),
    )
    x, bias, torch_W = leaf(x), leaf(bias), W.to_torch()
    found, wanted = (
        torch.autograd.grad(bsr_linear(x, V, bias=bias, activation="gelu").sum(), (x, bias)) for V in (torch_W, W)
    )
    assert all(map(torch.equal, found, wanted))
    values = torch_W.values().detach().requires_grad_()
    built = torch.sparse_bsr_tensor(torch_W.crow_indices(), torch_W.col_indices(), values, torch_W.shape)
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    grouped = partial(bsr_grouped_linear, expert_ids=ids)
    for op in (bsr_linear, lambda x, W: bsr_matmul(W, x.mT), grouped, bsr_gated_linear):
        with pytest.raises(RuntimeError, match=r"pass BsrMatrix.from_torch\(W.detach\(\)\).requires_grad_\(\), whose"):
            op(x, torch_W.detach().requires_grad_())
        with pytest.raises(RuntimeError, match=r"pass BsrMatrix.from_torch\(W\), or call"):
            op(x, built)
    V = BsrMatrix.from_torch(torch_W.detach()).requires_grad_()
    for matrix in (V, BsrMatrix.from_torch(built)):
        bsr_linear(x, matrix, activation="gelu").sum().backward()
    assert torch.equal(V.grad, values.grad)


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
def test_a_pattern_that_changes_before_backward(device, view):
    x = leaf(normal(8, 64, device=device))
    W = random_bsr((64, 64), (32, 32), density=0.5).to(device)
    y = bsr_linear(x, W.t() if view else W)
    W.col_indices.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_under_torch_compile(device, activation, view):
    """Forward and backward are in one graph each, with the results of an eager call."""
    torch._dynamo.reset()
    W = random_bsr((64, 96), (32, 32), density=0.6, generator=torch.Generator().manual_seed(1)).to(device)
    W.check_indices()

    def step(x, values, bias):
        A = W.with_values(values)
        return gemm(
            bsr_linear(x, A.t() if view else A, bias=bias, activation=activation),
            x,
            epilogue=lambda z: z * torch.sigmoid(z),
        )

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for tokens in (64, 96) if view else (96, 64):
        x = normal(tokens, 64 if view else 96, device=device)
        if x.shape[0] != (96 if view else 64):
            continue
        inputs = [leaf(t) for t in (x, W.values, normal(96 if view else 64, device=device))]
        again = [leaf(t) for t in inputs]
        y, expected = compiled(*inputs), step(*again)
        torch.testing.assert_close(y, expected)
        dy = normal(*y.shape, device=device)
        y.backward(dy)
        expected.backward(dy)
        for t, other in zip(inputs, again, strict=True):
            near(t.grad, other.grad.double(), 0.5)


@pytest.mark.parametrize("form", ["values", "patterns"])
def test_experts(device, form):
    """A mixture of experts: of each expert's values over its own tokens, none for groups without an expert."""
    experts, block, run = 3, (64, 32), 64
    generator = torch.Generator().manual_seed(2)
    singles = [random_bsr((128, 96), block, density=0.7, generator=generator).to(device) for _ in range(experts)]
    if form == "values":
        first = singles[0]
        values = normal(experts, *first.values.shape, device=device)
        W = BsrMatrix(first.crow_indices, first.col_indices, values, (experts, *first.shape))
    else:
        W = BsrMatrix.stack(singles)
    groups = torch.tensor([2, 0, 7, 2, 2, -1], dtype=torch.int32, device=device)
    values = leaf(W.values)
    W = W.with_values(values)
    dense = leaf(W.to_dense().detach().double())
    x, bias = leaf(normal(len(groups) * run, 96, device=device)), leaf(normal(experts, 128, device=device))
    y = bsr_grouped_linear(x, W, expert_ids=groups, bias=bias, activation="silu")
    dy = normal(*y.shape, device=device)
    y.backward(dy)
    x64, bias64 = leaf(x.double()), leaf(bias.double())
    nearest = groups.clamp(0, experts - 1).long().repeat_interleave(run)
    there = ((groups >= 0) & (groups < experts)).repeat_interleave(run)[:, None]
    z = torch.einsum("tk,tmk->tm", x64, dense[nearest]) * there + bias64[nearest]
    torch.nn.functional.silu(z).backward(dy.double())
    near(x.grad, x64.grad, 2)
    near(bias.grad, bias64.grad, 2)
    mask = W.with_values(torch.ones_like(W.values)).to_dense().double()
    near(W.with_values(values.grad).to_dense(), dense.grad * mask, 2)


def misaligned(t):
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


FORMS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "misaligned": misaligned,
    "with gaps": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "last stride 2": lambda t: torch.stack([t, t], -1)[..., 0],
    "last stride 2, misaligned": lambda t: misaligned(torch.stack([t, t], -1))[..., 1],
    "last stride 0": lambda t: t[..., :1].expand_as(t),
    "rows of stride 0": lambda t: t[..., :1, :].expand_as(t),
    "one element": lambda t: t.new_ones(()).expand_as(t),  # of y.sum()
    "reversed batch": lambda t: t.flip(0),
}


def products(device) -> dict:
    """By name: a function of leaves, and the leaves."""
    single = random_bsr((96, 128), (32, 64), density=0.6, generator=torch.Generator().manual_seed(1)).to(device)
    one = single.with_values(normal(*single.values.shape, device=device))
    items = BsrMatrix.stack([one] * 3)
    patterns = BsrMatrix.stack([one, random_bsr((96, 128), (32, 64), density=0.4).to(device), one])
    groups = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)

    def of(op, W, view=False, **terms):
        def run(values, x, bias):
            A = W.with_values(values)
            A = A.t() if view else A
            return op(A, x, bias=bias, **terms) if op is bsr_matmul else op(x, A, bias=bias, **terms)

        return run

    def x(*shape):
        return normal(*shape, device=device)

    def multiplied(a, b, bias, residual=None, **terms):
        return gemm(a, b, bias=bias, residual=residual, **terms)

    dense = x(40, 64), x(64, 48), x(48)
    return {
        "gemm": (multiplied, dense),
        "gemm, gelu and a residual": (lambda *t: multiplied(*t, activation="gelu"), (*dense, x(40, 48))),
        "gemm, relu, a bias of rows": (lambda *t: multiplied(*t, activation="relu"), (*dense[:2], x(40, 1))),
        "gemm, a batch": (lambda *t: multiplied(*t, activation="silu"), (x(3, 40, 64), *dense[1:], x(3, 40, 48))),
        "gemm, two batches": (multiplied, (x(3, 1, 40, 64), x(2, 64, 48), x(48))),
        "gemm, one row": (lambda *t: multiplied(*t, activation="gelu"), (x(1, 64), *dense[1:])),
        "bsr_linear": (of(bsr_linear, one, activation="gelu"), (one.values, x(40, 128), x(96))),
        "bsr_linear, leading dimensions": (of(bsr_linear, one), (one.values, x(2, 20, 128), x(96))),
        "bsr_linear, transposed": (of(bsr_linear, one, True), (one.values, x(40, 96), x(128))),
        "bsr_linear, one token": (of(bsr_linear, one), (one.values, x(1, 128), x(96))),
        "bsr_matmul": (of(bsr_matmul, one, activation="relu"), (one.values, x(128, 40), x(40))),
        "bsr_matmul, a bias of rows": (of(bsr_matmul, one), (one.values, x(128, 40), x(96, 1))),
        "bsr_matmul, a batch of b": (of(bsr_matmul, one), (one.values, x(2, 128, 40), x(40))),
        "items": (of(bsr_linear, items), (items.values, x(3, 40, 128), x(3, 96))),
        "items, shared x": (of(bsr_matmul, items), (items.values, x(128, 64), x(64))),
        "patterns": (of(bsr_matmul, patterns), (patterns.values, x(3, 128, 40), x(40))),
        "experts": (
            lambda values, x, bias: bsr_grouped_linear(
                x, items.with_values(values), expert_ids=groups, bias=bias, activation="gelu"
            ),
            (items.values, x(192, 128), x(3, 96)),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", products("cpu"))
def test_gradients_by_any_strides(place, name, form):
    """Whatever the strides and the address of dy, the gradients are those of a contiguous one."""
    run, tensors = products(place)[name]
    leaves = [leaf(t) for t in tensors]
    y = run(*leaves)
    dy = FORMS[form](normal(*y.shape, device=place))
    assert dy.shape == y.shape
    found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    plain = torch.autograd.grad(y, leaves, dy.clone(memory_format=torch.contiguous_format))
    for mine, want in zip(found, plain, strict=True):
        torch.testing.assert_close(mine.float(), want.float(), rtol=0.02, atol=0.02 * want.abs().max().item() + 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_operands_by_any_strides(place, form):
    """sddmm, whose operands are gradients as autograd has them."""
    pattern = random_bsr((96, 128), (32, 64), density=0.6, generator=torch.Generator().manual_seed(1)).to(place)
    a, b = FORMS[form](normal(96, 40, device=place)), FORMS[form](normal(40, 128, device=place))
    want = sddmm(a.clone(memory_format=torch.contiguous_format), b.contiguous(), pattern)
    torch.testing.assert_close(sddmm(a, b, pattern).float(), want.float(), rtol=0.02, atol=0.02)
