"""GEMV and small-batch GEMM: W times one to sixteen columns streams W's stored values, bound by device memory.

A CTA owns a strip of `tile_m` rows of a block row, and all columns of a column tile. Concatenated, the strip's parts of
its stored blocks form one matrix of tile_m rows. Its warps process pieces of it round-robin and reduce at the end:

    warp w    pieces w, w + warps, ...  of 32 x stages columns: load W, load B, multiply, all in registers
    threads   sum of all warps' partial sums, in warp order, then the epilogue; one element per thread

The order of k inside an MMA is free as long as A and B agree. So no operand passes through shared memory: a lane loads
eight consecutive k of its row of W, 16 bytes, which are its part of two MMAs; the same eight k of its column of B are
its part of their other operand.

    lane (g, t) = (lane / 4, lane % 4)     W rows g and g + 8, columns 8 t .. 8 t + 7, and B column g
    first MMA   k 8 t .. 8 t + 3 of all t;     second MMA   k 8 t + 4 .. 8 t + 7

(FP8 has 16 k of four MMAs; see fp8.py.) These k are the K-tile that the source returns. Block widths are multiples
of it, so a K-tile never spans two blocks, and a warp's 32 columns lie in one block or two. The addresses of W's values
do not depend on indices, so the first loads of W are in flight while the indices are fetched. Then, for each piece:

    load B       at the block column of the index
    next index   of the warp's next piece
    multiply     and load W's next piece into the registers that become free

Memory is kept busy by the number of warps: 32 per SM with 2 KB in flight each, where DRAM's rate times its latency is
some 30 KB. So W is not prefetched further, and registers are few enough for that many warps.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.epilogue import formula
from cute_kernels.matmul.epilogue.chunk import Chunk
from cute_kernels.matmul.epilogue.formula import EpilogueArgs
from cute_kernels.tile.ampere import mma_op
from cute_kernels.tile.ptx import load_elements, load_vector, opaque

from .config import LANES_K, PAD, lane_words, loads_vectors, registers, span

WARP = 32  # lanes
RESERVED = 1024  # bytes of shared memory that a CTA takes besides its own
NOT_NEGATIVE = 0x7FFFFFFF  # a mask that says so, which makes divisions cheap


def a_register(row: int, w: int) -> tuple:
    """(register, MMA_M, half) of word w of the vector in W's row g + 8 row: an MMA's rows g and g + 8 take turns."""
    return w % 2 * 2 + row % 2, row // 2, w // 2


def b_register(j: int, w: int) -> tuple:
    """(register, MMA_N, half) of word w of the vector in B's column g + 8 j."""
    return w % 2, j, w // 2


