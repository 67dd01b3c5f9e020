"""Block-sparse products beyond the conformance cases: widths, views, torch's own sparse tensors, batches, groups."""

import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import explain, gemm
from cute_kernels import functions as F
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.runtime.families import unsupported
from cute_kernels.testing.patterns import PATTERNS
from cute_kernels.testing.reference import normal, poisoned
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul
from sparse_collective import dispatch as sparse_ops
from sparse_collective.bsr_gemm.catalogue import linear as linear_facts
from sparse_collective.bsr_gemm.family import BSR

from .. import host_emulation
from ..conformance import FAMILIES, axes_of, case_of, cases_of
from ..gemm_calls import check
from ..gemm_cases import make, run
from .bsr_parts import BOTH_OPS, FORMS, batch, bsr, operands, parts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH_FORMS = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("n", [1, 7, 8, 17, 250, 264])
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (128, 128)], ids=str)
def test_widths(device, block, n):
    """If TMA cannot read b, a kernel without it does, and explain says so. A linear layer's rows it always can."""
    W = bsr("bernoulli", block, device)
    plan = check(bsr_matmul, *operands(bsr_matmul, W, n))
    assert (plan.facts.family == "skinny") is (n <= 16)
    if n % 8 and n > 1:
        assert plan.facts.path == "sm_80"
        assert any("not on path sm_90" in note for note in plan.notes) or plan.facts.arch != "sm_90a"
    path = check(bsr_linear, *operands(bsr_linear, W, n)).facts.path
    assert path == explain(gemm, *(normal(64, 64, device=device) for _ in "ab")).facts.path


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_block(data):
    """For any height and width that are multiples of 16, with any density, on either path."""
    sides = st.integers(1, 9).map(lambda i: 16 * i)
    op, path = data.draw(st.sampled_from(["bsr_matmul", "bsr_linear"])), data.draw(st.sampled_from(["sm_80", "sm_90"]))
    family, block = FAMILIES[f"bsr {path}"], (data.draw(sides), data.draw(sides))
    chosen = {axis: data.draw(st.sampled_from(values)) for axis, values in axes_of(family, op).items()}
    columns = data.draw(st.integers(1, 10)) * 8
    with pytest.MonkeyPatch.context() as patch:
        host_emulation.install(patch)
        run(case_of(family, op, chosen | {"block": block, "columns": columns, "pattern": None}, 0), "cpu")


# Calls: (op, *args) or (op, *args, terms); `n` draws on W's device


def terms(n):
    """Empty block rows give activation(bias); residuals of the other major."""
    for block in ((64, 64), (48, 112)):
        W = bsr("empty_rows", block, n.keywords["device"], grid=(4, 5))
        m, k = W.shape
        yield bsr_matmul, W, n(k, 264), {"bias": n(1, 264, dtype=FP32)}
        yield bsr_matmul, W, n(k, 264), {"residual": n(264, m).t(), "epilogue": lambda x: F.maximum(x, -0.25) * 2.0}
        yield bsr_linear, n(264, k), W, {"bias": n(m), "activation": "gelu_tanh"}
        yield bsr_linear, n(264, k), W, {"bias": n(m, dtype=FP32), "epilogue": lambda x: x * F.sigmoid(x)}


def batches_of_b(n):
    W = bsr("bernoulli", (64, 64), n.keywords["device"])
    m, k = W.shape
    for lead in ((3,), (2, 3), (1,)):
        b = n(*lead, k, 72)
        yield bsr_matmul, W, b, {"bias": n(m, 1), "residual": n(*lead, m, 72)}
        yield bsr_matmul, W, b[:, ::2] if len(lead) == 2 else b[::2]
        yield bsr_matmul, W, n(*lead, 72, k).mT
        yield bsr_matmul, W, b[..., :1, :].expand(b.shape)
        yield bsr_linear, n(*lead, 10, k), W


def views(n):
    W = bsr("bernoulli", (64, 64), n.keywords["device"])
    m, k = W.shape
    yield bsr_matmul, W, n(400, 400)[8 : 8 + k, 64:328]
    yield bsr_linear, n(3, 400, 400)[1, :200, 16 : 16 + k], W
    yield bsr_linear, n(k), W
    yield bsr_linear, n(1, k + 7)[:, :k], W
    yield bsr_linear, n(5, 2, 3, k)[1:3], W


def views_of_batches(n):
    """One b for all items, and operands and outputs in any order of dimensions."""
    for form in FORMS:
        W, _ = batch(form, device=n.keywords["device"])
        L, m, k = W.shape
        for b in (n(k, 264), n(k, 264).expand(L, k, 264), n(L, 264, k).mT, n(264, L, k).permute(1, 2, 0)):
            yield bsr_matmul, W, b
            yield bsr_linear, b.mT, W
        b, own = n(L, k, 264), n(L, 2 * m, dtype=FP32)[:, ::2]
        yield bsr_matmul, W, b, {"out": n(m, L, 264).transpose(0, 1)}
        yield bsr_linear, b.mT, W, {"bias": own, "out": n(264, L, m).transpose(0, 1)}
        yield bsr_matmul, W, b, {"bias": own[..., None]}


