"""A copy of an fp32 operand along K: as it is, or as its TF32 parts side by side (matmul.precision), in one pass.

    along K    (rows, K) -> (rows, parts x K)       a thread loads UNROLL vectors of 16 bytes, and stores each as parts
    turned     (K, N) -> (N, groups, parts, group)  a CTA loads TILE_K rows of TILE_N numbers, a warp a row; shared
                                                    memory turns them; 8 lanes store 32 numbers of a column along K

In shared memory a column has one number more than TILE_K: so lanes that have neighboring columns write to different
banks, and those that read 8 vectors of each of 4 columns, one number at a time, read from different ones.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import select_

from ..matmul.precision import DROPPED
from ..tile.element import element_of
from ..tile.ptx import load_vector
from .config import THREADS, TILE_K, TILE_N, UNROLL, PartsFacts

FP32 = element_of("float32")
VECTOR, WIDTH = FP32.vector, FP32.width
WARP = 32
EXPONENT = 0x7F800000  # all ones: infinities and NaN


def rounded(bits: Int32) -> Int32:
    """The bits of the nearest TF32 number, of two the even one; what is not finite is another's business."""
    return (bits + (DROPPED >> 1) + ((bits >> 13) & 1)) & ~DROPPED


class Parts:
    """The kernel of one `PartsFacts`."""

    def __init__(self, facts: PartsFacts):
        self.facts, self.threads = facts, THREADS

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (rows, K) contiguous, K a multiple of a vector; turned (L, K, N), its last stride 1
        out: cute.Tensor,  # (rows, parts x K) contiguous; turned (L, N, groups, parts x group)
        stream: cuda.CUstream,
    ):
        if const_expr(self.facts.turned):
            L, K, N = x.shape
            grid = (cute.ceil_div(K, TILE_K), cute.ceil_div(N, TILE_N), L)
            self.turn(x, out).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)
        else:
            vectors = x.shape[0] * (x.shape[1] // VECTOR)
            grid = (cute.ceil_div(vectors, THREADS * UNROLL), 1, 1)
            self.copy(x, out).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def copy(self, x: cute.Tensor, out: cute.Tensor):
        line = x.shape[1] // VECTOR  # vectors of a row
        first = cute.arch.block_idx()[0] * (THREADS * UNROLL) + cute.arch.thread_idx()[0]
        loaded = []
        for u in range_constexpr(UNROLL):
            vector = first + u * THREADS
            at = x.iterator.toint() + Int64(vector) * (VECTOR * WIDTH)
            loaded.append(load_vector(at, vector < x.shape[0] * line, stream=True))
        for u in range_constexpr(UNROLL):
            vector = first + u * THREADS
            row = vector // line
            if row < x.shape[0]:
                place = Int64(row) * (self.facts.parts * line) + (vector - row * line)
                self.store(loaded[u], out.iterator.toint() + place * (VECTOR * WIDTH), line)

    @cute.kernel
    def turn(self, x: cute.Tensor, out: cute.Tensor):
        K, N = x.shape[1], x.shape[2]
        tile_k, tile_n, l = cute.arch.block_idx()
        tidx = cute.arch.thread_idx()[0]
        warp, lane = tidx // WARP, tidx % WARP
        pitch = const_expr(TILE_K + 1)
        smem = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(TILE_N * pitch), 16)
        k0, n0 = tile_k * TILE_K, tile_n * TILE_N
        n, rows = n0 + lane, const_expr(THREADS // WARP)
        at = x.iterator.toint() + (Int64(l) * x.stride[0] + n) * WIDTH
        loaded = []
        for i in range_constexpr(TILE_K // rows):
            k = k0 + i * rows + warp
            inside = (k < K) & (n < N)
            loaded.append(load_vector(at + Int64(k) * x.stride[1] * WIDTH, inside, stream=True, words=1)[0])
        for i in range_constexpr(TILE_K // rows):
            smem[lane * pitch + i * rows + warp] = loaded[i]
        cute.arch.sync_threads()
        group = out.shape[3] // self.facts.parts
        lanes = const_expr(WARP // VECTOR)  # of 32 numbers of a column
        n = n0 + tidx // lanes
        for i in range_constexpr(TILE_K // WARP):
            local = i * WARP + tidx % lanes * VECTOR
            k = k0 + local
            if (k < K) & (n < N):
                words = [smem[tidx // lanes * pitch + local + v] for v in range(VECTOR)]
                place = Int64(l) * out.stride[0] + Int64(n) * out.stride[1]
                place += k // group * out.stride[2] + k % group
                self.store(words, out.iterator.toint() + place * WIDTH, group // VECTOR)

    def store(self, words, to: Int64, line: Int32) -> None:
        """Four numbers: each part a vector, `line` vectors after the one before it."""
        x, small = cute.make_rmem_tensor(VECTOR, Int32), None
        for v in range(VECTOR):
            x[v] = words[v]
        if self.facts.parts > 1:
            x, small = self.split(x)
        for part in range(self.facts.parts):
            values = small if small is not None and part == self.facts.small else x
            at = to + Int64(part * line) * (VECTOR * WIDTH)
            pointer = make_ptr(Int32, at, AddressSpace.gmem, assumed_align=VECTOR * WIDTH)
            cute.autovec_copy(values, cute.make_tensor(pointer, VECTOR))

    def split(self, x: cute.Tensor) -> tuple:
        """The bits of (big, small), as matmul.precision.split has them."""
        big, small = (cute.make_rmem_tensor(VECTOR, Int32) for _ in range(2))
        for v in range(VECTOR):
            nearest = rounded(x[v])
            nearest = select_((nearest & EXPONENT) == EXPONENT, x[v] & ~DROPPED, nearest)
            big[v] = Int32(select_((x[v] & EXPONENT) == EXPONENT, x[v], nearest))
        wide, part, rest = (cute.recast_tensor(t, Float32) for t in (x, big, small))
        for v in range(VECTOR):
            rest[v] = Float32(select_((x[v] & EXPONENT) == EXPONENT, Float32(0.0), wide[v] - part[v]))
            small[v] = rounded(small[v])
        return big, small
