"""What a product takes under a configuration, and how it is launched: a cost model of waves, for an H200.

The model of one work tile, in clocks of an SM: its tensor-core time (2048 multiply-adds of 16 bits a clock) or the
time its operands take from L2 (42 bytes a clock and SM: the measured 8.7 TB/s at the 1.55 GHz of a loaded card),
whichever is longer, and what no other work hides: filling the pipeline, and the store. A cooperative kernel hides none
of its store; of two ping-pong consumer groups one stores while the other multiplies. Where K is split among the CTAs of
a cluster, each takes its share of the loop and of the store, and the exchange comes between them.
"""

from .config import BlockFacts, GemmConfig
from .problem import Extents, Problem

MAC_BYTES_PER_CLOCK = 4096  # multiply-adds times the bytes of an element
L2_BYTES_PER_CLOCK = 42
# The same feed is more a clock where clocks are slower: products of 8-bit floats ran at some 1.35 GHz.
L2_OF_8_BITS = 48 / L2_BYTES_PER_CLOCK
PIPELINE_FILL = 1500  # clocks from a CTA's start to its first product; an estimate
# A warpgroup's store, for each accumulator of a thread. Light: 2000 clocks for 128 of them, an estimate. Loaded: the 25
# instructions of bias and GELU more, another estimate. What all else of a tile takes of a cooperative kernel of 8-bit
# floats was measured (H100, by sums over 1024, 2048 and 8192): 3600 to 3800 clocks of 128 accumulators. A part of it
# does not depend on the tile's size: block-sparse products took 4 to 10 % longer in tiles of 128x128, pairs of which
# share an operand, than of 128x256. So these have clocks besides, but not narrower ones, which wait for bytes.
STORE_CLOCKS = {"light": 16, "loaded": 40}
STORE_CLOCKS_OF_8_BITS = {"light": 28, "loaded": 52}
SQUARE_TILE_CLOCKS = 450  # of 8 bits
# Of a split K: an estimate of what an exchange costs by itself, what is published of stores to another SM of a cluster
# (2.7 to 3.3 TB/s in all), and what DRAM delivers to all SMs (4.27 TB/s), which no split exceeds.
EXCHANGE_CLOCKS, EXCHANGE_BYTES_PER_CLOCK = 1500, 12
DRAM_BYTES_PER_CLOCK = 2750
# Clocks from the release of a stage until both CTAs of a cluster have its next K-tile. The two have the same operand on
# its way, so they ask DRAM for half as many bytes at a time as two CTAs alone. H200: 64x64x64 tiles with 8 stages took
# 330 to 380 clocks a K-tile (128x4096x4096 and 128x4096x14336, by the difference), where their bytes take 293 from L2;
# K split between two CTAs was 19 % faster. Measured with 16-bit operands alone.
MULTICAST_LATENCY = 2750
LAST_RESORT = 1e15  # added to the clocks of a kernel that is not made for a product: any other goes before it
PANEL_BYTES = 8 << 20  # of B that stay in L2 beside A's and D's traffic; 16 MB measured 1 % slower, 32 MB 5 %


def cost(cfg: GemmConfig, problem: Problem, sms: int, l2_bytes_per_clock: float = L2_BYTES_PER_CLOCK) -> float:
    """Clocks the product takes under this configuration; `l2_bytes_per_clock`: what L2 feeds one SM, where measured."""
    width = k_width(cfg, problem.block)
    k_tiles = max(1.0, problem.density * problem.extents.K / width / cfg.split)
    mma, load = k_tile_clocks(cfg, problem.width, l2_bytes_per_clock)
    if cfg.cluster_m * cfg.cluster_n > 1 and problem.width == 2 and k_tiles > cfg.stages:
        load = max(load, MULTICAST_LATENCY / (cfg.stages * cfg.rings))
    loop = k_tiles * max(mma / problem.mma_rate, load)
    return persistent(cfg, problem, sms, row_tiles(cfg, problem.extents, problem.block), loop)


