"""The sm_90 store: accumulators through the epilogue into shared memory and out by TMA, or directly to global memory.

Each consumer warpgroup stores its own 64-row slabs in chunks of 64 rows x `epi_n` columns, through its own ring of
buffers (writers_sm90), so warpgroups never wait for each other. With split-K, each CTA stores its share of a tile's
chunks.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ...tile.hopper import WARPGROUP
from ...tile.ptx import load_volatile
from ..contexts import StoreCtx
from . import formula
from .chunk import Chunk
from .formula import coordinates
from .writers_sm90 import SLAB_M, DirectWriter, PackedWriter, TmaWriter

PIECE = 32  # accumulators per call of the epilogue


def in_fp32(acc: cute.Tensor, first: int, count: int) -> tuple[cute.Tensor, int]:
    """(tensor, first index) of `count` accumulators from index `first` on, in FP32.

    FP16 accumulators are read in pairs: read one by one, the compiler keeps each in its own register during the
    mainloop, and serializes WGMMAs of 192 columns.
    """
    if acc.element_type is Float32:
        return acc, first
    words = cute.make_rmem_tensor(count // 2, Int32)
    for v in range(count // 2):
        words[v] = cute.recast_tensor(acc, Int32)[first // 2 + v]
    wide = cute.make_rmem_tensor(count, Float32)
    wide.store(cute.recast_tensor(words, acc.element_type).load().to(Float32))
    return wide, 0


class StoreSm90:
    """Store of the accumulators of one consumer warpgroup."""

    def __init__(self, facts, group_n: int, dtype, anchor_bias: bool = True):
        cfg = facts.config
        self.spec = facts.epilogue
        self.dtype = dtype
        self.tile_m, self.tile_n = cfg.tile_m, cfg.tile_n
        self.warps_m = cfg.warps_m
        self.warpgroups = cfg.warps_m * cfg.warps_n  # that share a tile
        self.group_n = group_n  # columns of one warpgroup
        self.slabs = cfg.tile_m // (SLAB_M * cfg.warps_m)  # 64-row slabs of one warpgroup
        box_n = cfg.tile_n // cfg.boxes_b if cfg.boxes_b > 1 else group_n
        self.epi_n = facts.chunk_columns(min(group_n, box_n))  # columns of one chunk
        self.narrow, self.out_name = facts.narrow, facts.out_dtype
        self.n_major = facts.majors[2] != "m"
        self.tma = facts.tma_store
        self.writer = (PackedWriter if self.narrow else TmaWriter) if self.tma else DirectWriter
        # An epilogue's arithmetic depends on no barrier, so the compiler would start it for all accumulators at once,
        # and the temporaries of 128 GELUs spill. A factor of 1.0, read from shared memory for each piece, keeps the
        # pieces apart. It multiplies the bias if there is one, which is fewer multiplications; with fewer registers
        # (`anchor_bias` False) that spilled.
        self.anchored = not facts.epilogue.is_light
        self.by_bias = self.anchored and anchor_bias and facts.epilogue.bias is not None
        # Row and column scales are applied here, the other terms by the epilogue.
        self.each = facts.epilogue.scale_m == "row", facts.epilogue.scale_n == "column"
        self.piece = PIECE // (1 + any(self.each))
        rest = (None if each else kind for each, kind in zip(self.each, (self.spec.scale_m, self.spec.scale_n)))
        self.spec = replace(self.spec, **dict(zip(("scale_m", "scale_n"), rest)))
        self.epilogue = formula.Epilogue(self.spec)
        self.chunks = group_n // self.epi_n  # of a slab
        self.boxes = cfg.boxes_b
        self.per_box = cfg.tile_n // self.boxes // self.epi_n  # chunks
        self.split = cfg.split
        self.gated = facts.epilogue.gated
        self.buffers = cfg.ring

    @property
    def layout_enum(self):
        return LayoutEnum.ROW_MAJOR if self.n_major else LayoutEnum.COL_MAJOR

    def make_tma(self, mD: cute.Tensor, sD_layout) -> tuple:
        """(TMA atom, D in its coordinates); without TMA (None, mD)."""
        if not self.tma:
            return None, mD
        smem = cute.slice_(sD_layout, (None, None, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mD, smem, (SLAB_M, self.epi_n))

    def tiles(self, mD: cute.Tensor) -> cute.Tensor:
        """(64, epi_n, rest_m, rest_n, outer_m, L); without TMA mD itself."""
        return cute.local_tile(mD, (SLAB_M, self.epi_n), (None, None, None, None)) if self.tma else mD

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # (MMA, slabs, 1) of this warpgroup, FP32 or FP16; with split-K, this CTA's part of it
        ctx: StoreCtx,
        places: tuple,  # (m, n, outer_m) of the tile; if it has boxes, of each one that this warpgroup has
        batch: tuple,  # l, and the batch index of A, if a bias has one for each
        rank=None,  # of this CTA among those that share the tile (split-K)
        following=None,  # overlap_store.NextTile, whose WGMMAs start in accumulators that have been read
    ):
        args, extent, group = ctx.args, ctx.extent, ctx.warpgroup
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        warp = cute.arch.make_warp_uniform(tidx // 32)
        group_m = group % self.warps_m
        first_column = group % self.warpgroups // self.warps_m * self.group_n
        out_m, out_n, outer_m = places[0]
        col0 = out_n * self.tile_n + first_column
        # (MMA, 1, 1): (row, column) of each accumulator inside a slab
        tCcD = ctx.thr_mma.partition_C(cute.make_identity_tensor((SLAB_M, self.group_n)))

        values = const_expr(SLAB_M * self.epi_n // WARPGROUP)
        writer = self.writer(self, ctx, tidx, warp)
        rMax = cute.make_rmem_tensor(1, Float32)  # the largest magnitude that this thread has seen
        rMax[0] = Float32(0.0)
        piece = const_expr(min(values, self.piece) if self.anchored else values)
        rD = cute.make_rmem_tensor(piece, Float32)
        share = const_expr(self.slabs * self.chunks // self.split // (1 + self.gated))
        corner = (out_m * (self.tile_m // SLAB_M) + group_m) * SLAB_M, col0
        # Scales loaded per chunk would come after the barriers of the chunk before, and each load would be waited for.
        # So all chunks' scales are loaded first if the epilogue leaves registers for them.
        loaded = {}
        if const_expr(not self.anchored):
            for i in range_constexpr(share):
                self.scales(i, args, corner, batch[0], rank, loaded)
        for i in range_constexpr(share):
            chunk = i if const_expr(self.split == 1) else rank * share + i
            s, e = chunk // self.chunks, chunk % self.chunks
            if const_expr(self.boxes > 1):
                box, rest = e // self.per_box, e % self.per_box
                out_m, out_n, outer_m = places[box]
                col0 = (out_n * self.per_box + rest - e) * self.epi_n
            outer = (outer_m, *batch)
            if const_expr(self.boxes > 1):  # an absent box lies past the last block and must not be read
                outer = (cutlass.min(outer_m, writer.blocks() - 1), *batch)
            at = const_expr(i * values)  # of the chunk's accumulators
            slab = out_m * (self.tile_m // SLAB_M) + s * self.warps_m + group_m
            if const_expr(self.gated):  # every second slab has the rows of `up`
                at = const_expr((2 * (i // self.chunks) * self.chunks + i % self.chunks) * values)
                slab = out_m * (self.tile_m // SLAB_M // 2) + s
            rows, columns = self.scales(i, args, corner, batch[0], rank, {} if self.anchored else loaded)
            writer.begin_chunk()
            for first in range_constexpr(0, values, piece):
                one = load_volatile(ctx.one) if const_expr(self.anchored) else None
                sums, begin = in_fp32(acc, at + first, piece)
                for v in range_constexpr(piece):
                    rD[v] = sums[begin + v]
                    if const_expr(self.anchored and not self.by_bias):
                        rD[v] = rD[v] * one
                self.multiply(rD, rows, columns, first)
                if const_expr(self.split == 1):
                    cD = coordinates(tCcD, e * values + first, piece, (slab * SLAB_M, col0))
                else:  # the accumulators of a chunk begin `values` after those of the chunk before
                    cD = coordinates(tCcD, first, piece, (slab * SLAB_M, col0 + e * self.epi_n))
                factor = one if const_expr(self.by_bias) else None
                rZ = writer.begin_piece(first, piece)
                values_of_d = Chunk(args, rD, cD, extent, outer, factor, rZ, rMax)
                self.epilogue.apply(values_of_d)
                if const_expr(self.gated):
                    for v in range_constexpr(piece):
                        rD[v] = rD[v] * acc[at + self.chunks * values + first + v]
                values_of_d = replace(values_of_d, extent=writer.extent(outer_m))
                if const_expr(self.narrow):
                    self.epilogue.quantize(values_of_d)
                writer.put(values_of_d, first)
            if const_expr(following is not None):
                following.start(i, i == 0)
            writer.end_chunk(i, share, (slab, (col0, e), outer_m, batch[0]))
        if const_expr(following is not None):
            following.wait()
        if const_expr(self.narrow):
            self.epilogue.finish(args, rMax)

    def scales(self, i: int, args: formula.EpilogueArgs, corner: tuple, l: Int32, rank, loaded: dict) -> tuple:
        """(row scales, column scales) of this CTA's i-th chunk; None for an operand without them.

        corner: the warpgroup's first row and column. loaded: scales of earlier chunks, to which this call adds.
        """
        chunk = i if self.split == 1 else rank * (self.slabs * self.chunks // self.split) + i
        s, e = chunk // self.chunks, chunk % self.chunks
        rows, columns = ("rows", i if self.split > 1 else s), ("columns", i if self.split > 1 else e)
        if self.each[0] and rows not in loaded:
            loaded[rows] = self.scales_of_rows(args.scale_m, corner[0] + s * self.warps_m * SLAB_M, l)
        if self.each[1] and columns not in loaded:
            loaded[columns] = self.scales_of_columns(args.scale_n, corner[1] + e * self.epi_n, l)
        return loaded.get(rows), loaded.get(columns)

    def scales_of_rows(self, scale: cute.Tensor, first: Int32, l: Int32) -> list:
        """Scales of the thread's two rows of the slab whose first row is `first`."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        rows = [first + tidx // 32 * 16 + tidx % 32 // 4 + 8 * r for r in range(2)]
        return [scale[cutlass.min(row, scale.shape[0] - 1), l] for row in rows]

    def scales_of_columns(self, scale: cute.Tensor, first: Int32, l: Int32) -> list:
        """This lane's share of the column scales of a chunk whose first column is `first`.

        A thread has two columns of every 8, and every fourth lane has the same ones. Those eight lanes load two columns
        of a different group of 8 each, so a thread does 2 loads instead of 16; `multiply` shuffles them."""
        lane = cute.arch.lane_idx()
        columns = [first + lane // 4 * 8 + lane % 4 * 2 + c for c in range(2)]
        return [scale[cutlass.min(column, scale.shape[0] - 1), l] for column in columns]

    def multiply(self, rD: cute.Tensor, rows: list | None, columns: list | None, first: int) -> None:
        """Multiply accumulators of a chunk, from index `first` on, by their row and column scales."""
        lane = cute.arch.lane_idx()
        for v in range(cute.size(rD)):
            j, r, c = (first + v) // 4, v // 2 % 2, v % 2  # group of 8 columns; the thread's row, and its column
            if columns is not None and r == 0:
                factor = cute.arch.shuffle_sync(columns[c], j * 4 + lane % 4)
                for other in (v, v + 2):
                    rD[other] = rD[other] * factor
            if rows is not None:
                rD[v] = rD[v] * rows[r]

    def pending(self, number: int, total: int) -> int:
        """Number of stores that may still read their buffers when store `number` of a tile's `total` writes its own.

        Buffers rotate, but each tile starts at buffer 0, which may be the last one that the previous tile used.
        """
        return 0 if number == 0 and total % self.buffers else self.buffers - 1

    def drain(self):
        """Wait until TMA stores have read shared memory, as they must before the CTA exits."""
        if self.tma:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
