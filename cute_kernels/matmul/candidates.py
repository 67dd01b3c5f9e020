"""Candidate configurations of dense GEMM: a short list per path, tuned on an H200.

Each is the best one for some problem. `legality` filters them and `cost` ranks them.
"""

from dataclasses import replace
from typing import Any

from ..arch import ArchSpec
from ..tile.element import Element
from .config import BARRIER_BYTES, BlockFacts, GemmConfig


def tile_k_of(block: BlockFacts | None, element: Element) -> int:
    """Extent of a K-tile: a swizzle row of 128 bytes (64 elements of 16 bits), or 64 or 32 bytes in narrower blocks."""
    widest, half, quarter = element.rows
    return widest if block is None or block.bk >= half + quarter else half if block.bk == half else quarter


def with_stages(cfg, spec: ArchSpec, element: Element, store_bytes: int, most: int = 8):
    """Return cfg with as many stages as shared memory allows, at most `most`."""
    free = spec.smem - 2 * BARRIER_BYTES - store_bytes - cfg.split_k_bytes
    return replace(cfg, stages=min(most, free // (cfg.stage_elements * cfg.rings * element.width)))


def sm90(
    tile_m, tile_n, tile_k, warps_m, warps_n, cluster_m=1, cluster_n=1, consumer_groups=1, ring=2, store_row=128, *,
    split=1, rings=1, most=8, spec, element,
) -> GemmConfig:  # fmt: skip
    """One sm_90 configuration with as many stages as fit, at most `most`."""
    cfg = GemmConfig(
        tile_m, tile_n, tile_k, 0, warps_m, warps_n, cluster_m, cluster_n, consumer_groups, ring, store_row,
        split=split, rings=rings,
    )  # fmt: skip
    return with_stages(cfg, spec, element, ring * warps_m * warps_n * consumer_groups * 64 * store_row, most)


def dense_sm90(spec: ArchSpec, element: Element) -> list[GemmConfig]:
    """Configurations worth trying; among equal costs the first one is taken."""
    k = element.rows[0]
    of: dict[str, Any] = {"spec": spec, "element": element}
    shared_high, shared_low = split_sm90(k, spec, element)
    return [
        sm90(128, 192, k, 1, 1, 2, 1, consumer_groups=2, ring=1, **of),
        sm90(128, 256, k, 2, 1, 2, 1, **of),
        sm90(256, 128, k, 2, 1, 1, 2, **of),
        sm90(128, 256, k, 2, 1, **of),
        sm90(256, 128, k, 2, 1, **of),
        sm90(128, 128, k, 1, 1, 1, 2, consumer_groups=2, **of),
        sm90(128, 128, k, 2, 1, **of),
        sm90(128, 64, k, 2, 1, ring=1, **of),
        sm90(64, 256, k, 1, 2, **of),
        sm90(64, 128, k, 1, 2, ring=1, **of),
        sm90(64, 64, 2 * k, 1, 2, ring=1, **of),
        sm90(64, 32, 2 * k, 1, 2, ring=1, **of),
        sm90(64, 64, k, 1, 2, 2, 1, ring=2, **of),
        *shared_high,
        *shared_low,
        *fp16_sums_sm90(k, (2, 1), **of),
        *([paired_sm90(k, *pair, **of) for pair in ((2, 1), (1, 2))] if element.width != 2 else []),
    ]


def paired_sm90(k: int, cluster_m: int, cluster_n: int, **of) -> GemmConfig:
    """For promoted accumulation, which with 128x128 tiles has registers for two WGMMAs of 64x128. Two such tiles share
    an operand."""
    return sm90(128, 128, k, 2, 1, cluster_m, cluster_n, **of)


def fp16_sums_sm90(k: int, pair: tuple[int, int], **of) -> list[GemmConfig]:
    """For FP16 accumulation, which has registers for 256 accumulators a thread: 128x256 tiles, ping-pong, with and
    without a cluster that shares an operand."""
    one = sm90(128, 256, k, 1, 1, consumer_groups=2, ring=1, **of)
    return [sm90(128, 256, k, 1, 1, *pair, consumer_groups=2, ring=1, **of), one]


def split_sm90(k: int, spec: ArchSpec, element: Element) -> tuple[list[GemmConfig], list[GemmConfig]]:
    """Split-K configurations for problems with few tiles, with 128 and with 64 rows.

    Their store chunks are narrow enough for each CTA to have one. In the cost model, other tiles (256 columns) gain
    less than 10 %.
    """
    of = {"spec": spec, "element": element}
    high = [
        sm90(128, 64, k, 2, 1, ring=1, store_row=64, split=2, **of),
        sm90(128, 128, k, 2, 1, ring=1, split=2, **of),
        sm90(128, 128, k, 2, 1, ring=1, store_row=64, split=4, **of),
        sm90(128, 64, k, 2, 1, ring=1, store_row=32, split=4, **of),
    ]
    low = [
        sm90(64, 128, k, 1, 2, ring=1, store_row=64, split=2, **of),
        sm90(64, 128, k, 1, 2, ring=1, store_row=32, split=4, **of),
    ]
    return high, low


def dense_sm80(spec: ArchSpec, element: Element) -> list[GemmConfig]:
    """Configurations of the mma.sync path, best first; the architecture's shared memory bounds their stages.

    Measured on an H200 (compiled for it), 4096 cubed: 256x128x32 477, 128x128x64 458, 128x128x32 434 TFLOP/s. With
    K-tiles of 64, two CTAs exceed the shared memory of sm_8x. FP8 and FP32 have one more, with fewer accumulators per
    warp, which leaves registers for promoted accumulation.
    """
    k = element.rows[1]
    shapes = [(256, 128, k, 4, 2), (128, 128, k, 2, 2), (128, 64, k, 2, 2), (64, 64, k, 2, 2)]
    shapes += [(128, 128, k, 4, 2)] if element.width != 2 else []
    return [sm80(*shape, spec=spec, element=element) for shape in shapes]


def sm80(tile_m, tile_n, tile_k, warps_m, warps_n, most=4, *, spec, element) -> GemmConfig:
    """One sm_80 configuration with as many stages as fit, at most `most`."""
    return with_stages(GemmConfig(tile_m, tile_n, tile_k, 0, warps_m, warps_n), spec, element, 0, most)
