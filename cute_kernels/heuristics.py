"""What a product takes under a configuration, and how it is launched: a cost model of waves, for an H200.

The model of one work tile, in clocks of an SM: its tensor-core time (2048 multiply-adds a clock) or the time its
operands take from L2 (42 bytes a clock and SM: the measured 8.7 TB/s at the 1.55 GHz of a loaded card), whichever is
longer, and what no other work hides: filling the pipeline, and the store. A cooperative kernel hides none of its store;
of two ping-pong teams one stores while the other multiplies. Where K is split among the CTAs of a cluster, each takes
its share of the loop and of the store, and the exchange comes between them.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from .candidates import tile_k_of
from .config import ELEMENT, FEW_VECTOR, BlockFacts, GemmConfig
from .sweep_tile import CONSUMERS, MOST_TABLE_BYTES, Geometry, sweep_table_bytes

MACS_PER_CLOCK = 2048
L2_BYTES_PER_CLOCK = 42
PIPELINE_FILL = 1500  # clocks from a CTA's start to its first product; an estimate
# A warpgroup's store, for each accumulator of a thread. Light: 2000 clocks for 128 of them, an estimate. Loaded: the 25
# instructions of bias and GELU more, another estimate.
STORE_CLOCKS = {"light": 16, "loaded": 40}
# Of a split K: an estimate of what an exchange costs by itself, what is published of stores to another SM of a cluster
# (2.7 to 3.3 TB/s in all), and what DRAM delivers to all SMs (4.27 TB/s), which no split exceeds.
EXCHANGE_CLOCKS, EXCHANGE_BYTES_PER_CLOCK = 1500, 12
DRAM_BYTES_PER_CLOCK = 2750
# Fitted to 90 times of sweeps, as sweep_cost says, at the clock of a loaded card, which these do not load as much: so
# shared memory's 128 bytes a clock, of TMA's writes and WGMMA's reads together, look like more.
SWEEP_CHUNK_CLOCKS, SWEEP_BLOCK_CLOCKS, SMEM_BYTES_PER_CLOCK = 392, 90, 165
SWEEP_FEED = {3: 1.03, 4: 1.1, 5: 1.37, 6: 1.15, 7: 1.15}  # times L2's rate, by stages of B
LONE_COLUMN = 1.3  # of a pair's column that one row has: its time over that of its bytes, with zeros for the other
# Of a product with at most so many columns: what the kernel for them waits for before its first values arrive, and from
# one piece to a warp's next (estimates).
FEW_COLUMNS, FEW_FILL, FEW_TURN = 16, 700, 800
FEW_FEED = 0.7  # of L2's rate, for plain loads: so that picks come out as measured
PANEL_BYTES = 8 << 20  # of B that stay in L2 beside A's and D's traffic; 16 MB measured 1 % slower, 32 MB 5 %


@dataclass(frozen=True)
class Extents:
    """The shape of a product."""

    M: int
    N: int
    K: int
    L: int = 1


class Shares(NamedTuple):
    """What is known of a sparse operand's pattern, as shares of its block columns. None: as of blocks at random.

    listed: the columns in which a group of 192 rows has a block. paired: in which a pair of block rows has one.
    longest: that the longest block row has.
    """

    listed: float | None = None
    paired: float | None = None
    longest: float | None = None


NOT_KNOWN = Shares()


def cost(
    cfg: GemmConfig,
    extents: Extents,
    block: BlockFacts | None,
    kept: float,
    sms: int,
    light: bool = True,
    l2_bytes_per_clock: float = L2_BYTES_PER_CLOCK,
    shares: Shares = NOT_KNOWN,
    b_k_major: bool = False,
) -> float:
    """Clocks the product takes under this configuration; `kept` is the share of K-tiles that exist.

    `light`: EpilogueSpec.is_light. `l2_bytes_per_clock`: what L2 feeds one SM, where measured (bench.ceilings).
    """
    if cfg.few:
        return few_cost(cfg, extents, block, kept, sms, l2_bytes_per_clock)
    least = 0.0
    if block is not None and extents.N <= FEW_COLUMNS:
        least = PIPELINE_FILL + values_bytes(extents, block, kept) / (others_of_dram(block) * DRAM_BYTES_PER_CLOCK)
    if cfg.sweep:
        swept = sweep_cost(cfg, extents, block, kept, sms, light, l2_bytes_per_clock, shares.listed, b_k_major)
        return max(swept, least)
    clusters_m = -(-row_tiles(cfg, extents, block) // cfg.cluster_m)
    clusters_n = -(-extents.N // (cfg.tile_n * cfg.cluster_n))
    waves = -(-clusters_m * clusters_n * extents.L // resident_clusters(cfg, sms))
    width = min(cfg.tile_k, block.bk) if block else cfg.tile_k
    k_tiles = max(1.0, kept * extents.K / width / cfg.split)
    mma = cfg.tile_m * cfg.tile_n * cfg.tile_k / MACS_PER_CLOCK
    load = (cfg.tile_m / cfg.cluster_n + cfg.tile_n / cfg.cluster_m) * cfg.tile_k * ELEMENT / l2_bytes_per_clock
    loop = k_tiles * max(mma, load)
    if cfg.pairs:  # columns that both rows have, and those of one
        paired = 1 - (1 - kept) ** 2 if shares.paired is None else shares.paired
        paired = min(1.0, 2 * kept, max(kept, paired))
        loop = extents.K / width * ((2 * kept - paired) * max(mma, load) + 2 * (paired - kept) * LONE_COLUMN * load)
    accumulators = cfg.tile_m * cfg.tile_n // (128 * cfg.warps_m * cfg.warps_n)
    store = accumulators // cfg.split * STORE_CLOCKS["light" if light else "loaded"]
    if cfg.split > 1:
        store += EXCHANGE_CLOCKS + cfg.exchange_bytes / EXCHANGE_BYTES_PER_CLOCK
    if cfg.split > 1:
        operands = (kept * extents.M + extents.N) * extents.K * extents.L * ELEMENT
        loop = max(loop, operands / DRAM_BYTES_PER_CLOCK / waves)
    alone = cfg.teams == 1 or waves == 1  # no other tile to multiply while this one is stored
    tile = loop + store if alone else max(loop, (loop + store) / 2)
    longest = 0.0 if shares.longest is None else loop * shares.longest / max(kept, 1e-9) + store
    clocks = max(waves * tile, longest) + PIPELINE_FILL
    return clocks if clocks > least else least + 0.02 * clocks  # of those that DRAM holds up, the best first


def others_of_dram(block: BlockFacts) -> float:
    """What kernels not made for few columns reach of DRAM's rate: measured with 1 token, W 16384 and 8192 squared."""
    return {16: 0.22, 32: 0.55}.get(tile_k_of(block), 0.8)


