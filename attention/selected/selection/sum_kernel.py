"""Kernel that adds the heads of a group in FP32, and writes a sum as two 16-bit numbers (sums.py).

A thread has 8 columns of a row. The `lanes` threads of a row are neighbors; with FP16 they find its largest sum.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr

from cute_kernels.dtypes import cutlass_dtype

from .sums import LEAST_EXPONENT, MOST_EXPONENT, SCALED, THREADS, VECTOR, SumFacts

ALIGN = 2 * VECTOR  # bytes of a load
INFINITY = 0x7F800000


class SumHeads:
    """Compiles to one kernel per `SumFacts`."""

    def __init__(self, facts: SumFacts):
        self.facts, self.dtype = facts, cutlass_dtype(facts.dtype)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, G * heads, S, D)
        mOut: cute.Tensor,  # (B, G * 2, S, D)
        stream: cuda.CUstream,
    ):
        batch, parts, length, _ = mOut.shape
        ctas = cute.ceil_div(batch * (parts // 2) * length, THREADS // self.facts.lanes)
        self.kernel(mQ, mOut).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, mOut: cute.Tensor):
        facts, lanes = self.facts, const_expr(self.facts.lanes)
        tidx = cute.arch.thread_idx()[0]
        number = cute.arch.block_idx()[0] * (THREADS // lanes) + tidx // lanes
        batch, parts, length, columns = mOut.shape
        groups = parts // 2
        heads = mQ.shape[1] // groups
        group, row, column = number // length, number % length, tidx % lanes * VECTOR
        b, g = group // groups, group % groups

        sums = cute.make_rmem_tensor(VECTOR, Float32)
        sums.fill(0.0)
        active = (b < batch) & (column < columns)
        if active:
            at = self.address(mQ, b, g * heads, row, column)
            step = 2 * Int64(mQ.stride[1])
            vectors = cute.make_rmem_tensor((VECTOR, facts.batch), self.dtype)
            for _ in cutlass.range(0, heads, facts.batch, unroll=1):
                for i in range_constexpr(facts.batch):
                    cute.autovec_copy(self.vector(at + i * step), vectors[None, i])
                for i in range_constexpr(facts.batch):
                    sums.store(sums.load() + vectors[None, i].load().to(Float32))
                at = at + facts.batch * step
        if const_expr(facts.scales):
            self.scale(sums)
        if active:
            high, low = (cute.make_rmem_tensor(VECTOR, self.dtype) for _ in range(2))
            high.store(sums.load().to(self.dtype))
            sums.store(sums.load() - high.load().to(Float32))
            bits = cute.recast_tensor(sums, Int32)
            for i in range_constexpr(VECTOR):
                if bits[i] & INFINITY == INFINITY:
                    sums[i] = Float32(0.0)
            low.store(sums.load().to(self.dtype))
            cute.autovec_copy(high, self.vector(self.address(mOut, b, 2 * g, row, column)))
            cute.autovec_copy(low, self.vector(self.address(mOut, b, 2 * g + 1, row, column)))

    @cute.jit
    def scale(self, sums: cute.Tensor):
        """Multiply a row by a power of two. NaN and infinities count as the largest exponent."""
        bits, largest = cute.recast_tensor(sums, Int32), Int32(0)
        for i in range_constexpr(VECTOR):
            largest = cutlass.max(largest, bits[i] & 0x7FFFFFFF)
        distance = 1
        while const_expr(distance < self.facts.lanes):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, distance))
            distance = distance * 2
        exponent = cutlass.min(cutlass.max(largest >> 23, LEAST_EXPONENT), MOST_EXPONENT)
        words = cute.make_rmem_tensor(1, Int32)
        words[0] = (127 + SCALED - exponent) << 23
        factor = cute.recast_tensor(words, Float32)[0]
        for i in range_constexpr(VECTOR):
            sums[i] = sums[i] * factor

    @cute.jit
    def address(self, tensor: cute.Tensor, b: Int32, head: Int32, row: Int32, column: Int32) -> Int64:
        strides = tensor.stride
        place = b * Int64(strides[0]) + head * Int64(strides[1]) + row * Int64(strides[2]) + column
        return tensor.iterator.toint() + 2 * place

    def vector(self, address: Int64) -> cute.Tensor:
        return cute.make_tensor(make_ptr(self.dtype, address, AddressSpace.gmem, assumed_align=ALIGN), VECTOR)
