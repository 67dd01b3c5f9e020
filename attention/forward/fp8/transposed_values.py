"""Kernel that transposes FP8 V: FP8 WGMMA requires the B operand of P V contiguous along the keys.

    V (B, Hkv, Sk, Dv) -> (B, Hkv, tiles, Dv * tile): tiles of `tile` keys, each in shared memory's layout

So the forward kernel loads a tile with one bulk copy. A TMA tensor load would need boxes as wide as the swizzle, 32
bytes for a tile of 96 or 160 keys, and TMA's time grows with the rows of its boxes.

In each group of 16 columns the keys are in the order of KEYS (mainloop.py); those past the last one are zeros. Packed
sequences have a batch of one, and sequence b begins at `first_column`, a tile boundary, so that no tile has keys of two
sequences.

A thread loads 4 neighboring columns of V, a word, of 16 keys, and stores 16 keys of 4 columns. Eight lanes of a warp
cover 32 columns of a key, a sector of memory, and the warp's four groups of lanes 64 keys of a column, two sectors.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.element import SWIZZLES
from cute_kernels.tile.ptx import load_vector, transpose_bytes

from ...seqlen import PackedSeqlens
from ..config import ValuesFacts

GROUP = 16  # keys that are permuted
KEYS = tuple(8 * (i % 4 // 2) + 2 * (i // 4) + i % 2 for i in range(GROUP))
WORD = 4  # values that are loaded at once
LANES = 8  # of a warp, side by side along Dv
KEYS_OF_CTA = 32 // LANES * GROUP


def first_column(k0, sequence, tile: int):
    """First column of a packed sequence whose first row is k0.

    The sequence before it has at most (k0 - its k0) // tile + 1 tiles, so no sequence begins before the end of another.
    """
    return (k0 // tile + sequence) * tile


def tiles_of(cols: int, tile: int, sequences: int = 0) -> int:
    """Number of tiles for `cols` keys; sequences: number of packed sequences."""
    if sequences:
        return first_column(cols, sequences, tile) // tile + 1
    return -(-cols // tile)


def place_of(column, d, head_dim: int, tile: int):
    """Byte offset in a tile in shared memory of 16 keys from `column` of the tile, for V's column d.

    smem_layout's order: lines as wide as the widest swizzle that the tile fills, with a line per column of V; within
    them the index of a 16-byte chunk is swizzled by the index of its 128 bytes.
    """
    width = next(span for span in SWIZZLES if tile % span == 0)
    chunk = column % width // GROUP ^ d * width // 128 % (width // GROUP)
    return column // width * (head_dim * width) + d * width + chunk * GROUP


class TransposeValues:
    """Compiles to one kernel per `ValuesFacts`."""

    def __init__(self, facts: ValuesFacts):
        self.facts = facts
        self.threads = facts.head_dim // (LANES * WORD) * 32

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv)
        mT: cute.Tensor,  # (B, Hkv, tiles, Dv * tile)
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        stream: cuda.CUstream,
    ):
        batch, heads, tiles, _ = mT.shape
        grid = (cute.ceil_div(tiles * self.facts.tile, KEYS_OF_CTA), heads, batch)
        self.kernel(mV, mT, cu_k).launch(grid=grid, block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mT: cute.Tensor, cu_k: cute.Tensor | None):
        head_dim, tile = self.facts.head_dim, self.facts.tile
        part, h, b = cute.arch.block_idx()
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % 32
        first = part * KEYS_OF_CTA + lane // LANES * GROUP  # column
        cute.arch.griddepcontrol_launch_dependents()
        d = tidx // 32 * (LANES * WORD) + lane % LANES * WORD
        if first < mT.shape[2] * tile:
            if const_expr(not self.facts.packed):
                begin, end, gV = first, mV.shape[2], mV[b, h, None, None]
            else:
                gV = mV[None, h, None]
                begin, end = self.keys_of(cu_k, first, mV.shape[0])
            at = gV.iterator.toint() + Int64(begin) * gV.stride[0] + d
            words = []
            for key in range_constexpr(GROUP):
                words.append(load_vector(at + Int64(key) * gV.stride[0], begin + key < end, False, 1)[0])
            rows = []
            for place in range_constexpr(0, GROUP, WORD):
                rows.append(transpose_bytes([words[key] for key in KEYS[place : place + WORD]]))
            to = mT[b, h, first // tile, None].iterator.toint()
            for i in range_constexpr(WORD):
                vector = cute.make_rmem_tensor(WORD, Int32)
                for j in range_constexpr(WORD):
                    vector[j] = rows[j][i]
                offset = place_of(first % tile, d + i, head_dim, tile)
                place = make_ptr(Int32, to + offset, AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(vector, cute.make_tensor(place, cute.make_layout(WORD)))

    @cute.jit
    def keys_of(self, cu_k: cute.Tensor, column: Int32, total: Int32) -> tuple:
        """(key of a column, one past its sequence's last): of the last sequence that begins at or before the column."""
        seqlens, tile = PackedSeqlens(cu_k, cu_k, total, total), self.facts.tile
        low, high = Int32(0), Int32(cu_k.shape[0] - 1)  # the sequence is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            begin, _ = seqlens.between(cu_k, middle, total)
            if first_column(begin, middle, tile) <= column:
                low = middle
            else:
                high = middle
        begin, end = seqlens.between(cu_k, low, total)
        return begin + column - first_column(begin, low, tile), end
