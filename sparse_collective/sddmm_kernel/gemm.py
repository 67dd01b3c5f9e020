"""SDDMM kernels of both paths: a source of K-tiles for the GEMM kernels.

    values[p] = A[rows of block p] B[columns of block p]        for every stored block p of a pattern

In a batch of patterns, each matrix sums over its groups of K (`runs`), an expert's tokens.

A stored block is an output tile, and K-tiles are those of the dense operands: the pattern determines a tile's rows and
columns, and where it is stored. On sm_90 a tile is several stored blocks of one block row, side by side: they share
A's rows, and each has a *box* of B's columns. Absent boxes are placed past the last block column of B and past the last
block of D, where TMA reads zeros and writes nothing.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.k_tiles import KTile
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.contexts import Load
from cute_kernels.matmul.dense import view
from cute_kernels.matmul.epilogue.formula import EpilogueArgs
from cute_kernels.matmul.kernel_sm80 import GemmSm80
from cute_kernels.matmul.kernels import kernel_sm90
from cute_kernels.matmul.mainloops.issue_sm90 import IssueSS

from .config import parts_of


@dataclass(frozen=True)
class SampledKTiles:
    """All K-tiles of the dense operands, for the boxes of one group."""

    count: Int32  # 0 for a group without boxes
    row: Int32  # block row
    rest_m: Int32  # row tile inside the block
    first: Int32  # index of the first box
    present: Int32  # number of boxes
    columns: tuple  # block column of each box; past the last one for an absent box
    blocks: Int32  # nnz
    parts: cutlass.Constexpr[int]  # boxes per block
    l: Int32
    runs: cute.Tensor | None = None  # (runs of K,) in the order of their items
    start: Int32 | None = None  # of this item's
    past: Int32 | None = None  # of an item that has none, so many K-tiles that its only one lies past K: zeros
    tiles_run: cutlass.Constexpr[int] = 1  # K-tiles in a run

    def out(self, n) -> tuple:
        """Output tile of the n-th box; past the last block for an absent one."""
        number = self.first + n
        absent = Int32(n >= self.present)
        return self.rest_m, number % self.parts, number // self.parts * (1 - absent) + self.blocks * absent

    def at(self, i) -> KTile:
        if self.runs is not None:
            run = Int32(self.runs[cutlass.min(self.start + i // self.tiles_run, self.runs.shape[0] - 1)])
            i = run * self.tiles_run + i % self.tiles_run + self.past
        a = (self.rest_m, i, self.row)
        if len(self.columns) == 1:
            return KTile(a=a, b=(i, self.columns[0]))
        return KTile(a=a, b=tuple((self.out(box)[1], i, column) for box, column in enumerate(self.columns)))


@dataclass(frozen=True)
class SampledSource:
    """The source of SDDMM: work tile m is row tile m % tiles_m of group m // tiles_m."""

    groups: cute.Tensor  # (groups, 3): block row, first box, boxes; see tables.box_groups
    col_indices: cute.Tensor  # (nnz,)
    count: Int32  # K-tiles along K
    tiles_m: cutlass.Constexpr[int]  # row tiles per block
    parts: cutlass.Constexpr[int]  # boxes per block
    boxes: cutlass.Constexpr[int]  # per tile
    block_columns: Int32
    runs: cute.Tensor | None = None  # (runs of K,) int32, in the order of their items
    starts: cute.Tensor | None = None  # (items + 1,) int32: where each item's begin
    tiles_run: cutlass.Constexpr[int] = 1  # K-tiles in a run
    rows: Int32 | None = None  # block rows of an item, where each has a pattern of its own
    columns: cutlass.Constexpr[int] = 1  # a work tile has all columns that its group has
    order = None

    @property
    def shared_rows(self) -> int:
        """1: groups have different columns."""
        return 1

    @property
    def shared_columns(self) -> int:
        return 1

    def bounds(self, m, n, l) -> tuple:
        """(block row, first box, boxes) of the group; in a batch also the range of the matrix's runs."""
        group = m // self.tiles_m
        row, first, present = (Int32(self.groups[group, i]) for i in range(3))
        if self.runs is None:
            return row, first, present
        item = l
        if self.rows is not None:
            item, row = row // self.rows, row % self.rows
        return row, first, present, Int32(self.starts[item]), Int32(self.starts[item + 1])

    def for_tile(self, m, l, bounds) -> SampledKTiles:
        row, first, present, *runs = bounds
        last = cutlass.max(present - 1, 0)
        columns = []
        for box in range(self.boxes):
            column = Int32(self.col_indices[(first + cutlass.min(Int32(box), last)) // self.parts])
            columns.append(
                column if self.boxes == 1 else cutlass.max(column, Int32(box >= present) * self.block_columns)
            )
        there, blocks = cutlass.min(present, 1), self.col_indices.shape[0]
        place = row, m % self.tiles_m, first, present, tuple(columns), blocks, self.parts, l
        if self.runs is None:
            return SampledKTiles(self.count * there, *place)
        start, end = runs
        count, past = cutlass.max((end - start) * self.tiles_run, 1) * there, self.count * Int32(start == end)
        return SampledKTiles(count, *place, self.runs, start, past, self.tiles_run)


class IssueBoxes(IssueSS):
    """Operands of K-tiles whose `b` has the coordinates of each box. Absent boxes are multiplied too, as zeros."""

    def __init__(self, facts: GemmFacts):
        super().__init__(facts)
        if facts.config.boxes > 4:  # the producer holds their coordinates
            self.registers = (40, 232)

    def load_b(self, tile, b: Load, barrier: cute.Pointer, stage: Int32) -> None:
        boxes = len(tile.b)
        for box in range(boxes):
            cute.copy(b.atom, b.gX[(None, *tile.b[box])], b.sX[None, stage * boxes + box], tma_bar_ptr=barrier)


class SampledGemm:
    """The blocks of a pattern of a (M, K) @ b (K, N), stored to d (nnz, bm, bk)."""

    def __init__(self, facts: GemmFacts):
        self.facts = facts
        issue = IssueBoxes if facts.config.boxes > 1 else IssueSS
        self.kernel = kernel_sm90(facts, issue(facts)) if facts.path == "sm_90" else GemmSm80(facts)

    @cute.jit
    def __call__(
        self,
        groups: cute.Tensor,  # (groups, 3)
        col_indices: cute.Tensor,  # (nnz,)
        runs: cute.Tensor | None,  # (runs of K,) int32, of a batch
        starts: cute.Tensor | None,  # (items + 1,) int32
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        *terms,  # see EpilogueArgs.of
    ):
        cfg, block = self.facts.config, self.facts.block
        bm, bk = block.bm, block.bk
        (M, K), (sM, sK) = a.shape, a.stride
        mA = view(a, (bm, K, M // bm), (sM, sK, sM * bm))
        (K, N), (sK, sN) = b.shape, b.stride
        mD = self.blocks(d)
        items = 1 if self.facts.path == "sm_90" else mD.shape[3]  # all have the same B
        mB = view(b, (bk, K, N // bk, items), (sN, sK, sN * bk, 0))
        tiles_m = parts_of(bm, cfg.tile_m)
        parts = parts_of(bk, cfg.box_n)
        rows = M // bm if const_expr(block.batch == "patterns") else None
        source = SampledSource(
            groups, col_indices, cute.ceil_div(K, cfg.tile_k), tiles_m, parts, cfg.boxes, N // bk,
            runs, starts, block.run // cfg.tile_k, rows,
        )  # fmt: skip
        args, launch = EpilogueArgs.of(self.facts, terms)
        args = args.viewed(residual=lambda t: self.blocks(t, Int64(bm * bk)))
        self.kernel(mA, mB, mD, source, args, groups.shape[0] * tiles_m, *launch)

    def blocks(self, d: cute.Tensor, stride: int | Int64 | None = None) -> cute.Tensor:
        """(bm, bk, nnz, L)

        stride: of nnz. An Int64 for a tensor that is indexed by element: a constant times a block's number would be
        computed in 32 bits, which 2^31 stored elements overflow. Other accesses compute their addresses themselves.
        """
        bm, bk = self.facts.block.bm, self.facts.block.bk
        stride = bm * bk if stride is None else stride
        if const_expr(self.facts.block.batch == "values"):
            return view(d, (bm, bk, d.shape[1], d.shape[0]), (bk, 1, stride, d.stride[0]))
        return view(d, (bm, bk, d.shape[0], 1), (bk, 1, stride, 0))
