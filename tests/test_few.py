"""The kernel for few columns: which K-tiles its lanes load, where MMAs find them, and the ops through it.

Without a GPU the walk over a row and the placing of registers are played on the host, and the ops run with torch in
the kernels' place; with one the kernel runs.
"""

import math
from dataclasses import replace

import pytest
import torch

import cute_kernels
from cute_kernels import explain
from cute_kernels import functions as F
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import candidates
from cute_kernels.matmul import cost as heuristics
from cute_kernels.matmul.config import BlockFacts, GemmConfig
from cute_kernels.runtime.families import unsupported
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul
from sparse_collective import ops as sparse_ops

from .bsr_parts import (
    LINEAR,
    SCATTERED,
    bsr,
    check,
    check_absent_blocks,
    check_in_a_larger_buffer,
    check_same_bits,
    dense,
    multiply,
    width,
)
from .cases import PATTERNS
from .reference import assert_as_good_as_torch, exact_and_torch, normal, poisoned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = [(16, 16), (32, 64), (64, 64), (128, 128), (512, 112), (48, 16), (256, 64), (32, 32), (16, 144), (64, 256)]
TOKENS = [1, 2, 3, 7, 8, 9, 15, 16]
CONFIGS = [
    GemmConfig(m, n, 8, stages, warps, 1, few=True)
    for m, n, stages, warps in (
        (16, 8, 2, 8), (16, 16, 2, 8), (32, 16, 2, 8), (16, 8, 4, 8), (16, 8, 1, 4), (32, 8, 3, 16)
    )
]  # fmt: skip


def facts_of(config, block, **changes):
    from cute_kernels.matmul.catalogue import linear

    return linear(ARCHS["sm_90"], changes.pop("path", "sm_90"), config, block, **changes)


