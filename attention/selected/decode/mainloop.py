"""The mainloop of decode from selected blocks: decode/fp8/mainloop, over the tiles of a list.

A warp gathers the rows of its tiles of K and V by cp.async, row by row. Its lanes look up the places of several tiles
at once, at least a whole step before the copies that need them. Keys that do not exist, are not visible, or are of an
entry that is no block are not read: they become zeros, and their scores -inf.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import select_

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.ampere import CHUNK, WARP, OperandTile, TileSteps

from ...decode.fp8.mainloop import MainloopFloat8, WarpState
from ...forward.mainloop_sm80 import first_vector, vectors
from ...forward.mask import cap_scores
from ...forward.softmax import rows_and_columns
from .problem import ListTiles


class GatherFloat8(MainloopFloat8):
    """Steps of one warp over the tiles of a list, from an FP8 cache."""

    def __init__(self, facts):
        super().__init__(facts, self.copy_tile)

    # ------------------------------------------------------------------ steps

    @cute.jit
    def fill_ring(
        self,
        ring: Int32,
        warp: Int32,
        tiles: ListTiles,
        caches: tuple,  # K and V of the head, (B or pages, S, D or Dv)
        valid: cute.Tensor,  # (stages,): existing keys of this lane's box of each tile in the ring
        following: cute.Tensor,  # (3,): places of the tiles that the first steps copy
    ):
        """Copy the first tiles of this warp. All places are looked up before the first copy."""
        at_once = const_expr(self.facts.tiles_at_once)
        places = [tiles.places(warp, n) for n in range(0, self.stages + 1, at_once)]
        for x in range_constexpr(3):
            following[x] = places[-1][x]
        place = [tiles.of_tile(places[s // at_once], s) for s in range(self.stages)]
        for s in range_constexpr(self.stages):
            to = ring + s * (self.k.bytes + self.v.bytes)
            valid[s] = place[s][2]
            for x in range_constexpr(2):
                if warp + s * self.warps < tiles.count:
                    self.copy_tile((self.k, self.v)[x], caches[x], place[s], to + x * self.k.bytes)
                cute.arch.cp_async_commit_group()

    @cute.jit
    def run(
        self,
        c: WarpState,
        tiles: ListTiles,
        caches: tuple,
        valid: cute.Tensor,
        following: cute.Tensor,
        softcap: Float32,
    ):
        """Run all tiles of this warp, every `warps`-th, after `fill_ring`."""
        for i in cutlass.range(c.warp, tiles.count, self.warps, unroll=1):
            self.step_of_list(c, i, tiles, caches, valid, following, softcap)

    @cute.jit
    def step_of_list(
        self,
        c: WarpState,
        i: Int32,
        tiles: ListTiles,
        caches: tuple,
        valid: cute.Tensor,  # (stages,)
        following: cute.Tensor,  # (3,): places of the tile that this step copies, and of later ones
        softcap: Float32,
    ):
        """Compute P and O of tile i."""
        scores, out = rows_and_columns(c.acc_S), rows_and_columns(c.acc_O)
        after = i + self.warps * self.stages
        n, at_once = i // self.warps + self.stages, const_expr(self.facts.tiles_at_once)
        sK = self.slot(c, i // self.warps % self.stages)
        sV = sK + self.k.bytes
        place, now = tiles.of_tile(tuple(following[x] for x in range(3)), n), valid[0]
        for s in range_constexpr(self.stages - 1):
            valid[s] = valid[s + 1]
        valid[self.stages - 1] = place[2]
        if n % at_once == at_once - 1:
            for x, value in enumerate(tiles.places(c.warp, n + 1)):  # not used in this step
                following[x] = value
        self.wait()
        c.acc_S.fill(0.0)
        self.multiply_k(c, sK)
        cute.arch.sync_warp()  # all lanes have read K
        if after < tiles.count:
            self.copy_tile(self.k, caches[0], place, sK)
        cute.arch.cp_async_commit_group()
        if const_expr(c.factors is not None):
            for r in range_constexpr(2):
                for column in range_constexpr(cute.size(scores, mode=[1])):
                    scores[r, column] = scores[r, column] * c.factors[r]
        if const_expr(self.facts.softcap):
            cap_scores(scores, softcap)
        if cute.arch.vote_any_sync(now < self.facts.box):
            self.mask_boxes(scores, now)
        if c.softmax.step_lazily(scores):
            c.softmax.rescale(out)
        self.wait()
        self.multiply_v(c, sV)
        cute.arch.sync_warp()  # all lanes have read V
        if after < tiles.count:
            self.copy_tile(self.v, caches[1], place, sV)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def mask_boxes(self, scores: cute.Tensor, valid: Int32):
        """Set scores (2, columns) of keys that do not exist to -inf; lane j has the number of those of box j."""
        for c in range_constexpr(cute.size(scores, mode=[1])):
            column = cute.arch.lane_idx() % 4 * 2 + const_expr(c // 2 * 8 + c % 2)
            if const_expr(self.facts.boxes > 1):
                seen = column % self.facts.box < cute.arch.shuffle_sync(valid, column // self.facts.box)
            else:
                seen = column < valid
            for r in range_constexpr(2):
                scores[r, c] = select_(seen, scores[r, c], -Float32.inf)

    # ------------------------------------------------------------------ global memory -> shared memory

    @cute.jit
    def copy_tile(self, op: cutlass.Constexpr, mX: cute.Tensor, place: tuple, to_tile: Int32):
        """Copy a warp's tile of K or V (B or pages, S, D) to the address `to_tile`; see ListTiles.places."""
        box, width = const_expr(self.facts.box), const_expr(mX.element_type.width // 8)
        line, element = first_vector(op, cute.arch.lane_idx())
        start = element * op.element.width  # in bytes
        to = op.offset(line, start)
        head = mX.iterator.toint() + start
        source, inside, passed = head, cutlass.Boolean(True), const_expr(-1)
        for lines, byte in const_expr(vectors(op)):
            if const_expr(lines > passed):
                passed = const_expr(lines)
                at, (page, row, valid) = line + lines, place
                if const_expr(self.facts.boxes > 1):
                    page, row, valid = (cute.arch.shuffle_sync(x, at // box) for x in place)
                    at = at % box
                inside = (at < valid) & (page >= 0)
                page = cutlass.max(page, 0)
                source = head + (Int64(page) * mX.stride[0] + Int64(row + at) * mX.stride[1]) * width
            x, add = op.split(lines, byte)
            self.tile_steps.copy_vector(op, source + byte, to_tile + (to ^ x) + add, inside)


class Gather16(GatherFloat8):
    """The same from a BF16 or FP16 cache: fragments of Q, K and V are those of mma.sync, without conversion."""

    def __init__(self, facts):
        super().__init__(facts)
        self.dtype, element = cutlass_dtype(facts.dtype), facts.element
        self.k = OperandTile(facts.config.tile_n, facts.head_dim, True, element.vector, WARP, 1, True, element)
        self.v = OperandTile(facts.head_dim_v, facts.config.tile_n, False, element.vector, WARP, 1, True, element)
        self.tile_steps = TileSteps(self.dtype)

    def multiply_k(self, c: WarpState, tile: Int32):
        """S += Q K', fragments of K prefetched one step ahead: each has 16 rows of K and 16 of D."""
        order = [(k, i) for k in range(self.facts.head_dim // 16) for i in range(self.cfg.tile_n // 16)]
        self.multiply_all(c.acc_S, lambda k: self.fragment_q(c, k), self.k, c.lanes[0], tile, order)

    def multiply_v(self, c: WarpState, tile: Int32):
        """O += P V, likewise."""
        rP = [self.fragment_p(c.acc_S, k) for k in range(self.cfg.tile_n // 16)]
        order = [(k, i) for k in range(len(rP)) for i in range(self.facts.head_dim_v // 16)]
        self.multiply_all(c.acc_O, lambda k: rP[k], self.v, c.lanes[1], tile, order)

    def multiply_all(self, acc: cute.Tensor, fragment, op: OperandTile, lane: Int32, tile: Int32, order: list):
        """acc += A B in steps of 16 of K and 16 columns."""
        prefetched = self.fragment_b(op, lane, tile, *order[0])
        for step, (k, i) in enumerate(order):
            rB = prefetched
            if step + 1 < len(order):
                prefetched = self.fragment_b(op, lane, tile, *order[step + 1])
            if i == 0:
                rA = fragment(k)
            self.tile_steps.multiply(cute.make_tensor(acc.iterator + 8 * i, (4, 1, 2)), rA, rB)

    def fragment_b(self, op: OperandTile, lane: Int32, tile: Int32, k: int, i: int) -> cute.Tensor:
        rB = cute.make_rmem_tensor((4, 2), self.dtype)
        self.tile_steps.read(op, k, lane, tile, rB, i)
        return rB

    @cute.jit
    def load_q(self, mQ: cute.Tensor, row: Int32, rows: Int32) -> tuple:
        fragments = []
        for _ in range_constexpr(self.facts.head_dim // 16):
            rQ = cute.make_rmem_tensor((8, 1), self.dtype)
            rQ.fill(0.0)
            fragments.append(rQ)
        for r in range_constexpr(2):
            if row + 8 * r < rows:
                at = mQ[row + 8 * r, None].iterator.toint() + cute.arch.lane_idx() % 4 * 4
                for i in range_constexpr(len(fragments)):
                    for half in range_constexpr(2):
                        place = make_ptr(self.dtype, at + (2 * i + half) * CHUNK, AddressSpace.gmem, assumed_align=4)
                        pair = cute.make_tensor(fragments[i].iterator + 4 * half + 2 * r, cute.make_layout(2))
                        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), pair)
        return fragments, None
