"""The sm_80 mainloop of attention: the steps of all warps for each KV tile, in forward and in decode.

    smem     | Q | K 0 | K 1 | .. | V 0 | V 1 | ..  K and V have a ring of `stages` stages each

A step over KV tile i, with S the scores and P their exponentials, both in registers (FlashAttention-2, Dao 2023):

    S = Q K[i]' -> wait V[i], __syncthreads, copy K[i + stages] -> softmax of S
    O = O factor + P V[i] -> wait K[i + 1], __syncthreads, copy V[i + stages]

So K is copied during a softmax and V during Q K', even with one stage each.

At head dimension 512 two or four warps split the head dimension of the same rows (FlashFacts.sharers). Each multiplies
a part of Q and K, writes its partial S to shared memory before the barrier that waits for V, and adds the others' after
it. Then all of them have the same scores, do the same softmax, and multiply P with their own columns of V.

The copies of a tile are one cp.async group: K[0] with Q, V[0], K[1], V[1], .. in this order, `2 stages` of them before
the loop and one at either barrier, empty past the last tile. The awaited tile is then always followed by 2 (stages - 1)
groups: one count for all waits.

The kernels differ in how Q, K and V are copied, how rows are packed, and what is stored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.matmul.kernel_sm80 import ALIGN
from cute_kernels.tile.ampere import CHUNK, WARP, OperandTile, TileSteps

from .config import FlashFacts
from .mask_and_softmax import QueryWork, mask_and_softmax
from .softmax import OnlineSoftmax, rows_and_columns

COLUMNS = 32  # columns multiplied from one set of B fragments


@dataclass(frozen=True)
class Consumer:
    """State of a warp for all tiles: addresses of operands in shared memory, and accumulators."""

    sQ: Int32
    sK: Int32
    sV: Int32
    rows_q: Int32  # address of the warp's rows of Q
    lanes: tuple  # offsets of this lane's ldmatrix rows in a tile of Q, K and V
    part: Int32 | None  # this warp's part of the head dimension; None if it is not split
    exchange: Int32 | None  # address of this lane's first vector of its warp's partial scores
    acc_S: cute.Tensor  # (MMA, MMA_M, MMA_N)
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N)
    acc_L: cute.Tensor  # (MMA, MMA_M, 1): row sums of P, if they are an MMA with ones
    ones: cute.Tensor
    softmax: OnlineSoftmax


class MainloopSm80:
    """Steps over the KV tiles of one query tile, with their storage and registers.

    copy: the kernel's `copy(op, source, n, tile, end)`, which copies tile n of K or V to the address `tile`; lines from
    `end` on, unless it is None, become zeros.
    adds_row_sums: True if row sums of P use additions (OnlineSoftmax.of_rows).
    """

    def __init__(self, facts: FlashFacts, copy: Callable, adds_row_sums: bool):
        self.facts, self.cfg, self.copy = facts, facts.config, copy
        self.adds_row_sums = adds_row_sums
        self.dtype = cutlass_dtype(facts.dtype)
        self.q, self.k, self.v = operand_tiles(facts)
        self.sharers = facts.sharers
        self.depth, self.columns = facts.head_dim // self.sharers, facts.head_dim_v // self.sharers  # of one warp
        self.tiles_m = self.q.span // 16  # m16 tiles of mma.sync in one warp's rows
        self.tile_steps = TileSteps(self.dtype)

    def consumer(self, warp: Int32, lane: Int32, scale_log2: Float32) -> Consumer:
        """Shared memory and registers of a warp."""
        cfg, facts = self.cfg, self.facts
        sQ = cutlass.memory.SmemAllocator().allocate(facts.smem_bytes, byte_alignment=ALIGN).toint()
        sK = sQ + self.q.bytes
        sV = sK + cfg.stages * self.k.bytes
        lanes = tuple(op.lane_offset(lane, 0) for op in (self.q, self.k, self.v))
        rows_q = sQ + self.row_group(warp) * (self.q.span * self.q.line_bytes)
        part = exchange = None
        if self.sharers > 1:
            part = warp % self.sharers
            exchange = sV + cfg.stages * self.v.bytes + warp * self.part_bytes + lane * CHUNK
            # A part is a multiple of 128 bytes wide, so that swizzles are the same in all of them.
            widths = (n * facts.element.width for n in (self.depth, self.depth, self.columns))
            lanes = tuple(at + part * width for at, width in zip(lanes, widths, strict=True))
        acc_S = cute.make_rmem_tensor((4, self.tiles_m, cfg.tile_n // 8), Float32)
        acc_O = cute.make_rmem_tensor((4, self.tiles_m, self.columns // 8), Float32)
        # Row sums of P are an MMA with ones: the compiler would postpone additions and then hold every P twice, before
        # and after rounding. MMAs are fewer instructions, too. But they sum rounded values, which is right for O and
        # not for LSE (1e-3 off, measured), so a kernel that writes LSE adds.
        acc_L = cute.make_rmem_tensor((4, self.tiles_m, 1), Float32)
        ones = cute.make_rmem_tensor((4, 1), self.dtype)
        ones.fill(1.0)
        sums = None if self.adds_row_sums else rows_and_columns(acc_L, self.tiles_m)[None, 0]
        softmax = OnlineSoftmax.of_rows(2 * self.tiles_m, scale_log2, sums)
        return Consumer(sQ, sK, sV, rows_q, lanes, part, exchange, acc_S, acc_O, acc_L, ones, softmax)

    def row_group(self, warp: Int32) -> Int32:
        """Row group of the query tile that a warp computes, in units of `q.span`."""
        return warp // self.sharers if self.sharers > 1 else warp

    def first_column(self, c: Consumer):
        """First column of O that a warp computes."""
        return c.part * self.columns if self.sharers > 1 else 0

    def writes_lse(self, c: Consumer):
        """True if this warp writes the LSE of its rows."""
        return c.part == 0 if self.sharers > 1 else True

    @property
    def part_bytes(self) -> int:
        """Bytes of one warp's partial scores of a tile."""
        return self.q.span * self.cfg.tile_n * 4

    # ------------------------------------------------------------------ steps

    @cute.jit
    def fill(self, c: Consumer, tiles, from_k, from_v, first_end: Int32, end: Int32 | None):
        """Copy the first KV tiles, one per stage; `first_end` is the end of the very first one."""
        for s in range_constexpr(self.cfg.stages):
            this_end = first_end if const_expr(s == 0) else end
            if s < tiles.count:
                self.copy(self.k, from_k, tiles.at(s), c.sK + s * self.k.bytes, this_end)
            cute.arch.cp_async_commit_group()
            if s < tiles.count:
                self.copy(self.v, from_v, tiles.at(s), c.sV + s * self.v.bytes, this_end)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def steps(self, c: Consumer, work: QueryWork, q_fragments: list, from_k, from_v, end: Int32 | None):
        """Run all tiles, after `fill` and the wait for Q and the first tile of K."""
        for segment in range_constexpr(len(work.tiles.kinds)):
            begin = 0 if const_expr(segment == 0) else work.tiles.ends[segment - 1]
            for i in cutlass.range(begin, work.tiles.ends[segment], unroll=1):
                self.step(c, work, i, work.tiles.kinds[segment], q_fragments, from_k, from_v, end)

    @cute.jit
    def step(
        self,
        c: Consumer,
        work: QueryWork,
        i: Int32,
        kind: cutlass.Constexpr,
        q_fragments: list,  # fragments of Q that stay in registers
        from_k,
        from_v,
        end: Int32 | None,
    ):
        """Compute P and O of tile i."""
        cfg, softmax, tiles = self.cfg, c.softmax, work.tiles
        scores, out = rows_and_columns(c.acc_S, self.tiles_m), rows_and_columns(c.acc_O, self.tiles_m)
        stage, after = i % cfg.stages, i + cfg.stages
        c.acc_S.fill(0.0)
        self.multiply(
            c.acc_S, lambda k: self.fragment_q(c, k, q_fragments), self.k, c.lanes[1], c.sK + stage * self.k.bytes
        )  # fmt: skip
        if const_expr(self.sharers > 1):
            self.store_partial_scores(c)
        self.wait(2 * (cfg.stages - 1))
        if after < tiles.count:
            self.copy(self.k, from_k, tiles.at(after), c.sK + stage * self.k.bytes, end)
        cute.arch.cp_async_commit_group()
        if const_expr(self.sharers > 1):
            self.reduce_scores(c)
        mask_and_softmax(self.facts, scores, softmax, work, i, kind)
        rP = self.convert(c.acc_S)
        softmax.rescale(out)
        if const_expr(not self.adds_row_sums):
            softmax.rescale(rows_and_columns(c.acc_L, self.tiles_m))
            for k in range_constexpr(len(rP)):
                self.tile_steps.multiply(c.acc_L, rP[k], c.ones)
        self.multiply(c.acc_O, lambda k: rP[k], self.v, c.lanes[2], c.sV + stage * self.v.bytes)
        self.wait(2 * (cfg.stages - 1))
        if after < tiles.count:
            self.copy(self.v, from_v, tiles.at(after), c.sV + stage * self.v.bytes, end)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def store_partial_scores(self, c: Consumer):
        """Write this warp's partial scores to shared memory, a lane's vector next to its neighbors'."""
        for i in range_constexpr(cute.size(c.acc_S) // 4):
            place = make_ptr(Float32, c.exchange + i * (WARP * CHUNK), AddressSpace.smem, assumed_align=CHUNK)
            cute.autovec_copy(
                cute.make_tensor(c.acc_S.iterator + 4 * i, cute.make_layout(4)),
                cute.make_tensor(place, cute.make_layout(4)),
            )

    @cute.jit
    def reduce_scores(self, c: Consumer):
        """Add the partial scores of the warps with the same rows. In pairs, so that the sums are bitwise identical in
        all warps."""
        others = [c.exchange + ((c.part ^ other) - c.part) * self.part_bytes for other in range(1, self.sharers)]
        for i in range_constexpr(cute.size(c.acc_S) // 4):
            parts = []
            for other in others:
                part = cute.make_rmem_tensor(4, Float32)
                place = make_ptr(Float32, other + i * (WARP * CHUNK), AddressSpace.smem, assumed_align=CHUNK)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), part)
                parts.append(part)
            for j in range_constexpr(4):
                score = c.acc_S[4 * i + j] + parts[0][j]
                if const_expr(self.sharers == 4):
                    score = score + (parts[1][j] + parts[2][j])
                c.acc_S[4 * i + j] = score

    @cute.jit
    def wait(self, groups: cutlass.Constexpr):
        """Wait until all but the latest `groups` groups of copies are visible to all threads; also a CTA-wide
        barrier."""
        cute.arch.cp_async_wait_group(groups)
        cute.arch.sync_threads()

    # ------------------------------------------------------------------ shared memory -> registers -> tensor cores

    def fragment_q(self, c: Consumer, k: int, q_fragments: list) -> cute.Tensor:
        """Fragment (8, MMA_M) of MMA step k: from registers, or read from shared memory."""
        if k < len(q_fragments):
            return q_fragments[k]
        rQ = cute.make_rmem_tensor((8, self.tiles_m), self.dtype)
        self.tile_steps.read(self.q, k, c.lanes[0], c.rows_q, rQ)
        return rQ

    def convert(self, acc_S: cute.Tensor) -> list:
        """P rounded to 16 bits, an A fragment (8, MMA_M) for each MMA step: the accumulators of two n8 MMAs."""
        steps = []
        for k in range(self.cfg.tile_n // self.v.element.mma_k):
            rP = cute.make_rmem_tensor((8, self.tiles_m), self.dtype)
            for i in range(self.tiles_m):
                for half in range(2):
                    part = cute.make_tensor(acc_S.iterator + 4 * (i + self.tiles_m * (2 * k + half)), 4)
                    to = cute.make_tensor(rP.iterator + 8 * i + 4 * half, 4)
                    to.store(part.load().to(self.dtype))
            steps.append(rP)
        return steps

    def multiply(self, acc: cute.Tensor, fragment: Callable, op: OperandTile, lane: Int32, tile: Int32):
        """acc += A B, with fragment(k) of A, and B in shared memory; fragments are prefetched one step ahead."""
        # S is in registers next to O while K is read
        columns = COLUMNS if op is self.v else COLUMNS // 2
        # Group the steps that have the same address
        depth, rows = (op.tile_k, self.columns) if op is self.v else (self.depth, op.rows)
        order = sorted(range(depth // op.element.mma_k), key=lambda k: op.step(0, k)[0])
        steps = [(k, n) for k in order for n in range(0, rows, columns)]
        rA, rB = fragment(order[0]), self.fragment_b(op, steps[0], columns, lane, tile)
        for i in range(len(steps)):
            nextA, nextB = rA, rB
            if i + 1 < len(steps):
                if steps[i + 1][1] == 0:
                    nextA = fragment(steps[i + 1][0])
                nextB = self.fragment_b(op, steps[i + 1], columns, lane, tile)
            n = steps[i][1]
            part = cute.make_tensor(acc.iterator + n // 8 * 4 * self.tiles_m, (4, self.tiles_m, columns // 8))
            self.tile_steps.multiply(part, rA, rB)
            rA, rB = nextA, nextB

    def fragment_b(self, op: OperandTile, step: tuple, columns: int, lane: Int32, tile: Int32) -> cute.Tensor:
        """Fragments (4, MMA_N) of some columns, at (MMA step, first column)."""
        rB = cute.make_rmem_tensor((4, columns // 8), self.dtype)
        self.tile_steps.read(op, step[0], lane, tile, rB, step[1] // 16)
        return rB


def operand_tiles(facts: FlashFacts) -> tuple:
    """(Q, K, V): layouts of their tiles in shared memory."""
    cfg = facts.config
    element, threads = facts.element, WARP * cfg.groups
    row_groups = cfg.groups // facts.sharers
    q = OperandTile(cfg.tile_m, facts.head_dim, True, element.vector, threads, row_groups, False, element)
    k = OperandTile(cfg.tile_n, facts.head_dim, True, element.vector, threads, 1, True, element)
    # (Dv, tile_n), as B of P V
    v = OperandTile(facts.head_dim_v, cfg.tile_n, False, element.vector, threads, 1, True, element)
    return q, k, v


def first_vector(op: OperandTile, thread) -> tuple:
    """(line, element) of the first vector that a thread copies: neighbors copy neighboring chunks of a line.

    If all threads together copy more lines at once than the tile has, threads whose line is past its last must not
    copy.
    """
    return thread // op.chunks, thread % op.chunks * op.vector


def lines_at_once(op: OperandTile) -> int:
    """Number of lines of which all threads copy `op.chunks` chunks at a time: 4 chunks at head dimension 96, 8 at
    others."""
    return op.threads // op.chunks


def vectors(op: OperandTile) -> list:
    """(lines, bytes) from a thread's first vector to each vector that it copies."""
    steps = range(0, op.line_bytes, op.chunks * CHUNK)
    return [(j, byte) for j in range(0, op.lines, lines_at_once(op)) for byte in steps]
