"""Products of 2:4 sparse matrices under torch.compile and torch.export, and their ops by opcheck."""

import pytest
import torch

from cute_kernels import Sparse24, gemm, prune_2_4
from cute_kernels.testing.reference import normal, poisoned
from sparse_collective import (
    Bsr24,
    BsrMatrix,
    bsr_gated_linear,
    bsr_grouped_linear,
    bsr_linear,
    bsr_matmul,
    random_bsr,
)

from ..sparse_collective.bsr_parts import FORMS, batch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE_PLACE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def dense(M=32, K=72, where="cpu") -> Sparse24:
    """Rows of 36 stored elements, which begin at multiples of 80 bytes."""
    return Sparse24.from_dense(prune_2_4(normal(M, K, device=where)))


def sparse(block=(128, 128), where="cpu", **more) -> Bsr24:
    V = random_bsr((2 * block[0], 3 * block[1]), block, density=0.6, device=where, **more).prune_2_4()
    V.check_indices()
    return V


def compiled(call, where, **more):
    return torch.compile(call, fullgraph=True, backend="inductor" if where == "cuda" else "aot_eager", **more)


def test_nothing_of_it_is_traced_twice():
    """One graph serves matrices of equal shape, and batches of any number of columns."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    product = torch.compile(lambda W, V, b, x: (gemm(W, b), bsr_linear(x, V)), fullgraph=True, backend=count)
    V = sparse()  # one, since a random number of stored blocks would be another shape
    for n in (24, 40, 56):
        W, b, x = dense(), normal(72, n), normal(n, 384)
        y, z = product(W, V, b, x)
        assert torch.equal(y, gemm(W, b)) and torch.equal(z, bsr_linear(x, V))
    assert len(graphs) <= 2 and all("sparse24_gemm" in g.code and "bsr24" in g.code for g in graphs)


@ONE_PLACE
def test_gemm(where):
    W, b, bias = dense(where=where), normal(72, 24, device=where), torch.randn(32, 1, device=where)
    residual = normal(32, 24, device=where)

    def call(b, bias, residual, out=None, **more):
        terms = {"bias": bias, "activation": "silu", "residual": residual, "alpha": 0.5, "beta": -2.0, **more}
        return gemm(W, b, out=out, **terms) * 2.0

    run = compiled(call, where)
    assert torch.equal(run(b, bias, residual), call(b, bias, residual))
    wide, function = residual.float(), {"epilogue": lambda t: t * 0.25}
    assert torch.equal(run(b, bias, wide, out_dtype=FP32), call(b, bias, wide, out_dtype=FP32))
    assert torch.equal(run(b, bias, residual, **function), call(b, bias, residual, **function))
    out = poisoned(24, 32, device=where)
    found = run(b, bias, residual, out=out.t())
    assert torch.equal(found, call(b, bias, residual)) and torch.equal(out.t() * 2.0, found)
    x = normal(24, 72, device=where)  # as a linear layer has it
    assert torch.equal(compiled(lambda x: gemm(W, x.t()).t(), where)(x), gemm(W, x.t()).t())


@ONE_PLACE
def test_block_sparse_products(where):
    V, x, bias = sparse(where=where), normal(24, 384, device=where), torch.randn(256, device=where)

    def call(x, bias, out=None):
        y = bsr_linear(x, V, bias=bias, activation="gelu", out=out) * 2.0
        z = bsr_matmul(
            V, x.t(), bias=bias[:, None], residual=y.t().to(x.dtype).contiguous(), epilogue=lambda t: t * 0.5
        )
        return y, z, bsr_gated_linear(x, V), torch.nn.functional.linear(x, V), torch.matmul(V, x.t()), V @ x.t()

    def both(*given, **more):
        for found, wanted in zip(compiled(call, where)(*given, **more), call(*given, **more), strict=True):
            assert torch.equal(found, wanted)

    both(x, bias)
    both(normal(2, 3, 384, device=where)[0], bias)
    out = poisoned(24, 256, dtype=FP32, device=where)
    both(x, bias, out=out)
    assert torch.equal(out, bsr_linear(x, V, bias=bias, activation="gelu", out=torch.empty_like(out)))
    wide = compiled(lambda x: bsr_linear(x, V, out_dtype=FP32), where)(x)
    assert torch.equal(wide, bsr_linear(x, V, out_dtype=FP32)) and wide.dtype == FP32


@pytest.mark.parametrize("form", FORMS)
@ONE_PLACE
def test_batches(where, form):
    V = batch(form, (64, 64), where, grid=(2, 3), names=("power_law", "no_blocks"))[0].prune_2_4()
    items, M, K = V.shape
    x, groups = normal(64 * 3, K, device=where), torch.tensor([1, 0, items], dtype=torch.int32, device=where)

    def call(x, groups):
        return bsr_grouped_linear(x, V, expert_ids=groups, activation="silu"), bsr_matmul(V, x.t()), bsr_linear(x, V)

    V.check_indices()
    for found, wanted in zip(compiled(call, where)(x, groups), call(x, groups), strict=True):
        assert found.shape == wanted.shape and torch.equal(found, wanted)


def test_inductor_and_export():
    """torch's own code around the ops, and a program without Python."""
    W, V, x = dense(256, 384), sparse(), normal(24, 384)

    def call(x):
        y = torch.empty(len(x), 256, dtype=BF16)
        gemm(W, x.t() * 2.0, out=y.t())
        return y + bsr_linear(x + 1.0, V)

    assert torch.allclose(torch.compile(call, fullgraph=True)(x), call(x), rtol=0.02, atol=0.02)

    class Both(torch.nn.Module):
        def forward(self, x):
            return call(x)

    program = torch.export.export(Both(), (x,))
    assert torch.equal(program.module()(x), call(x))


