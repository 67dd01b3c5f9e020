"""Candidate configurations of block-sparse GEMM: short lists, tuned on an H200."""

from dataclasses import replace
from typing import Any

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul.candidates import fp16_sums_sm90, paired_sm90, sm80, sm90, split_sm90, tile_k_of
from cute_kernels.matmul.config import BlockFacts, GemmConfig
from cute_kernels.tile.element import Element


def bsr_sm90(block: BlockFacts, spec: ArchSpec, element: Element) -> list[GemmConfig]:
    """Configurations worth trying, best first among equals."""
    return wide_sm90(block, spec, element) + (promoted_sm90(block, spec, element) if element.width != 2 else [])


def promoted_sm90(block: BlockFacts, spec: ArchSpec, element: Element) -> list[GemmConfig]:
    """For promoted accumulation, which needs both warpgroups on one tile: cooperative kernels instead of ping-pong,
    for blocks narrower or lower than 128 and for small N.

    For small N the bytes of A in flight matter, so narrow K-tiles have rings of as many bytes as wide ones.
    """
    k = tile_k_of(block, element)
    of: dict[str, Any] = {"spec": spec, "element": element}
    few = of | {"ring": 1, "most": 8 * element.rows[0] // k}
    own = {"consumer_groups": 2, "rings": 2, "ring": 1}
    low = -(-block.bm // 128) * 128 > -(-block.bm // 64) * 64
    found = [sm90(64, 64, k, 1, 2, **few), sm90(64, 32, k, 1, 2, **few)]
    if not low:  # fewer rows of B a byte of A
        found += [sm90(128, 32, k, 2, 1, **few), sm90(128, 16, k, 2, 1, **few)]
    if k == element.rows[1]:  # bound by L2, which a pair of column tiles asks less of
        found.insert(0, sm90(64, 256, k, 1, 2, 1, 2, **of))
        found += [sm90(64, 256, k, 1, 1, 1, columns, **own, **of) for columns in (1, 2)]
    if k < element.rows[0]:  # wide_sm90 has the low ones
        high = [sm90(128, 256, k, 2, 1, **of), sm90(128, 128, k, 2, 1, **of)]
        return found if low else [*high, *found]
    if low:
        return [sm90(64, 256, k, 1, 2, **of), sm90(64, 128, k, 1, 2, ring=1, **of), *found]
    return [paired_sm90(k, *pair_of(block), **of), *found]


def pair_of(block: BlockFacts) -> tuple[int, int]:
    """(cluster_m, cluster_n): two row tiles of one block share B, two column tiles A."""
    return (2, 1) if block.bm % 256 == 0 else (1, 2)


def wide_sm90(block: BlockFacts, spec: ArchSpec, element: Element) -> list[GemmConfig]:
    """Configurations for elements of any width."""
    k, of = tile_k_of(block, element), {"spec": spec, "element": element}
    # Small N: rows outside B cost TMA time, too (one token: 63 us with 64 columns, 64 tokens: 48).
    narrow = [sm90(64, columns, k, 1, 1, consumer_groups=2, ring=1, **of) for columns in (64, 32, 16)]
    if k < element.rows[0]:
        # No cluster: A's part of a narrow K-tile is a few hundred bytes, and waiting for a neighbor costs more.
        return [
            sm90(64, 256, k, 1, 1, consumer_groups=2, ring=1, **of),
            sm90(64, 256, k, 1, 2, **of),
            sm90(64, 128, k, 1, 2, ring=1, **of),
            *narrow,
        ]
    shared_high, shared_low = split_sm90(k, spec, element)
    if block.bm <= 64:
        return [
            sm90(64, 256, k, 1, 1, 1, 2, consumer_groups=2, ring=1, **of),
            sm90(64, 256, k, 1, 1, consumer_groups=2, ring=1, **of),
            sm90(64, 128, k, 1, 1, consumer_groups=2, **of),
            *narrow,
            *shared_low,
        ]
    if -(-block.bm // 128) * 128 > -(-block.bm // 64) * 64:  # 192 rows are three tiles of 64, not two of 128
        return wide_sm90(replace(block, bm=64), spec, element)
    pair = pair_of(block)
    # No pair fits into a run of 128.
    unpaired = [sm90(128, 128, k, 1, 1, consumer_groups=2, **of)] if block.run else []
    return [
        sm90(128, 192, k, 1, 1, *pair, consumer_groups=2, ring=1, **of),
        sm90(128, 256, k, 2, 1, *pair, **of),
        sm90(128, 256, k, 2, 1, **of),
        sm90(128, 128, k, 1, 1, *pair, consumer_groups=2, **of),
        *unpaired,
        sm90(128, 128, k, 2, 1, **of),
        sm90(128, 64, k, 2, 1, ring=1, **of),
        *narrow,
        *shared_high,
        *fp16_sums_sm90(k, pair, **of),
    ]


def bsr_sm80(block: BlockFacts, spec: ArchSpec, element: Element) -> list[GemmConfig]:
    """Configurations of the mma.sync path, best first; the architecture's shared memory bounds their stages.

    Measured on an H200 (compiled for it), 512x112 blocks: 128x128x64 405, 256x128x64 396, 128x128x32 371 TFLOP/s.
    """
    wide, narrow, least = element.rows
    if element.width == 1 and block.bk % narrow:  # promoted accumulation needs K-tiles of one length
        narrow = least
    if block.bm < 64:
        tile_m = 16 if block.bm % 32 else 32
        shapes = [(tile_m, 128, narrow, 1, 4), (tile_m, 64, narrow, 1, 4)]
    elif block.bm % 128:
        shapes = [(64, 128, narrow, 2, 2), (64, 64, narrow, 2, 2)]
    else:
        deep = spec.smem > 200_000
        shapes = [(128, 128, wide if deep else narrow, 2, 2), (128, 64, narrow, 2, 2)]
    widest, of = tile_k_of(block, element), {"spec": spec, "element": element}
    if element.width != 2 and block.bm % 128 == 0:  # with fewer accumulators per warp: promotion spills with 128
        shapes.append((128, 128, narrow, 4, 2))
    return [sm80(m, n, min(k, widest), wm, wn, 3 if k == wide else 4, **of) for m, n, k, wm, wn in shapes]
