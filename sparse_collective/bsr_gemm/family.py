"""The interface of block-sparse GEMM families, and the default family with one block row per tile."""

from collections.abc import Iterator

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul import cost
from cute_kernels.matmul.candidates import tile_k_of
from cute_kernels.matmul.catalogue import epilogues_of, gates
from cute_kernels.matmul.config import BlockFacts, GemmConfig, GemmFacts
from cute_kernels.matmul.family import FEATURES, ProductFamily
from cute_kernels.matmul.problem import Problem
from cute_kernels.runtime.fake import fake_tensor
from cute_kernels.runtime.families import register
from cute_kernels.tile.element import BITS_16, Element

from . import catalogue
from .arguments import bsr_args
from .candidates import bsr_sm80, bsr_sm90

FEW_COLUMNS = 16  # at most so many, and DRAM holds a product up
NARROW_COLUMNS = 32  # of the narrowest tiles, which the sm_80 path has not


class BsrFamily(ProductFamily):
    """A family of block-sparse products. Their entries take, in this order:

    crow_indices, what `pattern` gives, values, b, d, and what every product takes.
    """

    ops: tuple[str, ...] = ("bsr_matmul", "bsr_linear", "bsr_gated_linear")
    orders = True

    def serves(self, block: BlockFacts | None) -> bool:
        return block is not None and block.operand == "a"

    def arguments(self, facts: GemmFacts) -> tuple:
        return bsr_args(facts, self.tables(facts))

    def tables(self, facts: GemmFacts) -> tuple:
        """Fakes of what `pattern` gives, with an order of work tiles or None in its place."""
        order = fake_tensor("int32", 2, 1, 2) if facts.ordered else None
        groups = fake_tensor("int32", 1, 0, 1) if facts.block.run else None
        numbers = fake_tensor("int32", 1, 0, 1) if facts.block.permuted else None
        return fake_tensor(facts.block.index_dtype, 1, 0, 1), order, groups, numbers

    def usual(self, op: str, spec: ArchSpec, block: BlockFacts, dtype: str) -> Iterator[GemmFacts]:
        linear = op != "bsr_matmul"
        make, shape = catalogue.linear if linear else catalogue.bsr, (block.bm, block.bk)
        for config in self.candidates(spec.path, block, spec):
            for epilogue in gates() if op == "bsr_gated_linear" else epilogues_of("row" if linear else "col", dtype):
                terms = {"epilogue": epilogue, "index_dtype": block.index_dtype, "dtype": dtype, "out_dtype": dtype}
                for ordered in (False, True) if self.orders else (False,):
                    yield make(spec, spec.path, config, shape, ordered=ordered, **terms)

    def pattern(self, facts: GemmFacts, W, order, groups) -> tuple:
        """The tensors that say where W's blocks are. `order`: of the work tiles; None unless the family `orders`."""
        pattern = W.pattern
        col, numbers = pattern.col_indices, pattern.numbers
        if pattern.nnz == 0:  # a tensor without elements has no address
            return col.new_zeros(1), order, groups, None if numbers is None else numbers.new_zeros(1)
        return col, order, groups, numbers


class Bsr(BsrFamily):
    """The GEMM kernels of both paths with the BSR source."""

    name = "bsr"
    features = FEATURES
    config = GemmConfig

    def candidates(self, path: str, block: BlockFacts, spec: ArchSpec, element: Element = BITS_16) -> list[GemmConfig]:
        return (bsr_sm90 if path == "sm_90" else bsr_sm80)(block, spec, element)

    def cost(self, config, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        clocks = cost.cost(config, problem, sms, l2_bytes_per_clock)
        return clocks if fast_from_dram(config, problem) else slowed_by_dram(problem, clocks)

    def grid(self, config, problem: Problem, sms: int) -> tuple[int, int]:
        group = cost.raster_group(config, problem)
        return group, in_step(config, cost.row_tiles(config, problem.extents, problem.block), group, sms)

    def entry(self, facts: GemmFacts):
        from .kernel import BsrGemm

        return BsrGemm(facts)

    def overlaps_wgmmas(self, facts: GemmFacts) -> bool:
        """False for FP8 blocks 32 wide: one WGMMA, whose accumulators are promoted before the next one."""
        return not (facts.promotes and max(facts.k_blocks) == 1)

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        made = [catalogue.bsr_kernels, catalogue.float8_kernels, catalogue.fp16_sums_kernels]
        made += [catalogue.narrow_kernels, catalogue.tf32_kernels]
        return [facts for kernels in made for facts in kernels(self, arch, quick)]


def in_step(config, tiles_m: int, group: int, sms: int) -> int:
    """Number of CTAs of a persistent kernel, such that panels stay in step.

    Stored blocks are sorted by column, so block rows that start together walk over B together, and its blocks are
    shared through L2 while they are there. With a CTA count that divides a panel (or is a multiple of it) they go on
    starting together, or so we explain that at 8192, 12.5 %, 128 CTAs are 1.4 to 3.3 % faster than 132.
    """
    slots = cost.resident_clusters(config, sms)
    panel = tiles_m // config.cluster_m * group
    for fewer in range(slots, int(0.94 * slots), -1):
        if panel % fewer == 0 or fewer % panel == 0:
            return fewer * config.cluster
    return cost.all_ctas(config, sms)


def values_bytes(problem: Problem) -> float:
    """Size of the stored blocks."""
    extents = problem.extents
    return problem.density * extents.M * extents.K * (extents.L if problem.block.batch else 1) * problem.width


def held_by_dram(problem: Problem) -> float:
    """Lower bound on the clocks of a small-N GEMM by kernels that are not made for it; 0 for others.

    They reach these shares of DRAM's rate: measured with 1 token, W 16384 and 8192 squared.
    """
    if problem.extents.N > FEW_COLUMNS:
        return 0.0
    _, half, quarter = problem.element.rows
    share = {quarter: 0.22, half: 0.55}.get(tile_k_of(problem.block, problem.element), 0.8)
    return cost.PIPELINE_FILL + values_bytes(problem) / (share * cost.DRAM_BYTES_PER_CLOCK)


def fast_from_dram(config: GemmConfig, problem: Problem) -> bool:
    """True for sm_90 configurations with narrow tiles, in FP8 with whole K-tiles: on an H200 they reach a higher DRAM
    bandwidth than the small-N kernel."""
    whole = tile_k_of(problem.block, problem.element) == problem.element.rows[0]
    return problem.width == 1 and whole and config.tile_n <= NARROW_COLUMNS


def slowed_by_dram(problem: Problem, clocks: float) -> float:
    """`clocks`, or what DRAM asks for; of those that it holds up, the best first."""
    least = held_by_dram(problem)
    return clocks if clocks > least else least + 0.02 * clocks


BSR = register(Bsr())
