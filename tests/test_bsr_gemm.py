"""Block-sparse products beyond the conformance cases: widths, views, torch's own sparse tensors, batches, groups."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels
from cute_kernels import explain, gemm
from cute_kernels import functions as F
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.families import unsupported
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul
from sparse_collective import eager as sparse_ops
from sparse_collective.catalogue import linear as linear_facts
from sparse_collective.family import BSR

from . import emulate
from .bsr_parts import LINEAR, bsr, check, dense, width
from .cases import PATTERNS
from .conformance import FAMILIES, axes_of, case_of, cases_of, make, of_runs, run
from .reference import assert_as_good_as_torch, exact_and_torch, normal, poisoned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = pytest.mark.parametrize("form", ["values", "patterns"])


@pytest.mark.parametrize("n", [1, 7, 8, 17, 250, 264])
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (128, 128)], ids=str)
def test_widths(device, block, n):
    """Where TMA cannot read b, a kernel without it does, and explain says so. A linear layer's rows it always can."""
    W = bsr("bernoulli", block, device)
    plan = check(W, width(W, n, device))
    assert (plan.facts.family == "skinny") is (n <= 16)
    if n % 8:
        assert n == 1 or plan.facts.path == "sm_80"
        assert n == 1 or any("not on path sm_90" in note for note in plan.notes) or plan.facts.arch != "sm_90a"
    path = check(W, width(W, n, device, True), linear=True).facts.path
    assert path == explain(gemm, *(normal(64, 64, device=device) for _ in "ab")).facts.path


@pytest.mark.parametrize("pattern", ["power_law", "one_full_row", "empty_rows"])
def test_many_rows(device, path, pattern):
    """More work tiles than the GPU has multiprocessors, of very unlike lengths."""
    W = bsr(pattern, (64, 64), device, grid=(64, 24))
    check(W, width(W, 520, device))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_block(data):
    """Of any height and width that are multiples of 16, with any density, on either path."""
    sides = st.integers(1, 9).map(lambda i: 16 * i)
    op, path = data.draw(st.sampled_from(["bsr_matmul", "bsr_linear"])), data.draw(st.sampled_from(["sm_80", "sm_90"]))
    family, block = FAMILIES[f"bsr {path}"], (data.draw(sides), data.draw(sides))
    chosen = {axis: data.draw(st.sampled_from(values)) for axis, values in axes_of(family, op).items()}
    columns = data.draw(st.integers(1, 10)) * 8
    with pytest.MonkeyPatch.context() as patch:
        emulate.install(patch)
        run(case_of(family, op, chosen | {"block": block, "columns": columns, "pattern": None}, 0), "cpu")


# torch's sparse tensors


def as_torch(W):
    return torch.sparse_bsr_tensor(W.crow_indices, W.col_indices, W.values, W.shape, check_invariants=True)


@LINEAR
def test_torch_sparse_bsr(device, path, linear):
    W = bsr("bernoulli", (32, 64), device, index_dtype=torch.int64)
    t = as_torch(W)
    check(W, width(W, 264, device, linear), linear=linear, matrix=t)
    t.values().mul_(2)  # shared memory: seen by the next call
    check(W, width(W, 264, device, linear), linear=linear, matrix=t)


def test_a_torch_tensor_is_checked_once_and_not_kept(device):
    W = bsr("bernoulli", (32, 64), device)
    t = as_torch(W)
    bsr_matmul(t, width(W, 8, device))
    matrix = sparse_ops.as_bsr("bsr_matmul", t)
    assert matrix is sparse_ops.as_bsr("bsr_matmul", t) and matrix.checked
    kept = weakref.ref(t)
    del t, matrix
    gc.collect()
    assert kept() is None, "the tensor, and with it the memory of its values, is never freed"


# Terms and views


