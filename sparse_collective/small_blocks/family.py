"""Blocks 16 to 64 high on sm_90: which configurations there are, what they ask, what they cost."""

import math
from dataclasses import replace

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul import cost, legality
from cute_kernels.matmul.candidates import with_stages
from cute_kernels.matmul.config import BlockFacts, GemmFacts
from cute_kernels.matmul.problem import Problem, listed_at_random
from cute_kernels.runtime.fake import fake_tensor
from cute_kernels.runtime.families import register
from cute_kernels.tile.element import BITS_16, Element

from ..bsr_gemm import catalogue
from ..bsr_gemm.family import BsrFamily, held_by_dram
from .config import SmallBlocksConfig
from .tables import tables_of
from .tile import CHUNK, CONSUMERS, MOST_TABLE_BYTES, Geometry, table_bytes

# Fitted to 90 times, as `cost` says, at the clock of a loaded card, which these do not load as much: so shared memory's
# 128 bytes a clock, of TMA's writes and WGMMA's reads together, look like more.
CHUNK_CLOCKS, BLOCK_CLOCKS, SMEM_BYTES_PER_CLOCK = 392, 90, 165
FEED = {3: 1.03, 4: 1.1, 5: 1.37, 6: 1.15, 7: 1.15}  # times L2's rate, by stages of B


