"""bsr_matmul and bsr_linear on both paths: block shapes, patterns, widths, terms and views against fp64.

Each op test also runs on the CPU, with torch in the kernels' place (the `device` fixture): that checks the host side.
"""

import gc
import math
import weakref

import pytest
import torch

import cute_kernels
from cute_kernels import explain, gemm
from cute_kernels import functions as F
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import candidates
from cute_kernels.matmul.config import BlockFacts
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul
from sparse_collective import ops as sparse_ops

from . import emulate
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
from .reference import assert_as_good_as_torch, exact_and_torch, normal, poisoned, poisoned_empty

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = [
    (16, 16),
    (32, 32),
    (32, 64),
    (64, 64),
    (128, 128),
    (128, 64),
    (64, 256),
    (256, 64),
    (48, 112),
    (512, 112),
    (16, 48),
    (192, 64),
    (80, 16),
]
PATTERN_NAMES = ("uniform", "empty_rows", "one_full_row", "power_law", "no_blocks", "all_blocks")


@LINEAR
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_shapes(device, path, block, linear):
    W = bsr("bernoulli", block, device, inside_nan=True)
    plan = check(W, width(W, 264, device, linear), linear=linear)
    assert (plan.facts.path, plan.facts.block.bm, plan.facts.block.bk) == (path, *block)


@LINEAR
@pytest.mark.parametrize("pattern", PATTERN_NAMES)
@pytest.mark.parametrize("block", [(64, 64), (128, 128), (48, 112)], ids=str)
def test_patterns(device, path, block, pattern, linear):
    """The rows of a pattern differ in length; empty ones come out as zeros, not as what was there before."""
    W = bsr(pattern, block, device, grid=(9, 7))
    check(W, width(W, 264, device, linear), linear=linear)


@pytest.mark.parametrize("pattern", ["power_law", "one_full_row", "empty_rows"])
def test_many_rows(device, path, pattern):
    """More work tiles than the GPU has multiprocessors, of very unlike lengths."""
    W = bsr(pattern, (64, 64), device, grid=(64, 24))
    check(W, width(W, 520, device))


@pytest.mark.parametrize("n", [1, 7, 8, 250, 264])
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (128, 128)], ids=str)
def test_widths(device, block, n):
    """Any number of columns; where TMA cannot read b, a kernel without it does, and explain says so."""
    W = bsr("bernoulli", block, device)
    plan = check(W, width(W, n, device))
    assert plan.facts.config.few is (n <= 16)
    if n in (7, 250):
        assert plan.facts.path == "sm_80"
        assert any("not on path sm_90" in note for note in plan.notes) or plan.facts.arch != "sm_90a"
    if n in (1, 8, 264):
        with cute_kernels.path("sm_80"):
            check(W, width(W, n, device))


@pytest.mark.parametrize("tokens", [1, 7, 8, 250, 264])
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (128, 128)], ids=str)
def test_tokens(device, path, block, tokens):
    """A linear layer's rows are 16-byte aligned for any number of tokens."""
    W = bsr("bernoulli", block, device)
    assert check(W, width(W, tokens, device, True), linear=True).facts.path == path


BLOCK_CONFIGS = [
    pytest.param(name, block, str(config), marks=getattr(pytest.mark, name), id=f"{name}-{block}-{config}")
    for name in ("sm_80", "sm_90")
    for block in ((16, 16), (64, 64), (128, 112), (256, 64))
    for config in getattr(candidates, f"candidates_{name.replace('_', '')}")(
        BlockFacts(*block, "int32"), ARCHS["sm_90"]
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "block", "config"), BLOCK_CONFIGS)
def test_every_configuration(monkeypatch, name, block, config):
    """Each candidate of the heuristics for four kinds of blocks, whatever the cost model picks."""
    listing = f"candidates_{name.replace('_', '')}"
    find = getattr(candidates, listing)
    monkeypatch.setattr(candidates, listing, lambda *args: [c for c in find(*args) if str(c) == config])
    monkeypatch.setattr(sparse_ops, "_PLANS", {})
    with cute_kernels.path(name):
        for pattern in ("power_law", "empty_rows"):
            W = bsr(pattern, block, "cuda", grid=(17, 7))
            assert str(check(W, width(W, 1032, "cuda")).facts.config) == config