@pytest.mark.parametrize("block", [(64, 64), (48, 112)], ids=str)
def test_terms(device, path, block):
    """Empty block rows give activation(bias); residuals of the other major, and a residual that is the output."""
    W = bsr("empty_rows", block, device, grid=(4, 5))
    b, residual = width(W, 264, device), normal(W.shape[0], 264, device=device)
    check(W, b, bias=normal(1, 264, dtype=FP32, device=device))
    check(W, b, residual=normal(264, W.shape[0], device=device).t(), epilogue=lambda x: F.maximum(x, -0.25) * 2.0)
    exact, by_torch = exact_and_torch(dense(W), b, BF16, residual=residual)
    bsr_matmul(W, b, residual=residual, out=residual)
    assert_as_good_as_torch(residual, exact, by_torch, k=W.shape[1])
    x = width(W, 264, device, True)
    for activation in ("relu", "gelu_tanh"):
        check(W, x, linear=True, bias=normal(W.shape[0], device=device), activation=activation)
    check(W, x, linear=True, bias=normal(W.shape[0], dtype=FP32, device=device), epilogue=lambda x: x * F.sigmoid(x))


@pytest.mark.parametrize("batch", [(3,), (2, 3), (1,)], ids=str)
def test_batches_of_b(device, path, batch):
    W = bsr("bernoulli", (64, 64), device)
    b = normal(*batch, W.shape[1], 72, device=device)
    check(W, b, bias=normal(W.shape[0], 1, device=device), residual=normal(*batch, W.shape[0], 72, device=device))
    check(W, b[:, ::2] if len(batch) == 2 else b[::2])
    check(W, normal(*batch, 72, W.shape[1], device=device).mT)
    check(W, b[..., :1, :].expand(b.shape))
    check(W, normal(*batch, 10, W.shape[1], device=device), linear=True)


def test_views(device, path):
    W = bsr("bernoulli", (64, 64), device)
    m, k = W.shape
    check(W, normal(400, 400, device=device)[8 : 8 + k, 64:328])
    check(W, normal(3, 400, 400, device=device)[1, :200, 16 : 16 + k], linear=True)
    check(W, normal(k, device=device), linear=True)
    check(W, normal(1, k + 7, device=device)[:, :k], linear=True)
    check(W, normal(5, 2, 3, k, device=device)[1:3], linear=True)


def test_views_without_alignment(device):
    W = bsr("bernoulli", (64, 64), device)
    k = W.shape[1]
    for b in (normal(k, 401, device=device)[:, 1:265], normal(k, 528, device=device)[:, ::2]):
        assert check(W, b).facts.path == "sm_80"
        assert check(W, b.t(), linear=True).facts.path == "sm_80"


def test_leading_dimensions_that_do_not_fold(device, path):
    """x is copied, out is copied to, and explain says so; nothing around out is written."""
    W = bsr("bernoulli", (64, 64), device)
    m, k = W.shape
    plan = check(W, normal(3, 10, k, device=device).transpose(0, 1), linear=True)
    assert any("x is copied" in note for note in plan.notes)
    for out in (poisoned(3, 10, m, device=device).transpose(0, 1), poisoned(10, 5, m + 8, device=device)[:, :3, :m]):
        x = normal(10, 3, k, device=device)
        plan = check(W, x, linear=True, out=out)
        assert plan.staged and any("out is copied to" in note for note in plan.notes)
    out = poisoned(3, 2, m, 40, device=device).transpose(0, 1)
    plan = check(W, normal(2, 3, k, 40, device=device), out=out)
    assert plan.staged and any("out is copied to" in note for note in plan.notes)


# Extents of 0