def empty_items(n):
    """The first, the last or every item may hold nothing; one item is a batch, too."""
    for form in FORMS:
        for names in (("no_blocks",) * 3, ("no_blocks", "all_blocks"), ("one_full_row", "no_blocks")):
            for some in (names, names[:1]):
                W, _ = batch(form, device=n.keywords["device"], names=some)
                L, m, k = W.shape
                yield bsr_matmul, W, n(L, k, 264), {"bias": n(L, m, 1)}


@pytest.mark.parametrize("calls", [terms, batches_of_b, views, views_of_batches, empty_items])
def test_calls(device, path, calls):
    for op, *args in calls(partial(normal, device=device)):
        check(op, *args[:2], **dict(*args[2:]))


def test_a_residual_may_be_the_output(device, path):
    W, b = operands(bsr_matmul, bsr("empty_rows", (64, 64), device), 264)
    residual = normal(W.shape[0], 264, device=device)
    expected = bsr_matmul(W, b, residual=residual.clone())
    assert torch.equal(bsr_matmul(W, b, residual=residual, out=residual), expected)


def test_views_without_alignment(device):
    W = bsr("bernoulli", (64, 64), device)
    for b in (normal(320, 401, device=device)[:, 1:265], normal(320, 528, device=device)[:, ::2]):
        assert check(bsr_matmul, W, b).facts.path == check(bsr_linear, b.t(), W).facts.path == "sm_80"


def test_leading_dimensions_that_do_not_fold(device, path):
    """x is copied, out is copied to, and explain says so; nothing around out is written."""
    W = bsr("bernoulli", (64, 64), device)
    m, k = W.shape
    plan = check(bsr_linear, normal(3, 10, k, device=device).transpose(0, 1), W)
    assert any("x is copied" in note for note in plan.notes)
    x, b = normal(10, 3, k, device=device), normal(2, 3, k, 40, device=device)
    for op, args, out in (
        (bsr_linear, (x, W), poisoned(3, 10, m, device=device).transpose(0, 1)),
        (bsr_linear, (x, W), poisoned(10, 5, m + 8, device=device)[:, :3, :m]),
        (bsr_matmul, (W, b), poisoned(3, 2, m, 40, device=device).transpose(0, 1)),
    ):
        plan = check(op, *args, out=out)
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
    out = bsr_matmul(W, normal(*lead, k, n, device=device), bias=bias[..., None], activation="relu")
    assert torch.equal(out, bias[..., None].relu().expand(*lead, m, n))
    out = bsr_linear(normal(*lead, n, k, device=device), W, bias=bias, activation="relu")
    assert torch.equal(out, bias[..., None, :].relu().expand(*lead, n, m))
    if items:
        groups = torch.tensor([2, 0] if n else [], dtype=torch.int32, device=device)
        out = bsr_grouped_linear(
            normal(len(groups) * 64, k, device=device), W, expert_ids=groups, bias=bias, activation="relu"
        )
        assert torch.equal(out, bias[groups.long()].relu().repeat_interleave(64, 0))


@pytest.mark.parametrize("side", [16, 64])
def test_no_columns_of_w(device, path, side):
    """K = 0: x of one dimension is one row; and any number of columns, on either path."""
    W = BsrMatrix.from_dense(torch.zeros(64, 0, dtype=BF16, device=device), (side, side))
    bias = normal(64, device=device)
    check(bsr_linear, normal(0, device=device), W, bias=bias, activation="relu")
    for n in (1, 5, 8, 12):
        check(bsr_matmul, W, normal(0, n, device=device), bias=bias[:, None])
        check(bsr_linear, normal(n, 1, 0, device=device), W, bias=bias)


# Plans and indices


def test_one_kernel_for_all_patterns(device, path):
    """Neither pattern nor shape is compiled in: with equal counts of blocks, one plan serves both matrices."""
    b = normal(256, 264, device=device)
    masks = PATTERNS["banded"](4, 4), PATTERNS["banded"](4, 4).flip(0)
    assert len({check(bsr_matmul, bsr(mask, (64, 64), device), b).facts for mask in masks}) == 1


@pytest.mark.gpu
def test_unchecked_indices_in_a_graph(path):
    W, b = operands(bsr_matmul, bsr("power_law", (64, 64), "cuda"), 264)
    bsr_matmul(W, b)
    indices = {"crow_indices": W.crow_indices.clone(), "col_indices": W.col_indices.clone()}
    fresh, graph = BsrMatrix(**parts(W, **indices)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="check_indices.. before the capture"):
        torch.zeros(1, device="cuda")
        bsr_matmul(fresh, b)


def test_uneven_rows_run_on_all_multiprocessors(emulated, monkeypatch):
    """CTAs that divide the rows are for rows of one length: a CTA meets the same ones in every panel."""
    seen, call = [], host_emulation.Emulated.__call__
    monkeypatch.setattr(
        host_emulation.Emulated, "__call__", lambda self, *args: (seen.append(args[-1]), call(self, *args))
    )
    even = PATTERNS["uniform"](64, 8)
    uneven = even.clone()
    uneven[0] = True
    b = normal(1024, 384)
    for mask in (even, uneven):
        W = bsr(mask, (128, 128))
        bsr_matmul(W, b)
        assert W.even is (mask is even)
        bsr_matmul(W.to(FP16), b.to(FP16))
    assert seen == [128, 128, 132, 132]