class SmallBlocks(BsrFamily):
    """A group of 192 rows walks over all columns that any of its blocks needs, with the operands swapped."""

    name = "small blocks"
    config = SmallBlocksConfig
    orders = False

    def candidates(
        self, path: str, block: BlockFacts, spec: ArchSpec, element: Element = BITS_16
    ) -> list[SmallBlocksConfig]:
        """Each the best for some pattern.

        Measured at 8192 cubed on an H200, in us, in this order: 16x16, 12.5 %: 664, 612, 883, 1043, 783; 100 %: 4860,
        4817, 3720, 3930, 3233; 32x32, 3 %: 204, 156, 182, 284, 198; 50 %: 1720, 1490, 1312, 1383, 1334; 64x64, 50 %:
        1707, 1431, 1057, 1166, 1096. A cluster is worth it where B is K-major and blocks are 16 wide: 656, not 767.
        """
        if path != "sm_90" or block.bm not in (16, 32, 64) or CHUNK > element.rows[0]:
            return []
        cfg = SmallBlocksConfig(256, 0)
        deep = replace(cfg, store_row=128, chunks=4)
        narrow = replace(deep, tile_n=128)
        shapes = [replace(cfg, cluster_m=2), cfg, narrow, replace(narrow, cluster_m=2), deep]
        store = CONSUMERS * 64
        return [with_stages(s, spec, element, store * s.store_row + s.chunk_elements * element.width) for s in shapes]

    def cost(self, config, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        """A chunk costs the bytes that TMA writes to shared memory and the products read from it (64 columns of B again
        for each block); or the bytes that arrive, for which a multicast to two CTAs is 10 % faster, not twice; or what
        a consumer spends on waiting and branching.

        Rings of 2 chunks fill up where chunks do, the more so with high blocks, and few stages of B do not cover L2's
        latency. Against 90 times at 8192 cubed (blocks of 16 to 64, 3 to 100 %, all candidates) that errs by 6 % (root
        mean square). Of the 90, 75 are as measured, some of them before TMA copied two rows as one (Geometry.fold); the
        15 others were too, and were lowered by 1 to 5 % by guess.
        """
        extents, block, density = problem.extents, problem.block, problem.density
        if table_bytes(extents.M, extents.K, config.cluster_m) > MOST_TABLE_BYTES:
            return math.inf
        steps = max(1, config.tile_k // block.bk)
        blocks = density * steps * config.tile_m / block.bm  # of a chunk, in one CTA
        listed = listed_at_random(density, block, config.tile_m * config.cluster_m)
        if problem.stats.listed is not None:  # of one CTA; a cluster's is taken to be larger as it is at random
            alone = max(1e-9, listed_at_random(density, block, config.tile_m))
            listed = min(1.0, problem.stats.listed * listed / alone)
        geometry = Geometry.of_block(block.bm, block.bk, problem.majors[1] == "k")
        listed = 1 - (1 - listed) ** geometry.gather
        slabs, deep = config.tile_n / 64, min(block.bk, config.tile_k)
        mma = blocks * slabs * deep * block.bm * 64 * problem.width / cost.MAC_BYTES_PER_CLOCK
        arriving = (listed * config.tile_n + density * config.tile_m) * config.tile_k * problem.width
        smem = (arriving + blocks * slabs * deep * (64 + block.bm) * problem.width) / SMEM_BYTES_PER_CLOCK
        issue = listed * CHUNK_CLOCKS + blocks / CONSUMERS * BLOCK_CLOCKS
        feed = l2_bytes_per_clock * (1 if config.cluster_m > 1 else 0.914) * FEED.get(config.stages, 1.0)
        _, second, first = sorted((max(mma, smem), arriving / feed, issue))
        chunk = first + (0.2 if config.stages == 3 else 0.1) * second  # nothing overlaps wholly
        if config.chunks == 2:
            chunk *= 1 + 1.21 * (block.bm / 64) ** 0.8 * min(1.0, density / max(1e-9, listed)) ** 1.13
        tiles = -(-extents.M // (config.tile_m * config.cluster_m)) * -(-extents.N // config.tile_n) * extents.L
        waves = -(-tiles // max(1, sms // config.cluster_m))
        store = config.tile_n // 2 * cost.store_clocks(problem)
        # Measured beside products that leave the card cool; beside others these kernels lost 5 % more than those.
        clocks = 1.05 * (waves * (extents.K / config.tile_k * chunk + store) + cost.PIPELINE_FILL)
        return max(clocks, held_by_dram(problem))

    def grid(self, config, problem: Problem, sms: int) -> tuple[int, int]:
        return cost.raster_group(config, problem), sms

    def unsupported(self, facts: GemmFacts) -> str:
        cfg, block = facts.config, facts.block
        if reason := legality.general(facts):
            return reason
        if facts.path != "sm_90":
            return "the kernel for small blocks exists on the sm_90 path only"
        if reason := legality.tma_operands(facts) or legality.store_buffers(facts):
            return reason
        if block.batch == "patterns" or block.run:
            return "a pattern for each item, or runs of columns with an item each: the tables are those of one pattern"
        if reason := Geometry.refuse(block.bm, block.bk):
            return reason
        if CHUNK > facts.element.rows[0]:
            return f"operands of {facts.dtype}: {CHUNK} of them, a chunk, are wider than a swizzled row"
        if cfg.tile_n not in (128, 256) or cfg.cluster_m > 2:
            return f"tile {cfg}: it is {cfg.tile_m} rows by 128 or 256 columns, in clusters of 1 or 2 rows"
        if cfg.stages < 2 or cfg.chunks < 2 or cfg.chunks & (cfg.chunks - 1):
            return f"{cfg}: a chunk is released when the next one has been issued, and rings wrap at powers of two"
        epilogue, other = facts.epilogue, "the kernels with a block row a tile have them"
        if block.batch and epilogue.residual and epilogue.activation == "gelu":  # 32 bytes of stack
            return f"a batch, a residual and GELU leave no registers; {other}"
        if epilogue.stores_z and not facts.tma_store:  # 96 bytes
            return f"a result and z stored element by element leave no registers; {other}"
        if cfg.tile_n > 128 and (epilogue.residual or epilogue.function or epilogue.stores_z or not facts.tma_store):
            # compiled: 32 to 456 bytes of stack with a residual
            return "128 accumulators of 160 registers a thread leave none for this epilogue; 128 columns have room"
        return legality.smem_sm90(facts)

    def entry(self, facts: GemmFacts):
        from .gemm import SmallBlocksGemm

        return SmallBlocksGemm(facts)

    def tables(self, facts: GemmFacts) -> tuple:
        counts, order = (fake_tensor("int32", 1, 0, 1) for _ in range(2))
        return counts, fake_tensor("int32", 2, 1, 1), fake_tensor("int32", 3, 2, 4), order

    def pattern(self, facts: GemmFacts, W, order, groups) -> tuple:
        return tables_of(W.pattern, facts.config.cluster_m, facts.majors[1] == "k")

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        return [] if quick else catalogue.small_blocks_kernels(self, arch)


SMALL_BLOCKS = register(SmallBlocks())
