"""Which configurations are tried for a dense product: short lists for each path, made on an H200.

Each is the best for some problem: legality says which of them can be built, cost which is best.
"""

from dataclasses import replace

from ..arch import ArchSpec
from ..tile.element import Element
from .config import BARRIER_BYTES, BlockFacts, GemmConfig


def tile_k_of(block: BlockFacts | None, element: Element) -> int:
    """A K-tile fills a 128-byte swizzle row, which is 64 elements of 16 bits; narrower blocks have one of 64 or 32."""
    widest, half, quarter = element.rows
    return widest if block is None or block.bk >= half + quarter else half if block.bk == half else quarter


def with_stages(cfg, spec: ArchSpec, element: Element, store_bytes: int, most: int = 8):
    """The deepest ring of such operands that shared memory allows."""
    free = spec.smem - 2 * BARRIER_BYTES - store_bytes - cfg.split_k_bytes
    return replace(cfg, stages=min(most, free // (cfg.stage_elements * cfg.rings * element.width)))


def sm90(
    tile_m, tile_n, tile_k, warps_m, warps_n, cluster_m=1, cluster_n=1, consumer_groups=1, ring=2, store_row=128, *,
    split=1, rings=1, most=8, spec, element,
) -> GemmConfig:  # fmt: skip
    """One sm_90 configuration with as many stages as fit, and at most so many."""
    cfg = GemmConfig(
        tile_m, tile_n, tile_k, 0, warps_m, warps_n, cluster_m, cluster_n, consumer_groups, ring, store_row,
        split=split, rings=rings,
    )  # fmt: skip
    return with_stages(cfg, spec, element, ring * warps_m * warps_n * consumer_groups * 64 * store_row, most)


def dense_sm90(spec: ArchSpec, element: Element) -> list[GemmConfig]:
    """Configurations worth trying, best first among equals."""
    k, of = element.rows[0], {"spec": spec, "element": element}
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
    """For sums that are promoted, which leave registers for two products of 64x128 where tiles are 128x128. Two such
    tiles share an operand."""
    return sm90(128, 128, k, 2, 1, cluster_m, cluster_n, **of)


def fp16_sums_sm90(k: int, pair: tuple[int, int], **of) -> list[GemmConfig]:
    """With 256 sums a thread, for which it has registers where they are fp16: 128x256 of each ping-pong group, in a
    cluster that shares an operand and alone."""
    shape, more = (128, 256, k, 1, 1), {"consumer_groups": 2, "ring": 1}
    return [sm90(*shape, *pair, **more, **of), sm90(*shape, **more, **of)]


def split_sm90(k: int, spec: ArchSpec, element: Element) -> tuple[list[GemmConfig], list[GemmConfig]]:
    """Configurations for few tiles, 128 and 64 rows high: several CTAs share the K-tiles of one.

    Their stores' chunks are so narrow that each CTA has one. By the model, others (256 columns) gain less than 10 %.
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
    """Configurations of the mma.sync path, best first; stages are bounded by the architecture's shared memory.

    Measured on an H200 (compiled for it), 4096 cubed: 256x128x32 477, 128x128x64 458, 128x128x32 434 TFLOP/s. K-tiles
    of 64 take more than sm_8x has for two CTAs. Of 8-bit floats and fp32 there is one with fewer sums a warp, which
    leaves registers for those that are promoted.
    """
    k = element.rows[1]
    shapes = [(256, 128, k, 4, 2), (128, 128, k, 2, 2), (128, 64, k, 2, 2), (64, 64, k, 2, 2)]
    shapes += [(128, 128, k, 4, 2)] if element.width != 2 else []
    return [sm80(*shape, spec=spec, element=element) for shape in shapes]


def sm80(tile_m, tile_n, tile_k, warps_m, warps_n, most=4, *, spec, element) -> GemmConfig:
    """One sm_80 configuration with as many stages as fit, and at most so many."""
    return with_stages(GemmConfig(tile_m, tile_n, tile_k, 0, warps_m, warps_n), spec, element, 0, most)
