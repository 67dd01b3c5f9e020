"""Kernels for at most 16 columns: configurations, legality, cost."""

import math

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul import cost, legality
from cute_kernels.matmul.config import BlockFacts, GemmFacts
from cute_kernels.matmul.problem import Problem
from cute_kernels.runtime.families import register
from cute_kernels.tile.element import BITS_16, Element

from ..bsr_gemm import catalogue
from ..bsr_gemm.family import FEW_COLUMNS, BsrFamily, values_bytes
from .config import LANES_K, PAD, SkinnyConfig, converts_by_bits, loads_vectors, registers

# Latency before the first values arrive, and from one piece of a warp to its next: estimates, in clocks.
FILL, TURN = 700, 800
FEED = 0.7  # share of L2's rate that plain loads reach, fitted to measurements


def float8_candidates(block: BlockFacts, high: bool, element: Element) -> list[SkinnyConfig]:
    """FP8 configurations: 4 KB in flight per warp. They need more registers, of which CTAs of four warps waste fewer
    than CTAs of eight."""
    tile_k, shapes = element.vector, [(16, 8, 4), (16, 16, 4), *([(32, 16, 2)] if high else [])]
    while block.scaled and block.bk % (LANES_K * tile_k):  # the lanes of a row must be in one block
        tile_k //= 2
    return [SkinnyConfig(m, n, stages * element.vector // tile_k, 4, tile_k) for m, n, stages in shapes]


class Skinny(BsrFamily):
    """GEMV and small-batch GEMM on both paths, the kernel closest to DRAM's rate."""

    name = "skinny"
    features = frozenset(("float8", "float8 output"))
    config = SkinnyConfig
    orders = False

    def candidates(
        self, path: str, block: BlockFacts, spec: ArchSpec, element: Element = BITS_16
    ) -> list[SkinnyConfig]:
        """Configurations for up to 8 columns and for up to 16.

        A warp has 2 or 4 KB of W in flight. Strips of 32 rows read half as much of B from L2. Measured (us, 8192
        squared, 12.5% of 128x128; 16384 squared, 25 % of 64x64) for 1 token: 4 warps with 4 KB each 11.4, 43.0; 8 warps
        with 2 KB 11.7, 42.6, with 4 KB 11.9, 42.1. For 16 tokens: 16 rows 13.5, 48.5; 32 rows 11.8, 49.1; 64x16 tiles
        by TMA 12.9, 45.5.
        """
        high = block.bm % 32 == 0
        if element.width == 1:
            return float8_candidates(block, high, element)
        return [SkinnyConfig(16, 8, 4, 4), SkinnyConfig(16, 16, 2, 8), *([SkinnyConfig(32, 16, 2, 8)] if high else [])]

    def cost(self, config, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        """Estimated clocks: the latency of the indices before the first values, plus the longest of three terms.

        DRAM delivers W once. L2 delivers W to each column tile and batch index, and for each strip of W the rows of B.
        A warp waits for each piece before it loads the next one. Strips of 32 rows have too few values in flight; above
        FEW_COLUMNS columns other kernels are faster. The latency counts once per column tile.
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
        """The reason why these facts are not supported. The kernel needs no TMA; but on the sm_90 path, operands that
        TMA cannot read are left to the sm_80 kernels."""
        if reason := legality.general(facts) or (legality.tma_operands(facts) if facts.path == "sm_90" else ""):
            return reason
        cfg, spec = facts.config, facts.spec
        if reason := self._k_tile(facts):
            return reason
        if cfg.tile_m not in (16, 32) or cfg.tile_n not in (8, 16):
            return f"tile {cfg}: must have 16 or 32 rows and 8 or 16 columns"
        if facts.block.permuted:
            return "a transposed view: this kernel requires blocks that are contiguous along K"
        if facts.block.bm % cfg.tile_m:
            return f"{cfg.tile_m} rows for blocks {facts.block.bm} high: a strip must lie in one block"
        if facts.ordered:
            return "an order of work tiles: the kernel for small batches does not support it"
        if cfg.warps > 32:
            return f"{cfg.warps} warps; a CTA has at most 32"
        most, needed = min(255, 65_536 // (32 * cfg.warps)), registers(facts)
        if needed > most:
            return f"{needed} registers per thread exceed {most}"
        needed = (cfg.tile_m + PAD) * cfg.tile_n * cfg.warps * 4
        return f"{needed} bytes of shared memory; {spec.name} has {spec.smem}" if needed > spec.smem else ""

    def _k_tile(self, facts: GemmFacts) -> str:
        """The reason why a lane's part of a row is not supported, or an empty string."""
        cfg, width, block = facts.config, facts.element.width, facts.block
        if width > 2:
            return f"operands of {facts.dtype}: this kernel supports 16-bit and FP8 operands"
        if width * cfg.tile_k not in ((4, 8, 16) if width == 1 else (16,)):
            return f"K-tiles of {cfg.tile_k}: a lane loads 16 bytes, or 8 or 4 for FP8"
        if width == 1 and not loads_vectors(facts):
            return f"operands of {facts.dtype}: rows of B must be contiguous along K, and multiples of 16 bytes"
        if block.scaled and block.bk % (LANES_K * cfg.tile_k):
            return f"K-tiles of {cfg.tile_k} for blocks {block.bk} wide with a scale each: four must lie in one block"
        return ""

    def tensor_core(self, facts: GemmFacts) -> str:
        return "HMMA"

    def entry(self, facts: GemmFacts):
        from ..bsr_gemm.kernel import BsrGemm
        from .fp8 import Float8SkinnyKernel
        from .kernel import SkinnyKernel

        return BsrGemm(facts, (Float8SkinnyKernel if facts.element.width == 1 else SkinnyKernel)(facts))

    def judge(self, facts: GemmFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        """Add problems of FP8 operands: each is converted, each 16x8x16 is an HMMA, and each accumulator is scaled."""
        found = super().judge(facts, cubin, resources, problems)
        if facts.element.width > 1:
            return found
        cfg, codes = facts.config, resources.opcodes
        mmas, words = cfg.tile_m // 16 * (cfg.tile_n // 8), cfg.stages * cfg.tile_k // 4
        least = {}
        if facts.block.scaled:
            least["FFMA"] = 4 * mmas * cfg.stages // self.entry(facts).kernel.together
        if not converts_by_bits(facts):
            least["F2FP" if facts.dtype == "float8_e4m3fn" else "PRMT"] = 2 * (cfg.tile_m + cfg.tile_n) // 8 * words
        if codes.get("HMMA", 0) != mmas * words:
            found.append(f"{codes.get('HMMA', 0)} HMMA for {mmas * words} MMA steps of a piece")
        return found + [f"{codes.get(c, 0)} {c}, of at least {n}" for c, n in least.items() if codes.get(c, 0) < n]

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        if quick:
            return []
        found = catalogue.skinny_kernels(self, arch) + catalogue.skinny_float8_kernels(self, arch)
        return found + catalogue.narrow_kernels(self, arch, quick)


SKINNY = register(Skinny())
