"""Products with a batch of block-sparse matrices, and grouped ones, on both paths against fp64.

As in test_bsr_ops, each test also runs on the CPU, with torch in the kernels' place.
"""

import pytest
import torch

from cute_kernels import explain
from cute_kernels import functions as F
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import candidates
from cute_kernels.matmul import cost as heuristics
from cute_kernels.matmul.catalogue import configurations, linear
from cute_kernels.runtime.families import unsupported
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul

from .cases import PATTERNS, mask_to_indices
from .reference import assert_as_good_as_torch, dense_of, exact_and_torch, normal, poisoned, poisoned_empty

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = pytest.mark.parametrize("form", ["values", "patterns"])
LINEAR = pytest.mark.parametrize("linear", [False, True], ids=["matmul", "linear"])
NAMES = ("power_law", "no_blocks", "empty_rows", "bernoulli", "all_blocks")


def batch(form, block, device, *, grid=(3, 5), items=4, dtype=BF16, index_dtype=torch.int32, names=NAMES):
    """A batch whose items differ: in their values, or in their patterns too, an empty one among them."""
    (rows, cols), (bm, bk) = grid, block
    masks = [PATTERNS[names[l % len(names) if form == "patterns" else 0]](*grid) for l in range(items)]
    parts = [mask_to_indices(mask, index_dtype) for mask in masks]
    kept = round(max(1.0, max(len(col) for _, col in parts) / rows) * bk)
    shape = (items, rows * bm, cols * bk)
    if form == "values":
        crow, col = (t.to(device) for t in parts[0])
        return BsrMatrix(crow, col, normal(items, len(col), *block, dtype=dtype, device=device, k=kept), shape)
    ends = torch.tensor([len(col) for _, col in parts]).cumsum(0).tolist()
    crow = torch.stack([crow + begin for (crow, _), begin in zip(parts, [0, *ends], strict=False)]).to(device)
    col = torch.cat([col for _, col in parts]).to(device)
    return BsrMatrix(crow, col, normal(len(col), *block, dtype=dtype, device=device, k=kept), shape)


def dense(W: BsrMatrix) -> torch.Tensor:
    """(L, M, K), block by block."""
    if W.batch == "values":
        return torch.stack([dense_of(W.crow_indices, W.col_indices, v, W.shape[1:]) for v in W.values])
    return torch.stack([dense_of(crow, W.col_indices, W.values, W.shape[1:]) for crow in W.crow_indices])


def judge(op, args, exact, by_torch, W, *, out=None, **terms):
    """One product into poisoned memory against the truth; returns its plan."""
    if out is None:
        out = poisoned(*exact.shape, dtype=by_torch.dtype, device=W.device)
    plan = explain(op, *args, out=out, **terms)
    assert op(*args, out=out, **terms) is out
    assert_as_good_as_torch(out, exact, by_torch, k=W.shape[-1], plan=plan)
    return plan


def check(W, b, *, linear=False, out=None, out_dtype=None, bias=None, matrix=None, **terms):
    a, b2 = (b, dense(W).mT) if linear else (dense(W), b)
    rows = bias[:, None] if linear and bias is not None and bias.dim() == 2 else bias
    dtype = out.dtype if out is not None else out_dtype or W.dtype
    exact, by_torch = exact_and_torch(a, b2, dtype, bias=rows, **terms)
    matrix = W if matrix is None else matrix
    op, args = (bsr_linear, (b, matrix)) if linear else (bsr_matmul, (matrix, b))
    return judge(op, args, exact, by_torch, W, out=out, bias=bias, **terms)


def operand(W, n, linear=False, *, shared=False, dtype=BF16):
    """b (L, K, n), or x (L, n, K); without L if shared."""
    items, _, K = W.shape
    return normal(*(() if shared else (items,)), *((n, K) if linear else (K, n)), dtype=dtype, device=W.device)


# Batches


