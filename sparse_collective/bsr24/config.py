"""Configurations of GEMM kernels with 2:4 sparse blocks: candidates, legality, cost, catalogue."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul import cost, legality
from cute_kernels.matmul.catalogue import COL, LIGHT, LINEAR, ROW, buildable, full
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec, GemmFacts
from cute_kernels.matmul.problem import Problem
from cute_kernels.sparse24.config import (
    STORED,
    Sparse24Config,
    Sparse24Float8Config,
    Sparse24Float8Sm80Config,
    Sparse24Sm80Config,
    candidates_sm80,
    k_tile_clocks,
    of_shape,
    of_stored_halves,
)
from cute_kernels.sparse24.format import SLAB, SPAN
from cute_kernels.tile.element import BITS_16, Element, element_of

from ..bsr_gemm import catalogue
from ..bsr_gemm.candidates import pair_of
from ..bsr_gemm.family import values_bytes

DRAM_SHARE = 0.8  # of DRAM's rate, as for block-sparse GEMMs with TMA; an estimate


@dataclass(frozen=True)
class Bsr24Config(Sparse24Config):
    """GemmConfig with 2:4 sparse blocks; `tile_k` counts columns of the whole block."""

    family: ClassVar[str] = "bsr24"


@dataclass(frozen=True)
class Bsr24Float8Config(Bsr24Config, Sparse24Float8Config):
    """FP8 configurations of the sm_90 path. Promoted accumulation adds one partial sum per K-tile."""


@dataclass(frozen=True)
class Bsr24Sm80Config(Bsr24Config, Sparse24Sm80Config):
    """Configurations of the mma.sync path."""


@dataclass(frozen=True)
class Bsr24Float8Sm80Config(Bsr24Config, Sparse24Float8Sm80Config):
    """FP8 configurations of sm_89."""


def candidates_of(path: str, block: BlockFacts, spec: ArchSpec, element: Element) -> list[Bsr24Config]:
    """Configurations worth trying; among equal costs the first one is taken."""
    if block.bm % SLAB or block.bk % SPAN:
        return []
    if path == "sm_90":
        return candidates(block, spec, element)
    kind = Bsr24Float8Sm80Config if element.width == 1 else Bsr24Sm80Config
    return [kind(**vars(c)) for c in candidates_sm80(spec, element) if block.bm % c.tile_m == 0]


def candidates(block: BlockFacts, spec: ArchSpec, element: Element) -> list[Bsr24Config]:
    """Configurations of the sm_90 path.

    Row tiles of one block share B in a cluster, which halves the bytes from L2; blocks as tall as a tile can only share
    A. Narrow tiles have K-tiles twice as long if the blocks allow it, for more bytes of A in flight.
    """
    line = 2 * SPAN // element.width  # columns of a K-tile
    wide = 2 * line if block.bk % (2 * line) == 0 else line
    narrow = [
        # tile_m, tile_n, tile_k, warps_m, warps_n, cluster_m, cluster_n, consumer_groups, ring
        (64, 64, wide, 1, 1, 1, 1, 2, 1),
        (64, 32, wide, 1, 1, 1, 1, 2, 1),
        (64, 16, wide, 1, 1, 1, 1, 2, 1),
    ]
    if block.bm % 128:
        shapes = [
            (64, 256, line, 1, 1, 1, 2, 2, 1),
            (64, 256, line, 1, 1, 1, 1, 2, 1),
            (64, 128, line, 1, 1, 1, 1, 2, 2),
        ]
    else:
        pair = pair_of(block)
        high = [(256, 192, line, 2, 1, 1, 2, 1, 1)] if block.bm % 256 == 0 else []
        shapes = [
            (128, 192, line, 1, 1, *pair, 2, 1),
            (128, 256, line, 2, 1, *pair, 1, 1),
            *high,
            (128, 256, line, 2, 1, 1, 1, 1, 1),
            (128, 128, line, 1, 1, *pair, 2, 2),
            (128, 128, line, 2, 1, 1, 1, 1, 2),
            (128, 64, wide, 2, 1, 1, 1, 1, 1),
        ]
    # With one ring, two ping-pong consumer groups leave tensor cores idle while they wait for a K-tile; with two they
    # do not.
    own = [(*shape[:-1], 1) for shape in shapes if shape[-2] == 2]
    kind = Bsr24Config
    if element.width == 1:  # promoted accumulation needs both warpgroups on one tile, or a ring each
        kind, low = Bsr24Float8Config, block.bm % 128
        shapes += [(64, 256, line, 1, 2, 1, 2, 1, 1)] if low else []
        narrow += [(64, 64, wide, 1, 2, 1, 1, 1, 1), (64, 32, wide, 1, 2, 1, 1, 1, 1)]
        narrow += [] if low else [(128, 32, wide, 2, 1, 1, 1, 1, 1), (128, 16, wide, 2, 1, 1, 1, 1, 1)]
    found: list[Any] = [of_shape(kind, shape, spec, element, rings=2) for shape in own]
    found = [config for config in found if config.stages > 2]  # with two, one load is in flight, which hides nothing
    return found + [of_shape(kind, shape, spec, element) for shape in (*shapes, *narrow)]


def clocks(cfg: Bsr24Config, problem: Problem, sms: int, l2_bytes_per_clock: float) -> float:
    """Estimated clocks, like cost.cost with the K-tiles of sparse24.config. Loads continue while a cooperative kernel
    stores: its ring is full again when the store is done."""
    products, loads = k_tile_clocks(cfg, problem.width, l2_bytes_per_clock, problem.promotes)
    k_tiles = max(1.0, problem.density * problem.extents.K / cfg.tile_k)
    hidden = 0.0
    if cfg.consumer_groups == 1:
        accumulators = cfg.tile_m * cfg.tile_n // (128 * cfg.warps_m * cfg.warps_n)
        hidden = min(accumulators * cost.store_clocks(problem), cfg.stages * loads)
    loop = max(k_tiles * products, k_tiles * loads - hidden)
    found = cost.persistent(cfg, problem, sms, cost.row_tiles(cfg, problem.extents, problem.block), loop)
    stored = 1 / STORED + 1 / (8 * problem.width)  # share of a dense block's bytes: values, and 2 bits of metadata each
    least = cost.PIPELINE_FILL + stored * values_bytes(problem) / (DRAM_SHARE * cost.DRAM_BYTES_PER_CLOCK)
    return found if found > least else least + 0.02 * found


def unsupported(facts: GemmFacts) -> str:
    """The reason why these facts are not supported, or an empty string: of 2:4 sparse blocks, then of any 2:4 sparse
    A."""
    cfg, block = facts.config, facts.block
    if reason := legality.general(facts):
        return reason
    if block is None or block.operand != "a" or block.permuted or facts.majors[0] != "k":
        return "2:4 sparse blocks must be those of the left operand, contiguous along K, and not of a transposed view"
    if block.bm % SLAB or block.bk % SPAN:
        return f"blocks of {block.bm}x{block.bk}: metadata are those of multiples of {SLAB} rows and {SPAN} columns"
    if block.bm % cfg.tile_m or block.bk % cfg.tile_k:
        tiles = f"tiles of {cfg.tile_m} rows and {cfg.tile_k} columns"
        return f"tile {cfg}: blocks of {block.bm}x{block.bk} are no whole {tiles}"
    return of_stored_halves(facts)


BLOCKS = ((128, 128), (64, 64), (256, 128), (192, 64), (128, 64))


def kernels(family, spec: ArchSpec, element: Element, quick: bool) -> Iterator[GemmFacts]:
    """The catalogue: each configuration for several blocks, for the first block also with the most expensive epilogue;
    other variations with one configuration."""
    path = spec.path
    for shape in BLOCKS[:1] if quick else BLOCKS if path == "sm_90" else BLOCKS[:2]:
        configs = family.candidates(path, BlockFacts(*shape, "int32"), spec, element)
        for config in configs[:1] if quick else configs:
            yield catalogue.linear(spec, path, config, shape)
            if not quick and shape == BLOCKS[0]:
                yield catalogue.bsr(spec, path, config, shape)
                yield catalogue.linear(spec, path, config, shape, epilogue=LINEAR)
    if quick:
        return
    fp32, runs = {"out_dtype": "float32", "aligns": (8, 8, 4)}, {"ranks": (3, 2, 2), "batch": "patterns"}
    items = replace(LINEAR, residual=None, bias_items=True)
    matmul: list[dict[str, Any]] = [
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
    layer: list[dict[str, Any]] = [
        {"ordered": True},
        {"majors": ("k", "n", "m")},
        {**fp32, "epilogue": LINEAR},
        {"aligns": (8, 8, 1)},
        {**runs, "run": 256, "epilogue": items},
        {**runs, "run": 64, "epilogue": items, "ordered": True},
        {"batch": "values", "ranks": (4, 2, 2), "run": 256},
    ]
    if path == "sm_80":
        layer += [{"aligns": (8, 1, 1)}, {"aligns": (8, 1, 8), "majors": ("k", "any", "m")}]
    for make, changes in ((catalogue.bsr, matmul), (catalogue.linear, layer)):
        for shape in BLOCKS[:2]:
            for change in changes if shape == BLOCKS[0] else changes[:1]:
                yield from main(family, make, spec, path, shape, **change)
    if path == "sm_90":  # where TMA cannot read b
        yield from main(family, catalogue.linear, spec, "sm_80", BLOCKS[0])
        yield from main(family, catalogue.linear, spec, "sm_80", BLOCKS[0], aligns=(8, 1, 1))


def float8_kernels(family, spec: ArchSpec, quick: bool) -> Iterator[GemmFacts]:
    """FP8 kernels: each configuration for several blocks with a scale per block, and variations of the main one."""
    if quick or not spec.float8:
        return
    element = element_of("float8_e4m3fn")
    usual = {"dtype": "float8_e4m3fn", "aligns": (element.vector, element.vector, 8)}
    tokens, one = EpilogueSpec(scale_n="column"), EpilogueSpec(scale_m="tensor", scale_n="column")
    loaded = replace(LINEAR, residual=None, scale_n="column")
    changes: list[dict[str, Any]] = [
        {},
        {"epilogue": one},
        {"use_fast_accum": True},
        {"epilogue": replace(loaded, scale_m="tensor"), "use_fast_accum": True},
        {"epilogue": loaded, "scaled": True},
        {"epilogue": tokens, "scaled": True, "ordered": True},
        {"epilogue": tokens, "scaled": True, "dtype": "float8_e5m2", "out_dtype": "float16"},
        {"epilogue": tokens, "scaled": True, "out_dtype": "float32", "aligns": (element.vector, element.vector, 4)},
        {"epilogue": tokens, "scaled": True, "batch": "values", "ranks": (4, 3, 3)},
        {"epilogue": tokens, "scaled": True, "batch": "patterns", "ranks": (3, 2, 2), "run": 256},
    ]
    for shape in ((128, 128), (64, 128), (256, 256)):
        configs = family.candidates(spec.path, BlockFacts(*shape, "int32"), spec, element)
        for config in configs:
            yield catalogue.linear(spec, spec.path, config, shape, **usual, epilogue=tokens, scaled=True)
            if shape == BLOCKS[0]:
                yield catalogue.linear(spec, spec.path, config, shape, **usual, epilogue=one, use_fast_accum=True)
        for change in changes if shape == BLOCKS[0] else changes[:1]:
            made = (catalogue.linear(spec, spec.path, config, shape, **usual | change) for config in configs)
            yield from buildable(family, made)[:1]
        terms = usual | {"majors": ("k", "k", "n"), "scaled": True, "epilogue": replace(COL, scale_n="column")}
        made = (catalogue.bsr(spec, spec.path, config, shape, **terms) for config in configs)
        yield from buildable(family, made)[:1]


def main(family, make, spec: ArchSpec, path: str, shape: tuple[int, int], **change) -> list[GemmFacts]:
    """The first configuration that supports these changes, in a list."""
    block = BlockFacts(*shape, "int32", run=change.get("run", 0))
    configs = family.candidates(path, block, spec, BITS_16)
    return buildable(family, (make(spec, path, config, shape, **change) for config in configs))[:1]
