"""The sm_80 store: accumulators through the epilogue into shared memory, and out in 16-byte vectors.

Each warp stores its own part of the tile, slab by slab, through two buffers of its own in the shared memory that the
operands have left, so warps never wait for each other:

    n-major D    a slab is 16 rows x all columns of the warp
    m-major D    a slab is 16 columns x all rows of the warp, written transposed

    32 lanes     epilogue in registers -> write the buffer -> __syncwarp -> read vectors, store what lies inside D

Two buffers take one __syncwarp a slab: a lane overwrites a buffer after the barrier of the slab in between, which
all lanes pass with their reads done. Where D's rows are not 16-byte aligned, `store_direct` writes by element.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.typing import AddressSpace

from ...tile.ampere import WARP
from ...tile.fp8 import packed, store_halves, turned
from . import formula
from .chunk import Chunk

SLAB = 16  # rows of one MMA; also the columns of two, whose rows one slab of an m-major D is made of


class StoreSm80:
    """Stores the accumulators of one warp."""

    def __init__(self, facts, dtype):
        cfg = facts.config
        self.spec, self.epilogue = facts.epilogue, formula.Epilogue(facts.epilogue)
        self.dtype = dtype
        self.tile_m, self.tile_n = cfg.tile_m, cfg.tile_n
        self.span_m, self.span_n = cfg.tile_m // cfg.warps_m, cfg.tile_n // cfg.warps_n  # of one warp
        self.mmas_m, self.mmas_n = self.span_m // 16, self.span_n // 8
        # 8-column products in a chunk: an epilogue that calls functions needs registers for its temporaries
        self.products = self.mmas_n if facts.epilogue.is_light else min(2, self.mmas_n)
        self.n_major = facts.majors[2] == "n"
        self.size = dtype.width // 8
        self.vector = 16 // self.size  # elements of one store
        self.vectorised = facts.majors[2] != "any" and facts.aligns[2] % self.vector == 0
        # A slab's lines run along D's contiguous mode. The padding makes the lanes' writes hit different banks:
        # 8 rows x 4 pairs of columns, or 8 rows x 4 columns two apart where lines are columns.
        self.line = self.span_n if self.n_major else self.span_m
        self.narrow, self.out_dtype = facts.narrow, facts.out_dtype
        self.pitch = self.line * self.size + (8 * max(2, self.size) if self.n_major else 16)
        self.slab_bytes = SLAB * self.pitch
        assert self.line <= WARP * self.vector, "a warp stores whole lines"
        self.outs = 1 + self.spec.stores_z  # D and, where it is stored, z
        self.bytes = cfg.warps_m * cfg.warps_n * 2 * self.outs * self.slab_bytes if self.vectorised else 0

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N), fp32 or fp16
        args: formula.EpilogueArgs,
        mD: cute.Tensor,  # (M, N, outer_m, L)
        smem: Int32,  # address of this CTA's buffers
        extent: tuple,  # (M, N)
        tile: tuple,  # (m, n, outer_m, l) and the item of A
        index_warp: tuple,  # (warp_m, warp_n)
        warp: Int32,
    ):
        lane = cute.arch.lane_idx()
        origin = (
            tile[0] * self.tile_m + index_warp[0] * self.span_m,
            tile[1] * self.tile_n + index_warp[1] * self.span_n,
        )
        # Slabs outside D are left out. The branches are of use for those inside too: without them the compiler mixes
        # the code of all slabs, and spills.
        mode = const_expr(0 if self.n_major or not self.vectorised else 1)
        rMax = cute.make_rmem_tensor(1, Float32)  # the largest magnitude that this thread has seen
        rMax[0] = Float32(0.0)
        for slab in range_constexpr((self.mmas_m, self.mmas_n // 2)[mode]):
            if origin[mode] + slab * SLAB < extent[mode]:
                buffer = smem + (warp * 2 + slab % 2) * self.outs * self.slab_bytes
                if const_expr(mode == 0):
                    for j in range_constexpr(0, self.mmas_n, self.products):
                        self.store_chunk(
                            acc, args, mD, buffer, extent, origin, tile, lane, (slab, j), self.products, rMax
                        )
                else:
                    for i in range_constexpr(self.mmas_m):
                        self.store_chunk(acc, args, mD, buffer, extent, origin, tile, lane, (i, 2 * slab), 2, rMax)
                if const_expr(self.vectorised):
                    cute.arch.sync_warp()
                    self.flush(mD, buffer, extent, origin, tile, lane, slab)
                    if const_expr(self.spec.stores_z):
                        self.flush(args.z, buffer + self.slab_bytes, extent, origin, tile, lane, slab)
        if const_expr(self.narrow):
            self.epilogue.finish(args, rMax)

    @cute.jit
    def store_chunk(
        self,
        acc: cute.Tensor,
        args: formula.EpilogueArgs,
        mD: cute.Tensor,
        buffer: Int32,
        extent: tuple,
        origin: tuple,
        tile: tuple,
        lane: Int32,
        first: cutlass.Constexpr,  # (i, j): the accumulators of the i-th 16 rows, from the j-th 8 columns on
        count: cutlass.Constexpr,  # of 8-column products
        rMax: cute.Tensor,  # (1,)
    ):
        """A chunk through the epilogue, and into the slab's buffer or straight to memory."""
        row, col = lane >> 2, (lane & 3) * 2  # of this lane's first accumulator
        m, n = origin[0] + row + first[0] * 16, origin[1] + col + first[1] * 8
        cD = [(m + v // 2 % 2 * 8, n + v // 4 * 8 + v % 2) for v in range(4 * count)]
        rD = cute.make_rmem_tensor(4 * count, Float32)
        for v in range_constexpr(4 * count):
            rD[v] = acc[v % 4, first[0], first[1] + v // 4].to(Float32)
        rZ = cute.make_rmem_tensor(4 * count, Float32) if const_expr(self.spec.stores_z) else None
        chunk = Chunk(args, rD, cD, extent, tile[2:], None, rZ, rMax)
        self.epilogue.apply(chunk)
        if const_expr(self.narrow):
            self.epilogue.quantize(chunk)
        for r, m in [(rD, mD), (rZ, args.z)][: self.outs]:
            if const_expr(not self.vectorised):
                self.store_direct(r, cD, m, extent, tile[2:])
            elif const_expr(self.narrow):
                self.write_words(r, buffer, first, lane)
            elif const_expr(self.n_major):
                self.write(r, buffer + row * self.pitch + (first[1] * 8 + col) * self.size)
            else:
                self.write(r, buffer + col * self.pitch + (first[0] * 16 + row) * self.size)
            buffer = buffer + self.slab_bytes

    @cute.jit
    def write(self, rD: cute.Tensor, at: Int32):
        """Write a chunk to shared memory, `at` being where its first element goes."""
        count = const_expr(cute.size(rD))
        rOut = cute.make_rmem_tensor(count, self.dtype)
        rOut.store(rD.load().to(self.dtype))
        width = const_expr(2 if self.n_major else 1)  # the two columns of a pair are neighbors only in a row
        for v in range_constexpr(0, count, width):
            c, r, j = const_expr((v % 2, v // 2 % 2, v // 4))
            line, element = const_expr((r * 8, j * 8) if self.n_major else (j * 8 + c, r * 8))
            to = at + line * self.pitch + element * self.size
            sD = make_ptr(self.dtype, to, AddressSpace.smem, assumed_align=width * self.size)
            value = cute.make_tensor(rOut.iterator + v, width)
            cute.autovec_copy(value, cute.make_tensor(sD, width))

    def write_words(self, rD: cute.Tensor, buffer: Int32, first: tuple, lane: Int32) -> None:
        """Write an FP8 chunk, a word per 8 columns (tile.fp8), to shared memory."""
        row, col = lane >> 2, (lane & 3) * 2
        for j in range(cute.size(rD) // 4):
            word = packed(rD, 4 * j, self.out_dtype)
            if self.n_major:
                at = buffer + row * self.pitch + (first[1] + j) * 8 + col
                store_halves(word, at, at + 8 * self.pitch)
            else:  # lines are columns
                at = buffer + (j * 8 + col + row % 2) * self.pitch + first[0] * 16 + row // 2 * 2
                store_halves(turned(word, lane), at, at + 8)

    @cute.jit
    def flush(
        self,
        mD: cute.Tensor,
        buffer: Int32,
        extent: tuple,
        origin: tuple,
        tile: tuple,
        lane: Int32,
        slab: cutlass.Constexpr,
    ):
        """Store a slab from shared memory, all lanes going down its lines."""
        per_line = const_expr(self.line // self.vector)
        step = const_expr(WARP // per_line)  # lines between two vectors of a lane
        line, element = lane // per_line, lane % per_line * self.vector
        m, n = origin[0] + slab * SLAB + line, origin[1] + element
        if const_expr(not self.n_major):
            m, n = origin[0] + element, origin[1] + slab * SLAB + line
        s_m, s_n, s_outer, s_l = mD.stride
        offset = Int64(m) * s_m + Int64(n) * s_n + Int64(tile[2]) * s_outer + Int64(tile[3]) * s_l
        to = mD.iterator.toint() + offset * self.size
        at = buffer + line * self.pitch + element * self.size
        atom = cute.make_copy_atom(CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        for v in range_constexpr(SLAB // step):
            sD = make_ptr(self.dtype, at + v * step * self.pitch, AddressSpace.smem, assumed_align=16)
            gD = make_ptr(self.dtype, to, AddressSpace.gmem, assumed_align=16)
            rD = cute.make_rmem_tensor(self.vector, self.dtype)
            cute.copy(atom, cute.make_tensor(sD, self.vector), rD)
            # A vector lies inside D or outside, since it divides the extent of the contiguous mode.
            coord = (m + v * step, n) if const_expr(self.n_major) else (m, n + v * step)
            if cute.elem_less(coord, extent):
                cute.copy(atom, rD, cute.make_tensor(gD, self.vector))
            to = to + step * (s_m if const_expr(self.n_major) else s_n) * self.size

    @cute.jit
    def store_direct(self, rD: cute.Tensor, cD: list, mD: cute.Tensor, extent: tuple, outer: tuple):
        if const_expr(self.narrow):
            formula.store_bytes(rD, cD, mD, extent, outer, self.out_dtype)
        else:
            for v in range_constexpr(cute.size(rD)):
                if cute.elem_less(cD[v], extent):
                    mD[cD[v][0], cD[v][1], outer[0], outer[1]] = rD[v].to(self.dtype)
