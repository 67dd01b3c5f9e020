"""Which configurations are tried for a product: short lists for each path and kind of kernel, made on an H200.

Each is the best for some problem: legality.unsupported says which of them can be built, heuristics.cost which is best.
"""

from dataclasses import replace

from .arch import ArchSpec
from .config import BARRIER_BYTES, ELEMENT, FEW_VECTOR, PAIRED_ROWS, BlockFacts, GemmConfig
from .sweep_tile import CHUNK, CONSUMERS, ROWS


def tile_k_of(block: BlockFacts | None) -> int:
    """64 elements fill a 128-byte swizzle row; narrower blocks get a K-tile of their own width."""
    return 64 if block is None or block.bk >= 48 else 32 if block.bk == 32 else 16


def with_stages(cfg: GemmConfig, spec: ArchSpec, store_bytes: int, most: int = 8) -> GemmConfig:
    """The deepest ring that shared memory allows."""
    if cfg.few:  # in registers
        return cfg
    stage = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * ELEMENT
    if cfg.sweep:  # B alone has stages
        stage = cfg.tile_n * cfg.tile_k * ELEMENT
        store_bytes += cfg.chunks * cfg.tile_m * cfg.tile_k * ELEMENT
    return replace(cfg, stages=min(most, (spec.smem - 2 * BARRIER_BYTES - store_bytes - cfg.exchange_bytes) // stage))


def sm90(
    tile_m, tile_n, tile_k, warps_m, warps_n, cluster_m=1, cluster_n=1, teams=1, ring=2, store_row=128, *, split=1, spec
) -> GemmConfig:  # fmt: skip
    """One sm_90 configuration with as many stages as fit."""
    cfg = GemmConfig(
        tile_m, tile_n, tile_k, 0, warps_m, warps_n, cluster_m, cluster_n, teams, ring, store_row, split=split,
    )  # fmt: skip
    return with_stages(cfg, spec, ring * warps_m * warps_n * teams * 64 * store_row)


def candidates_sm90(block: BlockFacts | None, spec: ArchSpec) -> list[GemmConfig]:
    """Configurations worth trying, best first among equals."""
    k = tile_k_of(block)
    # Of few columns: rows outside of B cost TMA time too (one token: 63 us with 64 columns, 64 tokens: 48).
    skinny = [sm90(64, columns, k, 1, 1, teams=2, ring=1, spec=spec) for columns in (64, 32, 16)]
    swept = sweeps(spec) if block is not None and block.bm in (16, 32, 64) else []
    if block is not None:
        skinny += few(block)
    if block is not None and k < 64:
        # No cluster: A's part of a narrow K-tile is a few hundred bytes, and waiting for a neighbour costs more.
        return [
            sm90(64, 256, k, 1, 1, teams=2, ring=1, spec=spec),
            sm90(64, 256, k, 1, 2, spec=spec),
            sm90(64, 128, k, 1, 2, ring=1, spec=spec),
            *skinny,
            *swept,
        ]
    shared_high, shared_low = split_sm90(k, spec)
    if block is not None and block.bm <= 64:
        return [
            sm90(64, 256, k, 1, 1, 1, 2, teams=2, ring=1, spec=spec),
            sm90(64, 256, k, 1, 1, teams=2, ring=1, spec=spec),
            sm90(64, 128, k, 1, 1, teams=2, spec=spec),
            *skinny,
            *shared_low,
            *swept,
            *(pairs(spec) if block.bm == PAIRED_ROWS and block.bk % 64 == 0 else []),
        ]
    wide = [sm90(128, 128, k, 2, 1, spec=spec), sm90(128, 64, k, 2, 1, ring=1, spec=spec)]
    if block is None:
        return [
            sm90(128, 192, k, 1, 1, 2, 1, teams=2, ring=1, spec=spec),
            sm90(128, 256, k, 2, 1, 2, 1, spec=spec),
            sm90(256, 128, k, 2, 1, 1, 2, spec=spec),
            sm90(128, 256, k, 2, 1, spec=spec),
            sm90(256, 128, k, 2, 1, spec=spec),
            sm90(128, 128, k, 1, 1, 1, 2, teams=2, spec=spec),
            *wide,
            sm90(64, 256, k, 1, 2, spec=spec),
            sm90(64, 128, k, 1, 2, ring=1, spec=spec),
            sm90(64, 64, 2 * k, 1, 2, ring=1, spec=spec),
            sm90(64, 32, 2 * k, 1, 2, ring=1, spec=spec),
            sm90(64, 64, k, 1, 2, 2, 1, ring=2, spec=spec),
            *shared_high,
            *shared_low,
        ]
    if -(-block.bm // 128) * 128 > -(-block.bm // 64) * 64:  # 192 rows are three tiles of 64, not two of 128
        return candidates_sm90(replace(block, bm=64), spec)
    pair = (2, 1) if block.bm % 256 == 0 else (1, 2)  # two row tiles of one block share B, two column tiles A
    return [
        sm90(128, 192, k, 1, 1, *pair, teams=2, ring=1, spec=spec),
        sm90(128, 256, k, 2, 1, *pair, spec=spec),
        sm90(128, 256, k, 2, 1, spec=spec),
        sm90(128, 128, k, 1, 1, *pair, teams=2, spec=spec),
        *([sm90(128, 128, k, 1, 1, teams=2, spec=spec)] if block.run else []),  # no pair fits into a run of 128
        *wide,
        *skinny,
        *shared_high,
    ]


def split_sm90(k: int, spec: ArchSpec) -> tuple[list[GemmConfig], list[GemmConfig]]:
    """Configurations for few tiles, 128 and 64 rows high: several CTAs share the K-tiles of one.

    Their stores' chunks are so narrow that each CTA has one. By the model, others (256 columns) gain less than 10 %.
    """
    high = [
        sm90(128, 64, k, 2, 1, ring=1, store_row=64, split=2, spec=spec),
        sm90(128, 128, k, 2, 1, ring=1, split=2, spec=spec),
        sm90(128, 128, k, 2, 1, ring=1, store_row=64, split=4, spec=spec),
        sm90(128, 64, k, 2, 1, ring=1, store_row=32, split=4, spec=spec),
    ]
    low = [
        sm90(64, 128, k, 1, 2, ring=1, store_row=64, split=2, spec=spec),
        sm90(64, 128, k, 1, 2, ring=1, store_row=32, split=4, spec=spec),
    ]
    return high, low


def sweeps(spec: ArchSpec) -> list[GemmConfig]:
    """Configurations of the sweep kernel (sparse_collective.sweep_sm90), each the best for some pattern.

    Measured at 8192 cubed on an H200, in us, in this order: 16x16, 12.5 %: 664, 612, 883, 1043, 783; 100 %: 4860,
    4817, 3720, 3930, 3233; 32x32, 3 %: 204, 156, 182, 284, 198; 50 %: 1720, 1490, 1312, 1383, 1334; 64x64, 50 %: 1707,
    1431, 1057, 1166, 1096. A cluster is worth it where B is K-major and blocks are 16 wide: 656 instead of 767.
    """
    cfg = GemmConfig(ROWS * CONSUMERS, 256, CHUNK, 0, CONSUMERS, 1, ring=1, store_row=64, sweep=True)
    deep = replace(cfg, store_row=128, chunks=4)
    shapes = [replace(cfg, cluster_m=2), cfg, replace(deep, tile_n=128), replace(deep, tile_n=128, cluster_m=2), deep]
    return [with_stages(shape, spec, shape.ring * CONSUMERS * 64 * shape.store_row) for shape in shapes]


def pairs(spec: ArchSpec) -> list[GemmConfig]:
    """Configurations whose tiles are two block rows (mainloop_pairs_sm90); two column tiles share A."""
    shapes = [
        sm90(128, 192, 64, 1, 1, 1, 2, teams=2, ring=1, spec=spec),
        sm90(128, 128, 64, 1, 1, 1, 2, teams=2, spec=spec),  # for epilogues that take more registers
        sm90(128, 256, 64, 1, 2, 1, 2, spec=spec),
    ]
    return [replace(shape, pairs=True) for shape in shapes]


def few(block: BlockFacts) -> list[GemmConfig]:
    """Configurations of the kernel for few columns (sparse_collective.few_columns): up to 8 of them, and up to 16.

    A warp has 2 or 4 KB of W under way. 32 rows a strip ask L2 for half as much of B. Measured (us, 8192 squared, 12.5%
    of 128x128; 16384 squared, 25 % of 64x64) for 1 token: 4 warps with 4 KB each 11.4, 43.0; 8 warps with 2 KB 11.7,
    42.6, with 4 KB 11.9, 42.1. For 16 tokens: 16 rows 13.5, 48.5; 32 rows 11.8, 49.1; 64x16 tiles by TMA 12.9, 45.5.
    """
    shapes = [(16, 8, 4, 4), (16, 16, 2, 8), *([(32, 16, 2, 8)] if block.bm % 32 == 0 else [])]
    return [GemmConfig(m, n, FEW_VECTOR, stages, warps, 1, few=True) for m, n, stages, warps in shapes]


def candidates_sm80(block: BlockFacts | None, spec: ArchSpec) -> list[GemmConfig]:
    """Configurations of the mma.sync path, best first; stages are bounded by the architecture's shared memory.

    Measured on an H200 (compiled for it): dense 4096 cubed 256x128x32 477, 128x128x64 458, 128x128x32 434 TFLOP/s;
    512x112 blocks 128x128x64 405, 256x128x64 396, 128x128x32 371. K-tiles of 64 take more than sm_8x has
    for two CTAs.
    """
    if block is not None and block.bm < 64:
        tile_m = 16 if block.bm % 32 else 32
        shapes = [(tile_m, 128, 32, 1, 4), (tile_m, 64, 32, 1, 4)]
    elif block is not None and block.bm % 128:
        shapes = [(64, 128, 32, 2, 2), (64, 64, 32, 2, 2)]
    elif block is not None:
        deep = spec.smem > 200_000
        shapes = [(128, 128, 64 if deep else 32, 2, 2), (128, 64, 32, 2, 2)]
    else:
        shapes = [(256, 128, 32, 4, 2), (128, 128, 32, 2, 2), (128, 64, 32, 2, 2), (64, 64, 32, 2, 2)]
    widest = tile_k_of(block)
    found = [
        with_stages(GemmConfig(m, n, min(k, widest), 0, wm, wn), spec, 0, most=3 if k == 64 else 4)
        for m, n, k, wm, wn in shapes
    ]
    return found if block is None else found + few(block)
