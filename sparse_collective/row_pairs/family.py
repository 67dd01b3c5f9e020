"""Pairs of block rows on sm_90: which configurations there are, what they ask, what they cost."""

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul import cost, legality
from cute_kernels.matmul.candidates import sm90
from cute_kernels.matmul.config import BlockFacts, GemmConfig, GemmFacts
from cute_kernels.matmul.problem import PAIRED_ROWS, Problem
from cute_kernels.runtime.fake import fake_tensor
from cute_kernels.runtime.families import register
from cute_kernels.tile.element import BITS_16, Element

from .. import catalogue
from ..family import BsrFamily, in_step, slowed_by_dram
from ..tile_order.family import order_of
from .tables import starts_of
from .tables_family import tables_of

LONE_COLUMN = 1.3  # of a column that one row has: its time over that of its bytes, with zeros for the other


@dataclass(frozen=True)
class RowPairsConfig(GemmConfig):
    """GemmConfig for tiles of 128 rows that are two block rows."""

    family: ClassVar[str] = "row pairs"
    rows_per_tile: ClassVar[int] = 2

    @property
    def short(self) -> str:
        return super().short + " pairs"

    def __str__(self) -> str:
        return super().__str__() + " pairs"


class RowPairs(BsrFamily):
    """A tile of 128 rows is two block rows, which share the blocks of B that both need."""

    name = "row pairs"
    config = RowPairsConfig

    def candidates(
        self, path: str, block: BlockFacts, spec: ArchSpec, element: Element = BITS_16
    ) -> list[RowPairsConfig]:
        """Two column tiles share A."""
        if path != "sm_90" or block.bm != PAIRED_ROWS or block.bk % element.rows[0]:
            return []
        k, of = element.rows[0], {"spec": spec, "element": element}
        shapes = [
            sm90(128, 192, k, 1, 1, 1, 2, consumer_groups=2, ring=1, **of),
            sm90(128, 128, k, 1, 1, 1, 2, consumer_groups=2, **of),  # for epilogues that take more registers
            sm90(128, 256, k, 1, 2, 1, 2, **of),
        ]
        return [RowPairsConfig(**vars(shape)) for shape in shapes]

    def cost(self, config, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        """Columns that both rows have, and those of one."""
        mma, load = cost.k_tile_clocks(config, problem.width, l2_bytes_per_clock)
        density, paired = problem.density, problem.stats.paired
        paired = 1 - (1 - density) ** 2 if paired is None else paired
        paired = min(1.0, 2 * density, max(density, paired))
        clocks = (2 * density - paired) * max(mma, load) + 2 * (paired - density) * LONE_COLUMN * load
        loop = problem.extents.K / cost.k_width(config, problem.block) * clocks
        return slowed_by_dram(problem, cost.persistent(config, problem, sms, self.row_tiles(config, problem), loop))

    def row_tiles(self, config, problem: Problem) -> int:
        return -(-problem.extents.M // config.tile_m)

    def grid(self, config, problem: Problem, sms: int) -> tuple[int, int]:
        group = cost.raster_group(config, problem)
        return group, in_step(config, self.row_tiles(config, problem), group, sms)

    def unsupported(self, facts: GemmFacts) -> str:
        cfg, block = facts.config, facts.block
        if reason := legality.general(facts):
            return reason
        if facts.path != "sm_90":
            return "pairs of block rows exist on the sm_90 path only"
        if reason := legality.tma_operands(facts) or legality.store_buffers(facts):
            return reason
        if block.bm != PAIRED_ROWS:
            return f"blocks {block.bm} high: a pair is of blocks {PAIRED_ROWS} high, each the rows of a WGMMA"
        if block.batch == "patterns" or block.run:
            return "a pattern for each item, or runs of columns with an item each: pairs are those of one pattern"
        k = facts.element.rows[0]
        if block.bk % k:
            return f"blocks {block.bk} wide: pairs take multiples of {k}, whole K-tiles"
        if (cfg.tile_m, cfg.tile_k, cfg.warps_m, cfg.cluster_m, cfg.split) != (128, k, 1, 1, 1):
            return (
                f"tile {cfg}: a pair is 128 rows by K-tiles of {k} that each warpgroup has whole, without a split; "
                "other rows have other K-tiles, so a cluster shares A alone"
            )
        if facts.epilogue.residual:  # compiled: 8 to 120 bytes of stack
            return "the loops of a pair leave no registers for a residual; kernels with a block row a tile have them"
        if facts.epilogue.stores_z and cfg.tile_n // cfg.warps_n > 128:  # 8 bytes, with GELU
            return "more than 128 accumulators a thread leave no registers for a second result"
        by_row = facts.epilogue.bias == "row" and facts.majors[2] == "n"
        if by_row and cfg.tile_n // cfg.warps_n > 128:  # as well, with GELU
            return "more than 128 accumulators a thread leave no registers for a bias that each row has its own of"
        return legality.sm90(facts)

    def sources(self, path: str) -> tuple[str, ...]:
        return *super().sources(path), "sparse_collective.row_pairs.gemm", "sparse_collective.row_pairs.mainloop_sm90"

    def entry(self, facts: GemmFacts):
        from .gemm import RowPairsGemm

        return RowPairsGemm(facts)

    def tables(self, facts: GemmFacts) -> tuple:
        order = fake_tensor("int32", 2, 1, 2) if facts.ordered else None
        return *(fake_tensor("int32", 2, 1, 1) for _ in range(2)), order

    def pattern(self, facts: GemmFacts, W, order, groups) -> tuple:
        return *tables_of(W), order

    def work_order(self, W, tiles):
        return order_of(W, tiles, lambda: starts_of(tables_of(W)))

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        return [] if quick else catalogue.row_pairs_kernels(self, arch)


ROW_PAIRS = register(RowPairs())
