"""Cost model of GEMM configurations (waves of tiles on an H200), and launch parameters.

A work tile costs, in SM clocks, the longer of its tensor-core time (2048 16-bit multiply-adds a clock) and the time of
its loads from L2 (42 bytes per clock and SM: the measured 8.7 TB/s at the 1.55 GHz of a loaded card), plus latency that
no other work hides: the pipeline fill and the store. A cooperative kernel hides none of its store; in a ping-pong
kernel one consumer group stores while the other multiplies. With split-K among the CTAs of a cluster, each CTA has its
share of the mainloop and of the store, with the reduction between them.
"""

from .config import BlockFacts, GemmConfig
from .problem import Extents, Problem

MAC_BYTES_PER_CLOCK = 4096  # multiply-adds times the bytes of an element
L2_BYTES_PER_CLOCK = 42
# The same bandwidth is more bytes per clock at a lower clock rate: FP8 GEMMs ran at some 1.35 GHz.
L2_OF_8_BITS = 48 / L2_BYTES_PER_CLOCK
PIPELINE_FILL = 1500  # clocks from a CTA's start to its first MMA; an estimate
# Clocks of a warpgroup's store per accumulator of a thread. Light: 2000 clocks for 128 accumulators, an estimate.
# Loaded: 25 more instructions for bias and GELU, an estimate. For a cooperative FP8 kernel everything but the mainloop
# was measured (H100, by K of 1024, 2048 and 8192): 3600 to 3800 clocks for 128 accumulators. A part of it does not
# depend on the tile size: block-sparse GEMMs took 4 to 10 % longer with tiles of 128x128, pairs of which share an
# operand, than with 128x256. So square tiles have extra clocks; narrower tiles, which are bound by loads, do not.
STORE_CLOCKS = {"light": 16, "loaded": 40}
STORE_CLOCKS_OF_8_BITS = {"light": 28, "loaded": 52}
SQUARE_TILE_CLOCKS = 450  # of 8 bits
# Split-K: an estimate of the fixed cost of the reduction; the published bandwidth of stores to another SM of a cluster
# (2.7 to 3.3 TB/s in all); and the DRAM bandwidth of all SMs (4.27 TB/s), which bounds any split.
EXCHANGE_CLOCKS, EXCHANGE_BYTES_PER_CLOCK = 1500, 12
DRAM_BYTES_PER_CLOCK = 2750
# Clocks from the release of a stage until both CTAs of a cluster have its next K-tile. Both wait for the same operand,
# so they have half as many bytes of DRAM traffic in flight as two separate CTAs. H200: 64x64x64 tiles with 8 stages
# took 330 to 380 clocks a K-tile (128x4096x4096 and 128x4096x14336, by the difference), where the loads take 293 from
# L2; split-K between two CTAs was 19 % faster. Measured with 16-bit operands only.
MULTICAST_LATENCY = 2750
LAST_RESORT = 1e15  # added to the clocks of a kernel that is not meant for a problem, so that any other is preferred
PANEL_BYTES = 8 << 20  # of B kept in L2 next to the traffic of A and D; 16 MB measured 1 % slower, 32 MB 5 %


def cost(cfg: GemmConfig, problem: Problem, sms: int, l2_bytes_per_clock: float = L2_BYTES_PER_CLOCK) -> float:
    """Estimated clocks of the GEMM under this configuration; l2_bytes_per_clock: L2 bandwidth per SM, if measured."""
    width = k_width(cfg, problem.block)
    k_tiles = max(1.0, problem.density * problem.extents.K / width / cfg.split)
    mma, load = k_tile_clocks(cfg, problem.width, l2_bytes_per_clock)
    if cfg.cluster_m * cfg.cluster_n > 1 and problem.width == 2 and k_tiles > cfg.stages:
        load = max(load, MULTICAST_LATENCY / (cfg.stages * cfg.rings))
    loop = k_tiles * max(mma / problem.mma_rate, load)
    if cfg.consumer_groups > cfg.rings and problem.promotes or cfg.schedule:  # not measured yet
        loop += LAST_RESORT
    return persistent(cfg, problem, sms, row_tiles(cfg, problem.extents, problem.block), loop)


def k_width(cfg, block: BlockFacts | None) -> int:
    """Columns of A that a K-tile advances by."""
    return min(cfg.tile_k, block.bk) if block else cfg.tile_k


def k_tile_clocks(cfg, width: int, l2_bytes_per_clock: float) -> tuple[float, float]:
    """Clocks of one K-tile with elements of `width` bytes: (MMAs, loads)."""
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
    """Clocks of the store per accumulator."""
    clocks = STORE_CLOCKS_OF_8_BITS if problem.width == 1 else STORE_CLOCKS
    return clocks["light" if problem.epilogue.is_light else "loaded"]


def row_tiles(cfg, extents: Extents, block: BlockFacts | None) -> int:
    """Number of row tiles; each block is tiled separately."""
    if block is None:
        return -(-extents.M // cfg.tile_m)
    return -(-block.bm // cfg.tile_m) * (extents.M // block.bm)


def resident_clusters(cfg, sms: int) -> int:
    """Number of resident clusters. 32 clusters of four CTAs do not fit on 132 SMs (twice the time): GPC sizes vary."""
    return max(1, (sms - 12 if cfg.cluster > 2 else sms) // cfg.cluster)


def all_ctas(cfg, sms: int) -> int:
    """Number of resident CTAs."""
    return resident_clusters(cfg, sms) * cfg.cluster if cfg.split > 1 else sms


def raster_group(cfg, problem: Problem) -> int:
    """Width of a raster panel in cluster tiles.

    Dense: near-square patches, 2048 columns wide. Sparse: a panel of B (K x columns) of PANEL_BYTES, or twice that for
    blocks 512 high, which read each of B's blocks less often.
    """
    columns = 2048
    if problem.block is not None:
        columns = PANEL_BYTES * max(1, problem.block.bm // 256) // (problem.width * max(1, problem.extents.K))
    return max(1, columns // (cfg.tile_n * cfg.cluster_n))
