"""Block-sparse products of CPU tensors: what they cost, and their gradients in fp64."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import functions as F
from cute_kernels import gemm
from cute_kernels.testing.reference import assert_as_good_as_torch, exact_and_torch, normal
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul, reference, sddmm

from .bsr_parts import batches, bsr, leaf, matrix

BF16, FP64 = torch.bfloat16, torch.float64

# What CPU tensors cost

FORMS = ["one", "transposed", "one pattern", "patterns"]


def of_form(form, dtype=BF16):
    if form in ("one", "transposed"):
        W = matrix(dtype=dtype)
        return W.t() if form == "transposed" else W
    return list(batches(dtype=dtype))[form == "patterns"]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, FP64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("small", [False, True], ids=["", "many chunks"])
def test_products_on_the_cpu(form, dtype, small, monkeypatch):
    if small:
        monkeypatch.setattr(reference, "CHUNK_BYTES", 5000)
        monkeypatch.setattr(reference, "MOST_COLUMNS", 7)
    W = of_form(form, dtype)
    dense, (M, K), batch = W.to_dense(), W.shape[-2:], W.shape[:-2]
    items = [(), batch] if batch else [(), (2, 5)]
    for lead in items:
        x = normal(*lead, 12, 2 * K, dtype=dtype)[..., ::2]  # of any strides
        bias, residual = normal(*batch, M, dtype=dtype), normal(*(batch or lead), M, 12, dtype=dtype)
        terms = {"activation": "gelu", "epilogue": lambda z: F.where(z > 0.0, z, z * 0.5)}
        beside = bias[..., None, :] if batch else bias
        y, z = (
            bsr_linear(x, W, bias=bias, **terms),
            bsr_matmul(W, x.mT, bias=bias[..., None], residual=residual, **terms),
        )
        exact = [
            exact_and_torch(x, dense.mT, dtype, bias=beside, **terms),
            exact_and_torch(dense, x.mT, dtype, bias=bias[..., None], residual=residual, **terms),
        ]
        for mine, (right, by_torch) in zip((y, z), exact, strict=True):
            assert mine.is_contiguous() and mine.dtype is dtype
            if dtype is FP64:
                torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
            else:
                assert_as_good_as_torch(mine, right, by_torch, k=K)
        out = torch.empty(*y.shape[:-1], 2 * M, dtype=torch.float32 if dtype is not FP64 else FP64)[..., ::2]
        assert bsr_linear(x, W, out=out) is out
        torch.testing.assert_close(out.double(), x.double() @ dense.mT.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, FP64])
@pytest.mark.parametrize("form", ["one pattern", "patterns"])
@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
def test_grouped_on_the_cpu(form, dtype, view):
    W = of_form(form, dtype)
    W = W.t() if view else W
    (_, M, K), groups = W.shape, torch.tensor([2, 0, 7, 2, -1], dtype=torch.int32)
    x, bias = normal(5 * 64, K, dtype=dtype), normal(3, M, dtype=dtype)
    y = bsr_grouped_linear(x, W, expert_ids=groups, bias=bias)
    dense = torch.cat([W.to_dense().double(), torch.zeros(1, M, K, dtype=FP64)])
    items, nearest = torch.tensor([2, 0, 3, 2, 3]), torch.tensor([2, 0, 2, 2, 0])
    exact = x.double().view(5, 64, K) @ dense[items].mT + bias.double()[nearest][:, None]
    rtol, atol = {FP64: (0, 1e-12), BF16: (2**-8, 1e-4), torch.float32: (0, 1e-4)}[dtype]
    torch.testing.assert_close(y.double(), exact.flatten(0, 1), rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", [(0, 96), (64, 0)])
def test_a_matrix_without_elements_on_the_cpu(shape):
    empty = torch.zeros(0, 16, 32)
    W = BsrMatrix(*(torch.zeros(n, dtype=torch.int32) for n in (shape[0] // 16 + 1, 0)), empty, shape)
    for lead in ((3,), (2, 3), ()):
        x = torch.ones(*lead, shape[1])
        assert torch.equal(bsr_linear(x, W), torch.zeros(*lead, shape[0]))
    assert torch.equal(W @ torch.ones(2, shape[1], 5), torch.zeros(2, shape[0], 5))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of a tensor that an operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
def test_a_product_costs_what_its_blocks_cost(view):
    """In multiplications, and in memory: nothing is as large as the dense matrix."""
    W = matrix(shape=(1024, 2048), block=(64, 32), density=0.1)
    V = W.t() if view else W
    x = normal(16, V.shape[1])
    bsr_linear(x, V)
    with FlopCounterMode(display=False) as flops, Largest() as largest:
        bsr_linear(x, V)
    assert flops.get_total_flops() == 2 * W.values.numel() * 16
    assert largest.most <= 2 * W.values.numel() < W.numel() / 4
    grouped = BsrMatrix.stack([W, W])
    groups = torch.tensor([0, 1], dtype=torch.int32)
    with FlopCounterMode(display=False) as flops:
        bsr_grouped_linear(normal(128, 2048), grouped, expert_ids=groups)
    assert flops.get_total_flops() == 2 * W.values.numel() * 128


def test_absent_blocks_are_not_read_on_the_cpu():
    W = bsr("bernoulli", (16, 32), "cpu")
    absent = ~W.with_values(torch.ones_like(W.values)).to_dense().bool()
    for column in range(5):
        part = slice(column * 32, (column + 1) * 32)
        b = normal(160, 8)
        b[part] = float("nan")
        assert torch.equal((W @ b).isfinite().all(1), absent[:, part].all(1))


# float32 and float64


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
@pytest.mark.parametrize("op", [gemm, bsr_matmul, bsr_linear, sddmm])
def test_wide_types_are_for_the_cpu(device, op, dtype):
    """A kernel multiplies 16-bit types; CPU tensors without one are multiplied below."""
    with pytest.raises(
        TypeError,
        match="torch.bfloat16 and torch.float16 .(cast|pass precision=.* cast) with .to|float64 on cuda.*use one of",
    ):
        W = matrix(device).to(dtype)
        x = normal(24, 96, dtype=dtype, device=device)
        calls = {gemm: (x, x.t()), bsr_matmul: (W, x.t()), bsr_linear: (x, W), sddmm: (x.t()[:64], x, W)}
        op(*calls[op])


def test_mixed_types_are_refused_on_the_cpu():
    a, W = normal(24, 96, dtype=FP64), matrix()
    with pytest.raises(TypeError, match="b is torch.float32 but a is torch.float64"):
        gemm(a, normal(96, 8, dtype=torch.float32))
    with pytest.raises(TypeError, match="x is torch.float64 but W is torch.bfloat16"):
        bsr_linear(a, W)
    with pytest.raises(TypeError, match="output of torch.float64"):
        gemm(a.float(), a.float().t(), out_dtype=FP64)
    with pytest.raises(TypeError, match="bias is torch.float64"):
        gemm(a.float(), a.float().t(), bias=normal(24, dtype=FP64))
    with pytest.raises(TypeError, match="a is torch.int8; .*CPU tensors may be torch.float32 and torch.float64, too"):
        gemm(a.to(torch.int8), a.to(torch.int8).t())


ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
FUNCTION = [None, lambda z: z * torch.sigmoid(z) + 0.25]


def doubles(*shapes):
    return [torch.randn(*shape, dtype=FP64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("function", FUNCTION, ids=["", "function"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_gemm(activation, function):
    def call(a, b, bias, residual):
        terms = {"activation": activation, "epilogue": function, "alpha": 0.5, "beta": 2.0}
        return gemm(a, b, bias=bias, residual=residual, **terms)

    for shapes in (((3, 5), (5, 4), (4,), (3, 4)), ((2, 1, 3, 5), (3, 5, 4), (3, 1), (2, 3, 3, 4))):
        assert torch.autograd.gradcheck(call, doubles(*shapes))


@pytest.mark.parametrize("function", FUNCTION, ids=["", "function"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
def test_gradcheck_of_products(activation, function, view):
    """Every element of the Jacobian of a plain product; of others, which differ in what follows it, along a vector."""
    W = matrix(dtype=FP64, shape=(32, 48), block=(16, 16), density=0.4)
    M, K = W.shape[::-1] if view else W.shape

    def of(values):
        return W.with_values(values).t() if view else W.with_values(values)

    def as_linear(values, x, bias):
        return bsr_linear(x, of(values), bias=bias, activation=activation, epilogue=function)

    def as_matmul(values, b, bias, residual):
        return bsr_matmul(of(values), b, bias=bias, activation=activation, residual=residual, epilogue=function)

    values, fast = leaf(W.values), activation is not None or function is not None
    assert torch.autograd.gradcheck(as_linear, (values, *doubles((3, K), (M,))), fast_mode=fast)
    assert torch.autograd.gradcheck(as_matmul, (values, *doubles((K, 2), (M, 1), (M, 2))), fast_mode=fast)


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
def test_gradcheck_of_batches(view):
    one = matrix(dtype=FP64, shape=(32, 48), block=(16, 16), density=0.4)
    same = BsrMatrix(one.crow_indices, one.col_indices, torch.randn(2, *one.values.shape, dtype=FP64), (2, 32, 48))
    for W in (same, BsrMatrix.stack([one, matrix(dtype=FP64, shape=(32, 48), block=(16, 16), density=0.2)])):
        M, K = W.shape[:-3:-1] if view else W.shape[1:]

        def call(values, x, bias):
            V = W.with_values(values)
            return bsr_linear(x, V.t() if view else V, bias=bias, activation="gelu")

        for x in ((2, 2, K), (2, K)):
            assert torch.autograd.gradcheck(call, (leaf(W.values), *doubles(x, (2, M))), fast_mode=len(x) == 3)
    W = one.with_values(one.values)
    for x in ((48,), (2, 2, 48)):
        assert torch.autograd.gradcheck(lambda x: bsr_linear(x, W), doubles(x))
    assert torch.autograd.gradcheck(lambda b: W @ b, doubles((2, 48, 2)))


@pytest.mark.parametrize("form", ["one pattern", "patterns"])
@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
def test_gradcheck_of_grouped_products(form, view):
    W, groups = of_form(form, FP64), torch.tensor([2, 5, 2, 0], dtype=torch.int32)
    M, K = W.shape[:-3:-1] if view else W.shape[1:]

    def call(values, x, bias):
        V = W.with_values(values)
        return bsr_grouped_linear(x, V.t() if view else V, expert_ids=groups, bias=bias, activation="silu")

    assert torch.autograd.gradcheck(call, (leaf(W.values), *doubles((256, K), (3, M))), fast_mode=True)


def test_gradcheck_of_conversions():
    W = matrix(dtype=FP64, shape=(32, 48), block=(16, 16), density=0.4)
    mask = W.with_values(torch.ones_like(W.values)).to_dense()[::16, ::16].bool()
    other = torch.randn(48, 32, dtype=FP64)
    for call in (
        lambda values: W.with_values(values).to_dense(),
        lambda values: W.with_values(values).transpose().to_dense() * other,
        lambda values: W.with_values(values).t().to_dense() * other,
        lambda values: W.with_values(values).t().clone().contiguous().values,
        lambda values: BsrMatrix.stack([W, W.with_values(values)]).to_dense(),
    ):
        assert torch.autograd.gradcheck(call, (leaf(W.values),))
    dense = torch.randn(32, 48, dtype=FP64).requires_grad_()
    assert torch.autograd.gradcheck(lambda d: BsrMatrix.from_dense(d, (16, 16), mask=mask).values, (dense,))
    x = torch.randn(3, 48, dtype=FP64)
    assert torch.autograd.gradcheck(lambda d: bsr_linear(x, BsrMatrix.from_dense(d, (16, 16), mask=mask)), (dense,))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, FP64])
def test_sddmm_of_wide_types(dtype, accumulate):
    W, a, b = matrix(dtype=dtype), normal(64, 24, dtype=dtype), normal(24, 96, dtype=dtype)
    out = torch.ones_like(W.values) if accumulate else None
    found = sddmm(a, b, W, out=out, accumulate=accumulate)
    exact = BsrMatrix.from_dense(a.double() @ b.double(), (16, 32), mask=W.to_dense()[::16, ::32] != 0).values
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact + accumulate, rtol=0, atol=1e-12 if dtype is FP64 else 1e-4)
