"""What the sweep kernel (sweep_sm90.py) must know of a pattern: which chunks of K a group of rows needs, and in which
order it meets their blocks. Made once per pattern, on its device, without waiting for it; plain torch.

    segment   the rows of one consumer warpgroup: 64 rows of W, 64 / bm block rows
    group     the segments of one cluster: 3 for each CTA
    chunk     64 columns of W: several block columns, or a part of one

For bm = bk = 16 a word holds 4 rows of 4 bits:   bit r * steps + s = block row r of the segment, K-step s of the chunk.
"""

from typing import NamedTuple

import torch

from cute_kernels.sweep_tile import CHUNK, CONSUMERS, MOST_TABLE_BYTES, ROWS, Geometry, sweep_table_bytes

BATCH = 32  # entries that a warp fetches at once, one a lane


class SweepPlan(NamedTuple):
    """The pattern as the kernel reads it; all int32, on the pattern's device.

    counts (groups,): how many chunks a group needs.
    entries (groups, chunks, 4 or 8): their numbers in ascending order, each followed by a word for every segment.
    order (max(nnz, 1),): the stored blocks segment by segment; in it, chunk by chunk in the order of a word's bits.
    """

    counts: torch.Tensor
    entries: torch.Tensor
    order: torch.Tensor


def table_shape(shape: tuple[int, int], cluster: int) -> tuple[int, int, int]:
    """(groups, chunks, fields) of a plan's entries for W of this shape, for clusters of so many CTAs.

    Raises ValueError for a table above MOST_TABLE_BYTES.
    """
    groups, chunks = -(-shape[0] // (ROWS * CONSUMERS * cluster)), -(-shape[1] // CHUNK)
    fields = 4 if cluster == 1 else 8
    if (size := sweep_table_bytes(*shape, cluster)) > MOST_TABLE_BYTES:
        raise ValueError(
            f"a sweep over {shape[0]}x{shape[1]} needs a table of {size} bytes, more than {MOST_TABLE_BYTES}"
        )
    return groups, chunks, fields


def sweep_plan(
    crow: torch.Tensor, col: torch.Tensor, shape: tuple[int, int], block: tuple[int, int], cluster: int
) -> SweepPlan:
    """The plan of a checked pattern: crow (M / bm + 1,), col (nnz,), W of `shape` (M, K) in blocks (bm, bk).

    `cluster`: CTAs of a cluster, 1 or 2. Raises ValueError for blocks that Geometry refuses, and for tables above
    MOST_TABLE_BYTES.
    """
    g, segments = Geometry.of_block(*block), CONSUMERS * cluster
    groups, chunks, fields = table_shape(shape, cluster)
    nnz, device = col.numel(), col.device
    entries = torch.zeros(groups, chunks + 1, fields, dtype=torch.int32, device=device)
    if nnz == 0:
        order = torch.zeros(1, dtype=torch.int32, device=device)
        return SweepPlan(torch.zeros(groups, dtype=torch.int32, device=device), entries, order)
    numbers = torch.arange(nnz, dtype=crow.dtype, device=device)
    row = torch.searchsorted(crow, numbers, right=True) - 1
    segment = row // g.rows
    chunk = col.long() * g.parts // g.steps
    bit = row % g.rows * g.steps + col % g.steps
    words = torch.zeros(groups, chunks, fields, dtype=torch.int32, device=device)
    place = ((segment // segments * chunks + chunk) * fields) + 1 + segment % segments
    one = torch.ones_like(bit, dtype=torch.int32) << bit.int()
    for part in range(g.parts):
        words.view(-1).index_add_(0, place + part * fields, one)  # every bit is set once
    needed = (words != 0).any(2)
    words[..., 0] = torch.arange(chunks, dtype=torch.int32, device=device)
    ranks = needed.cumsum(1)
    to = torch.where(needed, ranks - 1, chunks)[..., None].expand(-1, -1, fields)
    entries.scatter_(1, to, words)  # what is not needed goes to the last place, which nobody reads
    order = torch.argsort((segment * chunks + chunk) * ROWS + bit)
    return SweepPlan(ranks[:, -1].int(), entries, order.int())
