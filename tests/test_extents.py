"""Every op and layer with extents of 0 and 1 in each dimension, forward and backward: torch's shapes and FP64 numbers.

On CPU tensors and on a GPU extents take all combinations of 0, 1 and a third number (a dimension of blocks: 0, 1 and 3
of them). On the emulator one dimension at a time is 0 or 1, or all are.
"""

import contextlib
import itertools
import math
import shutil
from functools import partial

import pytest
import torch
from torch.nn import functional as nnf

import cute_kernels
from attention import (
    BlockMask,
    attention,
    attention_backward,
    block_sparse_attention,
    merge,
    scaled_dot_product_attention,
)
from cute_kernels import Sparse24, gemm, prune_2_4, quantize, quantize_gated
from cute_kernels.reference import gate
from cute_kernels.testing.reference import normal
from sparse_collective import (
    BsrMatrix,
    bsr_gated_linear,
    bsr_grouped_linear,
    bsr_linear,
    bsr_matmul,
    interleaved,
    random_bsr,
    sddmm,
)
from sparse_collective import nn as layers

from . import host_emulation
from .emulator import emulate
from .emulator.ops import on_emulator

SIDE = 16  # of blocks
ACTIVATIONS = {None: lambda z: z, "gelu": nnf.gelu, "relu": torch.relu}
EMULATORS = [("emulator", "sm_90"), ("emulator", "sm_80")]
without_compiler = pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="needs a C++ compiler (CXX)")


