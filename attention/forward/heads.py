"""Heads of a query tile's rows: one head, or all query heads that share a KV head (GQA packing).

    OneHead      row r of head h is query r of head h
    GqaPacking   row r of KV head h_kv is query r // g of head h_kv * g + r % g

With GQA packing K and V are read once for the g heads. A source (kv_tiles, block_source) holds one of them; kernels
address rows of Q, O, LSE and sinks through it.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from .mask import LOG2E


@dataclass(frozen=True)
class OneHead:
    """All rows of a tile belong to head tile.h."""

    def rows(self, queries):
        """Number of rows for so many queries."""
        return queries

    def query(self, row):
        """Query index of a row."""
        return row

    def place(self, tile, row) -> tuple:
        """(query head, query index) of a row."""
        return tile.h, row

    def queries(self, m, tile_m, queries) -> tuple:
        """(first, after) of the queries of tile m, which has `tile_m` rows, of so many queries."""
        first = m * tile_m
        return first, cutlass.min(first + tile_m, queries)

    def view(self, tensor: cute.Tensor, tile, seqlen) -> cute.Tensor:
        """Rows of a tile's heads: (rows, ..) of (B, H, Sq, ..)."""
        one = tensor[(seqlen.b, tile.h, *(None for _ in tensor.shape[2:]))]
        return cute.domain_offset((seqlen.q0, *(0 for _ in one.shape[1:])), one)

    def of_tile(self, tile, seqlen) -> "TileRows":
        return TileRows(self, tile, seqlen, self.rows(seqlen.rows))

    def sink_registers(self, mSinks: cute.Tensor | None, rows: int) -> cute.Tensor | None:
        """Registers (rows,) for the sinks of a thread's rows, all the same register. None without sinks (H,)."""
        if mSinks is None:
            return None
        return cute.make_tensor(cute.make_rmem_tensor(1, Float32).iterator, cute.make_layout(rows, stride=0))

    @cute.jit
    def read_sinks(self, mSinks: cute.Tensor | None, tile, row: Int32, sinks: cute.Tensor | None):
        """Fill the registers of sink_registers, unless there are none; sinks are multiplied by log2(e)."""
        if const_expr(mSinks is not None):
            sinks[0] = mSinks[tile.h].to(Float32) * LOG2E

    @cute.jit
    def store_lse(self, lse: cute.Tensor, mLSE: cute.Tensor, rows: "TileRows", row: Int32, lane, owner):
        """Store the LSE of a thread's rows `row`, `row` + 8, .. to (B, H, Sq).

        The first lane of each quad stores it if `owner` is True: warps that split the head dimension have the same LSE.
        """
        if lane % 4 == 0 and owner:
            for r in range_constexpr(cute.size(lse)):
                if row + 8 * r < rows.end:
                    mLSE[rows.seqlen.b, rows.tile.h, rows.seqlen.q0 + row + 8 * r] = lse[r]


@dataclass(frozen=True)
class GqaPacking(OneHead):
    """The rows of a tile belong to the query heads of KV head tile.h_kv; the heads of a query are adjacent rows."""

    qhead_per_kvhead: Int32

    def rows(self, queries):
        return queries * self.qhead_per_kvhead

    def query(self, row):
        return row // self.qhead_per_kvhead

    def place(self, tile, row) -> tuple:
        return tile.h_kv * self.qhead_per_kvhead + row % self.qhead_per_kvhead, row // self.qhead_per_kvhead

    def queries(self, m, tile_m, queries) -> tuple:
        first = m * tile_m
        after = cutlass.min((first + tile_m - 1) // self.qhead_per_kvhead + 1, queries)
        return first // self.qhead_per_kvhead, after

    def view(self, tensor: cute.Tensor, tile, seqlen) -> cute.Tensor:
        """Rows of a tile's heads: ((g, Sq), ..) of (B, H, Sq, ..)."""
        one = tensor[(seqlen.b, *(None for _ in tensor.shape[1:]))]
        (_, queries, *shape), (head, query, *stride) = one.shape, one.stride
        layout = cute.make_layout(((self.qhead_per_kvhead, queries), *shape), stride=((head, query), *stride))
        packed = cute.make_tensor(one.iterator + Int64(tile.h_kv * self.qhead_per_kvhead) * head, layout)
        return cute.domain_offset(((0, seqlen.q0), *(0 for _ in shape)), packed)

    def sink_registers(self, mSinks: cute.Tensor | None, rows: int) -> cute.Tensor | None:
        return None if mSinks is None else cute.make_rmem_tensor(rows, Float32)

    @cute.jit
    def read_sinks(self, mSinks: cute.Tensor | None, tile, row: Int32, sinks: cute.Tensor | None):
        """Fill the registers of sink_registers with the sinks of a thread's rows `row`, `row` + 8, .."""
        if const_expr(mSinks is not None):
            for r in range_constexpr(cute.size(sinks)):
                head, _ = self.place(tile, row + 8 * r)
                sinks[r] = mSinks[head].to(Float32) * LOG2E

    @cute.jit
    def store_lse(self, lse: cute.Tensor, mLSE: cute.Tensor, rows: "TileRows", row: Int32, lane, owner):
        gLSE = rows.view(mLSE)
        if lane % 4 == 0 and owner:
            for r in range_constexpr(cute.size(lse)):
                if row + 8 * r < rows.end:
                    gLSE[row + 8 * r] = lse[r]


@dataclass(frozen=True)
class TileRows:
    """Rows of a query tile's heads in one sequence."""

    heads: OneHead
    tile: Any  # scheduler.QueryTile or problem.DecodeTile
    seqlen: Any  # seqlen.SeqlenInfo
    end: Int32  # number of rows of the heads: a tile's rows from here on do not exist

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """(rows, columns) of (B, H, Sq, columns)."""
        return self.heads.view(tensor, self.tile, self.seqlen)
