"""Skinny products, of 16 columns or fewer: which K-tiles lanes load, where MMAs find them, and when they are chosen.

Without a GPU the walk over a row and the placing of registers are played on the host.
"""

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels import explain
from cute_kernels.arch import ARCHS
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.runtime.families import unsupported
from sparse_collective import bsr_linear
from sparse_collective import eager as sparse_ops
from sparse_collective.catalogue import bsr as bsr_facts
from sparse_collective.catalogue import linear as linear_facts
from sparse_collective.k_tiles import BsrKTiles
from sparse_collective.skinny.config import SkinnyConfig
from sparse_collective.skinny.family import SKINNY
from sparse_collective.skinny.kernel import LANES_K, SkinnyKernel, a_register, b_register

from .bsr_parts import LINEAR, bsr, check, multiply, picked, width
from .cases import PATTERNS
from .reference import normal

BLOCKS = [(16, 16), (32, 64), (64, 64), (128, 128), (512, 112), (48, 16), (256, 64), (32, 32), (16, 144), (64, 256)]
CONFIGS = [SkinnyConfig(*shape) for shape in ((16, 8, 2, 8), (16, 16, 2, 8), (32, 16, 2, 8), (16, 8, 4, 8))]
CONFIGS += [SkinnyConfig(16, 8, 1, 4), SkinnyConfig(32, 8, 3, 16)]


def facts_of(config, block, path="sm_90"):
    return linear_facts(ARCHS["sm_90"], path, config, block)


# -- on the host ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "block"),
    [(config, block) for config in CONFIGS for block in BLOCKS if block[0] % config.tile_m == 0],
    ids=str,  # a strip lies in one block
)
def test_every_k_tile_is_loaded_once_and_none_past_the_row(block, config):
    """Warps, pieces and lanes of a row walk it as multiply() does; what `valid` refuses is a repetition."""
    kernel, steps = SkinnyKernel(facts_of(config, block)), block[1] // 8
    for blocks in range(1, 40):
        columns = [1000 + 3 * p for p in range(7 + blocks)]
        row = BsrKTiles(columns, blocks * steps, 7, 7, 0, 0, 0, steps)
        pieces, found = -(-row.count // kernel.piece), []
        for warp in range(config.warps):
            for piece in range(warp, pieces, config.warps):
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
    for density in (0.05, 0.25, 1.0):
        pick = picked(block, (64 * block[0], n, 96 * block[1]), density, path=path, b_k_major=True)
        few = pick.family == "skinny"
        assert n == 16 or few is (n < 16)  # with 16, wide blocks and a large W are for tiles of 64 x 16 (measured)
        assert not few or (pick.config.tile_n == 8) is (n <= 8)


def test_what_the_predicate_refuses():
    config, spec = CONFIGS[0], ARCHS["sm_90"]
    strides = {"aligns": (8, 1, 1), "majors": ("k", "any", "any")}
    for path, arch in (("sm_90", "sm_90"), ("sm_80", "sm_90"), ("sm_80", "sm_86")):
        assert unsupported(bsr_facts(ARCHS[arch], path, config, (16, 16))) == ""
        refused = unsupported(bsr_facts(ARCHS[arch], path, config, (16, 16), **strides))
        assert ("TMA" in refused) if path == "sm_90" else refused == ""
    for changed, why in (
        ({"tile_m": 64}, "16 or 32 rows"), ({"tile_n": 32}, "8 or 16 columns"), ({"stages": 30}, "registers"),
        ({"warps": 64}, "at most 32"),
    ):  # fmt: skip
        assert why in unsupported(bsr_facts(spec, "sm_90", replace(config, **changed), (32, 32)))
    assert "one block" in unsupported(bsr_facts(spec, "sm_90", replace(config, tile_m=32), (48, 16)))
    assert "order" in unsupported(bsr_facts(spec, "sm_90", config, (16, 16), ordered=True))
    assert "TMA" in unsupported(bsr_facts(ARCHS["sm_80"], "sm_90", config, (16, 16)))


# -- the ops ----------------------------------------------------------------------------------------------------


@LINEAR
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 15, 16])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_few_columns_take_this_kernel(device, path, block, n, linear):
    """On either path, where nothing forces it. A row-major b of odd width is no operand of the sm_90 path."""
    W = bsr("bernoulli", block, device, grid=(3, 11), inside_nan=True)
    b = width(W, n, device, linear)
    if not linear and path == "sm_90" and n != 1 and n % 8:
        b = width(W, n, device, True).t()
    facts = check(W, b, linear=linear).facts
    assert facts.family == "skinny" and (facts.path, facts.block.bm, facts.block.bk) == (path, *block)


