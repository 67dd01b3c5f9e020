"""The mainloop of decode from an FP8 KV cache: the steps of a warp over its own tiles of K and V.

    smem    | K 0 | V 0 | K 1 | V 1 | ..    a ring of `stages` stages for each warp

A warp has all 16 packed rows, every fourth tile, and its own softmax. It copies its tiles by cp.async, waits for its
own copies, and synchronizes with the other warps only at the end. So each byte of K and V is read from shared memory,
and converted to 16 bits, once.

    copy K[0], V[0], K[1], V[1], .. -> load Q
    wait K[i] -> S = Q K[i]' -> copy K[i + stages] -> softmax of S -> wait V[i] -> O = O factor + P V[i] -> copy V[..]

FP8 values are converted in registers to FP16, which represents all of them; MMAs have FP16 operands and FP32
accumulators. ldmatrix moves 16-bit elements, so it treats two FP8 values as one:

    K    a lane gets four values along D of one column of K', in one register: two pairs. Their indices along D do not
         matter if Q's fragments have the same order (q_fragments).
    V    transposed, a lane gets V[t, d], V[t, d + 1], V[t + 1, d], V[t + 1, d + 1]. It needs pairs along t: one byte
         permutation. Fragments contain the even or the odd columns, which Merge.write puts in order.

Q's fragments come from q_float8, in FP16, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.ampere import CHUNK, WARP, OperandTile, TileSteps
from cute_kernels.tile.element import BITS_16
from cute_kernels.tile.ptx import BY_BITS_SCALE, float8_to_fp16, float8_to_fp16_across

from ...forward.config import DecodeFacts
from ...forward.mask_and_softmax import QueryWork, mask_and_softmax
from ...forward.softmax import OnlineSoftmax, rows_and_columns
from ..pages import pages_of_tile
from .q import q_fragments

ROWS = 16  # packed rows of a CTA, of one mma.sync
PAIR = 2  # FP8 values per ldmatrix element


@dataclass(frozen=True)
class WarpState:
    """State of a warp: the address of its ring in shared memory, its fragments of Q, and its accumulators."""

    warp: Int32
    ring: Int32
    lanes: tuple  # offsets of this lane's ldmatrix rows in a tile of K and of V
    q: list  # fragments (8, 1) of each 16 of D, if they stay in registers
    at_q: Int32 | None  # address of this lane's part of them, if not
    factors: cute.Tensor | None  # (2,), factors of the scores of a thread's rows
    acc_S: cute.Tensor  # (4, 1, tile_n / 8)
    acc_O: cute.Tensor  # (4, 1, Dv / 8)
    softmax: OnlineSoftmax


class MainloopFloat8:
    """Steps of one warp over its tiles, and its fragments of Q.

    copy: the kernel's `copy(op, source, tile, n, pages, to, end)`, which copies tile n of K or V to the address `to`;
    lines from `end` on, unless it is None, become zeros. `pages` come from pages.pages_of_tile.
    """

    def __init__(self, facts: DecodeFacts, copy: Callable):
        self.facts, self.cfg, self.copy = facts, facts.config, copy
        self.warps, self.stages = facts.config.groups, facts.config.stages
        self.k, self.v = cache_tiles(facts)
        self.dtype: Any = Float16  # of the operands of MMAs
        self.tile_steps = TileSteps(self.dtype)

    # ------------------------------------------------------------------ steps

    @cute.jit
    def fill(self, ring: Int32, warp: Int32, tile, tiles, from_k: tuple, from_v: tuple, end: Int32):
        """Copy the first tiles of this warp. Lines from `end` on, which only the very first tile may have, become
        zeros.

        from_k, from_v: (mX, page_table or None), as `copy` takes them.
        """
        for s in range_constexpr(self.stages):
            i, to = warp + s * self.warps, ring + s * (self.k.bytes + self.v.bytes)
            this_end = end if const_expr(s == 0) else None
            pages = self.pages_of(tile, tiles, from_k, i)
            if i < tiles.count:
                self.copy(self.k, from_k, tile, tiles.at(i), pages, to, this_end)
            cute.arch.cp_async_commit_group()
            if i < tiles.count:
                self.copy(self.v, from_v, tile, tiles.at(i), pages, to + self.k.bytes, this_end)
            cute.arch.cp_async_commit_group()

    def pages_of(self, tile, tiles, from_k: tuple, i: Int32) -> Int32:
        """Page indices of the i-th tile, or of the last one."""
        return pages_of_tile(self.facts, from_k[1], tile.b, tiles.at(cutlass.min(i, tiles.count - 1)))

    @cute.jit
    def steps(self, c: WarpState, work: QueryWork, from_k: tuple, from_v: tuple):
        """Run all tiles of this warp, every `warps`-th, after `fill`."""
        tiles, stride = work.tiles, self.warps
        next_pages = cute.make_rmem_tensor(1, Int32)  # page indices of the tile that the next step copies
        next_pages[0] = self.pages_of(work.tile, tiles, from_k, c.warp + self.stages * stride)
        for segment in range_constexpr(len(tiles.kinds)):
            begin = Int32(0) if const_expr(segment == 0) else tiles.ends[segment - 1]
            first = begin + ((c.warp - begin) & (stride - 1))
            for i in cutlass.range(first, tiles.ends[segment], stride, unroll=1):
                self.step(c, work, i, tiles.kinds[segment], from_k, from_v, next_pages)

    @cute.jit
    def step(
        self,
        c: WarpState,
        work: QueryWork,
        i: Int32,
        kind: cutlass.Constexpr,
        from_k: tuple,
        from_v: tuple,
        next_pages: cute.Tensor,  # (1,)
    ):
        """Compute P and O of tile i."""
        tiles, softmax = work.tiles, c.softmax
        scores, out = rows_and_columns(c.acc_S), rows_and_columns(c.acc_O)
        after = i + self.warps * self.stages
        sK = self.slot(c, i // self.warps % self.stages)
        sV = sK + self.k.bytes
        pages = next_pages[0]
        next_pages[0] = self.pages_of(work.tile, tiles, from_k, after + self.warps)  # not used in this step
        self.wait()
        c.acc_S.fill(0.0)
        self.multiply_k(c, sK)
        cute.arch.sync_warp()  # all lanes have read K
        if after < tiles.count:
            self.copy(self.k, from_k, work.tile, tiles.at(after), pages, sK, None)
        cute.arch.cp_async_commit_group()
        if const_expr(c.factors is not None):
            for r in range_constexpr(2):
                for column in range_constexpr(cute.size(scores, mode=[1])):
                    scores[r, column] = scores[r, column] * c.factors[r]
        if mask_and_softmax(self.facts, scores, softmax, work, i, kind, lazily=True):
            softmax.rescale(out)
        self.wait()
        self.multiply_v(c, sV)
        cute.arch.sync_warp()  # all lanes have read V
        if after < tiles.count:
            self.copy(self.v, from_v, work.tile, tiles.at(after), pages, sV, None)
        cute.arch.cp_async_commit_group()

    @property
    def ring_bytes(self) -> int:
        """Bytes of one warp's ring."""
        return self.stages * (self.k.bytes + self.v.bytes)

    def slot(self, c: WarpState, stage) -> Int32:
        return c.ring + stage * (self.k.bytes + self.v.bytes)

    @cute.jit
    def wait(self):
        """Wait for the oldest copies, of one tile of K or V. Each tile is a group, followed by `2 stages - 1` younger
        ones."""
        cute.arch.cp_async_wait_group(2 * self.stages - 1)
        cute.arch.sync_warp()

    # ------------------------------------------------------------------ shared memory -> registers -> tensor cores

    def multiply_k(self, c: WarpState, tile: Int32):
        """S += Q K', fragments of K prefetched one step ahead: each has 16 rows of K and 32 of D."""
        order = [(k, i) for k in range(self.facts.head_dim // 32) for i in range(self.cfg.tile_n // 16)]
        prefetched = self.read(self.k, c.lanes[0], tile, *order[0])
        for step, (k, i) in enumerate(order):
            words = prefetched
            if step + 1 < len(order):
                prefetched = self.read(self.k, c.lanes[0], tile, *order[step + 1])
            acc = cute.make_tensor(c.acc_S.iterator + 8 * i, (4, 1, 2))
            for chunk in range(2):  # 16 values along D each
                rB = self.fragment([self.convert(words[chunk + 2 * half], float8_to_fp16) for half in range(2)])
                self.tile_steps.multiply(acc, self.fragment_q(c, 2 * k + chunk), rB)

    def multiply_v(self, c: WarpState, tile: Int32):
        """O += P V, fragments of V prefetched one step ahead: each has 16 rows and 32 columns of V."""
        rP = [self.fragment_p(c.acc_S, k) for k in range(self.cfg.tile_n // 16)]
        order = [(k, i) for k in range(len(rP)) for i in range(self.facts.head_dim_v // 32)]
        prefetched = self.read(self.v, c.lanes[1], tile, *order[0])
        for step, (k, i) in enumerate(order):
            words = prefetched
            if step + 1 < len(order):
                prefetched = self.read(self.v, c.lanes[1], tile, *order[step + 1])
            for chunk in range(2):  # 16 columns each
                upper, lower = (self.convert(words[2 * chunk + half], float8_to_fp16_across) for half in range(2))
                rB = self.fragment(list(zip(upper, lower, strict=True)))  # of even columns, and of odd ones
                acc = cute.make_tensor(c.acc_O.iterator + 8 * (2 * i + chunk), (4, 1, 2))
                self.tile_steps.multiply(acc, rP[k], rB)

    def convert(self, word: Int32, how: Callable) -> tuple:
        """Convert four values to two pairs of FP16."""
        return how(word, self.facts.cache, self.facts.by_bits)

    def fragment_q(self, c: WarpState, chunk: int) -> cute.Tensor:
        """Fragment of the chunk-th 16 of D: from registers, or read from shared memory."""
        if c.at_q is None:
            return c.q[chunk]
        rQ = cute.make_rmem_tensor((8, 1), self.dtype)
        cute.autovec_copy(self.smem_fragment_q(c.at_q, chunk), rQ)
        return rQ

    def smem_fragment_q(self, at_q: Int32, chunk: int) -> cute.Tensor:
        """Its place (8, 1) in shared memory."""
        place = make_ptr(self.dtype, at_q + chunk * (WARP * CHUNK), AddressSpace.smem, assumed_align=CHUNK)
        return cute.make_tensor(place, cute.make_layout((8, 1)))

    def read(self, op: OperandTile, lane: Int32, tile: Int32, k: int, i: int) -> cute.Tensor:
        """Four words of four values: the matrices of MMA step k of 32 bytes or 16 rows, of the i-th 16 rows or 32
        bytes."""
        rX = cute.make_rmem_tensor((8, 1), Float16)
        self.tile_steps.read(op, k, lane, tile, rX, i)
        return cute.recast_tensor(rX, Int32)

    def fragment(self, pairs: list) -> cute.Tensor:
        """B fragment (4, 2): two registers for each of two n8 tiles."""
        rB = cute.make_rmem_tensor((4, 2), Float16)
        words = cute.recast_tensor(rB, Int32)
        for n, pair in enumerate(pairs):
            words[2 * n], words[2 * n + 1] = pair
        return rB

    def fragment_p(self, acc_S: cute.Tensor, k: int) -> cute.Tensor:
        """A fragment (8, 1): P of the k-th 16 columns, rounded to 16 bits."""
        rP = cute.make_rmem_tensor((8, 1), self.dtype)
        for half in range(2):
            part = cute.make_tensor(acc_S.iterator + 4 * (2 * k + half), 4)
            cute.make_tensor(rP.iterator + 4 * half, 4).store(part.load().to(self.dtype))
        return rP

    # ------------------------------------------------------------------ initial state

    def load_q(self, mQ: cute.Tensor, row: Int32, rows: Int32) -> tuple:
        """(fragments (8, 1) of each 16 of D of rows `row` and `row` + 8, factors of their scores or None); rows from
        `rows` on are zeros."""
        return q_fragments(self.facts, mQ, row, rows)

    @cute.jit
    def state(
        self,
        ring: Int32,
        at_q: Int32,
        warp: Int32,
        mQ: cute.Tensor,  # (rows, D), packed
        row: Int32,  # of this thread, the first
        rows: Int32,
        k_scale: Float32 | None,  # of the head
        scale_log2: Float32,
    ) -> WarpState:
        """Initial state of a warp."""
        lane = cute.arch.lane_idx()
        q, factors = self.load_q(mQ, row, rows)
        at_q = at_q + lane * CHUNK
        if const_expr(self.facts.q_in_registers):
            at_q = None
        else:
            if warp == 0:  # all warps have the same fragments
                for chunk in range_constexpr(len(q)):
                    cute.autovec_copy(q[chunk], self.smem_fragment_q(at_q, chunk))
            cute.arch.sync_threads()
            q = []
        if const_expr(factors is None and (k_scale is not None or self.facts.by_bits)):
            factors = cute.make_rmem_tensor(2, Float32)
            factors.fill(1.0)
        for r in range_constexpr(2):
            if const_expr(k_scale is not None):
                factors[r] = factors[r] * k_scale
            if const_expr(self.facts.by_bits):
                factors[r] = factors[r] / BY_BITS_SCALE
        acc_S = cute.make_rmem_tensor((4, 1, self.cfg.tile_n // 8), Float32)
        acc_O = cute.make_rmem_tensor((4, 1, self.facts.head_dim_v // 8), Float32)
        lanes = tuple(op.lane_offset(lane, 0) for op in (self.k, self.v))
        softmax = OnlineSoftmax.of_rows(2, scale_log2)
        return WarpState(warp, ring, lanes, q, at_q, factors, acc_S, acc_O, softmax)


def cache_tiles(facts: DecodeFacts) -> tuple:
    """(K, V): layouts of a warp's tiles in shared memory, in elements of two FP8 values, as copies and ldmatrix use
    them."""
    rows, vector = facts.config.tile_n, BITS_16.vector
    k = OperandTile(rows, facts.head_dim // PAIR, True, vector, WARP, 1, True, BITS_16)
    v = OperandTile(facts.head_dim_v // PAIR, rows, False, vector, WARP, 1, True, BITS_16)
    return k, v