@pytest.fixture(
    params=[
        "cpu",
        "emulated",
        *(pytest.param(p, marks=without_compiler) for p in EMULATORS),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
    ids=lambda p: p if isinstance(p, str) else "_".join(p),
)
def where(request, monkeypatch):
    """(device, True on the emulator, and with torch in the kernels' place, where plans are reused)"""
    if request.param == "emulated":
        host_emulation.install(monkeypatch)
        yield "cpu", True
    elif isinstance(request.param, str):
        yield request.param, False
    else:
        with on_emulator(request.param[1], sms=2):
            yield "cpu", True


def combinations(few: bool, **extents: int) -> list[dict]:
    """Extents with 0 and 1 in their places: all combinations, or few."""
    if not few:
        return [
            dict(zip(extents, each, strict=True)) for each in itertools.product(*((0, 1, n) for n in extents.values()))
        ]
    some = [{**extents, name: n} for name in extents for n in (0, 1)]
    return [*some, dict.fromkeys(extents, 0), dict.fromkeys(extents, 1)]


def in_graphs(size: dict, few: bool) -> bool:
    """True for the sizes that are also compiled: one dimension is 0, or all are 0 or 1."""
    values = [*size.values()]
    return not few and (len({*values}) == 1 or values.count(0) == 1 and 1 not in values)


@contextlib.contextmanager
def named(size: dict):
    """Errors name the size."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"extents: {size}")
        raise


def near(found, right, error=0.03):
    assert found.shape == right.shape
    largest = right.abs().max().item() if right.isfinite().all() and right.numel() else 1.0
    torch.testing.assert_close(found.double(), right.double(), rtol=error, atol=error * max(largest, 1.0))


def incoming(results):
    """Gradients of results: dense, as of sum(), and the same along the last dimension."""
    yield [torch.randn_like(y) for y in results]
    yield [y.new_ones(()).expand(y.shape) for y in results]
    yield [torch.randn_like(y[..., :1]).expand(y.shape) for y in results]


def check(run, plain, tensors, compiled=False):
    """run(*tensors) and its gradients against plain(*tensors) in FP64. Both return a tensor or several."""
    mine, theirs = ([t.detach().to(d).requires_grad_() for t in tensors] for d in (None, torch.float64))
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)
    found, want = run(*mine), plain(*theirs)
    found, want = ((r,) if isinstance(r, torch.Tensor) else r for r in (found, want))
    for y, right in zip(found, want, strict=True):
        near(y, right)
    for dys in incoming(found) if not compiled else [next(incoming(found))]:
        gradients = torch.autograd.grad(found, mine, dys, retain_graph=True)
        exact = torch.autograd.grad(want, theirs, [dy.double() for dy in dys], allow_unused=True, retain_graph=True)
        for g, right, t in zip(gradients, exact, mine, strict=True):
            assert g is not None and g.dtype == t.dtype
            near(g, torch.zeros_like(t) if right is None else right)


# ---------------------------------------------------------------------- gemm


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm(activation, where, request):
    place, few = where
    if activation != "gelu" and "emulator" in request.node.name:
        pytest.skip("as gelu on the emulator")
    act = ACTIVATIONS[activation]
    for size in combinations(few, M=16, K=24, N=8):
        M, K, N = size.values()
        a, b, bias, rows, residual = (
            normal(*shape, device=place) for shape in ((M, K), (K, N), (N,), (M, 1), (M, N))
        )  # fmt: skip

        def run(a, b, bias, residual):
            return gemm(a, b, bias=bias, residual=residual, activation=activation, alpha=0.5, beta=2.0)

        def plain(a, b, bias, r):
            return act(0.5 * a @ b + bias + 2 * r)

        with named(size):
            check(run, plain, (a, b, bias, residual))
            check(lambda a, b, bias: gemm(a, b, bias=bias), lambda a, b, bias: a @ b + bias, (a, b, rows))
            check(run, plain, (a, b, bias[None], residual))
            if activation == "gelu" and in_graphs(size, few):
                check(run, plain, (a, b, bias, residual), compiled=True)


def test_gemm_of_batches(where):
    place, few = where
    for size in combinations(few, L=2, M=16, K=24, N=8):
        L, M, K, N = size.values()
        for a, b in (((L, M, K), (K, N)), ((L, M, K), (L, K, N)), ((M, K), (L, K, N)), ((3, 1, M, K), (L, K, N))):
            tensors = normal(*a, device=place), normal(*b, device=place), normal(N, device=place)
            with named(size):
                check(
                    lambda a, b, bias: gemm(a, b, bias=bias, activation="gelu"),
                    lambda a, b, bias: nnf.gelu(a @ b + bias), tensors,
                )  # fmt: skip


@pytest.mark.parametrize("precision", ["tf32", "3xtf32"])
def test_fp32(precision, where):
    place, few = where
    for size in combinations(few, M=32, K=32, N=8):
        M, K, N = size.values()
        M, K = M - M % SIDE, K - K % SIDE
        W = matrix(M // SIDE, K // SIDE, place, torch.float32)
        a, b = (torch.randn(*shape, device=place) for shape in ((M, K), (K, N)))
        x = torch.randn(N, K, device=place)
        with named(size):
            near(gemm(a, b, precision=precision), a.double() @ b.double())
            near(bsr_linear(x, W, precision=precision), x.double() @ W.to_dense().double().t())
            near(bsr_matmul(W, b, precision=precision), W.to_dense().double() @ b.double())
            near(gemm(a[:, :1], b[:1], precision=precision), a[:, :1].double() @ b[:1].double())


def test_fp8(where, request):
    """FP8 operands with scales of each kind, and an FP8 output; without gradients."""
    place, few = where
    if "sm_80" in request.node.name:
        pytest.skip("sm_80 has no FP8 MMA")
    for size in combinations(few, M=32, K=64, N=8):
        M, K, N = size.values()
        a, b = normal(M, K, device=place), normal(K, N, device=place)
        wanted = a.double() @ b.double()
        with named(size):
            for kinds in (("tensor", "tensor"), ("row", "column"), ("1x128", "128x128")):
                qa, qb = (quantize(t, per=kind) for t, kind in zip((a, b), kinds, strict=True))
                near(gemm(qa, qb), wanted, 0.15)
            y, amax = gemm(a, b, out_dtype=torch.float8_e4m3fn, return_amax=True)
            near(y.float(), wanted, 0.15)
            near(amax, wanted.abs().amax().view(1) if wanted.numel() else wanted.new_zeros(1))
            z = normal(M, 128 * N, device=place)
            narrow = quantize_gated(z)
            near(narrow.values.double() * narrow.scale.double(), gate(z.double(), "silu"), 0.15)


def test_sparse24(where):
    place, few = where
    for size in combinations(few, M=32, K=16, N=8):
        M, K, N = size.values()
        w, b = prune_2_4(normal(M, 4 * K, device=place)), normal(4 * K, N, device=place)
        with named(size):
            near(gemm(Sparse24.from_dense(w), b), w.double() @ b.double())


# ---------------------------------------------------------------------- block-sparse GEMMs


def matrix(rows: int, columns: int, device, dtype=torch.bfloat16, per_row: int | None = None) -> BsrMatrix:
    """(rows * SIDE, columns * SIDE); some blocks, per_row in each block row."""
    per_row = min(columns, 2) if per_row is None else per_row
    crow = torch.arange(rows + 1, dtype=torch.int32, device=device) * per_row
    col = torch.arange(per_row, dtype=torch.int32, device=device).repeat(rows)
    values = torch.randn(rows * per_row, SIDE, SIDE, device=device).to(dtype)
    return BsrMatrix(crow, col, values, (rows * SIDE, columns * SIDE))


def dense(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """(..., rows * SIDE, columns * SIDE) of the values (..., nnz, SIDE, SIDE) of a `matrix`."""
    per_row = values.shape[-3] // max(rows, 1)
    whole = values.new_zeros(*values.shape[:-3], rows, columns, SIDE, SIDE)
    whole[..., :per_row, :, :] = values.unflatten(-3, (rows, per_row)) if rows else 0.0
    return whole.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bsr(activation, view, where, request):
    place, few = where
    if activation != "gelu" and "emulator" in request.node.name:
        pytest.skip("as gelu on the emulator")
    act = ACTIVATIONS[activation]
    for size in [*combinations(few, M=3, K=2, N=8), {"M": 3, "K": 2, "N": 8, "blocks": 0}]:
        M, K, N, *blocks = size.values()
        W = matrix(M, K, place, per_row=blocks[0] if blocks else None)
        m, k = (K * SIDE, M * SIDE) if view else (M * SIDE, K * SIDE)

        def of(values, W=W):
            A = W.with_values(values)
            return A.t() if view else A

        def whole(values, M=M, K=K):
            return dense(values, M, K).mT if view else dense(values, M, K)

        def tensors(*shapes, W=W):
            return W.values, *(normal(*shape, device=place) for shape in shapes)

        with named(size):
            for c in (False, True) if activation == "gelu" and in_graphs(size, few) else (False,):
                check(
                    lambda v, b, bias, r: bsr_matmul(of(v), b, bias=bias, activation=activation, residual=r),
                    lambda v, b, bias, r: act(whole(v) @ b + bias + r), tensors((k, N), (N,), (m, N)), c,
                )  # fmt: skip
                check(
                    lambda v, x, bias: bsr_linear(x, of(v), bias=bias, activation=activation),
                    lambda v, x, bias: act(x @ whole(v).mT + bias), tensors((N, k), (m,)), c,
                )  # fmt: skip
            check(
                lambda v, b, bias: bsr_matmul(of(v), b, bias=bias, activation=activation),
                lambda v, b, bias: act(whole(v) @ b + bias), tensors((2, k, N), (m, 1)),
            )  # fmt: skip
            for shape in ((2, N, k), (k,)):
                check(
                    lambda v, x, bias: bsr_linear(x, of(v), bias=bias, activation=activation),
                    lambda v, x, bias: act(x @ whole(v).mT + bias), tensors(shape, (m,)),
                )  # fmt: skip


def test_gated(where):
    place, few = where
    for size in combinations(few, H=2, K=2, N=8):
        H, K, N = size.values()
        W = matrix(8 * H, K, place)
        tensors = W.values, normal(N, K * SIDE, device=place)

        def plain(values, x, H=H, K=K):
            return gate(x @ dense(values, 8 * H, K).mT, "silu")

        with named(size):
            check(lambda values, x, W=W: bsr_gated_linear(x, W.with_values(values)), plain, tensors)
            near(bsr_gated_linear(tensors[1], W), plain(*(t.double() for t in tensors)))
            halves = torch.randn(2, H * 64, K)
            near(interleaved(*halves).unflatten(0, (H, 2, 64)).transpose(0, 1).flatten(1, 2), halves)


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("form", ["values", "patterns"])
def test_batches_and_experts(form, view, where):
    """A batch of L matrices; and L experts of which two runs of N tokens, or T tokens by offsets, are."""
    place, few = where
    for size in combinations(few, L=2, M=3, K=2, N=64):
        L, M, K, N = size.values()
        W = matrix(M, K, place)
        if L == 0:
            with pytest.raises(ValueError, match="L at least 1"):
                BsrMatrix(W.crow_indices, W.col_indices, W.values[None][:0], (L, *W.shape))
            continue
        values = torch.randn(L, *W.values.shape, device=place).bfloat16()
        if form == "values":
            W = BsrMatrix(W.crow_indices, W.col_indices, values, (L, *W.shape))
        else:
            W = BsrMatrix.stack([W.with_values(v) for v in values])
        m, k = (K * SIDE, M * SIDE) if view else (M * SIDE, K * SIDE)

        def of(values, W=W):
            A = W.with_values(values)
            return A.t() if view else A

        def whole(values, L=L, M=M, K=K):
            w = dense(values if form == "values" else values.unflatten(0, (L, -1)), M, K)
            return w.mT if view else w

        def tensors(*shapes, W=W):
            return W.values, *(normal(*shape, device=place) for shape in shapes)

        with named(size):
            for x in ((L, N, k), (N, k)):
                check(
                    lambda v, x, bias: bsr_linear(x, of(v), bias=bias, activation="gelu"),
                    lambda v, x, bias: nnf.gelu(x @ whole(v).mT + bias[:, None]), tensors(x, (L, m)),
                )  # fmt: skip
            ids = torch.tensor([L - 1, 0], dtype=torch.int32, device=place)[: 2 * bool(N)]
            ends = torch.tensor([N // 2, N], dtype=torch.int32, device=place)[-L:]
            by_run = ids.long().repeat_interleave(64)
            by_token = torch.searchsorted(ends, torch.arange(N, dtype=torch.int32, device=place), right=True)
            for routing, experts in (({"expert_ids": ids}, by_run), ({"offs": ends}, by_token)):

                def plain(v, x, bias, experts=experts):
                    return nnf.gelu((x[:, None] @ whole(v).mT[experts])[:, 0] + bias[experts])

                check(
                    lambda v, x, bias: bsr_grouped_linear(x, of(v), bias=bias, activation="gelu", **routing),
                    plain, tensors((len(experts), k), (L, m)),
                )  # fmt: skip


def test_sddmm(where):
    place, few = where
    for size in combinations(few, M=3, K=32, N=2):
        M, K, N = size.values()
        pattern = matrix(M, N, place)
        a, b = normal(M * SIDE, K, device=place), normal(K, N * SIDE, device=place)
        blocks = (a.double() @ b.double()).unflatten(0, (M, SIDE)).unflatten(2, (N, SIDE)).transpose(1, 2)
        want = blocks[pattern.row_of_block().long(), pattern.col_indices.long()]
        with named(size):
            near(sddmm(a, b, pattern), want)
            ones = torch.ones_like(want).bfloat16()
            near(sddmm(a, b, pattern, out=ones.clone(), accumulate=True), want + 1)
            near(sddmm(a, b, pattern, out=ones.clone()), want)


def test_bsr24(where):
    place, few = where
    for size in combinations(few, M=1, K=2, N=8):
        M, K, N = size.values()
        if not M or not K:  # of no blocks there is no 2:4 matrix of this shape
            W = random_bsr((128, 128), (64, 64), density=0.0, device=place)
        else:
            W = random_bsr((M * 64, K * 64), (64, 64), density=1.0, device=place)
        V = W.prune_2_4()
        x = normal(N, W.shape[1], device=place)
        with named(size):
            near(bsr_linear(x, V), x.double() @ V.to_bsr().to_dense().double().t())


LAYERS = {
    "BsrLinear": partial(layers.BsrLinear, 64, 128, activation="gelu"),
    "GatedBsrLinear": partial(layers.GatedBsrLinear, 64, 128, True),
    "SwiGLU": partial(layers.SwiGLU, 64, 64),
    "experts": partial(layers.BsrMixtureOfExperts, 64, 64, 2, 1, group_rows=64),
    "experts, bias": partial(layers.BsrMixtureOfExperts, 64, 64, 2, 1, True, group_rows=64),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, where):
    """Zero tokens and one token, also in batches: gradients have the parameters' shapes; of zero tokens they are 0."""
    place, few = where
    layer = LAYERS[name](blocksize=(32, 32), density=0.5, device=place, dtype=torch.bfloat16)
    for shape in ((0,), (1,), (2, 0), (0, 2), (1, 1)):
        x = normal(*shape, 64, device=place).requires_grad_()
        with named({"tokens": shape}):
            layer.zero_grad()
            y = layer(x)
            y.sum().backward()
            assert y.shape[:-1] == x.shape[:-1] and x.grad.shape == x.shape
            for p in layer.parameters():
                grad = torch.zeros_like(p) if p.grad is None and not p.numel() else p.grad
                assert grad.isfinite().all() and (x.numel() or not grad.any())
            with torch.no_grad():
                near(layer(x), y.detach().double())


# ---------------------------------------------------------------------- attention


def softmax_of(q, k, v, sinks=None, seen=None, bias=None):
    """(out, lse) of FP64 tensors; rows that see nothing are 0."""
    per_head = q.shape[1] // max(k.shape[1], 1)
    k, v = (t.repeat_interleave(per_head, 1) for t in (k, v))
    s = q @ k.mT / math.sqrt(max(q.shape[-1], 1))
    s = s if bias is None else s + bias
    s = s if seen is None else s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    p = torch.softmax(s, -1).nan_to_num() if s.shape[-1] else s
    return p[..., : k.shape[2]] @ v, s.logsumexp(-1)


def heads(B: int, H: int, Sq: int, Sk: int, device, D: int = 64, Dv: int = 64):
    return tuple(normal(*shape, device=device) for shape in ((B, 2 * H, Sq, D), (B, H, Sk, D), (B, H, Sk, Dv)))


def causal(Sq: int, Sk: int, device) -> torch.Tensor:
    return torch.ones(Sq, Sk, dtype=torch.bool, device=device).tril(Sk - Sq)


@pytest.mark.parametrize("form", ["plain", "causal, sinks", "score_mod"])
def test_attention(form, where, request):
    place, few = where
    if form == "score_mod" and "emulated" in request.node.name:
        pytest.skip("kernels with a score_mod have no emulation by torch")
    for size in combinations(few, B=2, H=2, Sq=5, Sk=7):
        B, H, Sq, Sk = size.values()
        tensors = heads(B, H, Sq, Sk, place)
        if form == "causal, sinks":
            tensors += (normal(2 * H, device=place),)
            seen = causal(Sq, Sk, place)

            def run(q, k, v, sinks):
                return attention(q, k, v, sinks=sinks, causal=True, return_lse=True)

            def plain(q, k, v, sinks, seen=seen):
                return softmax_of(q, k, v, sinks, seen)

        elif form == "score_mod":
            tensors += (normal(8, device=place),)

            def run(q, k, v, table):
                return attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j], return_lse=True)

            def plain(q, k, v, table, Sk=Sk):
                return softmax_of(q, k, v, bias=table[:Sk])

        else:
            run, plain = attention, lambda *t: softmax_of(*t)[0]
        with named(size):
            check(run, plain, tensors)
            if form != "plain" and in_graphs(size, few):
                check(run, plain, tensors, compiled=True)