@LINEAR
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (48, 112), (128, 128)], ids=str)
def test_patterns(device, path, block, pattern, linear):
    """Empty rows, rows of one piece, and of more than the warps take at once."""
    W = bsr(pattern, block, device, grid=(9, 33))
    b = width(W, 5, device, True)
    assert check(W, b if linear else b.t(), linear=linear).facts.family == "skinny"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations_that_are_no_candidates(monkeypatch, path, config):
    monkeypatch.setattr(SKINNY, "candidates", lambda path, block, spec: [config])
    monkeypatch.setattr(sparse_ops, "_PLANS", PlanCache())
    monkeypatch.setenv("CUTE_KERNELS_TUNED", "0")
    for block in BLOCKS:
        if block[0] % config.tile_m == 0:
            W = bsr("power_law", block, "cuda", grid=(9, 41))
            for n, linear in ((1, False), (8, True), (16, False), (37, True)):
                check(W, width(W, n, "cuda", linear), linear=linear)


@pytest.mark.gpu
def test_many_strips(path):
    W = bsr("power_law", (64, 64), "cuda", grid=(128, 96))
    for n in (1, 8, 16):
        assert check(W, width(W, n, "cuda", True), linear=True).facts.family == "skinny"


@pytest.mark.parametrize("n", [1, 7, 16])
def test_operands_of_any_strides(device, n):
    """Vectors where B is K-major and aligned, elements elsewhere."""
    W = bsr("bernoulli", (64, 64), device)
    k = W.shape[1]
    for b in (normal(k, n + 3, device=device)[:, 1 : 1 + n], normal(k, 2 * n, device=device)[:, ::2]):
        assert check(W, b).facts.family == "skinny"
    for x in (
        normal(n, k + 5, device=device)[:, 5:], normal(n, k + 3, device=device)[:, :k],
        normal(n, 2 * k, device=device)[:, ::2], normal(k, n, device=device).t(),
        normal(n, device=device)[:, None].expand(n, k), normal(2, 5, k, device=device), normal(k, device=device),
    ):  # fmt: skip
        assert check(W, x, linear=True).facts.family == "skinny"


@LINEAR
def test_an_infinity_in_the_last_block_stays_one(device, path, linear):
    """Lanes past the end of a row multiply nothing: an infinity times their zeros would be NaN."""
    W = bsr("all_blocks", (16, 48), device, grid=(2, 3))
    W.values.abs_()
    b = width(W, 3, device, True).abs_()
    b[:, W.shape[1] - 8 :] = math.inf
    out = multiply(W, b if linear else b.t(), linear)
    assert (out == math.inf).all()


def test_uneven_rows_need_no_order_and_are_planned_once(emulated):
    """No table is made of the pattern, and the second call finds the plan of the first."""
    W = bsr("power_law", (64, 64), "cpu", grid=(40, 24))
    x = width(W, 4, "cpu", True)
    first = bsr_linear(x, W)
    assert not W.even and torch.equal(bsr_linear(x, W), first)
    (plan,) = sparse_ops._PLANS.plans.values()
    assert plan.facts.family == "skinny" and plan.ordered is None and not plan.facts.ordered


def test_explain_says_which_kernel_it_is(emulated, path):
    W = bsr("bernoulli", (64, 64), "cpu")
    text = str(explain(bsr_linear, width(W, 3, "cpu", True), W))
    assert "skinny" in text and "element by element" not in text
