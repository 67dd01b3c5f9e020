"""Which kernels there are for products with 2:4 sparse blocks, what they ask, and what they cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul import cost, legality
from cute_kernels.matmul.candidates import with_stages
from cute_kernels.matmul.catalogue import COL, LIGHT, LINEAR, ROW, buildable, full
from cute_kernels.matmul.config import BlockFacts, GemmFacts
from cute_kernels.matmul.problem import Problem
from cute_kernels.sparse24.config import STORED, Sparse24Config, k_tile_clocks
from cute_kernels.sparse24.format import SLAB, SPAN
from cute_kernels.tile.element import Element

from .. import catalogue
from ..candidates import pair_of
from ..family import values_bytes

STORED_BYTES = 1 / STORED + 1 / 16  # of a dense block's: values, and 2 bits for each of them
DRAM_SHARE = 0.8  # of DRAM's rate: as of block-sparse products by TMA; an estimate


@dataclass(frozen=True)
class Bsr24Config(Sparse24Config):
    """GemmConfig of a product with 2:4 sparse blocks; `tile_k` counts columns of the whole block."""

    family: ClassVar[str] = "bsr24"


def candidates(block: BlockFacts, spec: ArchSpec, element: Element) -> list[Bsr24Config]:
    """Configurations worth trying, best first among equals.

    Row tiles of one block share B in a cluster, which halves what L2 delivers; blocks as high as a tile have only A to
    share. K-tiles of narrow tiles are 128 long where blocks are, for more bytes of A under way.
    """
    wide = 2 * SPAN if block.bk % (2 * SPAN) == 0 else SPAN
    narrow = [
        # tile_m, tile_n, tile_k, warps_m, warps_n, cluster_m, cluster_n, consumer_groups, ring
        (64, 64, wide, 1, 1, 1, 1, 2, 1),
        (64, 32, wide, 1, 1, 1, 1, 2, 1),
        (64, 16, wide, 1, 1, 1, 1, 2, 1),
    ]
    if block.bm % 128:
        shapes = [
            (64, 256, SPAN, 1, 1, 1, 2, 2, 1),
            (64, 256, SPAN, 1, 1, 1, 1, 2, 1),
            (64, 128, SPAN, 1, 1, 1, 1, 2, 2),
        ]
    else:
        pair = pair_of(block)
        high = [(256, 192, SPAN, 2, 1, 1, 2, 1, 1)] if block.bm % 256 == 0 else []
        shapes = [
            (128, 192, SPAN, 1, 1, *pair, 2, 1),
            (128, 256, SPAN, 2, 1, *pair, 1, 1),
            *high,
            (128, 256, SPAN, 2, 1, 1, 1, 1, 1),
            (128, 128, SPAN, 1, 1, *pair, 2, 2),
            (128, 128, SPAN, 2, 1, 1, 1, 1, 2),
            (128, 64, wide, 2, 1, 1, 1, 1, 1),
        ]
    found = []
    for *tile, ring in (*shapes, *narrow):
        m, n, k, warps_m, warps_n, *rest = tile
        store = ring * warps_m * warps_n * rest[-1] * 64 * 128
        found.append(with_stages(Bsr24Config(m, n, k, 0, warps_m, warps_n, *rest, ring), spec, element, store))
    return found


def clocks(cfg: Bsr24Config, problem: Problem, sms: int, l2_bytes_per_clock: float) -> float:
    """As cost.cost, of K-tiles as sparse24.config has them. Loads go on while a cooperative kernel stores: its ring is
    full again when the store is done."""
    products, loads = k_tile_clocks(cfg, problem.width, l2_bytes_per_clock)
    k_tiles = max(1.0, problem.density * problem.extents.K / cfg.tile_k)
    hidden = 0.0
    if cfg.consumer_groups == 1:
        accumulators = cfg.tile_m * cfg.tile_n // (128 * cfg.warps_m * cfg.warps_n)
        hidden = min(accumulators * cost.store_clocks(problem), cfg.stages * loads)
    loop = max(k_tiles * products, k_tiles * loads - hidden)
    found = cost.persistent(cfg, problem, sms, cost.row_tiles(cfg, problem.extents, problem.block), loop)
    least = cost.PIPELINE_FILL + STORED_BYTES * values_bytes(problem) / (DRAM_SHARE * cost.DRAM_BYTES_PER_CLOCK)
    return found if found > least else least + 0.02 * found


def unsupported(facts: GemmFacts) -> str:
    """What 2:4 sparse blocks ask, and then what all sm_90 kernels do."""
    cfg, block, spec = facts.config, facts.block, facts.epilogue
    if reason := legality.general(facts):
        return reason
    if facts.path != "sm_90" or facts.spec.path != "sm_90":
        return f"2:4 sparse blocks: {facts.spec.name}'s kernels of the path {facts.path} have none; sm_90's WGMMA has"
    if block is None or block.operand != "a" or block.permuted or facts.majors[0] != "k":
        return "2:4 sparse blocks are those of the left operand, contiguous along K, and of no transposed view"
    if spec.stores_z or spec.gated:
        return "2:4 sparse blocks with a second result or a gate in the epilogue: there is none yet"
    if block.bm % SLAB or block.bk % SPAN:
        return f"blocks of {block.bm}x{block.bk}: sparse WGMMA takes multiples of {SLAB} rows and {SPAN} columns"
    if cfg.tile_k not in (SPAN, 2 * SPAN) or cfg.split > 1:
        return f"tile {cfg}: K-tiles of {SPAN} or {2 * SPAN} fill a swizzled row of A's stored half; K is not split"
    if block.bm % cfg.tile_m or block.bk % cfg.tile_k:
        tiles = f"tiles of {cfg.tile_m} rows and {cfg.tile_k} columns"
        return f"tile {cfg}: blocks of {block.bm}x{block.bk} are no whole {tiles}"
    return legality.tma_operands(facts) or legality.sm90(facts)


BLOCKS = ((128, 128), (64, 64), (256, 128), (192, 64), (128, 64))


def kernels(family, spec: ArchSpec, element: Element, quick: bool) -> Iterator[GemmFacts]:
    """The catalogue: each configuration of several blocks, plain and with the heaviest epilogue; one with all else."""
    first = BLOCKS[:1] if quick else BLOCKS
    for shape in first:
        configs = family.candidates(spec.path, BlockFacts(*shape, "int32"), spec, element)
        for config in configs[:1] if quick else configs:
            yield catalogue.linear(spec, spec.path, config, shape)
            if not quick and shape == BLOCKS[0]:
                yield catalogue.bsr(spec, spec.path, config, shape)
                yield catalogue.linear(spec, spec.path, config, shape, epilogue=LINEAR)
    if quick:
        return
    fp32, runs = {"out_dtype": "float32", "aligns": (8, 8, 4)}, {"ranks": (3, 2, 2), "batch": "patterns"}
    items = replace(LINEAR, residual=None, bias_items=True)
    matmul = [
        {"ordered": True},
        {"dtype": "float16", "out_dtype": "float16"},
        {"majors": ("k", "k", "n")},
        {"index_dtype": "int64"},
        {"ranks": (3, 3, 3)},
        {"epilogue": COL},
        {"epilogue": ROW},
        {"epilogue": LIGHT},
        {"epilogue": full()},
        {"aligns": (8, 8, 1)},
        fp32,
        {**fp32, "epilogue": full()},
        {"batch": "values", "ranks": (4, 3, 3)},
    ]
    layer = [
        {"ordered": True},
        {"majors": ("k", "n", "m")},
        {**fp32, "epilogue": LINEAR},
        {"aligns": (8, 8, 1)},
        {**runs, "run": 256, "epilogue": items},
        {**runs, "run": 64, "epilogue": items, "ordered": True},
        {"batch": "values", "ranks": (4, 2, 2), "run": 256},
    ]
    for make, changes in ((catalogue.bsr, matmul), (catalogue.linear, layer)):
        for shape in BLOCKS[:2]:
            for change in changes if shape == BLOCKS[0] else changes[:1]:
                block = BlockFacts(*shape, "int32", run=change.get("run", 0))
                configs = family.candidates(spec.path, block, spec, element)
                yield from buildable(family, (make(spec, spec.path, c, shape, **change) for c in configs))[:1]
