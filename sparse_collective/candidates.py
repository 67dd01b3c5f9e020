"""Which configurations of the GEMM kernels are tried for a block-sparse product: short lists, made on an H200."""

from dataclasses import replace

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul.candidates import sm80, sm90, split_sm90, tile_k_of
from cute_kernels.matmul.config import BlockFacts, GemmConfig


def bsr_sm90(block: BlockFacts, spec: ArchSpec) -> list[GemmConfig]:
    """Configurations worth trying, best first among equals."""
    k = tile_k_of(block)
    # Of few columns: rows outside of B cost TMA time too (one token: 63 us with 64 columns, 64 tokens: 48).
    narrow = [sm90(64, columns, k, 1, 1, consumer_groups=2, ring=1, spec=spec) for columns in (64, 32, 16)]
    if k < 64:
        # No cluster: A's part of a narrow K-tile is a few hundred bytes, and waiting for a neighbour costs more.
        return [
            sm90(64, 256, k, 1, 1, consumer_groups=2, ring=1, spec=spec),
            sm90(64, 256, k, 1, 2, spec=spec),
            sm90(64, 128, k, 1, 2, ring=1, spec=spec),
            *narrow,
        ]
    shared_high, shared_low = split_sm90(k, spec)
    if block.bm <= 64:
        return [
            sm90(64, 256, k, 1, 1, 1, 2, consumer_groups=2, ring=1, spec=spec),
            sm90(64, 256, k, 1, 1, consumer_groups=2, ring=1, spec=spec),
            sm90(64, 128, k, 1, 1, consumer_groups=2, spec=spec),
            *narrow,
            *shared_low,
        ]
    if -(-block.bm // 128) * 128 > -(-block.bm // 64) * 64:  # 192 rows are three tiles of 64, not two of 128
        return bsr_sm90(replace(block, bm=64), spec)
    pair = (2, 1) if block.bm % 256 == 0 else (1, 2)  # two row tiles of one block share B, two column tiles A
    # No pair fits into a run of 128.
    unpaired = [sm90(128, 128, k, 1, 1, consumer_groups=2, spec=spec)] if block.run else []
    return [
        sm90(128, 192, k, 1, 1, *pair, consumer_groups=2, ring=1, spec=spec),
        sm90(128, 256, k, 2, 1, *pair, spec=spec),
        sm90(128, 256, k, 2, 1, spec=spec),
        sm90(128, 128, k, 1, 1, *pair, consumer_groups=2, spec=spec),
        *unpaired,
        sm90(128, 128, k, 2, 1, spec=spec),
        sm90(128, 64, k, 2, 1, ring=1, spec=spec),
        *narrow,
        *shared_high,
    ]


def bsr_sm80(block: BlockFacts, spec: ArchSpec) -> list[GemmConfig]:
    """Configurations of the mma.sync path, best first; stages are bounded by the architecture's shared memory.

    Measured on an H200 (compiled for it), 512x112 blocks: 128x128x64 405, 256x128x64 396, 128x128x32 371 TFLOP/s.
    """
    if block.bm < 64:
        tile_m = 16 if block.bm % 32 else 32
        shapes = [(tile_m, 128, 32, 1, 4), (tile_m, 64, 32, 1, 4)]
    elif block.bm % 128:
        shapes = [(64, 128, 32, 2, 2), (64, 64, 32, 2, 2)]
    else:
        deep = spec.smem > 200_000
        shapes = [(128, 128, 64 if deep else 32, 2, 2), (128, 64, 32, 2, 2)]
    widest = tile_k_of(block)
    return [sm80(m, n, min(k, widest), wm, wn, 3 if k == 64 else 4, spec=spec) for m, n, k, wm, wn in shapes]