class SkinnyKernel:
    """Compiles to one kernel per `GemmFacts`; called with operands in the kernel's modes (see k_tiles)."""

    def __init__(self, facts: GemmFacts):
        cfg = facts.config
        self.facts, self.cfg, self.epilogue = facts, cfg, formula.Epilogue(facts.epilogue)
        self.dtype, self.out_dtype = cutlass_dtype(facts.dtype), cutlass_dtype(facts.out_dtype)
        self.threads, self.width = WARP * cfg.warps, facts.element.width
        self.mmas_m, self.mmas_n = cfg.tile_m // 16, cfg.tile_n // 8
        self.words = lane_words(facts)
        self.piece = LANES_K * cfg.stages  # K-tiles
        # Whether a row is a whole number of pieces, however many blocks it has.
        self.whole = facts.block.bk % (self.piece * cfg.tile_k) == 0
        # Whether the lanes of a row are always in one block; how many K-tiles of a lane are, one after another.
        self.uniform, self.span = facts.block.bk % (LANES_K * cfg.tile_k) == 0, span(facts)
        pitch = cfg.tile_m + PAD
        self.sums = (cfg.tile_m, cfg.tile_n, cfg.warps), (1, pitch, pitch * cfg.tile_n)
        self.smem_bytes = pitch * cfg.tile_n * cfg.warps * 4
        self.resident = max(1, 65_536 // (self.threads * registers(facts)))  # CTAs that an SM is to hold
        # Per cent of what an SM has: enough for the CTAs that are to be there; the rest is L1, for B.
        self.carveout = min(100, -(-100 * self.resident * (self.smem_bytes + RESERVED) // facts.spec.smem))

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (bm, bk, blocks)
        mB: cute.Tensor,  # (N, bk, K / bk, L)
        mD: cute.Tensor,  # (bm, N, M / bm, L)
        source,
        args: EpilogueArgs,
        tiles_m: Int32,  # strips of the whole product
        group: None,
        max_ctas: None,
        stream: cuda.CUstream,
    ):
        """Launch. CTAs of one strip's column tiles and batch indices are adjacent, so all but the first hit L2."""
        tiles_n = cute.ceil_div(mD.shape[1], self.cfg.tile_n)
        per_strip = tiles_n * mD.shape[3]
        self.kernel(mA, mB, mD, source, args, tiles_n, per_strip).launch(
            grid=(tiles_m * per_strip, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=self.carveout,  # unnamed, the DSL would ask a GPU for it
            use_pdl=self.facts.chained,
            stream=stream,
        )

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        source,
        args: EpilogueArgs,
        tiles_n: Int32,
        per_strip: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sSum = cutlass.memory.SmemAllocator().allocate_tensor(  # (M, N, WARPS)
            Float32, cute.make_layout(self.sums[0], stride=self.sums[1]), byte_alignment=16
        )
        if const_expr(self.facts.chained):
            cute.arch.griddepcontrol_launch_dependents()
        m, n, l = self.decode(tiles_n, per_strip)
        k_tiles = source.for_tile(m, l, source.bounds(m, n, l))
        # (MMA, MMA_M, MMA_N)
        acc = cute.make_rmem_tensor((4, self.mmas_m, self.mmas_n), Float32)
        acc.fill(0.0)
        self.multiply(k_tiles, mA, mB[None, None, None, l], n, acc, warp)
        self.keep(acc, sSum[None, None, warp])
        if const_expr(self.facts.chained):
            cute.arch.griddepcontrol_wait()  # a warp without pieces has not waited yet
        cute.arch.sync_threads()
        m, n, l = self.decode(tiles_n, per_strip)  # once more: the loop needs all registers
        k_tiles = source.for_tile(m, l, source.bounds(m, n, l))
        self.store(sSum, args, mD, (n, l), k_tiles)

    @cute.jit
    def decode(self, tiles_n: Int32, per_strip: Int32):
        """(m, n, l) of this CTA, computed anew at each use to save registers."""
        index = opaque(cute.arch.block_idx()[0])
        m, n, l = index & NOT_NEGATIVE, Int32(0), Int32(0)
        if per_strip > 1:  # skips the division otherwise
            index = m
            m = index // per_strip
            rest = index - m * per_strip
            l = rest // tiles_n
            n = rest - l * tiles_n
        return m, n, l

    @cute.jit
    def multiply(
        self,
        k_tiles,
        mA: cute.Tensor,  # (bm, bk, blocks)
        mB: cute.Tensor,  # (N, bk, K / bk)
        n: Int32,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N), zeros
        warp: Int32,
    ):
        """Accumulate this warp's pieces of the strip."""
        cfg, stages = self.cfg, self.cfg.stages
        pieces = ((k_tiles.count + (self.piece - 1)) & NOT_NEGATIVE) // self.piece
        if warp < pieces:
            lane = cute.arch.lane_idx()
            g, t = lane >> 2, lane & 3
            rest_m, _, _ = k_tiles.out(n)
            a_lane = mA.iterator.toint() + (rest_m * cfg.tile_m + g) * (mA.stride[0] * self.width)
            # Columns past the last one load it again; what comes of them is not stored.
            columns = [cutlass.min(n * cfg.tile_n + j * 8 + g, mB.shape[0] - 1) for j in range(self.mmas_n)]
            b_lane = [mB.iterator.toint() + Int64(column) * (mB.stride[0] * self.width) for column in columns]
            if const_expr(self.uniform):
                a_lane = a_lane + t * (cfg.tile_k * self.width)
                b_lane = [x + Int64(t) * (mB.stride[1] * cfg.tile_k * self.width) for x in b_lane]
                t = Int32(0)
            rA, rB = self.loaded()
            rCol = cute.make_rmem_tensor(stages, Int32)  # block columns of the next piece's K-tiles
            # W's first values are asked for before its indices are waited for.
            self.load_piece(k_tiles, warp, t, mA, a_lane, rA)
            self.fetch(k_tiles, warp, t, rCol)
            if const_expr(self.facts.chained):
                cute.arch.griddepcontrol_wait()  # for B
            for piece in cutlass.range(warp, pieces, cfg.warps, unroll=1):
                following = piece + cfg.warps
                for s in range_constexpr(0, stages, self.span):
                    self.load_b(k_tiles, self.number(piece, t, s), s, mB, b_lane, rCol, rB)
                self.fetch(k_tiles, cutlass.min(following, pieces - 1), t, rCol)
                self.multiply_piece(k_tiles, piece, rA, rB, acc)
                if following < pieces:
                    self.load_piece(k_tiles, following, t, mA, a_lane, rA)

    def loaded(self) -> tuple:
        """Registers for a lane's parts of W and B of a piece."""
        shape_a, shape_b = (4, self.mmas_m, 2, self.cfg.stages), (2, self.mmas_n, 2, self.cfg.stages)
        return cute.make_rmem_tensor(shape_a, Int32), cute.make_rmem_tensor(shape_b, Int32)

    def place_a(self, row: int, w: int) -> tuple:
        """Register index, in a stage, of word w of W's row g + 8 row."""
        return a_register(row, w)

    def place_b(self, j: int, w: int) -> tuple:
        """Register index, in a stage, of word w of B's column g + 8 j."""
        return b_register(j, w)

    @cute.jit
    def multiply_piece(self, k_tiles, piece: Int32, rA: cute.Tensor, rB: cute.Tensor, acc: cute.Tensor):
        """Multiply the loaded piece and accumulate it in acc (MMA, MMA_M, MMA_N)."""
        atom = cute.make_mma_atom(mma_op(self.dtype))
        tA, tB = cute.recast_tensor(rA, self.dtype), cute.recast_tensor(rB, self.dtype)
        for s in range_constexpr(self.cfg.stages):
            for half in range_constexpr(2):
                cute.gemm(atom, acc, tA[None, None, half, s], tB[None, None, half, s], acc)

    @cute.jit
    def load_piece(self, k_tiles, piece: Int32, t: Int32, mA: cute.Tensor, a_lane: Int64, rA: cute.Tensor):
        """Load a lane's part of W of a piece."""
        for s in range_constexpr(0, self.cfg.stages, self.span):
            self.load_a(k_tiles, self.number(piece, t, s), s, mA, a_lane, rA)

    def number(self, piece, t, s: int):
        """Index of a lane's K-tile s of a piece; of the first lane's if the lanes share a block."""
        return ((piece & NOT_NEGATIVE) * self.piece + s * LANES_K + t) & NOT_NEGATIVE

    def k_tile(self, k_tiles, i):
        """K-tile i, clamped to the row's last one, so that nothing is read out of range."""
        return k_tiles.at(i if self.whole else cutlass.min(i, k_tiles.count - 1) & NOT_NEGATIVE)

    def valid(self, k_tiles, i):
        """True if K-tile i exists; None if all do."""
        return None if self.whole else i < k_tiles.count

    @cute.jit
    def fetch(self, k_tiles, piece: Int32, t: Int32, rCol: cute.Tensor):
        """Load the block columns of a lane's K-tiles of a piece."""
        for s in range_constexpr(0, self.cfg.stages, self.span):
            rCol[s] = self.k_tile(k_tiles, self.number(piece, t, s)).b[1]

    @cute.jit
    def load_a(self, k_tiles, i: Int32, first: cutlass.Constexpr, mA: cute.Tensor, a_lane: Int64, rA: cute.Tensor):
        """Load a lane's vectors of W from K-tile i on, as many as always lie in one block."""
        _, k, block = self.k_tile(k_tiles, i).a
        at = a_lane + Int64(block) * (mA.stride[2] * self.width) + k * (self.cfg.tile_k * self.width)
        for s in range_constexpr(first, first + self.span):
            for row in range_constexpr(2 * self.mmas_m):
                offset = const_expr((row * 8 * mA.stride[0] + (s - first) * LANES_K * self.cfg.tile_k) * self.width)
                words = load_vector(at + offset, self.valid(k_tiles, i), stream=True, words=self.words)
                for w in range_constexpr(self.words):
                    rA[(*self.place_a(row, w), s)] = words[w]

    @cute.jit
    def load_b(
        self,
        k_tiles,
        i: Int32,
        first: cutlass.Constexpr,
        mB: cute.Tensor,  # (N, bk, K / bk)
        b_lane: list,
        rCol: cute.Tensor,
        rB: cute.Tensor,
    ):
        """Load the same k of a lane's columns of B."""
        k, _ = self.k_tile(k_tiles, i).b
        step = mB.stride[1] * self.width
        for j in range_constexpr(self.mmas_n):
            at = b_lane[j] + Int64(rCol[first]) * (mB.stride[2] * self.width) + Int64(k * self.cfg.tile_k) * step
            for s in range_constexpr(first, first + self.span):
                valid = self.valid(k_tiles, i)
                if const_expr(loads_vectors(self.facts)):
                    words = load_vector(at, valid, stream=False, words=self.words, fresh=self.facts.chained)
                else:
                    words = load_elements(at, Int64(step), valid)
                at = at + LANES_K * self.cfg.tile_k * step
                for w in range_constexpr(self.words):
                    rB[(*self.place_b(j, w), s)] = words[w]

    # ------------------------------------------------------------------ sums, epilogue, store

    @cute.jit
    def keep(self, acc: cute.Tensor, sSum: cute.Tensor):
        """Write a warp's partial sums to its (M, N) in shared memory."""
        lane = cute.arch.lane_idx()
        g, t = lane >> 2, lane & 3
        for j in range_constexpr(self.mmas_n):
            for i in range_constexpr(self.mmas_m):
                for v in range_constexpr(4):
                    sSum[i * 16 + v // 2 * 8 + g, j * 8 + 2 * t + v % 2] = acc[v, i, j]

    @cute.jit
    def store(self, sSum: cute.Tensor, args: EpilogueArgs, mD: cute.Tensor, tile: tuple, k_tiles):
        """Reduce the partial sums of all warps and store them through the epilogue, consecutive along D's contiguous
        mode."""
        cfg = self.cfg
        n, l = tile
        rest_m, n, row = k_tiles.out(n)
        size = const_expr(cfg.tile_m * cfg.tile_n)
        rMax = cute.make_rmem_tensor(1, Float32)  # the largest magnitude that this thread has seen
        rMax[0] = Float32(0.0)
        extent = (mD.shape[0], mD.shape[1])
        for v in range_constexpr(-(-size // self.threads)):
            e = cute.arch.thread_idx()[0] + v * self.threads
            i, j = e % cfg.tile_m, e // cfg.tile_m
            if const_expr(self.facts.majors[2] == "n"):
                i, j = e // cfg.tile_n, e % cfg.tile_n
            coord = (rest_m * cfg.tile_m + i, n * cfg.tile_n + j)
            if e < size and coord[1] < extent[1]:
                rD = cute.make_rmem_tensor(1, Float32)
                rD[0] = sSum[i, j, 0]
                for w in range_constexpr(1, cfg.warps):
                    rD[0] = rD[0] + sSum[i, j, w]
                rZ = cute.make_rmem_tensor(1, Float32) if const_expr(self.facts.epilogue.stores_z) else None
                chunk = Chunk(args, rD, [coord], extent, (row, l, k_tiles.l), None, rZ, rMax)
                self.epilogue.apply(chunk)
                if const_expr(self.facts.narrow):
                    self.epilogue.quantize(chunk)
                    formula.store_bytes(rD, [coord], mD, extent, (row, l), self.facts.out_dtype)
                else:
                    mD[coord[0], coord[1], row, l] = rD[0].to(self.out_dtype)
                if const_expr(self.facts.epilogue.stores_z):
                    args.z[coord[0], coord[1], row, l] = rZ[0].to(self.out_dtype)
        if const_expr(self.facts.narrow):
            self.epilogue.finish(args, rMax)
