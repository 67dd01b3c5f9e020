"""V of 8-bit floats, transposed: what WGMMA of 8 bits takes as B of P V, contiguous along the keys.

    V (B, Hkv, Sk, Dv) -> (B, Hkv, Dv, columns)

In each group of 16 columns the keys are in the order of mainloop_float8.KEYS; those past the last one are zeros. The
number of columns is a multiple of 16. Of packed sequences there is one item, and sequence b begins at `first_column`:
at a multiple of the tile's columns, so that no tile has keys of two sequences, and none of them zeros to write.

A thread loads 4 neighbouring columns of V, a word, of 16 keys, and stores 16 keys of 4 columns. Of a warp eight lanes
have 32 columns of a key, a sector of memory, and the four others 64 keys of a column, two sectors.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.ptx import load_vector, transpose_bytes

from .config import ValuesFacts
from .mainloop_float8 import GROUP, KEYS
from .seqlen import PackedSeqlens

WORD = 4  # values that are loaded at once
LANES = 8  # of a warp, side by side along Dv
KEYS_OF_CTA = 32 // LANES * GROUP


def first_column(k0, sequence, tile: int):
    """Where a packed sequence begins, whose first row is k0.

    The one before it has at most (k0 - its k0) // tile + 1 tiles, so none begins before another's end.
    """
    return (k0 // tile + sequence) * tile


def columns_of(cols: int, sequences: int = 0, tile: int = GROUP) -> int:
    """How many columns there are for so many keys; tile: of packed sequences."""
    if sequences:
        return first_column(cols, sequences, tile) + tile
    return -(-cols // GROUP) * GROUP


class TransposeValues:
    """Compiles to one kernel per `ValuesFacts`."""

    def __init__(self, facts: ValuesFacts):
        self.facts = facts
        self.threads = facts.head_dim // (LANES * WORD) * 32

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv)
        mT: cute.Tensor,  # (B, Hkv, Dv, columns)
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        stream: cuda.CUstream,
    ):
        batch, heads, _, columns = mT.shape
        grid = (cute.ceil_div(columns, KEYS_OF_CTA), heads, batch)
        self.kernel(mV, mT, cu_k).launch(grid=grid, block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mT: cute.Tensor, cu_k: cute.Tensor | None):
        part, h, b = cute.arch.block_idx()
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % 32
        first = part * KEYS_OF_CTA + lane // LANES * GROUP  # column of mT
        d = tidx // 32 * (LANES * WORD) + lane % LANES * WORD
        columns = mT.shape[3]
        if first < columns:
            if const_expr(self.facts.tile == 0):
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
            to = mT[b, h, d, None].iterator.toint() + first
            for i in range_constexpr(WORD):
                vector = cute.make_rmem_tensor(WORD, Int32)
                for j in range_constexpr(WORD):
                    vector[j] = rows[j][i]
                place = make_ptr(Int32, to + Int64(i) * mT.stride[2], AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(vector, cute.make_tensor(place, cute.make_layout(WORD)))

    @cute.jit
    def keys_of(self, cu_k: cute.Tensor, column: Int32, total: Int32) -> tuple:
        """(key of a column, one past its sequence's last): of the last sequence that begins at the column or before."""
        seqlens, tile = PackedSeqlens(cu_k, cu_k, total, total), self.facts.tile
        low, high = Int32(0), Int32(cu_k.shape[0] - 1)  # it is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            begin, _ = seqlens.between(cu_k, middle, total)
            if first_column(begin, middle, tile) <= column:
                low = middle
            else:
                high = middle
        begin, end = seqlens.between(cu_k, low, total)
        return begin + column - first_column(begin, low, tile), end