@pytest.mark.parametrize("items", [None, 3])
@pytest.mark.parametrize("shape", [(0, 64, 8), (64, 0, 8), (64, 64, 0), (0, 0, 0)], ids=str)
def test_extents_of_zero(device, path, shape, items):
    m, k, n = shape
    W = BsrMatrix.from_dense(torch.zeros(m, k, dtype=BF16, device=device), (16, 16))
    lead = () if items is None else (items,)
    W = W if items is None else BsrMatrix.stack([W] * items)
    bias = normal(*lead, m, device=device)
    out = bsr_matmul(W, normal(*lead, k, n, device=device), bias[..., None], "relu")
    assert torch.equal(out, bias[..., None].relu().expand(*lead, m, n))
    out = bsr_linear(normal(*lead, n, k, device=device), W, bias, "relu")
    assert torch.equal(out, bias[..., None, :].relu().expand(*lead, n, m))
    if items:
        groups = torch.tensor([2, 0] if n else [], dtype=torch.int32, device=device)
        out = bsr_grouped_linear(normal(len(groups) * 64, k, device=device), W, groups, bias, "relu")
        assert torch.equal(out, bias[groups.long()].relu().repeat_interleave(64, 0))


@pytest.mark.parametrize("side", [16, 64])
def test_no_columns_of_w(device, path, side):
    """K = 0: x of one dimension is one row; and any number of columns, on either path."""
    W = BsrMatrix.from_dense(torch.zeros(64, 0, dtype=BF16, device=device), (side, side))
    bias = normal(64, device=device)
    out = poisoned(64, device=device)
    assert bsr_linear(normal(0, device=device), W, bias, "relu", out=out) is out and torch.equal(out, bias.relu())
    for n in (1, 5, 8, 12):
        out = bsr_matmul(W, normal(0, n, device=device), bias[:, None], out=poisoned(64, n, device=device))
        assert torch.equal(out, bias[:, None].expand(64, n))
        out = bsr_linear(normal(n, 1, 0, device=device), W, bias, out=poisoned(n, 1, 64, device=device))
        assert torch.equal(out, bias.expand(n, 1, 64))


# Plans and indices


def test_one_kernel_for_all_patterns(device, path):
    """Neither pattern nor shape is compiled in: with equal counts of blocks, one plan serves both matrices."""
    one, other = (bsr(mask, (64, 64), device) for mask in (PATTERNS["banded"](4, 4), PATTERNS["banded"](4, 4).flip(0)))
    b = width(one, 264, device)
    assert check(one, b).facts == check(other, b).facts


def test_wrong_indices_are_found_before_the_launch(device, path):
    """The plan of these facts is known, the next matrix is still checked."""
    W = bsr("all_blocks", (64, 64), device)
    b = width(W, 264, device)
    bsr_matmul(W, b)
    with pytest.raises(ValueError, match="sorted and without duplicates|col_indices"):
        bsr_matmul(BsrMatrix(W.crow_indices, W.col_indices.flip(0), W.values, W.shape), b)
    W, _ = batch("patterns", device)
    wrong = BsrMatrix(W.crow_indices - W.crow_indices[:, :1], W.col_indices, W.values, W.shape)
    for call in (
        lambda: bsr_matmul(wrong, normal(W.shape[-1], 8, device=device)),
        lambda: bsr_grouped_linear(normal(64, W.shape[-1], device=device), wrong, numbers([0], device)),
    ):
        with pytest.raises(ValueError, match=r"crow_indices\[\d, 0\] is 0; it must be where item \d ends"):
            call()


@pytest.mark.gpu
def test_unchecked_indices_in_a_graph(path):
    W = bsr("power_law", (64, 64), "cuda")
    b = width(W, 264, "cuda")
    bsr_matmul(W, b)
    fresh = BsrMatrix(W.crow_indices, W.col_indices, W.values, W.shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="check_indices.. before the capture"):
        torch.zeros(1, device="cuda")
        bsr_matmul(fresh, b)


