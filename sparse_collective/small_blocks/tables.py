"""The tables of the kernel for small blocks: the columns of W that a group of rows needs, and the order in which it
loads their blocks. Made once per pattern, on its device, without synchronizing.

    segment   the rows of one consumer warpgroup: 64 rows of W, 64 / bm block rows
    group     the segments of one cluster: 3 for each CTA
    slice     a block column, or 64 columns of a wider one, or two neighboring ones: the unit in which B is loaded
    chunk     as many of the needed slices as make 64 columns, neighboring or not

For bm = bk = 16 a word holds 4 rows of 4 bits:   bit r * steps + s = block row r of the segment, column s of the chunk.
"""

from typing import NamedTuple

import torch

from ..pattern import Pattern
from .tile import CONSUMERS, MOST_TABLE_BYTES, ROWS, Geometry, table_bytes

BATCH = 32  # entries that a warp fetches at once, one a lane


class BlockTables(NamedTuple):
    """The pattern as the kernel reads it; all int32, on the pattern's device.

    counts (groups,): number of slices that a group needs.
    slices (groups, slices of a row): their indices in ascending order; past the count, anything.
    words (groups, chunks, 4 or 8): of each chunk of those, a word for every segment.
    order (max(nnz, 1),): the stored blocks segment by segment; in it, chunk by chunk in the order of a word's bits.
    """

    counts: torch.Tensor
    slices: torch.Tensor
    words: torch.Tensor
    order: torch.Tensor


def table_shapes(shape: tuple[int, int], g: Geometry, cluster: int) -> tuple[tuple, tuple]:
    """Shapes of a plan's slices and words, for W of this shape and clusters of so many CTAs.

    Raises ValueError for words above MOST_TABLE_BYTES.
    """
    groups, slices = -(-shape[0] // (ROWS * CONSUMERS * cluster)), -(-shape[1] // (g.width * g.gather))
    if (size := table_bytes(*shape, cluster)) > MOST_TABLE_BYTES:
        raise ValueError(
            f"small blocks of {shape[0]}x{shape[1]} need a table of {size} bytes, more than {MOST_TABLE_BYTES}"
        )
    return (groups, slices), (groups, -(-slices // g.slices), 4 if cluster == 1 else 8)


def block_tables(
    crow: torch.Tensor, col: torch.Tensor, shape: tuple[int, int], block: tuple[int, int], cluster: int, b_k_major: bool
) -> BlockTables:
    """The plan of a checked pattern: crow (M / bm + 1,), col (nnz,), W of `shape` (M, K) in blocks (bm, bk).

    `cluster`: CTAs of a cluster, 1 or 2; `b_k_major`: whether the dense operand is contiguous along K. Raises as
    Geometry.of_block and `table_shapes` do.
    """
    g, segments = Geometry.of_block(*block, b_k_major), CONSUMERS * cluster
    (groups, slices), words_shape = table_shapes(shape, g, cluster)
    nnz, device = col.numel(), col.device
    words = torch.zeros(words_shape, dtype=torch.int32, device=device)
    if nnz == 0:
        counts, order = (torch.zeros(n, dtype=torch.int32, device=device) for n in (groups, 1))
        return BlockTables(counts, torch.zeros(groups, slices, dtype=torch.int32, device=device), words, order)
    numbers = torch.arange(nnz, dtype=crow.dtype, device=device)
    row = torch.searchsorted(crow, numbers, right=True) - 1
    segment, first = row // g.rows, col.long() * g.parts // g.gather
    group = segment // segments
    needed = torch.zeros(groups, slices, dtype=torch.bool, device=device)
    for part in range(g.parts):
        needed.view(-1).index_fill_(0, group * slices + first + part, True)
    ranks = needed.cumsum(1)
    rank = ranks.view(-1)[group * slices + first] - 1
    chunk = rank // g.slices
    bit = row % g.rows * g.steps + rank % g.slices * g.gather + col % g.gather
    place = (group * words.shape[1] + chunk) * words.shape[2] + segment % segments
    one = torch.ones_like(bit, dtype=torch.int32) << bit.int()
    for part in range(g.parts):
        words.view(-1).index_add_(0, place + part * words.shape[2], one)  # every bit is set once
    everything = torch.arange(slices, device=device).expand(groups, -1)
    to = torch.where(needed, ranks - 1, slices)
    table = torch.zeros(groups, slices + 1, dtype=torch.int32, device=device)
    table.scatter_(1, to, everything.int())  # other slices go to the last place, which is not read
    order = torch.argsort((segment * words.shape[1] + chunk) * ROWS + bit)
    return BlockTables(ranks[:, -1].int(), table[:, :-1].contiguous(), words, order.int())


def tables_of(pattern: Pattern, cluster: int, b_k_major: bool) -> BlockTables:
    """block_tables of a pattern, cached with it.

    In the tables of a transposed pattern, `order` holds positions among the stored blocks.
    """

    def make() -> BlockTables:
        crow, col, (M, K) = pattern.crow_indices, pattern.col_indices, pattern.shape[-2:]
        tables = block_tables(crow, col, (M, K), pattern.blocksize, cluster, b_k_major)
        if pattern.numbers is None or pattern.nnz == 0:
            return tables
        return tables._replace(order=pattern.numbers.index_select(0, tables.order))

    return pattern.derived(("small blocks", cluster, b_k_major), make)
