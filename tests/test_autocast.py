"""All public ops under torch.autocast beside torch's own: dtypes of results and gradients, values, torch.compile."""

import contextlib

import pytest
import torch
import torch.nn.functional as nnf

from attention import attention, block_sparse_attention, scaled_dot_product_attention
from cute_kernels import Sparse24, explain, gemm, prune_2_4, quantize
from sparse_collective import (
    BsrMatrix,
    bsr_gated_linear,
    bsr_grouped_linear,
    bsr_linear,
    bsr_matmul,
    sddmm,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def normal(*shape):
    return torch.randn(shape, dtype=FP64) / shape[-1] ** 0.5


def block_sparse(values, items: bool = False) -> BsrMatrix:
    """A (128, 64) matrix, or two, of blocks of 32 x 32, six of eight in each."""
    crow, col = torch.tensor([0, 2, 3, 4, 6]), torch.tensor([0, 1, 0, 1, 0, 1])
    crow, col = (t.to(values.device, torch.int32) for t in (crow, col))
    return BsrMatrix(crow, col, values, (2, 128, 64) if items else (128, 64))


def dense(values) -> torch.Tensor:
    return block_sparse(values, values.dim() == 4).to_dense()


def gated(z):
    g, u = z.unflatten(-1, (-1, 2, 64)).unbind(-2)
    return (nnf.silu(g) * u).flatten(-2)


def groups(x) -> torch.Tensor:
    return torch.tensor([1, 0], dtype=torch.int32, device=x.device)


def blocks(q) -> torch.Tensor:
    return torch.ones(1, 1, dtype=torch.bool, device=q.device)


QKV = (2, 4, 40, 64), (2, 4, 50, 64), (2, 4, 50, 64)
VALUES = (6, 32, 32)
# name -> (op, the same by torch, shapes of the operands)
OPS = {
    "gemm": (gemm, torch.matmul, ((3, 40, 64), (64, 48))),
    "gemm, residual": (
        lambda a, b, r: gemm(a, b, residual=r),
        lambda a, b, r: torch.addmm(r, a, b),
        ((40, 64), (64, 48), (40, 48)),
    ),
    "gemm, bias": (
        lambda a, b, bias: gemm(a, b, bias=bias, activation="gelu_tanh"),
        lambda a, b, bias: nnf.gelu(nnf.linear(a, b.t(), bias), approximate="tanh"),
        ((40, 64), (64, 48), (48,)),
    ),
    "bsr_linear": (
        lambda x, values, bias: bsr_linear(x, block_sparse(values), bias=bias, activation="relu"),
        lambda x, values, bias: nnf.linear(x, dense(values), bias).relu(),
        ((3, 40, 64), VALUES, (128,)),
    ),
    "bsr_matmul": (
        lambda b, values, r: bsr_matmul(block_sparse(values), b, residual=r),
        lambda b, values, r: torch.addmm(r, dense(values), b),
        ((64, 48), VALUES, (128, 48)),
    ),
    "W.T": (
        lambda x, values: bsr_linear(x, block_sparse(values).t()),
        lambda x, values: nnf.linear(x, dense(values).t()),
        ((40, 128), VALUES),
    ),
    "W @ b": (lambda b, values: block_sparse(values) @ b, lambda b, values: dense(values) @ b, ((64, 48), VALUES)),
    "F.linear": (
        lambda x, values: nnf.linear(x, block_sparse(values)),
        lambda x, values: nnf.linear(x, dense(values)),
        ((40, 64), VALUES),
    ),
    "bsr_gated_linear": (
        lambda x, values: bsr_gated_linear(x, block_sparse(values)),
        lambda x, values: gated(nnf.linear(x, dense(values))),
        ((40, 64), VALUES),
    ),
    "bsr_grouped_linear": (
        lambda x, values: bsr_grouped_linear(x, block_sparse(values, True), expert_ids=groups(x)),
        lambda x, values: torch.cat([nnf.linear(part, w) for part, w in zip(x.chunk(2), dense(values).flip(0))]),
        ((128, 64), (2, *VALUES)),
    ),
    "attention": (attention, nnf.scaled_dot_product_attention, QKV),
    "block_sparse_attention": (
        lambda q, k, v: block_sparse_attention(q, k, v, blocks(q)),
        nnf.scaled_dot_product_attention,
        QKV,
    ),
    "scaled_dot_product_attention": (scaled_dot_product_attention, nnf.scaled_dot_product_attention, QKV),
    "scaled_dot_product_attention, mask": (
        scaled_dot_product_attention,
        nnf.scaled_dot_product_attention,
        (*QKV, (2, 1, 40, 50)),
    ),
}
DTYPES = [(FP32, FP32), (BF16, FP32), (FP32, FP16), (FP16, FP16), (FP64, FP64)]  # of the first operand and the others
BOUNDS = {BF16: 3e-2, FP16: 4e-3, FP32: 1e-5, FP64: 1e-10}


def operands(shapes, dtypes, place):
    """With gradients; the last of attention's is a mask, which torch takes in float32 and in query's dtype."""
    first, others = dtypes
    exact = [normal(*shape) for shape in shapes]
    inputs = [t.to(place, first if i == 0 else others).requires_grad_() for i, t in enumerate(exact)]
    return exact, inputs


def step(op, inputs, dtype, place) -> tuple:
    """The result and all gradients. Backward runs outside of autocast, as torch asks of its users."""
    with contextlib.nullcontext() if dtype is None else torch.autocast(place, dtype):
        y = op(*inputs)
    return y, *torch.autograd.grad(y.double().square().sum(), inputs)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", OPS)
def test_dtypes_are_those_of_torch(name, dtype, place):
    ours, theirs, shapes = OPS[name]
    for dtypes in DTYPES:
        if place == "cuda" and FP64 in dtypes:
            continue  # no kernel multiplies it
        exact, inputs = operands(shapes, dtypes, place)
        found, want = (step(op, inputs, dtype, place) for op in (ours, theirs))
        assert found[0].dtype == want[0].dtype == (FP64 if FP64 in dtypes else dtype)
        for gradient, t in zip(found[1:], inputs, strict=True):
            assert gradient.dtype == t.dtype and gradient.shape == t.shape
        truth = step(theirs, [t.requires_grad_() for t in exact], None, "cpu")
        bound = max(BOUNDS[t] for t in (dtype, *dtypes)) if FP64 not in dtypes else 1e-10
        for t, t64 in zip(found, truth, strict=True):
            assert (t.double().cpu() - t64).abs().max() <= bound * t64.abs().max()
        with torch.no_grad(), torch.autocast(place, dtype):
            assert ours(*inputs).dtype == found[0].dtype
        with torch.autocast(place, dtype, enabled=False):  # off again: what it is without
            if dtypes == (FP16, FP16):
                assert ours(*inputs).dtype == FP16


@pytest.mark.parametrize(
    ("place", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("name", [n for n in OPS if n not in ("W @ b", "block_sparse_attention")])
def test_under_compile(name, place, backend):
    """Autocast inside of the graph, around it, and left between two calls."""
    torch._dynamo.reset()
    ours, _, shapes = OPS[name]
    _, inputs = operands(shapes, (FP32, FP32), place)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)

    @torch.compile(fullgraph=True, backend=backend)
    def inside(*inputs):
        with torch.autocast(place, BF16):
            return ours(*inputs)

    want = step(ours, inputs, BF16, place)
    for found in (step(compiled, inputs, BF16, place), step(inside, inputs, None, place)):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    if place == "cpu":
        assert compiled(*inputs).dtype == FP32
    torch._dynamo.reset()


@pytest.mark.parametrize("place", PLACES)
def test_operands_with_structured_sparsity(place):
    w, x = normal(128, 64).to(place), normal(40, 64).to(place, FP32)
    W = Sparse24.from_dense(prune_2_4(w.float()))
    V = BsrMatrix.from_dense(w.float(), (64, 64)).prune_2_4()
    with torch.autocast(place, BF16):
        y, z = gemm(W, x.t()), bsr_linear(x, V)
    assert y.dtype == z.dtype == BF16
    for found, matrix in ((y.t(), W), (z, V)):
        torch.testing.assert_close(found.float(), x @ matrix.to_dense().t(), rtol=3e-2, atol=3e-2)


def test_torch_sparse_bsr_tensors():
    x, W = normal(40, 64).float(), block_sparse(normal(*VALUES).float()).to_torch()
    with torch.autocast("cpu", BF16):
        assert bsr_linear(x, W).dtype == BF16
        assert torch.equal(bsr_linear(x, W), bsr_linear(x, BsrMatrix.from_torch(W)))


def test_what_is_not_cast():
    """out=, a precision, FP8 and float64; sddmm, as torch.sparse.sampled_addmm."""
    a, b = normal(40, 64).float(), normal(64, 48).float()
    q, k, v = (normal(*shape).float() for shape in QKV)
    W = block_sparse(normal(*VALUES).float())
    (a8, scale_a), (b8, scale_b) = quantize(a, per="row"), quantize(b.t(), per="row")
    k8, v8 = (t.to(torch.float8_e4m3fn) for t in (k, v))
    exact = gemm(a, b)
    with torch.autocast("cpu", FP16):
        assert torch.equal(gemm(a, b, out=torch.empty(40, 48)), exact)
        assert torch.matmul(a, b, out=torch.empty(40, 48)).dtype == FP32
        assert gemm(a, b, precision="3xtf32").dtype == FP32
        assert bsr_linear(a, W, out=torch.empty(40, 128)).dtype == FP32
        assert bsr_linear(a, W, precision="tf32").dtype == FP32
        assert attention(q, k, v, out=torch.empty_like(q)).dtype == FP32
        assert block_sparse_attention(q, k, v, blocks(q), out=torch.empty_like(q)).dtype == FP32
        assert gemm(a8, b8.t(), scale_a=scale_a, scale_b=scale_b.t()).dtype == BF16
        assert sddmm(normal(128, 40).float(), normal(40, 64).float(), W).dtype == FP32
        # other arguments that say a dtype
        assert gemm(a, b, out_dtype=FP32).dtype == bsr_linear(a, W, out_dtype=FP32).dtype == FP32
        assert gemm(a, b, residual=exact, out_dtype=FP32).dtype == FP32
        assert gemm(a, b, accumulation_dtype=FP16).dtype == FP16
        # a cache of FP8 with a query that is cast
        out = attention(q[:, :, :1], k8, v8, seqused_k=torch.tensor([50, 7], dtype=torch.int32))
        assert out.dtype == FP16
        with pytest.raises(TypeError, match="b is torch.float32 but a is torch.float64"):
            gemm(a.double(), b)
        with pytest.raises(RuntimeError):
            torch.matmul(a.double(), b)
        for wrong in ((None, b), (a, [1.0])):
            with pytest.raises(TypeError, match="must be a torch.Tensor"):
                gemm(*wrong)
        with pytest.raises(TypeError, match="must be a torch.Tensor"):
            attention(q, None, v)
    with torch.autocast("cpu", BF16), pytest.raises((TypeError, ValueError), match="accumulation_dtype"):
        gemm(a, b, accumulation_dtype=FP16)


def test_explain():
    """Plans are those of the calls."""
    a, b = normal(40, 64).float(), normal(64, 48).float()
    q, k, v = (normal(*shape).float() for shape in QKV)
    W = block_sparse(normal(*VALUES).float())
    calls = [
        (gemm, a, b), (bsr_linear, a, W), (bsr_matmul, W, b), (bsr_gated_linear, a, W), (attention, q, k, v),
        (block_sparse_attention, q, k, v, blocks(q)), (scaled_dot_product_attention, q, k, v),
    ]  # fmt: skip
    for call in calls:
        with torch.autocast("cpu", BF16):
            plan = explain(*call, arch="sm_90")
            assert plan.out_dtype == BF16 and (plan.facts is not None or plan.unfused)
        instead = "torch.autocast or torch.nn.functional.scaled" if "attention" in call[0].__name__ else "torch.matmul"
        with pytest.raises(TypeError, match=f"torch.float32.*cast with .to.., or use {instead}"):
            explain(*call, arch="sm_90")
