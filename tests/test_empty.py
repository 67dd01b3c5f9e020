"""Every op with each dimension of size 0 in turn, forward and backward: torch's shapes and numbers."""

import math

import pytest
import torch

import cute_kernels
from attention import BlockMask, attention, block_sparse_attention
from cute_kernels import Sparse24, gemm, prune_2_4, quantize
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

ACTIVATIONS = {None: lambda z: z, "gelu": torch.nn.functional.gelu, "relu": torch.relu}


def check(run, plain, tensors, compiled=False):
    """run(*tensors) and its gradients against plain(*tensors), in fp64. Results may be several."""
    mine, theirs = ([t.detach().to(d).requires_grad_() for t in tensors] for d in (None, torch.float64))
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)
    found, want = run(*mine), plain(*theirs)
    found, want = ((r,) if isinstance(r, torch.Tensor) else r for r in (found, want))
    for y, right in zip(found, want, strict=True):
        near(y, right)
    dys = [torch.randn_like(y) for y in found]
    gradients = torch.autograd.grad(found, mine, dys)
    right = torch.autograd.grad(want, theirs, [dy.double() for dy in dys], allow_unused=True)
    for g, exact, t in zip(gradients, right, mine, strict=True):
        assert g is not None and g.dtype == t.dtype
        near(g, torch.zeros_like(t) if exact is None else exact)


def near(found, right):
    assert found.shape == right.shape
    largest = right.abs().max().item() if right.isfinite().all() and right.numel() else 1.0
    torch.testing.assert_close(found.double(), right.double(), rtol=0.03, atol=0.03 * max(largest, 1.0))


def sizes(**extents):
    """The extents with each of them 0 in turn, and with all of them 0."""
    return [*({**extents, name: 0} for name in extents), dict.fromkeys(extents, 0)]


def label(value):
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None


# ---------------------------------------------------------------------- gemm


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", sizes(M=16, K=24, N=8), ids=label)
def test_gemm(size, activation, compiled, place, request):
    M, K, N = size.values()
    if compiled and (activation != "gelu" or "emulated" in request.node.name):
        pytest.skip("as gelu, and as on the CPU")
    a, b, bias, rows, residual = (
        normal(*shape, device=place) for shape in ((M, K), (K, N), (N,), (M, 1), (M, N))
    )  # fmt: skip
    act = ACTIVATIONS[activation]

    def run(a, b, bias, residual):
        return gemm(a, b, bias=bias, residual=residual, activation=activation, alpha=0.5, beta=2.0)

    check(run, lambda a, b, bias, r: act(0.5 * a @ b + bias + 2 * r), (a, b, bias, residual), compiled)
    check(lambda a, b, bias: gemm(a, b, bias=bias), lambda a, b, bias: a @ b + bias, (a, b, rows), compiled)


@pytest.mark.parametrize("size", sizes(L=2, M=16, K=24, N=8), ids=label)
def test_gemm_of_batches(size, place):
    L, M, K, N = size.values()
    for a, b in (((L, M, K), (K, N)), ((L, M, K), (L, K, N)), ((M, K), (L, K, N)), ((3, 1, M, K), (L, K, N))):
        tensors = normal(*a, device=place), normal(*b, device=place), normal(N, device=place)
        check(
            lambda a, b, bias: gemm(a, b, bias=bias, activation="gelu"),
            lambda a, b, bias: torch.nn.functional.gelu(a @ b + bias),
            tensors,
        )


@pytest.mark.parametrize("size", sizes(M=32, K=64, N=8), ids=label)
def test_gemm_without_gradients(size, place):
    """For FP8 operands, with scales and an FP8 output; and of a Sparse24."""
    M, K, N = size.values()
    a, b = normal(M, K, device=place), normal(K, N, device=place)
    for per_a, per_b in (("tensor", "tensor"), ("row", "column"), ("1x128", "128x128")):
        (qa, sa), (qb, sb) = quantize(a, per=per_a), quantize(b, per=per_b)
        near(gemm(qa, qb, scale_a=sa, scale_b=sb), torch.zeros(M, N, device=place))
    y, amax = gemm(a, b, out_dtype=torch.float8_e4m3fn, return_amax=True)
    assert y.shape == (M, N) and not y.float().any() and amax.item() == 0
    if M and K or not M and not K:
        near(gemm(Sparse24.from_dense(prune_2_4(a)), b), a @ b)