TYPES = [(FP16, FP16, False), (FP16, FP16, True), (BF16, FP32, False), (FP16, FP32, True), (BF16, FP16, False)]


@pytest.mark.parametrize(("dtype", "out_dtype", "linear"), TYPES)
def test_types(device, path, dtype, out_dtype, linear):
    W = bsr("bernoulli", (64, 64), device, dtype=dtype)
    check(W, width(W, 264, device, linear, dtype), linear=linear, out_dtype=out_dtype)


@LINEAR
def test_int64_indices(device, path, linear):
    W = bsr("power_law", (64, 64), device, index_dtype=torch.int64)
    assert check(W, width(W, 264, device, linear), linear=linear).facts.block.index_dtype == "int64"


@LINEAR
def test_torch_sparse_bsr(device, path, linear):
    W = bsr("bernoulli", (32, 64), device, index_dtype=torch.int64)
    t = torch.sparse_bsr_tensor(W.crow_indices, W.col_indices, W.values, W.shape)
    check(W, width(W, 264, device, linear), linear=linear, matrix=t)
    t.values().mul_(2)  # shared memory: seen by the next call
    check(W, width(W, 264, device, linear), linear=linear, matrix=t)


def test_a_torch_tensor_is_checked_once(device):
    W = bsr("bernoulli", (32, 64), device)
    t = torch.sparse_bsr_tensor(W.crow_indices, W.col_indices, W.values, W.shape)
    bsr_matmul(t, width(W, 8, device))
    matrix = sparse_ops.as_bsr("bsr_matmul", t)
    assert matrix is sparse_ops.as_bsr("bsr_matmul", t) and matrix.checked


def test_a_torch_tensor_is_not_kept(device):
    W = bsr("bernoulli", (32, 64), device)
    t = torch.sparse_bsr_tensor(W.crow_indices, W.col_indices, W.values, W.shape)
    bsr_matmul(t, width(W, 8, device))
    kept = weakref.ref(t)
    del t
    gc.collect()
    assert kept() is None, "the tensor, and with it the memory of its values, is never freed"


# Terms


@pytest.mark.parametrize("block", [(64, 64), (48, 112)], ids=str)
def test_matmul_terms(device, path, block):
    W = bsr("empty_rows", block, device, grid=(4, 5))
    b, residual = width(W, 264, device), normal(W.shape[0], 264, device=device)
    check(W, b, bias=normal(264, device=device), activation="gelu", residual=residual)
    check(W, b, bias=normal(1, 264, dtype=FP32, device=device))
    check(W, b, bias=normal(W.shape[0], 1, dtype=FP32, device=device), activation="silu")
    check(W, b, residual=normal(264, W.shape[0], device=device).t(), epilogue=lambda x: F.maximum(x, -0.25) * 2.0)
    out = residual.clone()
    exact, by_torch = exact_and_torch(dense(W), b, BF16, residual=residual)
    bsr_matmul(W, b, residual=out, out=out)
    assert_as_good_as_torch(out, exact, by_torch, k=W.shape[1])


@pytest.mark.parametrize("block", [(64, 64), (48, 112)], ids=str)
def test_linear_terms(device, path, block):
    """An empty block row gives activation(bias), not zero."""
    W = bsr("empty_rows", block, device, grid=(4, 5))
    x = width(W, 264, device, True)
    for activation in ("relu", "gelu_tanh"):
        check(W, x, linear=True, bias=normal(W.shape[0], device=device), activation=activation)
    check(W, x, linear=True, bias=normal(W.shape[0], dtype=FP32, device=device), epilogue=lambda x: x * F.sigmoid(x))


