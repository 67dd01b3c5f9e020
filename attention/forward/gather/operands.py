"""Q, K and V with gathered KV tiles: rings that the producer warpgroup fills by cp.async.

They have a row of shared memory of 128 bytes for each key, or row of Q, and 64 columns, all keys of the first columns,
then those of the next. The swizzle permutes the eight 16-byte chunks of a row by the lowest bits of the row's number. K
is read as (tile_n, D), V as (D, tile_n).

A warp has a quarter of the tile's keys. It copies 128 bytes of four keys with one instruction, eight lanes for each.
Rows of Q, the heads of a token one after another, are copied alike, so that Q may have any strides.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.common import LoadCacheMode
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.element import VECTOR_BYTES

from ..config import GatherFacts
from ..heads import GqaPacking
from ..operand_sm90 import Operand, Values
from .source import UnionSteps

WARPS = 4  # of the producer warpgroup
LINE = 128  # bytes of a swizzled row
CHUNKS = LINE // VECTOR_BYTES
AT_ONCE = 32 // CHUNKS  # keys that an instruction copies


class GatheredRows(Operand):
    """Q or K, gathered."""

    def make_load(self, tensor: cute.Tensor) -> tuple:
        """(None, tensor): no TMA descriptor."""
        return None, tensor


class GatheredValues(Values):
    """V, gathered."""

    def make_load(self, tensor: cute.Tensor) -> tuple:
        """(None, tensor): no TMA descriptor."""
        return None, tensor


def gathering(facts: GatherFacts, warps: int = WARPS) -> Arrivals:
    """Arrivals at a ring that `warps` producer warps fill: each of their threads' when its copies have landed, and a
    thread's of each consumer warp."""
    return Arrivals(warps, 4 * facts.config.groups, filling=32)


@dataclass(frozen=True)
class Rows:
    """Rows of K or V in global memory, as a lane copies them."""

    at: Int64  # address of this lane's 16 bytes of row 0
    stride: Int32  # bytes from one row to the next
    cols: Int32  # number of rows


@dataclass(frozen=True)
class Gather:
    """Copies of one producer warp among those that copy."""

    facts: cutlass.Constexpr[GatherFacts]
    warp: Int32
    warps: cutlass.Constexpr[int] = WARPS  # that copy Q

    @property
    def keys(self) -> int:
        """Keys of a tile that a warp copies."""
        return self.facts.config.tile_n // WARPS

    @property
    def blocks(self) -> int:
        """Blocks that a warp's keys belong to."""
        return max(self.keys // self.facts.block_size, 1)

    def rows(self, head: cute.Tensor) -> Rows:
        """Rows of one head of K or V (Sk, D)."""
        width = head.element_type.width // 8
        lane = cute.arch.lane_idx() % CHUNKS * VECTOR_BYTES
        return Rows(head.iterator.toint() + Int64(lane), Int32(head.stride[0]) * width, head.shape[0])

    def load_blocks(self, steps: UnionSteps, step: Int32) -> Int32:
        """Load the blocks of this warp's keys of a step, or of step 0 if it is negative: lane i has block
        i % self.blocks."""
        first = cutlass.max(step, 0) * self.facts.config.tile_n + self.warp * self.keys
        return Int32(steps.union[first // self.facts.block_size + cute.arch.lane_idx() % self.blocks])

    @cute.jit
    def copy(self, rows: Rows, blocks: Int32, to: Int32):
        """Begin to copy this warp's keys to the stage at address `to`; keys past the end of K become zeros."""
        facts, size = self.facts, const_expr(self.facts.block_size)
        tile, lane = const_expr(facts.config.tile_n * LINE), cute.arch.lane_idx()
        key, chunk = lane // CHUNKS, lane % CHUNKS
        to = to + (self.warp * self.keys + key) * LINE
        swizzled = [to + (chunk ^ (key + AT_ONCE * odd)) * VECTOR_BYTES for odd in range(2)]
        begin = Int32(0)  # of this warp's keys in its only block
        if const_expr(size > self.keys):
            begin = self.warp * self.keys % size
        for i in range_constexpr(self.keys // AT_ONCE):
            block = blocks
            if const_expr(self.blocks > 1):
                block = cute.arch.shuffle_sync(blocks, const_expr(AT_ONCE * i // size) + key // size)
            row = block * size + begin + (const_expr(AT_ONCE * i % size) + key % size)
            source, exists = rows.at + Int64(row) * Int64(rows.stride), row < rows.cols
            at = swizzled[i % 2] + const_expr(i * AT_ONCE * LINE)
            for part in range_constexpr(facts.head_dim * 2 // LINE):
                self.copy_chunk(source + part * LINE, at + part * tile, exists)

    @cute.jit
    def copy_queries(self, head: cute.Tensor, first: Int32, heads: GqaPacking, to: Int32):
        """Begin to copy this warp's rows of a query tile, whose row 0 is `first`, to address `to`; rows past the end
        become zeros.

        head: (Sq, D, query heads) from the KV head's first query head on.
        """
        tile_m, width = const_expr(self.facts.config.tile_m), head.element_type.width // 8
        copies = const_expr(-(-tile_m // AT_ONCE // self.warps))  # of AT_ONCE rows; the last warp may have fewer
        tile, lane = const_expr(tile_m * LINE), cute.arch.lane_idx()
        own = self.warp * const_expr(copies * AT_ONCE) + lane // CHUNKS
        at, chunk = head.iterator.toint() + Int64(lane % CHUNKS * VECTOR_BYTES), lane % CHUNKS
        for i in range_constexpr(copies):
            row = first + own + AT_ONCE * i
            token, h = row // heads.qhead_per_kvhead, row % heads.qhead_per_kvhead
            source = at + (Int64(token) * head.stride[0] + Int64(h) * head.stride[2]) * width
            place = to + (own + AT_ONCE * i) * LINE + (chunk ^ (own + AT_ONCE * i) % CHUNKS) * VECTOR_BYTES
            if const_expr((i + 1) * self.warps * AT_ONCE <= tile_m):
                for part in range_constexpr(self.facts.head_dim * 2 // LINE):
                    self.copy_chunk(source + part * LINE, place + part * tile, token < head.shape[0])
            elif own + AT_ONCE * i < tile_m:
                for part in range_constexpr(self.facts.head_dim * 2 // LINE):
                    self.copy_chunk(source + part * LINE, place + part * tile, token < head.shape[0])

    @cute.jit
    def copy_chunk(self, source: Int64, to: Int32, exists: Boolean):
        """Begin to copy 16 bytes; zeros if they do not exist."""
        layout = cute.make_layout(((VECTOR_BYTES // BYTES, 1), 1))  # ((vector, rest), copies)
        gX = cute.make_tensor(make_ptr(Int32, source, AddressSpace.gmem, assumed_align=VECTOR_BYTES), layout)
        sX = cute.make_tensor(make_ptr(Int32, to, AddressSpace.smem, assumed_align=VECTOR_BYTES), layout)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=8 * VECTOR_BYTES)
        pred = cute.make_rmem_tensor((1, 1), Boolean)  # (rest, copies)
        pred[0] = exists
        cute.copy(atom, gX, sX, pred=pred)


BYTES = 4  # of a word of copies
