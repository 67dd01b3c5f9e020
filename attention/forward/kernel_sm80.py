"""The sm_80 attention kernel: cp.async in, ldmatrix and mma.sync, O straight from registers. For sm_80 and newer.

    all warps    load, multiply, and do the softmax of their own rows: 16 of the query tile, or a multiple of 16

    smem     | Q | K 0 | K 1 | .. | V 0 | V 1 | ..  K and V have a ring of `stages` stages each

One CTA does one query tile: the grid is all of them, in the scheduler's order, and `max_ctas` has no meaning here.
Several CTAs share an SM where registers and shared memory allow it: while warps of one do a softmax, those of another
have the tensor cores.

A step over K/V tile i, with S the scores and P their exponentials, both in registers (FlashAttention-2, Dao 2023):

    S = Q K[i]' -> wait V[i], __syncthreads, copy K[i + stages] -> softmax of S
    O = O factor + P V[i] -> wait K[i + 1], __syncthreads, copy V[i + stages]

So K is copied during a softmax and V during the product of Q and K, even with one stage each. The copies of a tile are
a group: K[0] with Q, V[0], K[1], V[1], .. in this order, `2 stages` of them before the loop and one at either barrier,
empty past the last tile. The tile waited for is then always followed by 2 (stages - 1) groups: one count for all waits.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.arch import MMA_K
from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.gemm_sm80 import ALIGN, OperandTile
from cute_kernels.mainloop_sm80 import CHUNK, TileSteps
from cute_kernels.store_sm80 import WARP

from .config import ELEMENT, FlashFacts
from .kv_tiles import WindowSource
from .mask_and_softmax import MaskAndSoftmax
from .scheduler import QueryScheduler
from .seqlen import DenseSeqlens
from .softmax import OnlineSoftmax, rows_and_columns
from .store_o import store_rows

VECTOR = CHUNK // ELEMENT  # elements of one copy
COLUMNS = 32  # of a product, multiplied from one set of fragments of B


class FlashForwardSm80(MaskAndSoftmax):
    """Compiles to one kernel per `FlashFacts`."""

    def __init__(self, facts: FlashFacts):
        cfg = facts.config
        self.facts, self.cfg = facts, cfg
        self.dtype = cutlass_dtype(facts.dtype)
        self.threads = WARP * cfg.groups
        self.q, self.k, self.v = operand_tiles(facts)
        self.tiles_m = self.q.span // 16  # of mma.sync, in one warp's rows
        self.kept = facts.head_dim // MMA_K if facts.q_in_registers else 0  # fragments of Q that stay in registers
        self.steps = TileSteps(self.dtype)
        self.smem_bytes = facts.smem_bytes

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        counter: cute.Tensor | None,  # None: there is no dynamic schedule here
        scale_log2: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        scheduler = QueryScheduler.of(self.facts, mQ.shape, mK.shape)
        seqlens = DenseSeqlens(mQ.shape[2], mK.shape[2])
        self.launch(
            mQ, mK, mV, mO, mLSE, counter, scheduler, seqlens, self.window(left, right), scale_log2, softcap, max_ctas,
            stream,
        )  # fmt: skip

    def window(self, left: Int32, right: Int32) -> WindowSource:
        return WindowSource(self.facts.window, self.cfg.tile_m, self.cfg.tile_n, left, right)

    @cute.jit
    def launch(
        self, mQ, mK, mV, mO, mLSE, counter, scheduler, seqlens, source, scale_log2, softcap, max_ctas, stream
    ):  # fmt: skip
        """The kernel: `scheduler` names query tiles, `lengths` how long items are, `source` tiles of K and V."""
        self.kernel(mQ, mK, mV, mO, mLSE, source, scheduler, seqlens, scale_log2, softcap).launch(
            grid=(scheduler.count, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        source,
        scheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
    ):
        cfg, facts = self.cfg, self.facts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()

        sQ = cutlass.utils.SmemAllocator().allocate(self.smem_bytes, byte_alignment=ALIGN).toint()
        sK = sQ + self.q.bytes
        sV = sK + cfg.stages * self.k.bytes
        # Where this lane's rows of the fragments' matrices lie in a tile: one place for Q and V, if D is Dv
        lanes = tuple(op.lane_offset(lane, 0) for op in (self.q, self.k, self.v))
        rows_q = sQ + warp * (self.q.span * self.q.line_bytes)

        acc_S = cute.make_rmem_tensor((4, self.tiles_m, cfg.tile_n // 8), Float32)  # (MMA, MMA_M, MMA_N)
        acc_O = cute.make_rmem_tensor((4, self.tiles_m, facts.head_dim_v // 8), Float32)
        # The sums of P's rows are products with ones: additions are put off by the compiler, which then holds every P
        # twice, before and after rounding. They are fewer instructions, too. But they are sums of rounded numbers,
        # which is right for O and not for LSE (1e-3 off, measured), so a kernel that gives LSE adds.
        acc_L = cute.make_rmem_tensor((4, self.tiles_m, 1), Float32)
        ones = cute.make_rmem_tensor((4, 1), self.dtype)
        ones.fill(1.0)
        scores, out, sums = (rows_and_columns(acc, self.tiles_m) for acc in (acc_S, acc_O, acc_L))
        softmax = OnlineSoftmax.of_rows(2 * self.tiles_m, scale_log2, None if const_expr(facts.adds) else sums[None, 0])
        lse = cute.make_rmem_tensor(2 * self.tiles_m, Float32)
        row0 = warp * self.q.span + lane // 4  # of this thread, in the tile

        tile = scheduler.decode(cute.arch.block_idx()[0])
        seqlen = seqlens.of(tile.b)
        tiles = source.for_tile(tile, seqlen)
        row = tile.m * cfg.tile_m + row0
        softmax.clear()
        acc_O.fill(0.0)
        acc_L.fill(0.0)
        if tiles.count > 0:
            from_q = self.thread_part(self.q, mQ, seqlen.b, tile.h, seqlen.q0)
            from_k, from_v = (
                self.thread_part(*x, seqlen.b, tile.h_kv, seqlen.k0) for x in ((self.k, mK), (self.v, mV))
            )
            # Zeros stand past the end of K and V. Only the first tile visited can reach there, or any that lists name.
            later = const_expr(None) if const_expr(facts.blocks is None) else seqlen.cols
            self.copy(self.q, from_q, tile.m, sQ, seqlen.rows)
            for s in range_constexpr(cfg.stages):
                end = seqlen.cols if const_expr(s == 0) else later
                if s < tiles.count:
                    self.copy(self.k, from_k, tiles.at(s), sK + s * self.k.bytes, end)
                cute.arch.cp_async_commit_group()
                if s < tiles.count:
                    self.copy(self.v, from_v, tiles.at(s), sV + s * self.v.bytes, end)
                cute.arch.cp_async_commit_group()
            self.wait(2 * cfg.stages - 1)
            kept = [self.fragment_q(k, [], lanes[0], rows_q) for k in range(self.kept)]
            for segment in range_constexpr(len(tiles.kinds)):
                begin = 0 if const_expr(segment == 0) else tiles.ends[segment - 1]
                for i in cutlass.range(begin, tiles.ends[segment], unroll=1):
                    slot, after = i % cfg.stages, i + cfg.stages
                    acc_S.fill(0.0)
                    self.multiply(
                        acc_S, lambda k: self.fragment_q(k, kept, lanes[0], rows_q),
                        self.k, lanes[1], sK + slot * self.k.bytes,
                    )  # fmt: skip
                    self.wait(2 * (cfg.stages - 1))
                    if after < tiles.count:
                        self.copy(self.k, from_k, tiles.at(after), sK + slot * self.k.bytes, later)
                    cute.arch.cp_async_commit_group()
                    self.mask_and_softmax(
                        scores, softmax, source, tiles, i, row, tile, seqlen, softcap, tiles.kinds[segment]
                    )
                    rP = self.convert(acc_S)
                    softmax.rescale(out)
                    if const_expr(not facts.adds):
                        softmax.rescale(sums)
                        for k in range_constexpr(len(rP)):
                            self.steps.multiply(acc_L, rP[k], ones)
                    self.multiply(acc_O, lambda k: rP[k], self.v, lanes[2], sV + slot * self.v.bytes)
                    self.wait(2 * (cfg.stages - 1))
                    if after < tiles.count:
                        self.copy(self.v, from_v, tiles.at(after), sV + slot * self.v.bytes, later)
                    cute.arch.cp_async_commit_group()
        softmax.finish(out, lse)
        gO = cute.domain_offset((seqlen.q0, 0), mO[seqlen.b, tile.h, None, None])
        store_rows(acc_O, gO, row, seqlen.rows, self.tiles_m)
        if const_expr(mLSE is not None):
            if lane % 4 == 0:
                for r in range_constexpr(2 * self.tiles_m):
                    if row + 8 * r < seqlen.rows:
                        mLSE[seqlen.b, tile.h, seqlen.q0 + row + 8 * r] = lse[r]

    # ------------------------------------------------------------------ global memory -> shared memory

    def thread_part(self, op: OperandTile, mX: cute.Tensor, b: Int32, h: Int32, begin: Int32) -> tuple:
        """(line, to, source, pitch): what this thread's copies of a head's tiles, from row `begin` on, have in common.

        Neighbouring threads copy neighbouring chunks, `op.chunks` of a line at a time. `to` is where the thread's first
        vector goes in a tile, `source` where that of the head's first tile comes from, `pitch` the bytes of a line.
        """
        line, element = first_vector(op, cute.arch.thread_idx()[0])
        pitch = Int64(mX.stride[2]) * ELEMENT
        head = (Int64(b) * mX.stride[0] + Int64(h) * mX.stride[1] + element) * ELEMENT
        return line, op.offset(line, element * ELEMENT), mX.iterator.toint() + head + (begin + line) * pitch, pitch

    @cute.jit
    def copy(self, op: cutlass.Constexpr, thread: tuple, n: Int32, tile: Int32, end: Int32 | None):
        """Copy tile n of an operand to `tile`; lines from `end` on, if that is given, become zeros."""
        if const_expr(lines_at_once(op) <= op.lines):
            self.copy_lines(op, thread, n, tile, end)
        elif thread[0] < op.lines:
            self.copy_lines(op, thread, n, tile, end)

    @cute.jit
    def copy_lines(self, op: cutlass.Constexpr, thread: tuple, n: Int32, tile: Int32, end: Int32 | None):
        """This thread's vectors of them."""
        line, to, source, pitch = thread
        source = source + n * op.lines * pitch
        passed = const_expr(0)
        for lines, byte in const_expr(vectors(op)):
            if const_expr(lines > passed):
                source = source + (lines - passed) * pitch
                passed = const_expr(lines)
            valid = cutlass.Boolean(True)
            if const_expr(end is not None):
                valid = n * op.lines + line + lines < end
            x, add = op.split(lines, byte)
            self.steps.copy_vector(op, source + byte, tile + (to ^ x) + add, valid)

    @cute.jit
    def wait(self, groups: cutlass.Constexpr):
        """Until all but the latest `groups` groups of copies are visible to all threads, and these have come here."""
        cute.arch.cp_async_wait_group(groups)
        cute.arch.sync_threads()

    # ------------------------------------------------------------------ shared memory -> registers -> tensor cores

    def fragment_q(self, k: int, kept: list, lane: Int32, tile: Int32) -> cute.Tensor:
        """Fragment (8, MMA_M) of MMA step k: of those that are kept, or read now."""
        if k < len(kept):
            return kept[k]
        rQ = cute.make_rmem_tensor((8, self.tiles_m), self.dtype)
        self.steps.read(self.q, k, lane, tile, rQ)
        return rQ

    def convert(self, acc_S: cute.Tensor) -> list:
        """P rounded to 16 bits, a fragment (8, MMA_M) of A for each MMA step: two n8 products' accumulators."""
        steps = []
        for k in range(self.cfg.tile_n // MMA_K):
            rP = cute.make_rmem_tensor((8, self.tiles_m), self.dtype)
            for i in range(self.tiles_m):
                for half in range(2):
                    part = cute.make_tensor(acc_S.iterator + 4 * (i + self.tiles_m * (2 * k + half)), 4)
                    to = cute.make_tensor(rP.iterator + 8 * i + 4 * half, 4)
                    to.store(part.load().to(self.dtype))
            steps.append(rP)
        return steps

    def multiply(self, acc: cute.Tensor, fragment, op: OperandTile, lane: Int32, tile: Int32):
        """acc += A B, with fragment(k) of A, and B in shared memory; fragments are read one step ahead."""
        # S is in registers beside O while K is read
        columns = COLUMNS if op is self.v else COLUMNS // 2
        order = sorted(range(op.tile_k // MMA_K), key=lambda k: op.step(0, k)[0])  # those of one address together
        steps = [(k, n) for k in order for n in range(0, op.rows, columns)]
        rA, rB = fragment(order[0]), self.fragment_b(op, steps[0], columns, lane, tile)
        for i in range(len(steps)):
            nextA, nextB = rA, rB
            if i + 1 < len(steps):
                if steps[i + 1][1] == 0:
                    nextA = fragment(steps[i + 1][0])
                nextB = self.fragment_b(op, steps[i + 1], columns, lane, tile)
            n = steps[i][1]
            part = cute.make_tensor(acc.iterator + n // 8 * 4 * self.tiles_m, (4, self.tiles_m, columns // 8))
            self.steps.multiply(part, rA, rB)
            rA, rB = nextA, nextB

    def fragment_b(self, op: OperandTile, step: tuple, columns: int, lane: Int32, tile: Int32) -> cute.Tensor:
        """Fragments (4, MMA_N) of some columns, at (MMA step, first column)."""
        rB = cute.make_rmem_tensor((4, columns // 8), self.dtype)
        self.steps.read(op, step[0], lane, tile, rB, step[1] // 16)
        return rB


def operand_tiles(facts: FlashFacts) -> tuple:
    """(Q, K, V): how their tiles lie in shared memory."""
    cfg = facts.config
    threads = WARP * cfg.groups
    q = OperandTile(cfg.tile_m, facts.head_dim, True, VECTOR, threads, cfg.groups, False)
    k = OperandTile(cfg.tile_n, facts.head_dim, True, VECTOR, threads, 1, True)
    v = OperandTile(facts.head_dim_v, cfg.tile_n, False, VECTOR, threads, 1, True)  # (Dv, tile_n), as B of P V
    return q, k, v


def first_vector(op: OperandTile, thread) -> tuple:
    """(line, element) of the first vector that a thread copies: neighbours copy neighbouring chunks of a line.

    Where all threads copy more lines at once than the tile has, those with a line past its last must copy nothing.
    """
    return thread // op.chunks, thread % op.chunks * VECTOR


def lines_at_once(op: OperandTile) -> int:
    """How many lines all threads copy `op.chunks` chunks of at a time: 4 chunks at head dimension 96, 8 at others."""
    return op.threads // op.chunks


def vectors(op: OperandTile) -> list:
    """(lines, bytes) from a thread's first vector to each one that it copies."""
    steps = range(0, op.line_bytes, op.chunks * CHUNK)
    return [(j, byte) for j in range(0, op.lines, lines_at_once(op)) for byte in steps]
