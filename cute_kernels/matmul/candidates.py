"""Which configurations are tried for a dense product: short lists for each path, made on an H200.

Each is the best for some problem: legality says which of them can be built, cost which is best.
"""

from dataclasses import replace

from ..arch import ArchSpec
from ..tile.element import ELEMENT
from .config import BARRIER_BYTES, BlockFacts, GemmConfig


def tile_k_of(block: BlockFacts | None) -> int:
    """64 elements fill a 128-byte swizzle row; narrower blocks get a K-tile of their own width."""
    return 64 if block is None or block.bk >= 48 else 32 if block.bk == 32 else 16


def with_stages(cfg, spec: ArchSpec, store_bytes: int, most: int = 8):
    """The deepest ring of 16-bit operands that shared memory allows."""
    free = spec.smem - 2 * BARRIER_BYTES - store_bytes - cfg.split_k_bytes
    return replace(cfg, stages=min(most, free // (cfg.stage_elements * ELEMENT)))


def sm90(
    tile_m, tile_n, tile_k, warps_m, warps_n, cluster_m=1, cluster_n=1, consumer_groups=1, ring=2, store_row=128, *,
    split=1, spec,
) -> GemmConfig:  # fmt: skip
    """One sm_90 configuration with as many stages as fit."""
    cfg = GemmConfig(
        tile_m, tile_n, tile_k, 0, warps_m, warps_n, cluster_m, cluster_n, consumer_groups, ring, store_row,
        split=split,
    )  # fmt: skip
    return with_stages(cfg, spec, ring * warps_m * warps_n * consumer_groups * 64 * store_row)


def dense_sm90(spec: ArchSpec) -> list[GemmConfig]:
    """Configurations worth trying, best first among equals."""
    shared_high, shared_low = split_sm90(64, spec)
    return [
        sm90(128, 192, 64, 1, 1, 2, 1, consumer_groups=2, ring=1, spec=spec),
        sm90(128, 256, 64, 2, 1, 2, 1, spec=spec),
        sm90(256, 128, 64, 2, 1, 1, 2, spec=spec),
        sm90(128, 256, 64, 2, 1, spec=spec),
        sm90(256, 128, 64, 2, 1, spec=spec),
        sm90(128, 128, 64, 1, 1, 1, 2, consumer_groups=2, spec=spec),
        sm90(128, 128, 64, 2, 1, spec=spec),
        sm90(128, 64, 64, 2, 1, ring=1, spec=spec),
        sm90(64, 256, 64, 1, 2, spec=spec),
        sm90(64, 128, 64, 1, 2, ring=1, spec=spec),
        sm90(64, 64, 128, 1, 2, ring=1, spec=spec),
        sm90(64, 32, 128, 1, 2, ring=1, spec=spec),
        sm90(64, 64, 64, 1, 2, 2, 1, ring=2, spec=spec),
        *shared_high,
        *shared_low,
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


def dense_sm80(spec: ArchSpec) -> list[GemmConfig]:
    """Configurations of the mma.sync path, best first; stages are bounded by the architecture's shared memory.

    Measured on an H200 (compiled for it), 4096 cubed: 256x128x32 477, 128x128x64 458, 128x128x32 434 TFLOP/s. K-tiles
    of 64 take more than sm_8x has for two CTAs.
    """
    shapes = [(256, 128, 32, 4, 2), (128, 128, 32, 2, 2), (128, 64, 32, 2, 2), (64, 64, 32, 2, 2)]
    return [sm80(*shape, spec=spec) for shape in shapes]


def sm80(tile_m, tile_n, tile_k, warps_m, warps_n, most=4, *, spec) -> GemmConfig:
    """One sm_80 configuration with as many stages as fit, and at most so many."""
    return with_stages(GemmConfig(tile_m, tile_n, tile_k, 0, warps_m, warps_n), spec, 0, most)