# Views


@pytest.mark.parametrize("batch", [(3,), (2, 3), (1,)], ids=str)
def test_batches(device, path, batch):
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
    check(W, normal(264, k, device=device).t())
    check(W, normal(k, 264, device=device).t(), linear=True)
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


@LINEAR
@pytest.mark.parametrize("offset", [8, 1])
def test_output_in_a_larger_buffer(device, path, offset, linear):
    """Row tiles that hang over the end of a block, and column tiles over the end of the row, write nothing there."""
    W = bsr("bernoulli", (48, 112), device)
    check_in_a_larger_buffer(W, width(W, 264, device, linear), offset, linear)


@LINEAR
def test_output_of_its_own(device, path, linear):
    W = bsr("empty_rows", (64, 64), device, grid=(4, 5))
    b = width(W, 264, device, linear)
    exact, by_torch = exact_and_torch(*((b, dense(W).t()) if linear else (dense(W), b)), BF16)
    with poisoned_empty():
        out = multiply(W, b, linear)
    assert_as_good_as_torch(out, exact, by_torch, k=W.shape[1])


@pytest.mark.parametrize("shape", [(0, 64, 8), (64, 0, 8), (64, 64, 0), (0, 0, 0)], ids=str)
def test_extents_of_zero(device, path, shape):
    m, k, n = shape
    W = BsrMatrix.from_dense(torch.zeros(m, k, dtype=BF16, device=device), (16, 16))
    bias = normal(m, 1, device=device)
    out = bsr_matmul(W, normal(k, n, device=device), bias, "relu")
    assert out.shape == (m, n) and torch.equal(out, bias.relu().expand(m, n))
    out = bsr_linear(normal(n, k, device=device), W, bias[:, 0], "relu")
    assert out.shape == (n, m) and torch.equal(out, bias.relu().t().expand(n, m))


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


def test_batches_of_out_that_do_not_flatten(device, path):
    """bsr_matmul and gemm copy to it, and explain says so."""
    W = bsr("bernoulli", (64, 64), device)
    (m, k), b = W.shape, normal(2, 3, W.shape[1], 40, device=device)
    out = poisoned(3, 2, m, 40, device=device).transpose(0, 1)
    plan = check(W, b, out=out)
    assert plan.staged and any("out is copied to" in note for note in plan.notes)
    a, out = normal(2, 3, 24, k, device=device), poisoned(3, 2, 24, 40, device=device).transpose(0, 1)
    assert gemm(a, b, out=out) is out and explain(gemm, a, b, out=out).staged
    assert_as_good_as_torch(out, *exact_and_torch(a, b, BF16), k=k)


# What must not be touched


@LINEAR
@pytest.mark.parametrize("block", [(64, 64), (48, 112), (16, 16), (32, 32), (128, 64), (80, 16), (64, 144)], ids=str)
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_parts_of_b_that_no_block_touches(device, path, block, junk, linear):
    """W's zeros are absent, not multiplied: what lies in b under an absent block never shows."""
    W = bsr(SCATTERED, block, device)
    check_absent_blocks(W, width(W, 264, device, linear), junk, linear)


@pytest.mark.parametrize("block", [(64, 64), (48, 112), (16, 16), (80, 16)], ids=str)
def test_a_spoilt_block_stays_in_its_row(device, path, block):
    W = bsr("all_blocks", block, device, grid=(3, 3))
    b = width(W, 264, device)
    exact, by_torch = exact_and_torch(dense(W), b, BF16)
    W.values[4] = float("nan")  # block (1, 1)
    out = bsr_matmul(W, b, out=poisoned(*exact.shape, device=device))
    bm = block[0]
    assert out[bm : 2 * bm].isnan().all()
    for part in (slice(0, bm), slice(2 * bm, 3 * bm)):
        assert_as_good_as_torch(out[part], exact[part], by_torch[part], k=W.shape[1])