def test_uneven_rows_run_on_all_multiprocessors(monkeypatch):
    """CTAs that divide the rows are for rows of one length: a CTA meets the same ones in every panel."""
    emulate.install(monkeypatch)
    seen = []
    call = emulate.Emulated.__call__
    monkeypatch.setattr(emulate.Emulated, "__call__", lambda self, *args: (seen.append(args[-1]), call(self, *args)))
    even = PATTERNS["uniform"](64, 8)
    uneven = even.clone()
    uneven[0] = True
    b = normal(1024, 384)
    for mask in (even, uneven):
        W = bsr(mask, (128, 128), "cpu")
        bsr_matmul(W, b)
        assert W.even is (mask is even)
        bsr_matmul(W.to(FP16), b.to(FP16))
    assert seen == [128, 128, 132, 132]


# Batches of W, and grouped products


def batch(form, device, block=(64, 64), names=("power_law", "no_blocks", "empty_rows", "all_blocks"), grid=(3, 5)):
    """(W, the dense (L, M, K)): its items differ in their values, or in their patterns too."""
    items = [bsr(names[l if form == "patterns" else 0], block, device, grid=grid) for l in range(len(names))]
    if form == "patterns":
        W = BsrMatrix.stack(items)
    else:
        values = torch.stack([normal(*items[0].values.shape, device=device, k=320) for _ in items])
        W = BsrMatrix(items[0].crow_indices, items[0].col_indices, values, (len(items), *items[0].shape))
    return W, torch.stack([dense(item) for item in W.unbind()])


def judge(op, args, exact, by_torch, *, out=None, **terms):
    out = poisoned(*exact.shape, dtype=by_torch.dtype, device=exact.device) if out is None else out
    plan = explain(op, *args, out=out, **terms)
    assert op(*args, out=out, **terms) is out
    assert_as_good_as_torch(out, exact, by_torch, k=320, plan=plan)
    return plan


@FORMS
def test_views_of_batches(device, path, form):
    """One b for all items, and operands and outputs in any order of dimensions."""
    W, weights = batch(form, device)
    L, M, K = W.shape
    for b in (
        normal(K, 264, device=device), normal(K, 264, device=device).expand(L, K, 264),
        normal(L, 264, K, device=device).mT, normal(264, L, K, device=device).permute(1, 2, 0),
    ):  # fmt: skip
        judge(bsr_matmul, (W, b), *exact_and_torch(weights, b, BF16))
        judge(bsr_linear, (b.mT, W), *exact_and_torch(b.mT, weights.mT, BF16))
    b, out = normal(L, K, 264, device=device), poisoned(M, L, 264, device=device).transpose(0, 1)
    judge(bsr_matmul, (W, b), *exact_and_torch(weights, b, BF16), out=out)
    own = normal(L, 2 * M, dtype=FP32, device=device)[:, ::2]
    terms = exact_and_torch(b.mT, weights.mT, BF16, bias=own[:, None])
    judge(bsr_linear, (b.mT, W), *terms, bias=own, out=poisoned(264, L, M, device=device).transpose(0, 1))
    judge(bsr_matmul, (W, b), *exact_and_torch(weights, b, BF16, bias=own[..., None]), bias=own[..., None])


@FORMS
@pytest.mark.parametrize("names", [("no_blocks",) * 3, ("no_blocks", "all_blocks"), ("one_full_row", "no_blocks")])
def test_empty_items(device, path, form, names):
    """The first, the last or every item may hold nothing; one item is a batch, too."""
    for some in (names, names[:1]):
        W, weights = batch(form, device, names=some)
        L, M, K = W.shape
        b, bias = normal(L, K, 264, device=device), normal(L, M, 1, device=device)
        judge(bsr_matmul, (W, b), *exact_and_torch(weights, b, BF16, bias=bias), bias=bias)


@FORMS
def test_many_uneven_and_even_rows_of_a_batch(device, path, form):
    """More work tiles than multiprocessors; rows of one pattern are dealt by length, those of several are not."""
    for names, even in ((("power_law", "bernoulli", "all_blocks"), False), (("uniform",) * 3, True)):
        W, weights = batch(form, device, names=names, grid=(24, 24))
        b = normal(3, W.shape[2], 520, device=device)
        judge(bsr_matmul, (W, b), *exact_and_torch(weights, b, BF16))
        assert W.even is even


