"""Skinny products, of 16 columns or fewer: which K-tiles lanes load, where MMAs find them, and the ops with them.

Without a GPU the walk over a row and the placing of registers are played on the host.
"""

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels.arch import ARCHS
from cute_kernels.runtime.families import unsupported
from cute_kernels.testing.patterns import PATTERNS
from cute_kernels.testing.reference import normal
from sparse_collective import bsr_linear, bsr_matmul
from sparse_collective import dispatch as sparse_ops
from sparse_collective.bsr_gemm.catalogue import bsr as bsr_facts
from sparse_collective.bsr_gemm.catalogue import linear as linear_facts
from sparse_collective.bsr_gemm.k_tiles import BsrKTiles
from sparse_collective.gemv.config import SkinnyConfig
from sparse_collective.gemv.family import SKINNY
from sparse_collective.gemv.kernel import SkinnyKernel

from ..conformance import FAMILIES
from ..gemm_calls import check
from .bsr_parts import BOTH_OPS, bsr, operands, skinny_loads

BLOCKS = [(16, 16), (32, 64), (64, 64), (128, 128), (512, 112), (48, 16), (256, 64), (32, 32), (16, 144), (64, 256)]
CONFIGS = [SkinnyConfig(*shape) for shape in ((16, 8, 2, 8), (16, 16, 2, 8), (32, 16, 2, 8), (16, 8, 4, 8))]
CONFIGS += [SkinnyConfig(16, 8, 1, 4), SkinnyConfig(32, 8, 3, 16)]
SPEC = ARCHS["sm_90"]


@pytest.mark.parametrize(
    ("config", "block"),
    [(config, block) for config in CONFIGS for block in BLOCKS if block[0] % config.tile_m == 0],
    ids=str,  # a strip lies in one block
)
def test_every_k_tile_is_loaded_once_and_none_past_the_row(block, config):
    """Warps, pieces and lanes of a row walk it as multiply() does; what `valid` refuses is a repetition."""
    kernel, steps = SkinnyKernel(linear_facts(SPEC, "sm_90", config, block)), block[1] // 8
    for blocks in range(1, 40):
        columns = [1000 + 3 * p for p in range(7 + blocks)]
        row = BsrKTiles(columns, blocks * steps, 7, 7, 0, 0, 0, steps)
        assert sorted(skinny_loads(kernel, row)) == [(7 + p, k) for p in range(blocks) for k in range(steps)]


def test_what_the_predicate_refuses():
    def reason(path="sm_90", arch="sm_90", block=(32, 32), more=None, **changes):
        return unsupported(bsr_facts(ARCHS[arch], path, replace(CONFIGS[0], **changes), block, **more or {}))

    strides = {"aligns": (8, 1, 1), "majors": ("k", "any", "any")}
    for path, arch in (("sm_90", "sm_90"), ("sm_80", "sm_90"), ("sm_80", "sm_86")):
        assert reason(path, arch) == ""
        assert (
            ("TMA" in reason(path, arch, more=strides)) == bool(reason(path, arch, more=strides)) == (path == "sm_90")
        )
    assert "16 or 32 rows" in reason(tile_m=64) and "8 or 16 columns" in reason(tile_n=32)
    assert "registers" in reason(stages=30) and "at most 32" in reason(warps=64)
    assert "one block" in reason(tile_m=32, block=(48, 16))
    assert "order" in reason(more={"ordered": True}) and "TMA" in reason(arch="sm_80")


# The ops


@BOTH_OPS
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (48, 112), (128, 128)], ids=str)
def test_patterns(device, path, block, pattern, op):
    """Empty rows, rows of one piece, and of more than the warps take at once."""
    facts = check(op, *operands(op, bsr(pattern, block, device, grid=(9, 33)), 5, k_major=True)).facts
    assert facts.family == "skinny" and (facts.path, facts.block.bm, facts.block.bk) == (path, *block)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations_that_are_no_candidates(monkeypatch, path, config):
    FAMILIES[f"skinny {path}"].force(monkeypatch)
    monkeypatch.setattr(SKINNY, "candidates", lambda *given: [config])
    for block in BLOCKS:
        if block[0] % config.tile_m == 0:
            W = bsr("power_law", block, "cuda", grid=(9, 41))
            for op, n in ((bsr_matmul, 1), (bsr_linear, 8), (bsr_matmul, 16), (bsr_linear, 37)):
                check(op, *operands(op, W, n))


@pytest.mark.gpu
def test_many_strips(path):
    W = bsr("power_law", (64, 64), "cuda", grid=(128, 96))
    for n in (1, 8, 16):
        assert check(bsr_linear, *operands(bsr_linear, W, n)).facts.family == "skinny"


@pytest.mark.parametrize("n", [1, 7, 16])
def test_operands_of_any_strides(device, n):
    """Vectors where B is K-major and aligned, elements elsewhere."""
    W = bsr("bernoulli", (64, 64), device)
    k = W.shape[1]
    for b in (normal(k, n + 3, device=device)[:, 1 : 1 + n], normal(k, 2 * n, device=device)[:, ::2]):
        assert check(bsr_matmul, W, b).facts.family == "skinny"
    for x in (
        normal(n, k + 5, device=device)[:, 5:], normal(n, k + 3, device=device)[:, :k],
        normal(n, 2 * k, device=device)[:, ::2], normal(k, n, device=device).t(),
        normal(n, device=device)[:, None].expand(n, k), normal(2, 5, k, device=device), normal(k, device=device),
    ):  # fmt: skip
        assert check(bsr_linear, x, W).facts.family == "skinny"


@BOTH_OPS
def test_an_infinity_in_the_last_block_stays_one(device, path, op):
    """Lanes past the end of a row multiply nothing: an infinity times their zeros would be NaN."""
    W = bsr("all_blocks", (16, 48), device, grid=(2, 3))
    W.values.abs_()
    args = operands(op, W, 3, k_major=True)
    x = args[0] if op is bsr_linear else args[1].t()
    x.abs_()[:, W.shape[1] - 8 :] = math.inf
    assert (op(*args) == math.inf).all()


def test_uneven_rows_need_no_order_and_are_planned_once(emulated):
    """No table is made of the pattern, and the second call finds the plan of the first."""
    x, W = operands(bsr_linear, bsr("power_law", (64, 64), grid=(40, 24)), 4)
    first = bsr_linear(x, W)
    assert not W.even and torch.equal(bsr_linear(x, W), first)
    (plan,) = sparse_ops._PLANS.plans.values()
    assert plan.facts.family == "skinny" and plan.ordered is None and not plan.facts.ordered
