"""Kernel family of SDDMM: candidates, legality, cost."""

from collections.abc import Iterator
from typing import Any

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.matmul import cost, legality
from cute_kernels.matmul.arguments import matrix, term_args
from cute_kernels.matmul.candidates import sm80, sm90
from cute_kernels.matmul.catalogue import buildable
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec, GemmFacts
from cute_kernels.matmul.family import ProductFamily
from cute_kernels.matmul.problem import Problem
from cute_kernels.runtime.fake import fake_tensor
from cute_kernels.runtime.families import register
from cute_kernels.tile.element import BITS_16, Element

from ..bsr_gemm.catalogue import BLOCKS
from .config import SampledConfig, parts_of

SIDES = (128, 64, 32, 16)


def fitting(block: int, widest: int) -> int:
    """Side of a tile, at most `widest`, that wastes little of a block's last tile and is not too narrow."""
    return min((s for s in SIDES if s <= widest), key=lambda side: parts_of(block, side) * (side + 16))


class Sampled(ProductFamily):
    """SDDMM: a GEMM of dense matrices of which only stored blocks are computed."""

    name = "sampled"
    ops = ("sddmm",)
    config = SampledConfig

    def serves(self, block: BlockFacts | None) -> bool:
        return block is not None and block.operand == "d"

    def candidates(
        self, path: str, block: BlockFacts, spec: ArchSpec, element: Element = BITS_16
    ) -> list[SampledConfig]:
        return (_sm90 if path == "sm_90" else _sm80)(block, spec, element)

    def cost(self, config, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        """The longer of the MMAs of all boxes of a tile, and the loads: of B per box, of A per group of boxes.

        One group per block row is half full on average. The tail of the last wave costs a quarter of a tile, fitted to
        measurements.
        """
        extents, block = problem.extents, problem.block
        rows, tiles_m = max(1, extents.M // block.bm), parts_of(block.bm, config.tile_m)
        boxes = problem.density * rows * (extents.N // block.bk) * parts_of(block.bk, config.box_n)
        groups = boxes / config.boxes + (rows * (0.5 - 0.5 / config.boxes) if config.boxes > 1 else 0)
        depth = -(-extents.K // config.tile_k) * config.tile_k * tiles_m
        macs = groups * config.tile_n * max(64, config.tile_m) * depth
        products = macs * problem.width / cost.MAC_BYTES_PER_CLOCK
        row_bytes = config.box_n * problem.width if problem.majors[1] == "n" else 128
        feed = l2_bytes_per_clock * min(1.0, 0.5 + row_bytes / 256)  # TMA is slower for short rows
        loads = (groups * config.tile_m + boxes * config.box_n) * depth * problem.width / feed
        tiles = groups * tiles_m
        accumulators = config.tile_m * config.tile_n // (128 * config.warps_m * config.warps_n)
        work = max(products, loads) + tiles * accumulators * cost.store_clocks(problem)
        return work / sms * (1 + 0.25 * sms / max(tiles, sms)) * max(1.0, sms / tiles) + cost.PIPELINE_FILL

    def grid(self, config, problem: Problem, sms: int) -> tuple[int, int]:
        return 1, sms

    def unsupported(self, facts: GemmFacts) -> str:
        cfg = facts.config
        if reason := legality.general(facts):
            return reason
        if facts.epilogue.bias or facts.epilogue.activation or facts.epilogue.function:
            return "a bias, an activation or an epilogue function: SDDMM does not support them"
        if (facts.block.batch is None) != (facts.block.run == 0) or facts.block.run % facts.config.tile_k:
            return f"runs of {facts.block.run}: a batch sums over runs of K, of whole K-tiles of {facts.config.tile_k}"
        if facts.path == "sm_80":
            return "several boxes a tile: sm_80 has one" if cfg.boxes > 1 else legality.sm80(facts)
        return legality.tma_operands(facts) or legality.store_buffers(facts) or _sm90_tile(facts)

    def entry(self, facts: GemmFacts):
        from .gemm import SampledGemm

        return SampledGemm(facts)

    def arguments(self, facts: GemmFacts) -> tuple:
        import cutlass.cute as cute

        block = facts.block
        values, rank = [], facts.ranks[2]
        for _ in range(2 if facts.epilogue.residual else 1):
            outer = (cute.sym_int32() for _ in range(rank - 2))
            values.append(fake_tensor(facts.out_dtype, rank, rank - 1, facts.aligns[2], (*outer, block.bm, block.bk)))
        runs = (fake_tensor("int32", 1, 0, 1) if block.run else None for _ in range(2))
        tables = fake_tensor("int32", 2, 1, 1), fake_tensor(block.index_dtype, 1, 0, 1), *runs
        operands = matrix(facts, 0), matrix(facts, 1), values[0]
        return *tables, *operands, *term_args(facts, residual=lambda: values[1])

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        found = list(_catalogue(self, arch_named(arch)))
        return buildable(self, found[:1] if quick else found)

    def usual(self, op: str, spec: ArchSpec, block: BlockFacts, dtype: str) -> Iterator[GemmFacts]:
        return iter(())

    def bundle(self, op: str, request) -> Iterator[GemmFacts]:
        """Facts of weight gradients: both operands contiguous along the blocks' sides."""
        spec = arch_named(request.arch)
        for dtype in request.dtypes:
            for shape in request.blocks:
                for index in request.index_dtypes:
                    block = BlockFacts(shape[0], shape[1], index, operand="d")
                    for config in self.candidates(spec.path, block, spec):
                        yield facts_of(spec, spec.path, config, shape, index_dtype=index, dtype=dtype, out_dtype=dtype)


def facts_of(spec: ArchSpec, path: str, config, block: tuple[int, int], **changes) -> GemmFacts:
    """Facts of a layer's weight gradient: a and b contiguous along the blocks' sides."""
    more = {name: changes.pop(name) for name in ("batch", "run") if name in changes}
    pattern = BlockFacts(*block, index_dtype=changes.pop("index_dtype", "int32"), **more, operand="d")
    terms: dict[str, Any] = {"majors": ("m", "n", "n"), "ranks": (2, 2, 3), "block": pattern} | changes
    return GemmFacts(arch=spec.target, path=path, config=config, **terms)


def _sampled(config, boxes: int) -> SampledConfig:
    return SampledConfig(**vars(config), boxes=boxes)


def _sm90(block: BlockFacts, spec: ArchSpec, element: Element) -> list[SampledConfig]:
    """Tiles of 128 or 64 rows, as wide as accumulators allow: all boxes of a tile share its rows of A."""
    side = fitting(block.bk, 128)
    k, half, _ = element.rows
    found = []
    if block.bm > 64 and fitting(block.bm, 128) == 128:
        shapes = [(128, 256, k, 2, 1), (128, 128, k, 2, 1)]
    else:
        shapes = [(64, 512, half, 1, 2), (64, 384, k, 1, 2), (64, 256, k, 1, 2), (64, 128, k, 1, 2)]
    for tile_m, tile_n, tile_k, warps_m, warps_n in shapes:
        boxes, rest = divmod(tile_n, side)
        if not rest and boxes % warps_n == 0:
            of = {"store_row": min(128, 4 * side), "spec": spec, "element": element}
            found.append(_sampled(sm90(tile_m, tile_n, tile_k, warps_m, warps_n, **of), boxes))
    return found


def _sm80(block: BlockFacts, spec: ArchSpec, element: Element) -> list[SampledConfig]:
    """One box per tile, up to 128 x 128."""
    tile_m, tile_n = fitting(block.bm, 128), fitting(block.bk, 128)
    warps_m, warps_n = (2 if side > 16 else 1 for side in (tile_m, tile_n))
    deep = spec.smem > 200_000 and tile_m * tile_n == 128 * 128
    k, stages = (element.rows[0], 3) if deep else (element.rows[1], 4)
    return [_sampled(sm80(tile_m, tile_n, k, warps_m, warps_n, stages, spec=spec, element=element), 1)]


def _sm90_tile(facts: GemmFacts) -> str:
    """Rules of WGMMA, TMA and the store for a tile of boxes."""
    cfg = facts.config
    group_n = cfg.tile_n // cfg.warps_n
    if (cfg.warps_m * cfg.warps_n, cfg.consumer_groups, cfg.cluster, cfg.split) != (2, 1, 1, 1):
        return f"{cfg}: SDDMM kernels have two consumer warpgroups, and neither ping-pong nor clusters nor split-K"
    if cfg.tile_m % (64 * cfg.warps_m) or group_n > 256 or cfg.tile_m * cfg.tile_n > 128 * 256:
        return f"tile {cfg}: 64 rows, and at most 256 columns and 128 accumulators a thread, for each warpgroup"
    if cfg.tile_m >= facts.block.bm + 64:
        return f"{cfg.tile_m} rows for blocks {facts.block.bm} high: some slabs of 64 rows would lie outside the block"
    if cfg.tile_n % cfg.boxes or cfg.box_n not in SIDES or cfg.boxes % cfg.warps_n and cfg.boxes > 1:
        return f"tile {cfg}: boxes are 16, 32, 64 or 128 columns wide, and a warpgroup has whole ones"
    if cfg.boxes == 1 and cfg.warps_n > 1:
        return f"tile {cfg}: a warpgroup has whole boxes"
    widest, half, _ = facts.element.rows
    if cfg.tile_k not in (half, widest) or cfg.stages < 2:
        return f"tile {cfg}: K-tiles of {half} or {widest}, and at least two stages"
    if cfg.box_n % min(cfg.box_n, cfg.store_row // facts.out_bytes):
        return f"tile {cfg}: a box is no whole chunks of the store"
    if facts.epilogue.residual and facts.out_bytes == 2 and cfg.tile_m * cfg.tile_n == 128 * 256:  # 16 bytes of stack
        return "128 accumulators a thread leave no registers to add to 16-bit values"
    return legality.smem_sm90(facts)


def _catalogue(family: Sampled, spec: ArchSpec) -> Iterator[GemmFacts]:
    fp32: dict[str, Any] = {"out_dtype": "float32", "aligns": (8, 8, 4)}
    changes: list[dict[str, Any]] = [
        {"majors": ("k", "k", "n")},
        {"dtype": "float16", "out_dtype": "float16"},
        fp32,
        {"index_dtype": "int64"},
        {"epilogue": EpilogueSpec(residual="n")},
        {"batch": "values", "run": 64, "ranks": (2, 2, 4)},
        {"batch": "patterns", "run": 128},
        {**fp32, "epilogue": EpilogueSpec(scale=True, residual="n")},
    ]
    for path in dict.fromkeys((spec.path, "sm_80")):
        for block in BLOCKS:
            configs = family.candidates(path, BlockFacts(*block, "int32", operand="d"), spec)
            for config in configs:
                yield facts_of(spec, path, config, block)
            if block in ((128, 128), (32, 32)):
                for change in changes:
                    yield facts_of(spec, path, configs[0], block, **change)


SAMPLED = register(Sampled())