@LINEAR
@FORMS
@pytest.mark.parametrize("block", [(16, 16), (32, 64), (64, 64), (128, 128), (256, 64), (48, 112), (512, 112)], ids=str)
def test_block_shapes(device, path, block, form, linear):
    W = batch(form, block, device)
    plan = check(W, operand(W, 264, linear), linear=linear)
    assert (plan.facts.path, plan.facts.block.batch) == (path, form)
    assert not plan.facts.config.sweep or form == "values", "a sweep's plan is that of one pattern"


SWEEPS = candidates.sweeps(ARCHS["sm_90"])


@pytest.fixture(params=range(len(SWEEPS)), ids=lambda i: f"{SWEEPS[i]}")
def swept(request, monkeypatch):
    """Ops take this configuration of the sweep kernel; for what it does not bear, its narrower neighbour."""
    chosen = SWEEPS[request.param]
    narrow = next(c for c in SWEEPS if c.tile_n == 128 and c.cluster_m == chosen.cluster_m)
    monkeypatch.setattr(candidates, "candidates_sm90", lambda block, spec: [chosen, narrow])
    monkeypatch.setattr("sparse_collective.ops._PLANS", {})
    monkeypatch.setenv("CUTE_KERNELS_TUNED", "0")
    return chosen


@pytest.mark.sm_90
@LINEAR
@pytest.mark.parametrize("block", [(16, 16), (32, 64), (64, 64), (16, 128)], ids=str)
@pytest.mark.parametrize("names", [("power_law",), ("empty_rows",), ("no_blocks",)], ids=str)
def test_sweeps_of_one_pattern(swept, device, block, names, linear):
    """Items differ in their values alone: one plan, and the blocks of item l lie l * nnz further on."""
    W = batch("values", block, device, grid=(500 // block[0] + 1, 600 // block[1] + 2), items=3, names=names)
    items, M, _ = W.shape
    assert check(W, operand(W, 264, linear), linear=linear).facts.config.sweep
    check(W, operand(W, 264, linear, shared=True), linear=linear)
    own = normal(*((items, M) if linear else (items, M, 1)), device=device)
    plan = check(W, operand(W, 136, linear), linear=linear, bias=own, activation="gelu")
    assert plan.facts.config.sweep and plan.facts.epilogue.bias_items
    if not linear:
        residual = normal(items, M, 264, device=device)
        plan = check(W, operand(W, 264), bias=normal(264, device=device), activation="relu", residual=residual)
        assert plan.facts.config.sweep


@pytest.mark.sm_90
@pytest.mark.gpu
def test_a_sweep_over_many_tiles(swept):
    """Clusters go from one item to the next, and rings and phases with them."""
    W = batch("values", (16, 16), "cuda", grid=(60, 40), items=7, names=("power_law",))
    check(W, operand(W, 3000))
    check(W, operand(W, 3000, True, shared=True), linear=True)


PAIRS = candidates.pairs(ARCHS["sm_90"])


@pytest.fixture(params=range(len(PAIRS)), ids=lambda i: f"{PAIRS[i]}")
def paired(request, monkeypatch):
    """Ops take this configuration of pairs of block rows; for what it does not bear, the second."""
    monkeypatch.setattr(candidates, "candidates_sm90", lambda block, spec: [PAIRS[request.param], PAIRS[1]])
    monkeypatch.setattr("sparse_collective.ops._PLANS", {})
    monkeypatch.setenv("CUTE_KERNELS_TUNED", "0")


@pytest.mark.sm_90
@LINEAR
@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("names", [("power_law",), ("uniform",), ("empty_rows",), ("no_blocks",)], ids=str)
def test_pairs_of_one_pattern(paired, device, rows, names, linear):
    """A block that is absent is so in every item, and not the next item's first."""
    W = batch("values", (64, 128), device, grid=(rows, 7), items=3, names=names)
    items, M, _ = W.shape
    assert check(W, operand(W, 264, linear), linear=linear).facts.config.pairs
    check(W, operand(W, 264, linear, shared=True), linear=linear)
    own = normal(*((items, M) if linear else (items, M, 1)), device=device)
    plan = check(W, operand(W, 136, linear), linear=linear, bias=own, activation="gelu")
    assert plan.facts.config.pairs and plan.facts.epilogue.bias_items


@pytest.mark.sm_90
@pytest.mark.gpu
def test_pairs_over_many_tiles(paired):
    W = batch("values", (64, 64), "cuda", grid=(41, 30), items=5, names=("power_law",))
    check(W, operand(W, 3000))
    check(W, operand(W, 3000, True, shared=True), linear=True)


def test_sweeps_and_pairs_that_are_refused():
    spec = ARCHS["sm_90"]
    one, several = ({"batch": form, "ranks": ranks} for form, ranks in (("values", (4, 3, 3)), ("patterns", (3, 3, 3))))
    assert unsupported(linear(spec, "sm_90", SWEEPS[0], (16, 16), **one)) == ""
    assert "one pattern" in unsupported(linear(spec, "sm_90", SWEEPS[0], (16, 16), **several))
    assert "one pattern" in unsupported(linear(spec, "sm_90", SWEEPS[0], (16, 16), **one, run=256))
    assert unsupported(linear(spec, "sm_90", PAIRS[0], (64, 64), **one)) == ""
    assert "one pattern" in unsupported(linear(spec, "sm_90", PAIRS[0], (64, 64), **several))
    assert "one pattern" in unsupported(linear(spec, "sm_90", PAIRS[1], (64, 64), **one, run=256))


def test_what_is_known_of_a_batch():
    """Of one pattern as much as of one matrix, of several nothing."""
    for form in ("values", "patterns"):
        W = batch(form, (64, 64), "cpu", items=3)
        W.check_indices()
        assert (W.shares == heuristics.NOT_KNOWN) == (form == "patterns")
        if form == "values":
            single = BsrMatrix(W.crow_indices, W.col_indices, W.values[0], W.shape[1:])
            single.check_indices()
            assert W.shares == single.shares


@LINEAR
@FORMS
@pytest.mark.parametrize("block", [(64, 64), (128, 128)], ids=str)
def test_one_b_for_all_items(device, path, block, form, linear):
    W = batch(form, block, device)
    check(W, operand(W, 264, linear, shared=True), linear=linear)


@FORMS
@pytest.mark.parametrize("n", [1, 7, 8, 250])
def test_widths(device, form, n):
    W = batch(form, (64, 64), device)
    check(W, operand(W, n))
    check(W, operand(W, n, True), linear=True)


@FORMS
def test_many_uneven_rows(device, path, form):
    """More work tiles than multiprocessors; rows of one pattern are dealt by length, those of several are not."""
    W = batch(form, (64, 64), device, grid=(24, 24), items=3)
    check(W, operand(W, 520))
    assert not W.even


@FORMS
def test_even_rows(device, path, form):
    W = batch(form, (64, 64), device, names=("uniform",))
    check(W, operand(W, 264))
    assert W.even


@FORMS
@pytest.mark.parametrize("names", [("no_blocks",), ("no_blocks", "all_blocks"), ("one_full_row", "no_blocks")], ids=str)
def test_empty_items(device, path, form, names):
    """The first, the last or every item may hold nothing."""
    W = batch(form, (64, 64), device, items=3, names=names)
    check(W, operand(W, 264), bias=normal(3, W.shape[1], 1, device=device))


@FORMS
def test_one_item(device, path, form):
    W = batch(form, (64, 64), device, items=1)
    check(W, operand(W, 72))
    check(W, operand(W, 72, True, shared=True), linear=True)


@FORMS
def test_types(device, path, form):
    for dtype, out_dtype in ((FP16, FP16), (BF16, FP32)):
        W = batch(form, (64, 64), device, dtype=dtype)
        check(W, operand(W, 264, dtype=dtype), out_dtype=out_dtype)
    W = batch(form, (64, 64), device, index_dtype=torch.int64)
    assert check(W, operand(W, 264)).facts.block.index_dtype == "int64"


def test_torch_sparse_bsr(device, path):
    W = BsrMatrix.stack([batch("values", (32, 64), device, items=1).unbind()[0] for _ in range(3)])
    check(W, operand(W, 264), matrix=W.to_torch())
    check(W, operand(W, 264, True), linear=True, matrix=W.to_torch())


@FORMS
@pytest.mark.parametrize("block", [(64, 64), (48, 112)], ids=str)
def test_matmul_terms(device, path, block, form):
    W = batch(form, block, device)
    items, M, _ = W.shape
    b, residual = operand(W, 264), normal(items, M, 264, device=device)
    check(W, b, bias=normal(264, device=device), activation="gelu", residual=residual)
    check(W, b, bias=normal(M, 1, dtype=FP32, device=device), activation="silu")
    check(W, b, bias=normal(items, M, 1, dtype=FP32, device=device), activation="relu")
    check(W, b, bias=normal(items, M, 2, device=device)[:, :, 1:], residual=residual.mT.contiguous().mT)
    check(W, b, epilogue=lambda x: F.maximum(x, -0.25) * 2.0)
    out = residual.clone()
    exact, by_torch = exact_and_torch(dense(W), b, BF16, residual=residual)
    bsr_matmul(W, b, residual=out, out=out)
    assert_as_good_as_torch(out, exact, by_torch, k=W.shape[-1])


@FORMS
@pytest.mark.parametrize("block", [(64, 64), (48, 112)], ids=str)
def test_linear_terms(device, path, block, form):
    W = batch(form, block, device)
    items, M, _ = W.shape
    x = operand(W, 264, True)
    check(W, x, linear=True, bias=normal(M, device=device), activation="gelu_tanh")
    check(W, x, linear=True, bias=normal(items, M, device=device), activation="gelu")
    check(W, x, linear=True, bias=normal(items, 2 * M, dtype=FP32, device=device)[:, ::2], activation="relu")


@FORMS
def test_views(device, path, form):
    W = batch(form, (64, 64), device)
    items, M, K = W.shape
    check(W, normal(264, items, K, device=device).permute(1, 2, 0))
    check(W, normal(items, 264, K, device=device).mT)
    check(W, normal(264, items, K, device=device).transpose(0, 1), linear=True)
    check(W, operand(W, 264), out=poisoned(M, items, 264, device=device).transpose(0, 1))
    check(W, operand(W, 264, True), linear=True, out=poisoned(264, items, M, device=device).transpose(0, 1))
    check(W, operand(W, 264, True), linear=True, out=poisoned(items, M, 264, device=device).mT)
    check(W, operand(W, 264, shared=True).expand(items, K, 264))
    with poisoned_empty():
        out = bsr_matmul(W, b := operand(W, 264))
    assert_as_good_as_torch(out, *exact_and_torch(dense(W), b, BF16), k=K)


@pytest.mark.parametrize("shape", [(0, 64, 8), (64, 0, 8), (64, 64, 0)], ids=str)
def test_extents_of_zero(device, path, shape):
    m, k, n = shape
    W = BsrMatrix.stack([BsrMatrix.from_dense(torch.zeros(m, k, dtype=BF16, device=device), (16, 16))] * 3)
    bias = normal(3, m, device=device)
    out = bsr_matmul(W, normal(3, k, n, device=device), bias[:, :, None], "relu")
    assert torch.equal(out, bias[:, :, None].relu().expand(3, m, n))
    out = bsr_linear(normal(3, n, k, device=device), W, bias, "relu")
    assert torch.equal(out, bias[:, None].relu().expand(3, n, m))
    groups = torch.tensor([2, 0] if n else [], dtype=torch.int32, device=device)
    out = bsr_grouped_linear(normal(len(groups) * 64, k, device=device), W, groups, bias, "relu")
    assert torch.equal(out, bias[groups.long()].relu().repeat_interleave(64, 0))


@FORMS
def test_what_other_items_and_absent_blocks_hold_never_shows(device, path, form):
    """NaN in one item's blocks or operand stays there; what lies in b under an absent block is not read."""
    W = batch(form, (64, 64), device, items=3, names=("bernoulli", "power_law", "all_blocks"))
    b = operand(W, 264)
    exact, by_torch = exact_and_torch(dense(W), b, BF16)
    b[1] = float("nan")
    out = bsr_matmul(W, b, out=poisoned(*exact.shape, device=device))
    for l in (0, 2):
        assert_as_good_as_torch(out[l], exact[l], by_torch[l], k=W.shape[-1])


@FORMS
def test_same_bits_as_item_by_item(device, path, form):
    W = batch(form, (128, 64), device, grid=(6, 12))
    b = operand(W, 520)
    out = bsr_matmul(W, b)
    assert torch.equal(bsr_matmul(W, b), out)
    for l, item in enumerate(W.unbind()):
        exact, by_torch = exact_and_torch(item.to_dense(), b[l], BF16)
        assert_as_good_as_torch(out[l], exact, by_torch, k=W.shape[-1])


# Grouped


def grouped(W, x, groups, *, out=None, bias=None, out_dtype=None, offsets=None, group_rows=None, **terms):
    """bsr_grouped_linear against the truth, run by run; numbers out of range multiply nothing."""
    items, M, K = W.shape
    runs, numbers = len(groups), groups.long()
    known = numbers.clamp(0, items - 1)
    weights = dense(W)[known] * (known == numbers)[:, None, None]
    rows = bias[known][:, None] if bias is not None and bias.dim() == 2 else bias
    dtype = out_dtype or W.dtype
    found = exact_and_torch(x.unflatten(0, (runs, -1)), weights.mT, dtype, bias=rows, **terms)
    exact, by_torch = (t.flatten(0, 1) for t in found)
    routing = {"groups": groups} if offsets is None else {"offsets": offsets, "group_rows": group_rows}
    return judge(bsr_grouped_linear, (x, W), exact, by_torch, W, out=out, bias=bias, **routing, **terms)


def numbers(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


ROUTING = [0, 0, 2, 3, 3, 1]


@FORMS
@pytest.mark.parametrize("g", [64, 128, 192, 256])
@pytest.mark.parametrize("block", [(64, 64), (128, 128), (256, 64), (32, 32), (16, 16), (48, 112)], ids=str)
def test_grouped(device, path, block, g, form):
    W = batch(form, block, device)
    x = normal(g * len(ROUTING), W.shape[-1], device=device)
    plan = grouped(W, x, numbers(ROUTING, device))
    cfg = plan.facts.config
    assert plan.facts.path == path and g % (cfg.tile_n * cfg.cluster_n) == 0


@FORMS
def test_grouped_terms(device, path, form):
    W = batch(form, (64, 64), device, index_dtype=torch.int64)
    items, M, K = W.shape
    x, groups = normal(128 * len(ROUTING), K, device=device), numbers(ROUTING, device)
    grouped(W, x, groups, bias=normal(M, device=device), activation="relu")
    grouped(W, x, groups, bias=normal(items, M, device=device), activation="gelu")
    grouped(W, x, groups, bias=normal(items, M, dtype=FP32, device=device), epilogue=lambda x: x * F.sigmoid(x))
    out = poisoned(len(x), M, dtype=FP32, device=device)
    grouped(W, x, groups, out=out, out_dtype=FP32)
    grouped(W, x, groups, out=poisoned(M, len(x), device=device).t())


@FORMS
def test_grouped_views(device, path, form):
    W = batch(form, (64, 64), device)
    K, rows, groups = W.shape[-1], 64 * len(ROUTING), numbers(ROUTING, device)
    grouped(W, normal(K, rows, device=device).t(), groups)
    grouped(W, normal(rows, K + 64, device=device)[:, 32 : 32 + K], groups)


@FORMS
def test_numbers_out_of_range_multiply_nothing(device, path, form):
    """Padding: the epilogue of nothing, with the bias of the nearest item."""
    W = batch(form, (64, 64), device)
    groups = numbers([-1, 3, 4, 0, 2**31 - 1, -(2**31), 2], device)
    x, bias = normal(64 * len(groups), W.shape[-1], device=device), normal(4, W.shape[1], device=device)
    grouped(W, x, groups, bias=bias, activation="relu")
    assert not bsr_grouped_linear(x, W, groups)[:64].any()


@FORMS
def test_offsets(device, path, form):
    """Where each expert's rows end; empty experts, and rows that belong to none."""
    W = batch(form, (64, 64), device)
    x = normal(64 * 7, W.shape[-1], device=device)
    for ends, groups in (
        ([128, 128, 320, 448], [0, 0, 2, 2, 2, 3, 3]),
        ([0, 64, 64, 192], [1, 3, 3, 4, 4, 4, 4]),
        ([448] * 4, [0] * 7),
    ):
        grouped(W, x, numbers(groups, device), offsets=numbers(ends, device), group_rows=64)


@FORMS
def test_many_runs(device, path, form):
    W = batch(form, (128, 128), device, grid=(8, 6), items=5)
    routing = sorted(torch.randint(0, 5, (40,)).tolist())
    grouped(W, normal(128 * 40, W.shape[-1], device=device), numbers(routing, device))


def test_grouped_agrees_with_a_linear_layer(device, path):
    W = batch("values", (64, 64), device, items=2)
    x = normal(256, W.shape[-1], device=device)
    out = bsr_grouped_linear(x, W, numbers([1, 1], device))
    exact, by_torch = exact_and_torch(x, dense(W)[1].t(), BF16)
    assert_as_good_as_torch(out, exact, by_torch, k=W.shape[-1])


# What is refused


def test_refused_products(device):
    W = batch("patterns", (32, 32), device)
    items, M, K = W.shape
    for args, message in (
        (
            (W, normal(3, K, 8, device=device)),
            "W is a batch of 4 items, so b needs 2 dimensions, .* or 3 with 4 matrices",
        ),
        ((W, normal(1, K, 8, device=device)), "or 3 with 4 matrices; it has shape"),
        ((W, normal(2, items, K, 8, device=device)), "or 3 with 4 matrices"),
        ((W, normal(items, K + 32, 8, device=device)), rf"W is {M}x{K} and b .*: {K} columns of W meet {K + 32}"),
        ((W, normal(items, K, 8, device=device), normal(3, M, 1, device=device)), "bias has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            bsr_matmul(*args)
    x = normal(items, 8, K, device=device)
    for args, message in (
        ((x[:2], W), "so x needs 2 dimensions, for all of them, or 3 with 4 matrices"),
        ((x[0, 0], W), "x needs 2 dimensions"),
        ((x, W, normal(items + 1, M, device=device)), rf"must be \({M},\) or \(4, {M}\), one value an output feature"),
    ):
        with pytest.raises(ValueError, match=message):
            bsr_linear(*args)


def test_refused_grouped(device):
    W = batch("patterns", (32, 32), device)
    x, groups = normal(192, W.shape[-1], device=device), numbers([0, 1, 2], device)
    ends = numbers([64, 64, 128, 192], device)
    for change, error, message in (
        ({"W": W.unbind()[0]}, ValueError, r"W is one matrix of shape .*; pass a batch \(E, M, K\), or use bsr_linear"),
        ({"x": x[None]}, ValueError, r"x must be \(T, K\), got \(1, 192"),
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
        ({"groups": [0, 1, 2]}, TypeError, "groups must be a torch.Tensor, got list"),
        ({"groups": groups.long()}, TypeError, "groups are torch.int64; the kernels read torch.int32"),
        ({"groups": groups[None]}, ValueError, "groups must be one contiguous dimension"),
        ({"groups": numbers([0, 0, 1, 1, 2, 2], device)[::2]}, ValueError, "must be one contiguous dimension"),
        ({"groups": groups[:2]}, ValueError, "192 rows of x in 2 groups: .* a multiple of 64; pad each"),
        ({"groups": numbers([0] * 5, device)}, ValueError, "192 rows of x in 5 groups"),
        ({"groups": groups[:0]}, ValueError, "192 rows of x in 0 groups"),
        ({"groups": groups.to("meta")}, ValueError, "groups is on meta, the others on"),
        ({"groups": None}, ValueError, "give either groups or offsets"),
        ({"offsets": ends}, ValueError, "give either groups or offsets"),
        ({"group_rows": 128}, ValueError, "x has 192 rows, but 3 groups of group_rows=128 are 384"),
        ({"groups": None, "offsets": ends}, ValueError, "offsets need group_rows"),
        ({"groups": None, "offsets": ends, "group_rows": 128}, ValueError, "T a multiple of group_rows=128"),
        ({"groups": None, "offsets": ends.long(), "group_rows": 64}, ValueError, "offsets must be .E,. torch.int32"),
        ({"groups": None, "offsets": [64], "group_rows": 64}, TypeError, "offsets must be a torch.Tensor"),
        ({"bias": normal(3, W.shape[1], device=device)}, ValueError, r"bias has shape \(3, 96\), must be"),
        ({"x": x.half()}, TypeError, "x is torch.float16 but W is torch.bfloat16"),
    ):
        with pytest.raises(error, match=message):
            bsr_grouped_linear(**({"x": x, "W": W, "groups": groups} | change))


def test_wrong_indices_are_found_before_the_launch(device):
    W = batch("patterns", (32, 32), device)
    wrong = BsrMatrix(W.crow_indices - W.crow_indices[:, :1], W.col_indices, W.values, W.shape)
    for call in (
        lambda: bsr_matmul(wrong, operand(W, 8)),
        lambda: bsr_grouped_linear(normal(64, W.shape[-1], device=device), wrong, numbers([0], device)),
    ):
        with pytest.raises(ValueError, match=r"crow_indices\[\d, 0\] is 0; it must be where item \d ends"):
            call()


def test_tiles_that_span_two_runs_are_unsupported():
    spec = ARCHS["sm_90"]
    for run, widest in ((64, 64), (128, 128), (192, 192), (256, 256)):
        found = set()
        for config in configurations("sm_90", (128, 128), spec, run=run):
            reason = unsupported(linear(spec, "sm_90", config, (128, 128), batch="values", run=run))
            columns = config.tile_n * config.cluster_n
            assert (run % columns != 0) == ("columns of a tile or cluster multiply one item of W" in reason)
            found |= {columns} if not reason else set()
        assert max(found) <= widest and len(found) >= 2


# On a GPU


@pytest.mark.gpu
class TestCuda:
    def test_graph(self, path):
        """Values, tokens and routing change between replays."""
        W = batch("patterns", (64, 64), "cuda", grid=(8, 8))
        x, bias = normal(128 * 6, W.shape[-1], device="cuda"), normal(4, W.shape[1], device="cuda")
        groups, ends = numbers(ROUTING, "cuda"), numbers([128, 256, 256, 768], "cuda")
        b, out = operand(W, 264), bsr_grouped_linear(x, W, groups, bias, "relu")
        by_ends = bsr_grouped_linear(x, W, offsets=ends, group_rows=128)
        batched = bsr_matmul(W, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bsr_grouped_linear(x, W, groups, bias, "relu", out=out)
            bsr_grouped_linear(x, W, offsets=ends, group_rows=128, out=by_ends)
            bsr_matmul(W, b, out=batched)
        for routing, after in (([3, 3, 1, 0, 2, 2], [0, 384, 384, 768]), ([1] * 6, [768] * 4)):
            x.copy_(normal(*x.shape, device="cuda"))
            W.values.copy_(normal(*W.values.shape, device="cuda", k=W.shape[-1]))
            groups.copy_(numbers(routing, "cuda"))
            ends.copy_(numbers(after, "cuda"))
            for t in (out, by_ends, batched):
                t.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, bsr_grouped_linear(x, W, groups.clone(), bias, "relu"))
            assert torch.equal(by_ends, bsr_grouped_linear(x, W, offsets=ends.clone(), group_rows=128))
            assert torch.equal(batched, bsr_matmul(W, b))
            grouped(W, x, groups, bias=bias, activation="relu")

    def test_no_synchronisation(self, path):
        W = batch("patterns", (64, 64), "cuda")
        x, groups = normal(128, W.shape[-1], device="cuda"), numbers([1, 0], "cuda")
        ends = numbers([64, 64, 128, 128], "cuda")
        b = operand(W, 264)

        def calls():
            bsr_matmul(W, b)
            bsr_grouped_linear(x, W, groups)
            bsr_grouped_linear(x, W, offsets=ends, group_rows=64)

        calls()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            calls()
        finally:
            torch.cuda.set_sync_debug_mode("default")