def test_unchecked_indices_are_checked_in_each_call():
    V, x = random_bsr((256, 384), (128, 128), density=0.6).prune_2_4(), normal(24, 384)
    crow = V.crow_indices.clone()
    crow[-1] += 1
    wrong = Bsr24(BsrMatrix(crow, V.col_indices, V.values, (256, 192)), V.metadata)
    with pytest.raises(ValueError, match="crow_indices"):
        compiled(lambda x: bsr_linear(x, wrong), "cpu")(x)


def refusals() -> list:
    W, V, b, x = dense(), sparse(), normal(72, 24), normal(24, 384)

    def leaf(t):
        return t.clone().requires_grad_()

    return [
        (lambda b: gemm(W, b), leaf(b), "Sparse24 does not compute gradients"),
        (lambda x: bsr_linear(x, V), leaf(x), "bsr_linear of a Bsr24 does not compute gradients"),
        (lambda bias: bsr_linear(x, V, bias=bias), leaf(torch.ones(256)), "does not compute gradients"),
        (lambda b: gemm(W, b), b[None], "b has 3 dimensions"),
        (lambda b: gemm(W, b), b[:40], "72 columns meet 40 rows"),
        (lambda x: bsr_linear(x, V), x[:, :128], "384 columns of W meet 128"),
        (lambda b: gemm(W, b, use_fast_accum=True), b, "scales and use_fast_accum"),
        (lambda x: bsr_linear(x, V, accumulation_dtype=FP16), x, "always accumulates in FP32"),
        (lambda x: bsr_linear(x, V, out_dtype=torch.float8_e4m3fn), x, "does not support FP8 outputs"),
        (lambda x: x @ V, x, "takes a Bsr24 as its left operand alone"),
    ]


@pytest.mark.parametrize("number", range(10))
def test_what_is_refused(number):
    call, given, words = refusals()[number]
    with pytest.raises(Exception, match=words):
        compiled(call, "cpu")(given)


@ONE_PLACE
def test_opcheck_of_gemm(where):
    from cute_kernels.sparse24 import torch_op  # noqa: F401 (registers the ops, as torch.compile does)

    W, b, ops = dense(where=where), normal(72, 24, device=where), torch.ops.cute_kernels
    matrix = W.values, W.metadata
    for kwargs in ({}, {"bias": normal(24, device=where), "activation": "relu"}, {"alpha": 2.0, "out_dtype": FP32}):
        torch.library.opcheck(ops.sparse24_gemm.default, (*matrix, b), kwargs)
    torch.library.opcheck(ops.sparse24_gemm_out.default, (*matrix, b, b.new_zeros(32, 24)), {})
    torch.library.opcheck(ops.sparse24_gemm_out.default, (*matrix, b, b.new_zeros(24, 32).t()), {"activation": "silu"})


@ONE_PLACE
def test_opcheck_of_block_sparse_products(where):
    from sparse_collective.bsr24 import torch_op  # noqa: F401 (registers the ops, as torch.compile does)

    op, into = torch.ops.sparse_collective.bsr24.default, torch.ops.sparse_collective.bsr24_out.default

    def parts(V, check=True):
        return V.crow_indices, V.col_indices, V.values, V.shape[-1], check, V.metadata

    V, x = sparse((64, 64), where), normal(24, 192, device=where)
    for kwargs in ({}, {"bias": normal(128, device=where), "activation": "gelu"}, {"out_dtype": FP32}):
        torch.library.opcheck(op, ("bsr_linear", *parts(V), x), kwargs)
    torch.library.opcheck(op, ("bsr_matmul", *parts(V, False), normal(2, 192, 8, device=where)), {})
    torch.library.opcheck(op, ("bsr_gated_linear", *parts(V), x), {"activation": "silu"})
    torch.library.opcheck(into, ("bsr_linear", *parts(V), x, x.new_zeros(24, 128, dtype=FP32)), {})
    for form in FORMS:
        V = batch(form, (64, 64), where, grid=(2, 3), names=("power_law", "no_blocks"))[0].prune_2_4()
        x, groups = normal(128, 192, device=where), torch.tensor([1, 0], dtype=torch.int32, device=where)
        torch.library.opcheck(op, ("bsr_grouped_linear", *parts(V), x), {"expert_ids": groups})
        torch.library.opcheck(op, ("bsr_matmul", *parts(V), x.t()), {})