def values_bytes(extents: Extents, block: BlockFacts, kept: float) -> float:
    """Size of the stored blocks."""
    return kept * extents.M * extents.K * (extents.L if block.batch else 1) * ELEMENT


def few_cost(cfg, extents, block, kept, sms, l2_bytes_per_clock) -> float:
    """`cost` of the kernel for few columns: the longest of three, and the indices that come before the first values.

    DRAM delivers W once. L2 delivers W to each column tile and item that it is multiplied with, and for every strip of
    W as many rows of B as there are columns. And a warp waits for each piece before it asks for the next one. No other
    kernel comes as near to DRAM's rate, but with strips of 32 rows too few values are under way; for more columns than
    FEW_COLUMNS it is no match for them. What a column tile fetches before its first values arrive counts for each.
    """
    if extents.N > FEW_COLUMNS:
        return math.inf
    values, tiles_n = values_bytes(extents, block, kept), -(-extents.N // cfg.tile_n)
    passes = tiles_n * (1 if block.batch else extents.L)
    from_l2 = values * passes * (1 + min(extents.N, cfg.tile_n) / cfg.tile_m) / FEW_FEED
    turns = max(1, math.ceil(kept * extents.K / (4 * FEW_VECTOR * cfg.stages * cfg.warps_m)))
    from_dram = values / DRAM_BYTES_PER_CLOCK / (1 if cfg.tile_m == 16 else 0.75)
    return FEW_FILL * tiles_n + max(from_dram, from_l2 / (sms * l2_bytes_per_clock), turns * FEW_TURN)


def row_tiles(cfg: GemmConfig, extents: Extents, block: BlockFacts | None) -> int:
    """How many row tiles a product has."""
    if block is None or cfg.pairs:
        return -(-extents.M // cfg.tile_m)
    return -(-block.bm // cfg.tile_m) * (extents.M // block.bm)


def resident_clusters(cfg: GemmConfig, sms: int) -> int:
    """How many clusters run at once. Of four CTAs 32 did not fit into 132 SMs (twice the time): GPCs differ in size."""
    return max(1, (sms - 12 if cfg.cluster > 2 else sms) // cfg.cluster)


def listed_at_random(kept: float, block: BlockFacts, rows: int) -> float:
    """The share of block columns in which `rows` rows of a random pattern have a block."""
    return 1 - (1 - kept) ** max(1, rows // block.bm)


def sweep_cost(cfg, extents, block, kept, sms, light, l2_bytes_per_clock, known, b_k_major) -> float:
    """`cost` of the sweep kernel; `known` is its shares.listed.

    A chunk costs the bytes that TMA writes to shared memory and the products read from it (64 columns of B again for
    each block); or the bytes that arrive, for which a multicast to two CTAs is 10 % faster, not twice; or what a
    consumer spends on waiting and branching. Rings of 2 chunks fill up where chunks do, the more so with high blocks,
    and few stages of B do not cover L2's latency. Against 90 times at 8192 cubed (blocks of 16 to 64, 3 to 100 %, the
    five of candidates.sweeps) that errs by 6 % (root mean square). Of the 90, 75 are as measured, some of them
    before TMA copied two rows as one (Geometry.fold); the 15 others were too, and were lowered by 1 to 5 % by guess.
    """
    if sweep_table_bytes(extents.M, extents.K, cfg.cluster_m) > MOST_TABLE_BYTES:
        return math.inf
    steps = max(1, cfg.tile_k // block.bk)
    blocks = kept * steps * cfg.tile_m / block.bm  # of a chunk, in one CTA
    listed = listed_at_random(kept, block, cfg.tile_m * cfg.cluster_m)
    if known is not None:  # of one CTA; a cluster's is taken to be larger as it is at random
        listed = min(1.0, known * listed / max(1e-9, listed_at_random(kept, block, cfg.tile_m)))
    listed = 1 - (1 - listed) ** Geometry.of_block(block.bm, block.bk, b_k_major).gather
    slabs, k_steps = cfg.tile_n / 64, min(block.bk, cfg.tile_k) / 16
    mma = blocks * slabs * k_steps * 16 * block.bm * 64 / MACS_PER_CLOCK
    arriving = (listed * cfg.tile_n + kept * cfg.tile_m) * cfg.tile_k * ELEMENT
    smem = (arriving + blocks * slabs * k_steps * (64 + block.bm) * 16 * ELEMENT) / SMEM_BYTES_PER_CLOCK
    issue = listed * SWEEP_CHUNK_CLOCKS + blocks / CONSUMERS * SWEEP_BLOCK_CLOCKS
    feed = l2_bytes_per_clock * (1 if cfg.cluster_m > 1 else 0.914) * SWEEP_FEED.get(cfg.stages, 1.0)
    _, second, first = sorted((max(mma, smem), arriving / feed, issue))
    chunk = first + (0.2 if cfg.stages == 3 else 0.1) * second  # nothing overlaps wholly
    if cfg.chunks == 2:
        chunk *= 1 + 1.21 * (block.bm / 64) ** 0.8 * min(1.0, kept / max(1e-9, listed)) ** 1.13
    tiles = -(-extents.M // (cfg.tile_m * cfg.cluster_m)) * -(-extents.N // cfg.tile_n) * extents.L
    waves = -(-tiles // max(1, sms // cfg.cluster_m))
    store = cfg.tile_n // 2 * STORE_CLOCKS["light" if light else "loaded"]
    # The times were measured beside products that leave the card cool; beside others sweeps lost 5 % more than those.
    return 1.05 * (waves * (extents.K / cfg.tile_k * chunk + store) + PIPELINE_FILL)


def grid_limit(cfg: GemmConfig, extents: Extents, block: BlockFacts | None, group: int, sms: int) -> int:
    """How many CTAs a persistent kernel runs on: for a sparse product, so many that panels stay in step.

    Stored blocks are sorted by column, so block rows that start together sweep B together, and its blocks are
    shared through L2 while they are there. With a CTA count that divides a panel (or is a multiple of it) they go on
    starting together, or so we explain that at 8192, 12.5 %, 128 CTAs are 1.4 to 3.3 % faster than 132.
    """
    slots = resident_clusters(cfg, sms)
    if cfg.split > 1:
        sms = slots * cfg.cluster
    if block is None or cfg.sweep:
        return sms
    panel = row_tiles(cfg, extents, block) // cfg.cluster_m * group
    for fewer in range(slots, int(0.94 * slots), -1):
        if panel % fewer == 0 or fewer % panel == 0:
            return fewer * cfg.cluster
    return sms


def raster_group(cfg: GemmConfig, extents: Extents, block: BlockFacts | None) -> int:
    """Width of a raster panel in cluster tiles.

    Dense: near-square patches, 2048 columns wide. Sparse: a panel of B (K x columns) of PANEL_BYTES; twice that where
    blocks 512 high read each of B's blocks less often.
    """
    columns = 2048
    if block is not None:
        columns = PANEL_BYTES * max(1, block.bm // 256) // (ELEMENT * max(1, extents.K))
    return max(1, columns // (cfg.tile_n * cfg.cluster_n))
