"""Products with at most 16 columns: which configurations there are, what they ask, what they cost."""

import math

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul import cost, legality
from cute_kernels.matmul.config import BlockFacts, GemmFacts
from cute_kernels.matmul.problem import Problem
from cute_kernels.runtime.families import register
from cute_kernels.tile.element import BITS_16, Element

from .. import catalogue
from ..family import FEW_COLUMNS, BsrFamily, entry_of, values_bytes
from .config import LANES_K, PAD, SkinnyConfig, converts_by_bits, loads_vectors, registers

# What the kernel waits for before its first values arrive, and from one piece to a warp's next: estimates, in clocks.
FILL, TURN = 700, 800
FEED = 0.7  # of L2's rate, for plain loads: so that picks come out as measured


def float8_candidates(block: BlockFacts, high: bool, element: Element) -> list[SkinnyConfig]:
    """Those of 8-bit floats: 4 KB under way a warp. They take more registers, of which CTAs of four warps leave fewer
    unused than those of eight do."""
    tile_k, shapes = element.vector, [(16, 8, 4), (16, 16, 4), *([(32, 16, 2)] if high else [])]
    while block.scaled and block.bk % (LANES_K * tile_k):  # the lanes of a row are in one block
        tile_k //= 2
    return [SkinnyConfig(m, n, stages * element.vector // tile_k, 4, tile_k) for m, n, stages in shapes]


class Skinny(BsrFamily):
    """Few columns, on both paths. No kernel comes as near to DRAM's rate."""

    name = "skinny"
    features = frozenset(("float8", "float8 output"))
    config = SkinnyConfig
    orders = False

    def candidates(
        self, path: str, block: BlockFacts, spec: ArchSpec, element: Element = BITS_16
    ) -> list[SkinnyConfig]:
        """Up to 8 columns, and up to 16.

        A warp has 2 or 4 KB of W under way. 32 rows a strip ask L2 for half as much of B. Measured (us, 8192 squared,
        12.5% of 128x128; 16384 squared, 25 % of 64x64) for 1 token: 4 warps with 4 KB each 11.4, 43.0; 8 warps with 2
        KB 11.7, 42.6, with 4 KB 11.9, 42.1. For 16 tokens: 16 rows 13.5, 48.5; 32 rows 11.8, 49.1; 64x16 tiles by TMA
        12.9, 45.5.
        """
        high = block.bm % 32 == 0
        if element.width == 1:
            return float8_candidates(block, high, element)
        return [SkinnyConfig(16, 8, 4, 4), SkinnyConfig(16, 16, 2, 8), *([SkinnyConfig(32, 16, 2, 8)] if high else [])]

    def cost(self, config, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        """The longest of three, and the indices that come before the first values.

        DRAM delivers W once. L2 delivers W to each column tile and item that it is multiplied with, and for every strip
        of W as many rows of B as there are columns. And a warp waits for each piece before it asks for the next one.
        With strips of 32 rows too few values are under way; for more columns than FEW_COLUMNS it is no match for other
        kernels. What a column tile fetches before its first values arrive counts for each.
        """
        extents, block = problem.extents, problem.block
        values, tiles_n = values_bytes(problem), -(-extents.N // config.tile_n)
        passes = tiles_n * (1 if block.batch else extents.L)
        from_l2 = values * passes * (1 + min(extents.N, config.tile_n) / config.tile_m) / FEED
        turns = max(
            1, math.ceil(problem.density * extents.K / (LANES_K * config.tile_k * config.stages * config.warps))
        )
        from_dram = values / cost.DRAM_BYTES_PER_CLOCK / (1 if config.tile_m == 16 else 0.75)
        resort = cost.LAST_RESORT if extents.N > FEW_COLUMNS else 0.0
        return resort + FILL * tiles_n + max(from_dram, from_l2 / (sms * l2_bytes_per_clock), turns * TURN)

    def unsupported(self, facts: GemmFacts) -> str:
        """It needs no TMA; but on the sm_90 path, where TMA serves no operand, all of sm_80's kernels compete."""
        if reason := legality.general(facts) or (legality.tma_operands(facts) if facts.path == "sm_90" else ""):
            return reason
        cfg, spec = facts.config, facts.spec
        if reason := self._k_tile(facts):
            return reason
        if cfg.tile_m not in (16, 32) or cfg.tile_n not in (8, 16):
            return f"tile {cfg}: few columns take 16 or 32 rows by 8 or 16 columns"
        if facts.block.permuted:
            return "a transposed view: this kernel reads blocks that are contiguous along K"
        if facts.block.bm % cfg.tile_m:
            return f"{cfg.tile_m} rows for blocks {facts.block.bm} high: a strip lies in one block"
        if facts.ordered:
            return "an order of work tiles: the kernel for few columns takes block rows as they come"
        if cfg.warps > 32:
            return f"{cfg.warps} warps; a block of threads has at most 32"
        most, needed = min(255, 65_536 // (32 * cfg.warps)), registers(facts)
        if needed > most:
            return f"{needed} registers a thread, of {most}"
        needed = (cfg.tile_m + PAD) * cfg.tile_n * cfg.warps * 4
        return f"{needed} bytes of shared memory; {spec.name} has {spec.smem}" if needed > spec.smem else ""

    def _k_tile(self, facts: GemmFacts) -> str:
        """What is asked of a lane's part of a row."""
        cfg, width, block = facts.config, facts.element.width, facts.block
        if width > 2:
            return f"operands of {facts.dtype}: this kernel multiplies those of 16 bits, and of 8 bits as such"
        if width * cfg.tile_k not in ((4, 8, 16) if width == 1 else (16,)):
            return f"K-tiles of {cfg.tile_k}: a lane loads 16 bytes, or of 8-bit floats 8 or 4"
        if width == 1 and not loads_vectors(facts):
            return f"operands of {facts.dtype}: rows of B must be contiguous along K, and multiples of 16 bytes"
        if block.scaled and block.bk % (LANES_K * cfg.tile_k):
            return f"K-tiles of {cfg.tile_k} for blocks {block.bk} wide with a scale each: four must lie in one block"
        return ""

    def tensor_core(self, facts: GemmFacts) -> str:
        return "HMMA"

    def entry(self, facts: GemmFacts):
        from .float8 import Float8SkinnyKernel
        from .kernel import SkinnyKernel

        return entry_of(facts)(facts, (Float8SkinnyKernel if facts.element.width == 1 else SkinnyKernel)(facts))

    def judge(self, facts: GemmFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        """Add problems of FP8 operands: each is converted, each 16x8x16 is an HMMA, and each accumulator is scaled."""
        found = super().judge(facts, cubin, resources, problems)
        if facts.element.width > 1:
            return found
        cfg, codes = facts.config, resources.opcodes
        mmas, words = cfg.tile_m // 16 * (cfg.tile_n // 8), cfg.stages * cfg.tile_k // 4
        least = {"HMMA": mmas * words}
        if facts.block.scaled:
            least["FFMA"] = 4 * mmas * cfg.stages // self.entry(facts).kernel.together
        if not converts_by_bits(facts):
            least["F2FP" if facts.dtype == "float8_e4m3fn" else "PRMT"] = 2 * (cfg.tile_m + cfg.tile_n) // 8 * words
        return found + [f"{codes.get(c, 0)} {c}, of at least {n}" for c, n in least.items() if codes.get(c, 0) < n]

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        if quick:
            return []
        found = catalogue.skinny_kernels(self, arch) + catalogue.skinny_float8_kernels(self, arch)
        return found + catalogue.narrow_kernels(self, arch, quick)


SKINNY = register(Skinny())