# ---------------------------------------------------------------------- block-sparse products


def matrix(rows: int, columns: int, device, density=0.6) -> BsrMatrix:
    if rows and columns:
        generator = torch.Generator().manual_seed(1)
        W = random_bsr((rows, columns), (16, 16), density=density, generator=generator).to(device)
        return W.with_values(normal(*W.values.shape, device=device))
    none = torch.zeros(0, dtype=torch.int32, device=device)
    return BsrMatrix(none.new_zeros(rows // 16 + 1), none, none.new_zeros(0, 16, 16).bfloat16(), (rows, columns))


BSR = sizes(M=48, K=32, N=8)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [*BSR, {"M": 48, "K": 32, "N": 8, "blocks": 0}], ids=label)
def test_bsr(size, activation, view, compiled, place, request):
    if compiled and (activation != "gelu" or "emulated" in request.node.name):
        pytest.skip("as gelu, and as on the CPU")
    M, K, N = list(size.values())[:3]
    W = matrix(M, K, place, 0.0 if "blocks" in size else 0.6)
    if "blocks" in size:
        W = BsrMatrix(W.crow_indices.new_zeros(4), W.col_indices[:0], W.values[:0], (M, K))
    act = ACTIVATIONS[activation]
    m, k = (K, M) if view else (M, K)

    def of(values):
        A = W.with_values(values)
        return A.t() if view else A

    def dense(values):
        whole = values.new_zeros(M // 16, K // 16, 16, 16)
        whole = whole.index_put((W.row_of_block().long(), W.col_indices.long()), values).transpose(1, 2).reshape(M, K)
        return whole.t() if view else whole

    def tensors(*shapes):
        return W.values, *(normal(*shape, device=place) for shape in shapes)

    check(
        lambda v, b, bias, r: bsr_matmul(of(v), b, bias=bias, activation=activation, residual=r),
        lambda v, b, bias, r: act(dense(v) @ b + bias + r), tensors((k, N), (N,), (m, N)), compiled,
    )  # fmt: skip
    check(
        lambda v, b, bias: bsr_matmul(of(v), b, bias=bias, activation=activation),
        lambda v, b, bias: act(dense(v) @ b + bias), tensors((2, k, N), (m, 1)), compiled,
    )  # fmt: skip
    for shape in ((N, k), (2, N, k), (k,)) if not compiled else ((N, k),):
        check(
            lambda v, x, bias: bsr_linear(x, of(v), bias=bias, activation=activation),
            lambda v, x, bias: act(x @ dense(v).mT + bias), tensors(shape, (m,)), compiled,
        )  # fmt: skip


@pytest.mark.parametrize("size", sizes(H=64, K=32, N=8), ids=label)
def test_gated(size, place):
    H, K, N = size.values()
    W = matrix(2 * H, K, place)

    def plain(values, x):
        whole = values.new_zeros(2 * H // 16, K // 16, 16, 16)
        whole = whole.index_put((W.row_of_block().long(), W.col_indices.long()), values).transpose(1, 2)
        gate, up = (x @ whole.reshape(2 * H, K).mT).unflatten(-1, (H // 64, 2, 64)).unbind(-2)
        return (torch.nn.functional.silu(gate) * up).reshape(*x.shape[:-1], H)

    tensors = W.values, normal(N, K, device=place)
    check(lambda values, x: bsr_gated_linear(x, W.with_values(values)), plain, tensors)
    near(bsr_gated_linear(tensors[1], W), plain(*tensors))


@pytest.mark.parametrize("view", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("form", ["values", "patterns"])
@pytest.mark.parametrize("size", sizes(M=48, K=32, N=64), ids=label)
def test_batches_and_experts(size, form, view, place):
    M, K, N = size.values()
    W = matrix(M, K, place)
    if form == "values":
        values = torch.stack([W.values] * 2)
        W = BsrMatrix(W.crow_indices, W.col_indices, values, (2, M, K))
    else:
        W = BsrMatrix.stack([W, W])
    m, k = (K, M) if view else (M, K)

    def of(values):
        A = W.with_values(values)
        return A.t() if view else A

    def dense(values):
        rows, cols = M // 16, K // 16
        single = matrix(M, K, place)
        at = single.row_of_block().long(), single.col_indices.long()
        parts = values if form == "values" else values.unflatten(0, (2, len(values) // 2))
        whole = [v.new_zeros(rows, cols, 16, 16).index_put(at, v).transpose(1, 2).reshape(M, K) for v in parts]
        return torch.stack(whole).mT if view else torch.stack(whole)

    def tensors(*shapes):
        return W.values, *(normal(*shape, device=place) for shape in shapes)

    for x in ((2, N, k), (N, k)):
        check(
            lambda v, x, bias: bsr_linear(x, of(v), bias=bias, activation="gelu"),
            lambda v, x, bias: torch.nn.functional.gelu(x @ dense(v).mT + bias[:, None]), tensors(x, (2, m)),
        )  # fmt: skip
    groups = torch.tensor([1, 0], dtype=torch.int32, device=place)[: 2 * bool(N)]

    def experts(v, x, bias):
        return bsr_grouped_linear(x, of(v), expert_ids=groups, bias=bias, activation="gelu")

    def plain(v, x, bias):
        runs = [x[i * N : (i + 1) * N] @ dense(v)[g].mT + bias[g] for i, g in enumerate(groups.tolist())]
        return torch.nn.functional.gelu(torch.cat(runs) if runs else x @ dense(v)[0].mT + bias[0])

    check(experts, plain, tensors((2 * N, k), (2, m)))


@pytest.mark.parametrize("size", sizes(M=48, K=32, N=64), ids=label)
def test_sddmm(size, place):
    M, K, N = size.values()
    pattern = matrix(M, N, place)
    a, b = normal(M, K, device=place), normal(K, N, device=place)
    blocks = (a.double() @ b.double()).unflatten(0, (M // 16, 16)).unflatten(2, (N // 16, 16)).transpose(1, 2)
    want = blocks[pattern.row_of_block().long(), pattern.col_indices.long()]
    near(sddmm(a, b, pattern), want)
    ones = torch.ones_like(want).bfloat16()
    near(sddmm(a, b, pattern, out=ones.clone(), accumulate=True), want + 1)
    near(sddmm(a, b, pattern, out=ones.clone()), want)


# ---------------------------------------------------------------------- attention


def softmax_of(q, k, v, sinks=None, seen=None, bias=None):
    """(out, lse) of fp64 tensors; rows that see nothing are 0."""
    per_head = q.shape[1] // max(k.shape[1], 1)
    k, v = (t.repeat_interleave(per_head, 1) for t in (k, v))
    s = q @ k.mT / math.sqrt(max(q.shape[-1], 1))
    s = s if bias is None else s + bias
    s = s if seen is None else s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    p = torch.softmax(s, -1).nan_to_num() if s.shape[-1] else s
    return p[..., : k.shape[2]] @ v, s.logsumexp(-1)


ATTENTION = [*sizes(B=2, H=2, Sq=5, Sk=7, D=64, Dv=64), {"B": 2, "H": 2, "Sq": 0, "Sk": 0, "D": 64, "Dv": 64}]


def heads(size, device):
    B, H, Sq, Sk, D, Dv = size.values()
    return tuple(normal(*shape, device=device) for shape in ((B, 2 * H, Sq, D), (B, H, Sk, D), (B, H, Sk, Dv)))


def refused(size, place, request) -> bool:
    """Head dimensions of 0 have no kernels; where something is to be computed the call says so."""
    kernel = place == "cuda" or "emulated" in request.node.name
    *rest, D, Dv = size.values()
    return kernel and 0 in (D, Dv) and 0 not in rest


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["plain", "causal, sinks", "score_mod"])
@pytest.mark.parametrize("size", ATTENTION, ids=label)
def test_attention(size, form, compiled, place, request):
    if compiled and (form == "plain" or "emulated" in request.node.name):
        pytest.skip("as the others, and as on the CPU")
    tensors = heads(size, place)
    (_, H, Sq, _), Sk = tensors[0].shape, tensors[1].shape[2]
    seen = torch.ones(Sq, Sk, dtype=torch.bool, device=place)
    run, plain = lambda *t: attention(*t, return_lse=True), softmax_of
    if form == "causal, sinks":
        tensors += (normal(H, device=place),)
        seen = seen.tril(Sk - Sq)

        def run(q, k, v, sinks):
            return attention(q, k, v, sinks=sinks, causal=True, return_lse=True)

        def plain(q, k, v, sinks):
            return softmax_of(q, k, v, sinks, seen)

    elif form == "score_mod":
        tensors += (normal(8, device=place),)

        def run(q, k, v, table):
            return attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j], return_lse=True)

        def plain(q, k, v, table):
            return softmax_of(q, k, v, bias=table[:Sk])

    if refused(size, place, request):
        with pytest.raises(Exception, match="head_dim 0; kernels exist for"):
            run(*tensors)
        return
    check(run, plain, tensors, compiled)
    if form == "plain":
        near(attention(*tensors), softmax_of(*(t.double() for t in tensors))[0])


@pytest.mark.parametrize("size", ATTENTION, ids=label)
def test_block_sparse_attention(size, place, request):
    tensors = (*heads(size, place), normal(2 * size["H"], device=place))
    Sq, Sk = size["Sq"], size["Sk"]
    shape = -(-Sq // 128), -(-Sk // 128)
    mask = BlockMask.from_blocks(torch.ones(shape, dtype=torch.bool, device=place), (128, 128), lengths=(Sq, Sk))

    def run(q, k, v, sinks):
        return block_sparse_attention(q, k, v, mask, sinks=sinks, return_lse=True)

    if refused(size, place, request):
        with pytest.raises(ValueError, match="head_dim 0; kernels exist for"):
            run(*tensors)
        return
    check(run, softmax_of, tensors)


@pytest.mark.parametrize("size", sizes(H=2, Sq=5, Sk=7), ids=label)
def test_packed_sequences(size, place):
    H, Sq, Sk = size.values()
    ends = [torch.tensor([0, 0, n, n], dtype=torch.int32, device=place) for n in (Sq, Sk)]
    q, k, v = (normal(n, h, 64, device=place) for n, h in ((Sq, 2 * H), (Sk, H), (Sk, H)))

    def run(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], return_lse=True)

    def plain(q, k, v, sinks):
        out, lse = softmax_of(*(t.transpose(0, 1)[None] for t in (q, k, v)), sinks)
        return out[0].transpose(0, 1), lse[0]

    check(run, plain, (q, k, v, normal(2 * H, device=place)))


@pytest.mark.parametrize("size", sizes(B=2, H=2, Sq=5, Sk=7), ids=label)
def test_caches(size, place):
    B, H, Sq, Sk = size.values()
    q, k, v = heads({**size, "D": 64, "Dv": 64}, place)
    lengths = torch.full((B,), min(Sk, 3), dtype=torch.int32, device=place)
    for found in (
        attention(q, k, v, seqused_k=lengths, return_lse=True),
        attention(q, k, v, seqused_k=torch.stack([lengths * 0, lengths], -1), return_lse=True),
    ):
        for mine, right in zip(found, softmax_of(q.double(), k[:, :, :3].double(), v[:, :, :3].double()), strict=True):
            near(mine, right)


def test_explain_of_empty_calls():
    a, b = torch.zeros(0, 8, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16)
    assert "nothing to compute" in str(cute_kernels.explain(gemm, a, b))