def test_head_dimensions(where):
    """Head dimensions of 0 and 1 have no kernels: the call says so where something is to be computed."""
    place, few = where
    for D, Dv in itertools.product((0, 1, 64), repeat=2):
        tensors = heads(1, 1, 5, 7, place, D, Dv)
        with named({"D": D, "Dv": Dv}):
            if (place == "cuda" or few) and (D, Dv) != (64, 64):
                with pytest.raises(ValueError, match="head_dim [01]; kernels exist for"):
                    attention(*tensors, return_lse=True)
                near(attention(*(t[:0] for t in tensors)), tensors[0].new_zeros(0, 2, 5, Dv))
            else:
                check(partial(attention, return_lse=True), softmax_of, tensors)


def test_block_sparse_attention(where):
    place, few = where
    for size in combinations(few, B=2, H=2, Sq=5, Sk=7):
        B, H, Sq, Sk = size.values()
        tensors = (*heads(B, H, Sq, Sk, place), normal(2 * H, device=place))
        shape = -(-Sq // 128), -(-Sk // 128)
        mask = BlockMask.from_blocks(torch.ones(shape, dtype=torch.bool, device=place), (128, 128), lengths=(Sq, Sk))

        def run(q, k, v, sinks, mask=mask):
            return block_sparse_attention(q, k, v, mask, sinks=sinks, return_lse=True)

        with named(size):
            check(run, softmax_of, tensors)


def test_packed_sequences(where):
    """Sequences of which one has Sq and Sk rows and the others none; with no sequence no row is in one."""
    place, few = where
    for size in combinations(few, sequences=3, H=2, Sq=5, Sk=7):
        B, H, Sq, Sk = size.values()
        cu = [torch.tensor([0, *[n] * B], dtype=torch.int32, device=place) for n in (Sq, Sk)]
        q, k, v = (normal(n, h, 64, device=place) for n, h in ((Sq, 2 * H), (Sk, H), (Sk, H)))

        def run(q, k, v, sinks, cu=cu):
            return attention(q, k, v, sinks=sinks, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], return_lse=True)

        def plain(q, k, v, sinks, B=B):
            if B == 0:
                return q * 0, (sinks.detach() + 0 * sinks)[:, None].expand(q.shape[1], len(q))
            out, lse = softmax_of(*(t.transpose(0, 1)[None] for t in (q, k, v)), sinks)
            return out[0].transpose(0, 1), lse[0]

        with named(size):
            check(run, plain, (q, k, v, normal(2 * H, device=place)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_caches(dtype, where):
    place, few = where
    for size in combinations(few, B=2, H=2, Sq=5, Sk=7):
        B, H, Sq, Sk = size.values()
        q, k, v = heads(B, H, Sq, Sk, place)
        k, v = k.to(dtype), v.to(dtype)
        used = min(Sk, 3)
        lengths = torch.full((B,), used, dtype=torch.int32, device=place)
        pages = [t.new_zeros(B + 1, H, 16, 64) for t in (k, v)]
        table = torch.arange(B, dtype=torch.int32, device=place)[:, None] + 1
        for page, t in zip(pages, (k, v), strict=True):
            page[1:, :, : min(Sk, 16)] = t
        wanted = softmax_of(q.double(), *(t[:, :, :used].double() for t in (k, v)))
        with named(size):
            for options in (
                {"seqused_k": lengths},
                {"seqused_k": torch.stack([lengths * 0, lengths], -1)},
                {"seqused_k": lengths, "page_table": table},
            ):
                keys = pages if "page_table" in options else (k, v)
                for mine, right in zip(attention(q, *keys, **options, return_lse=True), wanted, strict=True):
                    near(mine, right)


@pytest.mark.parametrize("form", ["plain", "causal", "mask"])
def test_sdpa(form, where, request):
    place, few = where
    if form != "causal" and "emulator" in request.node.name:
        pytest.skip("the kernels of attention and block_sparse_attention")
    for size in combinations(few, B=2, H=2, Sq=5, Sk=7):
        B, H, Sq, Sk = size.values()
        options, seen = {"enable_gqa": True}, None
        if form == "causal":
            options["is_causal"] = True
            seen = torch.ones(Sq, Sk, dtype=torch.bool, device=place).tril()
        elif form == "mask":
            seen = options["attn_mask"] = torch.ones(Sq, Sk, dtype=torch.bool, device=place).triu()
        with named(size):
            check(
                lambda *t: scaled_dot_product_attention(*t, **options), lambda *t: softmax_of(*t, seen=seen)[0],
                heads(B, H, Sq, Sk, place),
            )  # fmt: skip


def test_shards(where):
    """merge of two shards, and attention_backward of each."""
    place, few = where
    for size in combinations(few, B=2, H=2, Sq=5, Sk=7):
        B, H, Sq, Sk = size.values()
        q, k, v = heads(B, H, Sq, 2 * Sk, place)
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        wanted = softmax_of(*exact)
        shards = list(zip(k.split([Sk, Sk], 2), v.split([Sk, Sk], 2), strict=True))
        with named(size):
            out, lse = merge(*zip(*(attention(q, *kv, return_lse=True) for kv in shards), strict=True))
            near(out, wanted[0])
            near(lse, wanted[1])
            dout = torch.randn_like(out)
            found = [attention_backward(dout, q, *kv, out, lse, grad_dtype=torch.float32) for kv in shards]
            right = torch.autograd.grad(wanted[0], exact, dout.double())
            near(sum(dq for dq, *_ in found), right[0])
            for i in (1, 2):
                near(torch.cat([of_shard[i] for of_shard in found], 2), right[i])


def test_explain_of_empty_calls():
    a, b = torch.zeros(0, 8, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16)
    assert "nothing to compute" in str(cute_kernels.explain(gemm, a, b))