def test_torch_batches(device, path):
    W = BsrMatrix.stack([bsr("power_law", (32, 64), device) for _ in range(3)])
    weights = torch.stack([dense(item) for item in W.unbind()])
    b = normal(3, W.shape[2], 264, device=device)
    judge(bsr_matmul, (W.to_torch(), b), *exact_and_torch(weights, b, BF16))
    judge(bsr_linear, (b.mT, W.to_torch()), *exact_and_torch(b.mT, weights.mT, BF16))


def numbers(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


ENDS = {  # where each of 4 experts' 64-row runs end; empty experts, and rows that belong to none
    (128, 128, 320, 448): [0, 0, 2, 2, 2, 3, 3],
    (0, 64, 64, 192): [1, 3, 3, 4, 4, 4, 4],
    (448,) * 4: [0] * 7,
    None: [-1, 3, 4, 0, 2**31 - 1, -(2**31), 2],  # out of range: nothing is multiplied, the bias is the nearest item's
}


@FORMS
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_groups_and_offsets(device, path, form, ends):
    W, weights = batch(form, device)
    x, groups = normal(64 * 7, W.shape[-1], device=device), numbers(ENDS[ends], device)
    bias = normal(4, W.shape[1], device=device)
    left, right, rows = of_runs(x, weights, groups, bias[:, None])
    exact, by_torch = (t.flatten(0, 1) for t in exact_and_torch(left, right, BF16, bias=rows, activation="relu"))
    routing = {"groups": groups} if ends is None else {"offsets": numbers(ends, device), "group_rows": 64}
    judge(bsr_grouped_linear, (x, W), exact, by_torch, bias=bias, activation="relu", **routing)
    out = bsr_grouped_linear(x, W, **routing)
    outside = torch.tensor([not 0 <= item < 4 for item in ENDS[ends]], device=device).repeat_interleave(64)
    assert not out[outside].any()


@pytest.mark.gpu
def test_offsets_in_a_graph(path):
    """They change between replays, and nothing is read on the host."""
    W, _ = batch("patterns", "cuda", grid=(8, 8))
    x, ends = normal(768, W.shape[-1], device="cuda"), numbers([128, 256, 256, 768], "cuda")
    out = bsr_grouped_linear(x, W, offsets=ends, group_rows=128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bsr_grouped_linear(x, W, offsets=ends, group_rows=128)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bsr_grouped_linear(x, W, offsets=ends, group_rows=128, out=out)
    for after in ([0, 384, 384, 768], [768] * 4):
        ends.copy_(numbers(after, "cuda"))
        graph.replay()
        assert torch.equal(out, bsr_grouped_linear(x, W, offsets=ends.clone(), group_rows=128))


def test_tiles_of_a_grouped_product_lie_in_one_run(emulated):
    for case in cases_of(FAMILIES["bsr sm_90"], "bsr_grouped_linear")[:20]:
        call = make(case)
        with cute_kernels.path("sm_90"):
            cfg = explain(call.op, *call.args, **call.terms).facts.config
        assert case.signature.run % (cfg.tile_n * cfg.cluster_n) == 0
    spec = ARCHS["sm_90"]
    for rows in (64, 128, 192, 256):
        found = set()
        for config in BSR.candidates("sm_90", BlockFacts(128, 128, "int32", "values", rows), spec):
            reason = unsupported(linear_facts(spec, "sm_90", config, (128, 128), batch="values", run=rows))
            columns = config.tile_n * config.cluster_n
            assert (rows % columns != 0) == ("columns of a tile or cluster multiply one item of W" in reason)
            found |= {columns} if not reason else set()
        assert max(found) <= rows and len(found) >= 2