def test_nothing_outside_b_is_read(device, path):
    W = bsr("all_blocks", (48, 112), device)
    k = W.shape[1]
    for linear in (False, True):
        rows, cols = (264, k) if linear else (k, 264)
        buffer = poisoned(rows + 64, cols + 64, device=device)
        view = buffer[16 : 16 + rows, 24 : 24 + cols]
        view.copy_(normal(rows, cols, device=device))
        check(W, view, linear=linear)


# Calls that repeat


@LINEAR
def test_same_bits_on_every_run(device, path, linear):
    W = bsr("power_law", (64, 64), device, grid=(40, 24))
    check_same_bits(W, width(W, 520, device, linear), linear)


def test_one_kernel_for_all_patterns(device, path):
    """Neither pattern nor shape is compiled in: with equal counts of blocks, one plan serves both matrices."""
    one, other = (bsr(mask, (64, 64), device) for mask in (PATTERNS["banded"](4, 4), PATTERNS["banded"](4, 4).flip(0)))
    b = width(one, 264, device)
    assert check(one, b).facts == check(other, b).facts


def test_wrong_indices_are_found_before_the_launch(device, path):
    W = bsr("all_blocks", (64, 64), device)
    b = width(W, 264, device)
    bsr_matmul(W, b)  # the plan of these facts is known, the next matrix is still checked
    wrong = BsrMatrix(W.crow_indices, W.col_indices.flip(0), W.values, W.shape)
    with pytest.raises(ValueError, match="sorted and without duplicates|col_indices"):
        bsr_matmul(wrong, b)


@pytest.mark.gpu
class TestCuda:
    def test_graph(self, path):
        W = bsr("power_law", (64, 64), "cuda", grid=(8, 8))
        x, bias = width(W, 264, "cuda", True), normal(W.shape[0], device="cuda")
        out = bsr_linear(x, W, bias, "relu")  # compiled, loaded and checked before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bsr_linear(x, W, bias, "relu", out=out)
        for _ in range(3):
            x.copy_(width(W, 264, "cuda", True))
            W.values.copy_(normal(*W.values.shape, device="cuda", k=W.shape[1]))
            out.fill_(float("nan"))
            graph.replay()
            exact, by_torch = exact_and_torch(x, dense(W).t(), BF16, bias=bias, activation="relu")
            assert_as_good_as_torch(out, exact, by_torch, k=W.shape[1])

    def test_unchecked_indices_in_a_graph(self, path):
        W = bsr("power_law", (64, 64), "cuda")
        b = width(W, 264, "cuda")
        bsr_matmul(W, b)
        fresh = BsrMatrix(W.crow_indices, W.col_indices, W.values, W.shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="check_indices.. before the capture"):
            torch.zeros(1, device="cuda")
            bsr_matmul(fresh, b)

    def test_current_stream(self, path):
        W = bsr("bernoulli", (64, 64), "cuda")
        b = width(W, 264, "cuda")
        expected, late = bsr_matmul(W, b), torch.zeros_like(b)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(b)
            out = bsr_matmul(W, late)
        stream.synchronize()
        assert torch.equal(out, expected)

    def test_no_synchronisation(self, path):
        W = bsr("bernoulli", (64, 64), "cuda")
        b = width(W, 264, "cuda")
        bsr_matmul(W, b)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            bsr_matmul(W, b)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_uneven_rows_run_on_all_multiprocessors(monkeypatch):
    """CTAs that divide the rows are for rows of one length: a CTA meets the same ones in every panel."""
    emulate.install(monkeypatch)
    seen = []
    run = emulate.Emulated.__call__
    monkeypatch.setattr(emulate.Emulated, "__call__", lambda self, *args: (seen.append(args[-1]), run(self, *args)))
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