# -- on the host ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_k_tile_is_loaded_once_and_none_past_the_row(block, config):
    """Warps, pieces and lanes of a row walk it as multiply() does; what `valid` refuses is a repetition."""
    from sparse_collective.k_tiles import BsrKTiles
    from sparse_collective.skinny.kernel import LANES_K, FewColumns

    if block[0] % config.tile_m:
        pytest.skip("a strip lies in one block")
    kernel, steps = FewColumns(facts_of(config, block)), block[1] // 8
    for blocks in range(1, 40):
        columns = [1000 + 3 * p for p in range(7 + blocks)]
        row = BsrKTiles(columns, blocks * steps, 7, 7, 0, 0, 0, steps)
        pieces, found = -(-row.count // kernel.piece), []
        for warp in range(config.warps_m):
            for piece in range(warp, pieces, config.warps_m):
                for t in range(LANES_K):
                    for s in range(0, config.stages, kernel.span):
                        i = kernel.number(piece, 0 if kernel.uniform else t, s)
                        if kernel.whole:
                            number = i
                        else:
                            number = min(i, row.count - 1)
                        (_, k, p), (_, column) = plain(row, number)
                        assert columns[p] == column and 7 <= p < 7 + blocks
                        if kernel.valid(row, i) is not False:
                            k += t if kernel.uniform else 0
                            found += [(p, k + j * LANES_K) for j in range(kernel.span)]
        assert sorted(found) == [(7 + p, k) for p in range(blocks) for k in range(steps)]


def plain(row, i):
    """BsrKTiles.at with Python's numbers."""
    p, k = divmod(i, row.steps)
    return (row.rest_m, k, row.first + p), (k, row.col_indices[row.begin + p])


@pytest.mark.parametrize(("mmas_m", "mmas_n"), [(1, 1), (1, 2), (2, 2)])
def test_registers_of_w_and_b_meet_in_the_same_k(mmas_m, mmas_n):
    """Two MMAs m16n8k16 over what 32 lanes have loaded are the product of 32 columns."""
    from sparse_collective.skinny.kernel import a_register, b_register

    W, x = torch.randn(16 * mmas_m, 32), torch.randn(8 * mmas_n, 32)
    a, b = torch.zeros(4, mmas_m, 2, 32, 2), torch.zeros(2, mmas_n, 2, 32, 2)  # a register holds two elements
    for lane in range(32):
        g, t = divmod(lane, 4)
        for w in range(4):
            two = slice(8 * t + 2 * w, 8 * t + 2 * w + 2)
            for row in range(2 * mmas_m):
                a[(*a_register(row, w), lane)] = W[g + 8 * row, two]
            for j in range(mmas_n):
                b[(*b_register(j, w), lane)] = x[g + 8 * j, two]
    out = torch.zeros(16 * mmas_m, 8 * mmas_n)
    for half in range(2):
        for i in range(mmas_m):
            for j in range(mmas_n):
                A, B = torch.zeros(16, 16), torch.zeros(16, 8)
                for lane in range(32):  # the fragments of mma.sync.m16n8k16, as PTX defines them
                    g, t = divmod(lane, 4)
                    for r in range(4):
                        k = 2 * t + 8 * (r // 2)
                        A[g + 8 * (r % 2), k : k + 2] = a[r, i, half, lane]
                    for r in range(2):
                        B[2 * t + 8 * r : 2 * t + 8 * r + 2, g] = b[r, j, half, lane]
                out[16 * i : 16 * i + 16, 8 * j : 8 * j + 8] += A @ B
    assert torch.allclose(out, W @ x.t(), atol=1e-4)


@pytest.mark.parametrize("path", ["sm_80", "sm_90"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("n", [1, 8, 9, 16, 17, 64])
def test_it_is_chosen_for_few_columns(n, block, path):
    facts, extents = BlockFacts(*block, "int32"), heuristics.Extents(64 * block[0], n, 96 * block[1])
    find = candidates.candidates_sm90 if path == "sm_90" else candidates.candidates_sm80
    for kept in (0.05, 0.25, 1.0):
        legal = [c for c in find(facts, ARCHS["sm_90"]) if not unsupported(facts_of(c, block, path=path))]
        pick = min(legal, key=lambda c: heuristics.cost(c, extents, facts, kept, 132, b_k_major=True))
        assert n == 16 or pick.few is (n < 16)  # with 16, wide blocks and a large W are for tiles of 64 x 16 (measured)
        assert not pick.few or (pick.tile_n == 8) is (n <= 8)


def test_what_the_predicate_refuses():
    from cute_kernels.matmul.catalogue import bsr, dense

    config, spec = CONFIGS[0], ARCHS["sm_90"]
    strides = {"aligns": (8, 1, 1), "majors": ("k", "any", "any")}
    for path, arch in (("sm_90", "sm_90"), ("sm_80", "sm_90"), ("sm_80", "sm_86")):
        assert unsupported(bsr(ARCHS[arch], path, config, (16, 16))) == ""
        refused = unsupported(bsr(ARCHS[arch], path, config, (16, 16), **strides))
        assert ("TMA" in refused) if path == "sm_90" else refused == ""
    for changed, why in (
        ({"tile_m": 64}, "16 or 32 rows"),
        ({"tile_n": 32}, "8 or 16 columns"),
        ({"tile_k": 64}, "K-tiles of 8"),
        ({"cluster_n": 2}, "without clusters"),
        ({"sweep": True}, "sweeps"),
        ({"stages": 30}, "registers"),
        ({"warps_m": 64}, "at most 32"),
    ):
        assert why in unsupported(bsr(spec, "sm_90", replace(config, **changed), (32, 32)))
    assert "one block" in unsupported(bsr(spec, "sm_90", replace(config, tile_m=32), (48, 16)))
    assert "order" in unsupported(bsr(spec, "sm_90", config, (16, 16), ordered=True))
    assert "dense" in unsupported(dense(spec, "sm_90", config))
    assert "TMA" in unsupported(bsr(ARCHS["sm_80"], "sm_90", config, (16, 16)))


# -- the ops ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=CONFIGS[:4], ids=str)
def forced(request, monkeypatch):
    """Ops take this configuration; where its strips do not fit into a block, the first one."""
    for name in ("candidates_sm90", "candidates_sm80"):
        monkeypatch.setattr(candidates, name, lambda block, spec: [request.param, CONFIGS[0]])
    monkeypatch.setattr(heuristics, "cost", lambda config, *args, **kwargs: config is not request.param)
    monkeypatch.setattr(sparse_ops, "_PLANS", {})
    monkeypatch.setenv("CUTE_KERNELS_TUNED", "0")
    return request.param


def operand(W, n, device, linear, path, dtype=BF16):
    """x (n, K), or b (K, n), which is row-major where the path can read that."""
    if linear or path == "sm_80" or n == 1 or n % 8 == 0:
        return width(W, n, device, linear, dtype)
    return width(W, n, device, True, dtype).t()


def few(plan):
    assert plan.facts.config.few
    return plan


@LINEAR
@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_shapes(device, path, block, n, linear):
    W = bsr("bernoulli", block, device, grid=(3, 11), inside_nan=True)
    plan = few(check(W, operand(W, n, device, linear, path), linear=linear))
    assert (plan.facts.path, plan.facts.block.bm, plan.facts.block.bk) == (path, *block)


@LINEAR
@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_configuration(forced, block, linear):
    """More columns than the heuristics would give it, too."""
    for n in (1, 8, 16, 37):
        W = bsr("power_law", block, "cuda", grid=(9, 41))
        few(check(W, width(W, n, "cuda", linear), linear=linear))


@LINEAR
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (48, 112), (128, 128)], ids=str)
def test_patterns(device, path, block, pattern, linear):
    """Empty rows, rows of one piece, and of more than the warps take at once."""
    W = bsr(pattern, block, device, grid=(9, 33))
    few(check(W, operand(W, 5, device, linear, path), linear=linear))


@pytest.mark.gpu
def test_many_strips(path):
    W = bsr("power_law", (64, 64), "cuda", grid=(128, 96))
    for n in (1, 8, 16):
        few(check(W, width(W, n, "cuda", True), linear=True))


@LINEAR
@pytest.mark.parametrize("n", [1, 5, 16])
def test_types(device, path, linear, n):
    for dtype, out_dtype in ((FP16, FP16), (BF16, FP32), (FP16, FP32), (BF16, FP16)):
        W = bsr("bernoulli", (64, 64), device, dtype=dtype)
        few(check(W, operand(W, n, device, linear, path, dtype), linear=linear, out_dtype=out_dtype))
    W = bsr("power_law", (32, 64), device, index_dtype=torch.int64)
    assert few(check(W, operand(W, n, device, linear, path), linear=linear)).facts.block.index_dtype == "int64"


@pytest.mark.parametrize("block", [(64, 64), (48, 112)], ids=str)
@pytest.mark.parametrize("n", [1, 6, 8, 13, 16])
def test_terms(device, path, block, n):
    """Rows without blocks get the epilogue of zero."""
    W = bsr("empty_rows", block, device, grid=(4, 5))
    rows = W.shape[0]
    b, x = operand(W, n, device, False, path), width(W, n, device, True)
    few(check(W, b, bias=normal(n, device=device), activation="gelu", residual=normal(rows, n, device=device)))
    few(check(W, b, bias=normal(rows, 1, dtype=FP32, device=device), activation="silu"))
    few(check(W, b, residual=normal(n, rows, device=device).t(), epilogue=lambda x: F.maximum(x, -0.25) * 2.0))
    few(check(W, x, linear=True, bias=normal(rows, device=device), activation="gelu_tanh", out_dtype=FP32))
    few(check(W, x, linear=True, bias=normal(rows, dtype=FP32, device=device), epilogue=lambda x: x * F.sigmoid(x)))


@pytest.mark.parametrize("n", [1, 7, 16])
def test_operands_of_any_strides(device, n):
    """Vectors where B is K-major and aligned, elements elsewhere."""
    W = bsr("bernoulli", (64, 64), device)
    k = W.shape[1]
    few(check(W, normal(k, n + 3, device=device)[:, 1 : 1 + n]))
    few(check(W, normal(k, 2 * n, device=device)[:, ::2]))
    few(check(W, normal(n, k, device=device).t()))
    few(check(W, normal(n, k + 5, device=device)[:, 5:], linear=True))
    few(check(W, normal(n, k + 3, device=device)[:, :k], linear=True))
    few(check(W, normal(n, 2 * k, device=device)[:, ::2], linear=True))
    few(check(W, normal(k, n, device=device).t(), linear=True))
    few(check(W, normal(n, device=device)[:, None].expand(n, k), linear=True))


def test_batches(device, path):
    W = bsr("bernoulli", (64, 64), device)
    k = W.shape[1]
    few(check(W, normal(3, k, 8, device=device), bias=normal(W.shape[0], 1, device=device)))
    few(check(W, normal(2, 5, k, device=device), linear=True))
    few(check(W, normal(k, device=device), linear=True))


@pytest.mark.parametrize("form", ["values", "patterns"])
@LINEAR
def test_batches_of_w(device, path, form, linear):
    masks = [PATTERNS[name](4, 6) for name in ("bernoulli", "empty_rows", "power_law")]
    parts = [bsr(masks[0] if form == "values" else mask, (32, 48), device) for mask in masks]
    shape = (3, *parts[0].shape)
    if form == "values":
        values = torch.stack([part.values for part in parts])
        W = BsrMatrix(parts[0].crow_indices, parts[0].col_indices, values, shape)
    else:
        starts = torch.tensor([0, *(part.nnz for part in parts[:-1])]).cumsum(0).tolist()
        crow = torch.stack([part.crow_indices + start for part, start in zip(parts, starts, strict=True)])
        col, values = (torch.cat([getattr(part, name) for part in parts]) for name in ("col_indices", "values"))
        W = BsrMatrix(crow, col, values, shape)
    weights = torch.stack([dense(part) for part in parts])
    b = normal(3, *((8, shape[2]) if linear else (shape[2], 8)), device=device)
    bias = normal(3, shape[1], device=device)
    given = bias if linear else bias[:, :, None]
    pair = (b, weights.mT) if linear else (weights, b)
    exact, by_torch = exact_and_torch(*pair, BF16, bias=bias[:, None] if linear else given)
    out = poisoned(*exact.shape, device=device)
    op, args = (bsr_linear, (b, W)) if linear else (bsr_matmul, (W, b))
    few(explain(op, *args, bias=given, out=out))
    op(*args, bias=given, out=out)
    assert_as_good_as_torch(out, exact, by_torch, k=shape[2])


@LINEAR
@pytest.mark.parametrize("block", [(64, 64), (16, 16), (48, 112), (16, 48), (128, 128)], ids=str)
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_parts_of_b_that_no_block_touches(device, path, block, junk, linear):
    """Neither B under an absent block, nor a row's neighbours in memory, shows."""
    W = bsr(SCATTERED, block, device, inside_nan=True)
    check_absent_blocks(W, operand(W, 6, device, linear, path), junk, linear)


@LINEAR
def test_an_infinity_in_the_last_block_stays_one(device, path, linear):
    """Lanes past the end of a row multiply nothing: an infinity times their zeros would be NaN."""
    W = bsr("all_blocks", (16, 48), device, grid=(2, 3))
    W.values.abs_()
    b = operand(W, 3, device, linear, path).abs_()
    last = W.shape[1] - 8
    b.narrow(1 if linear else 0, last, 8).fill_(math.inf)
    out = multiply(W, b, linear)
    assert (out == math.inf).all()


@LINEAR
@pytest.mark.parametrize("offset", [8, 1])
def test_output_in_a_larger_buffer(device, path, offset, linear):
    W = bsr("bernoulli", (48, 112), device)
    for plan in check_in_a_larger_buffer(W, operand(W, 11, device, linear, path), offset, linear):
        few(plan)


@LINEAR
def test_same_bits_on_every_run(device, path, linear):
    W = bsr("power_law", (64, 64), device, grid=(40, 24))
    for n in (1, 16):
        check_same_bits(W, operand(W, n, device, linear, path), linear)


def test_uneven_rows_need_no_order_and_are_planned_once(emulated):
    """No table is made of the pattern, and the second call finds the plan of the first."""
    W = bsr("power_law", (64, 64), "cpu", grid=(40, 24))
    x = width(W, 4, "cpu", True)
    first = bsr_linear(x, W)
    assert not W.even and torch.equal(bsr_linear(x, W), first)
    (plan,) = sparse_ops._PLANS.values()
    assert few(plan).ordered is None and not plan.facts.ordered


def test_explain_says_which_kernel_it_is(emulated):
    W = bsr("bernoulli", (64, 64), "cpu")
    text = str(explain(bsr_linear, width(W, 3, "cpu", True), W))
    assert "few columns" in text and "element by element" not in text
    with cute_kernels.path("sm_80"):
        assert "few columns" in str(explain(bsr_linear, width(W, 3, "cpu", True), W))
