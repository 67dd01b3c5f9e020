"""Store policies: how O, and LSE if it is requested, get from registers to global memory, without shared memory.

    StoreRows      O in a 16-bit dtype
    StorePartial   O in FP32, normalized, so that attention.merge combines it by LSE with that of other keys

A policy stores one query tile; rows are those of forward/heads.py. Decode's StoreSplit (decode/store.py) stores a split
of the keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.element import BITS_16

from .config import FlashFacts
from .heads import TileRows

VECTOR = BITS_16.vector  # elements that one thread stores at once: a 32-bit word is two neighboring elements
FP32 = 4  # bytes


class StoreRows:
    """Store O in a 16-bit dtype."""

    def of_tile(self, output: cute.Tensor, tile) -> cute.Tensor:
        """O (B, H, Sq, Dv) or LSE (B, H, Sq) that a tile is stored to."""
        return output

    @cute.jit
    def __call__(
        self,
        acc: cute.Tensor,  # ((2, 2), tiles_m, columns / 8)
        lse: cute.Tensor,  # (2 tiles_m,)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        rows: TileRows,
        row: Int32,  # this thread's rows are row, row + 8, row + 16, ..
        column,  # first column of acc
        lane,  # index of this thread in its warp or CTA
        owner,  # True if this thread's warp stores the LSE
        tiles_m: cutlass.Constexpr = 1,
    ):
        """Store this thread's rows of a query tile."""
        gO = cute.domain_offset((0, column), rows.view(self.of_tile(mO, rows.tile)))
        self.store_o(acc, gO, row, rows.end, tiles_m)
        if const_expr(mLSE is not None):
            rows.heads.store_lse(lse, self.of_tile(mLSE, rows.tile), rows, row, lane, owner)

    def store_o(self, acc, gO, row, rows, tiles_m):
        store_rows(acc, gO, row, rows, tiles_m)


class StorePartial(StoreRows):
    """Store O in FP32."""

    def store_o(self, acc, gO, row, rows, tiles_m):
        store_fp32(acc, gO, row, rows, tiles_m)


def store_policy(facts: FlashFacts) -> StoreRows:
    """The policy of a forward kernel."""
    return StorePartial() if facts.stored_dtype == "float32" else StoreRows()


@cute.jit
def exchange(words: list, lane: Int32) -> list:
    """words[j] is this lane's word of group j; returns the words that lanes 0 to 3 of the quad hold of group `lane`."""
    odd, high = lane % 2 == 1, lane % 4 >= 2
    pairs = []
    for j in range_constexpr(0, 4, 2):
        keep, send = words[j], words[j + 1]
        if odd:
            keep, send = words[j + 1], words[j]
        got = cute.arch.shuffle_sync_bfly(send, 1)
        first, second = keep, got
        if odd:
            first, second = got, keep
        pairs.append((first, second))
    keep, send = pairs[0], pairs[1]
    if high:
        keep, send = pairs[1], pairs[0]
    got = (cute.arch.shuffle_sync_bfly(send[0], 2), cute.arch.shuffle_sync_bfly(send[1], 2))
    low, up = keep, got
    if high:
        low, up = got, keep
    return [low[0], low[1], up[0], up[1]]


@cute.jit
def store_rows(acc: cute.Tensor, mO: cute.Tensor, row: Int32, rows: Int32, tiles_m: cutlass.Constexpr = 1):
    """Store an accumulator ((2, 2), tiles_m, Dv / 8) to mO (Sq, Dv), or ((g, Sq), Dv), whose columns are contiguous.

    Its rows are `row`, `row` + 8, `row` + 16 and so on, 2 tiles_m of them. Rows from `rows`, the extent of mO, on are
    not stored. Each of the four threads of a quad holds two neighboring columns out of eight. The threads exchange
    them, so that each has all eight columns of every fourth group, sixteen bytes. A quad then stores 64 bytes of a row
    at once.
    """
    lane = cute.arch.lane_idx()
    values = cute.make_rmem_tensor(cute.size(acc), mO.element_type)
    flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    values.store(flat.load().to(mO.element_type))
    words = cute.recast_tensor(values, Int32)  # (2 tiles_m rows, Dv / 8)
    for r in range_constexpr(2 * tiles_m):
        if const_expr(isinstance(mO.stride[0], tuple)):  # rows of several heads
            at = mO[row + 8 * r, None].iterator.toint() + lane % 4 * VECTOR * BITS_16.width
        else:
            at = mO.iterator.toint() + (Int64(row + 8 * r) * mO.stride[0] + lane % 4 * VECTOR) * BITS_16.width
        for i in range_constexpr(cute.size(acc) // (16 * tiles_m)):
            mine = exchange([words[r + 2 * tiles_m * (4 * i + j)] for j in range(4)], lane)
            vector = cute.make_rmem_tensor(4, Int32)
            for j in range_constexpr(4):
                vector[j] = mine[j]
            if row + 8 * r < rows:
                place = make_ptr(Int32, at + i * 64, AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(vector, cute.make_tensor(place, cute.make_layout(4)))


@cute.jit
def store_fp32(acc: cute.Tensor, mO: cute.Tensor, row: Int32, rows: Int32, tiles_m: cutlass.Constexpr = 1):
    """store_rows for FP32, two neighboring columns at a time."""
    values = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for r in range_constexpr(2 * tiles_m):
        if row + 8 * r < rows:
            at = mO[row + 8 * r, None].iterator.toint() + cute.arch.lane_idx() % 4 * (2 * FP32)
            for i in range_constexpr(cute.size(acc) // (4 * tiles_m)):
                pair, first = cute.make_rmem_tensor(2, Float32), const_expr(2 * (r + 2 * tiles_m * i))
                for j in range_constexpr(2):
                    pair[j] = values[first + j]
                place = make_ptr(Float32, at + i * (8 * FP32), AddressSpace.gmem, assumed_align=2 * FP32)
                cute.autovec_copy(pair, cute.make_tensor(place, cute.make_layout(2)))