def k_width(cfg, block: BlockFacts | None) -> int:
    """Columns of A that a K-tile advances by."""
    return min(cfg.tile_k, block.bk) if block else cfg.tile_k


def k_tile_clocks(cfg, width: int, l2_bytes_per_clock: float) -> tuple[float, float]:
    """Of one K-tile of elements of `width` bytes: (products, loads)."""
    mma = cfg.tile_m * cfg.tile_n * cfg.tile_k * width / MAC_BYTES_PER_CLOCK
    load = (cfg.tile_m / cfg.cluster_n + cfg.tile_n / cfg.cluster_m) * cfg.tile_k * width / l2_bytes_per_clock
    return mma, load / L2_OF_8_BITS if width == 1 else load


def persistent(cfg, problem: Problem, sms: int, tiles_m: int, loop: float) -> float:
    """Clocks of a persistent kernel whose tiles, `tiles_m` high, have mainloops of `loop` clocks."""
    extents, density = problem.extents, problem.density
    clusters_m, clusters_n = -(-tiles_m // cfg.cluster_m), -(-extents.N // (cfg.tile_n * cfg.cluster_n))
    waves = -(-clusters_m * clusters_n * extents.L // resident_clusters(cfg, sms))
    accumulators = cfg.tile_m * cfg.tile_n // (128 * cfg.warps_m * cfg.warps_n)
    store = accumulators // cfg.split * store_clocks(problem)
    if problem.width == 1 and problem.block and cfg.tile_m == cfg.tile_n == cfg.tile_k == 128:
        store += SQUARE_TILE_CLOCKS
    if cfg.split > 1:
        store += EXCHANGE_CLOCKS + cfg.split_k_bytes / EXCHANGE_BYTES_PER_CLOCK
        operands = (density * extents.M + extents.N) * extents.K * extents.L * problem.width
        loop = max(loop, operands / DRAM_BYTES_PER_CLOCK / waves)
    alone = cfg.consumer_groups == 1 or waves == 1  # no other tile to multiply while this one is stored
    tile = loop + store if alone else max(loop, (loop + store) / 2)
    longest = problem.stats.longest
    longest = 0.0 if longest is None else loop * longest / max(density, 1e-9) + store
    return max(waves * tile, longest) + PIPELINE_FILL


def store_clocks(problem: Problem) -> int:
    """Of an accumulator."""
    clocks = STORE_CLOCKS_OF_8_BITS if problem.width == 1 else STORE_CLOCKS
    return clocks["light" if problem.epilogue.is_light else "loaded"]


def row_tiles(cfg, extents: Extents, block: BlockFacts | None) -> int:
    """How many row tiles a product has; a block is cut into tiles of its own."""
    if block is None:
        return -(-extents.M // cfg.tile_m)
    return -(-block.bm // cfg.tile_m) * (extents.M // block.bm)


def resident_clusters(cfg, sms: int) -> int:
    """How many clusters run at once. Of four CTAs 32 did not fit into 132 SMs (twice the time): GPCs differ in size."""
    return max(1, (sms - 12 if cfg.cluster > 2 else sms) // cfg.cluster)


def all_ctas(cfg, sms: int) -> int:
    """How many CTAs run at once."""
    return resident_clusters(cfg, sms) * cfg.cluster if cfg.split > 1 else sms


def raster_group(cfg, problem: Problem) -> int:
    """Width of a raster panel in cluster tiles.

    Dense: near-square patches, 2048 columns wide. Sparse: a panel of B (K x columns) of PANEL_BYTES; twice that where
    blocks 512 high read each of B's blocks less often.
    """
    columns = 2048
    if problem.block is not None:
        columns = PANEL_BYTES * max(1, problem.block.bm // 256) // (problem.width * max(1, problem.extents.K))
    return max(1, columns // (cfg.tile_n * cfg.cluster_n))