@BOTH_FORMS
def test_many_uneven_and_even_rows_of_a_batch(device, path, form):
    """More work tiles than multiprocessors; rows of one pattern are ordered by length, those of several are not."""
    for names, even in ((("power_law", "bernoulli", "all_blocks"), False), (("uniform",) * 3, True)):
        W, _ = batch(form, device=device, names=names, grid=(24, 24))
        check(bsr_matmul, W, normal(3, W.shape[2], 520, device=device))
        assert W.even is even


# torch's sparse tensors


@BOTH_OPS
def test_torch_sparse_bsr(device, path, op):
    W = bsr("bernoulli", (32, 64), device, index_dtype=torch.int64)
    t = torch.sparse_bsr_tensor(W.crow_indices, W.col_indices, W.values, W.shape, check_invariants=True)
    batched = BsrMatrix.stack([bsr("power_law", (32, 64), device) for _ in range(3)]).to_torch()
    for matrix in (t, batched, t):
        args = [matrix if isinstance(arg, BsrMatrix) else arg for arg in operands(op, W, 264)]
        check(op, *args)
        matrix.values().mul_(2)  # shared memory: seen by the next call


def test_a_torch_tensor_is_checked_once_and_not_kept(device):
    t = bsr("bernoulli", (32, 64), device).to_torch()
    bsr_matmul(t, normal(320, 8, device=device))
    matrix = sparse_ops.as_bsr("bsr_matmul", t)
    assert matrix is sparse_ops.as_bsr("bsr_matmul", t) and matrix.checked
    kept = weakref.ref(t)
    del t, matrix
    gc.collect()
    assert kept() is None, "the tensor, and with it the memory of its values, is never freed"


# Grouped products


def numbers(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


ENDS = {  # where each of 4 experts' 64-row runs end; empty experts, and rows that belong to none
    (128, 128, 320, 448): [0, 0, 2, 2, 2, 3, 3],
    (0, 64, 64, 192): [1, 3, 3, 4, 4, 4, 4],
    (448,) * 4: [0] * 7,
    None: [-1, 3, 4, 0, 2**31 - 1, -(2**31), 2],  # out of range: nothing is multiplied, the bias is the nearest item's
}


@BOTH_FORMS
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_groups_and_offsets(device, path, form, ends):
    W, _ = batch(form, device=device)
    x, groups = normal(64 * 7, W.shape[-1], device=device), numbers(ENDS[ends], device)
    fused = {"bias": normal(4, W.shape[1], device=device), "activation": "relu"}
    check(bsr_grouped_linear, x, W, expert_ids=groups, **fused)
    out = bsr_grouped_linear(x, W, expert_ids=groups)
    if ends:
        routing = {"offs": numbers(ends, device), "group_rows": 64}
        assert torch.equal(bsr_grouped_linear(x, W, **routing), out)
        assert torch.equal(
            bsr_grouped_linear(x, W, **routing, **fused), bsr_grouped_linear(x, W, expert_ids=groups, **fused)
        )
    outside = torch.tensor([not 0 <= item < 4 for item in ENDS[ends]], device=device).repeat_interleave(64)
    assert not out[outside].any()


@pytest.mark.gpu
def test_offsets_in_a_graph(path):
    """They change between replays, and nothing is read on the host."""
    W, _ = batch("patterns", device="cuda", grid=(8, 8))
    x, ends = normal(768, W.shape[-1], device="cuda"), numbers([128, 256, 256, 768], "cuda")
    out = bsr_grouped_linear(x, W, offs=ends, group_rows=128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bsr_grouped_linear(x, W, offs=ends, group_rows=128)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bsr_grouped_linear(x, W, offs=ends, group_rows=128, out=out)
    for after in ([0, 384, 384, 768], [768] * 4):
        ends.copy_(numbers(after, "cuda"))
        graph.replay()
        assert torch.equal(out, bsr_grouped_linear(x, W, offs=ends.clone(), group_rows=128))


def test_tiles_of_a_grouped_product_lie_in_one_run(emulated):
    for case in cases_of(FAMILIES["bsr sm_90"], "bsr_grouped_linear")[:20]:
        config = make(case).plan().facts.config
        assert case.signature.run % (config.tile_n * config.cluster_n) == 0
    spec = ARCHS["sm_90"]
    for rows in (64, 128, 192, 256):
        found = set()
        for config in BSR.candidates("sm_90", BlockFacts(128, 128, "int32", "values", rows), spec):
            reason = unsupported(linear_facts(spec, "sm_90", config, (128, 128), batch="values", run=rows))
            columns = config.tile_n * config.cluster_n
            assert (rows % columns != 0) == ("columns of a tile or cluster multiply one matrix of W" in reason)
            found |= {columns} if not reason else set()
        assert max(found) <= rows and len(found) >= 2
