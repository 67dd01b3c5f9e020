"""Kernel that converts FP8 V to FP16, which represents all E4M3 values, before FP8 forward attention.

    V (B, Hkv, Sk, Dv) E4M3 -> (B, Hkv, Sk, Dv) FP16, any strides with a last stride of 1

A thread loads eight values at a time, so that a warp's 16-byte stores are neighbors.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.element import VECTOR_BYTES
from cute_kernels.tile.ptx import float8_to_fp16, load_vector

from ..config import ValuesFacts

THREADS = 256
PIECE = 8  # values that a thread loads at once
PIECES = 4  # pieces that it loads before its first store


class ConvertValues:
    """Compiles to one kernel per `ValuesFacts` without a tile."""

    def __init__(self, facts: ValuesFacts):
        self.facts = facts

    @cute.jit
    def __call__(self, mV: cute.Tensor, mTo: cute.Tensor, cu_k: None, stream: cuda.CUstream):  # (B, Hkv, Sk, Dv) twice
        batch, heads, rows, dim = mV.shape
        grid = cute.ceil_div(rows * (dim // PIECE), THREADS * PIECES), heads, batch
        self.kernel(mV, mTo).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mTo: cute.Tensor):
        part, h, b = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        rows, pieces = mV.shape[2], self.facts.head_dim // PIECE  # of a row
        first = part * (THREADS * PIECES) + cute.arch.thread_idx()[0]
        gV, gTo, loaded = mV[b, h, None, None], mTo[b, h, None, None], []
        for i in range_constexpr(PIECES):
            row, d = (first + i * THREADS) // pieces, (first + i * THREADS) % pieces * PIECE
            at = gV.iterator.toint() + Int64(row) * gV.stride[0] + d
            loaded.append((row, d, load_vector(at, row < rows, True, 2)))
        for row, d, words in loaded:
            vector = cute.make_rmem_tensor(4, Int32)
            for i in range_constexpr(2):
                vector[2 * i], vector[2 * i + 1] = float8_to_fp16(words[i], "float8_e4m3fn", False)
            to = gTo.iterator.toint() + (Int64(row) * gTo.stride[0] + d) * 2
            if row < rows:
                place = make_ptr(Int32, to, AddressSpace.gmem, assumed_align=VECTOR_BYTES)
                cute.autovec_copy(vector, cute.make_tensor(place, cute.make_layout(4)))
