"""What the sweep kernel (sweep_sm90.py) must know of a pattern: which chunks of K a group of rows needs, and in which
order it meets their blocks. Made once per pattern, on its device, without waiting for it; plain torch.

    segment   the rows of one consumer warpgroup: 64 rows of W, 64 / bm block rows
    group     the segments of one cluster: 3 for each CTA
    chunk     64 columns of W: several block columns, or a part of one

For bm = bk = 16 a word holds 4 rows of 4 bits:   bit r * steps + s = block row r of the segment, K-step s of the chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

CHUNK = 64  # K elements the kernel works on at a time
ROWS = 64  # rows of W that a consumer owns
CONSUMERS = 3
BATCH = 32  # entries that a warp fetches at once, one a lane
MOST_BYTES = 256 << 20  # of a plan's table: groups x chunks


@dataclass(frozen=True)
class Geometry:
    """How blocks of one shape lie in segments and chunks.

    `rows` block rows a segment; `steps` block columns a chunk, each `width` wide; or, where blocks are wider than a
    chunk, `parts` chunks a block.
    """

    rows: int
    steps: int
    width: int
    parts: int

    @staticmethod
    def refuse(bm: int, bk: int) -> str:
        """Why blocks of this shape cannot be swept; "" if they can."""
        if bm not in (16, 32, 64):
            return f"blocks {bm} high: a sweep takes heights of 16, 32 and 64"
        if bk not in (16, 32) and bk % CHUNK:
            return f"blocks {bk} wide: a sweep takes widths of 16, 32 and multiples of {CHUNK}"
        return ""

    @staticmethod
    def of_block(bm: int, bk: int) -> "Geometry":
        if reason := Geometry.refuse(bm, bk):
            raise ValueError(reason)
        width = min(bk, CHUNK)
        return Geometry(ROWS // bm, CHUNK // width, width, bk // width)

    @staticmethod
    def of(facts) -> "Geometry":
        return Geometry.of_block(facts.block.bm, facts.block.bk)


class SweepPlan(NamedTuple):
    """The pattern as the kernel reads it; all int32, on the pattern's device.

    counts (groups,): how many chunks a group needs.
    entries (groups, chunks, 4 or 8): their numbers in ascending order, each followed by a word for every segment.
    order (max(nnz, 1),): the stored blocks segment by segment; in it, chunk by chunk in the order of a word's bits.
    """

    counts: torch.Tensor
    entries: torch.Tensor
    order: torch.Tensor


def table_bytes(shape: tuple[int, int], cluster: int) -> int:
    """Size of a plan's entries for W of this shape, for clusters of so many CTAs."""
    groups = -(-shape[0] // (ROWS * CONSUMERS * cluster))
    return groups * -(-shape[1] // CHUNK) * (4 if cluster == 1 else 8) * 4


def sweep_plan(
    crow: torch.Tensor, col: torch.Tensor, shape: tuple[int, int], block: tuple[int, int], cluster: int
) -> SweepPlan:
    """The plan of a checked pattern: crow (M / bm + 1,), col (nnz,), W of `shape` (M, K) in blocks (bm, bk).

    `cluster`: CTAs of a cluster, 1 or 2. Raises ValueError for blocks that Geometry refuses, and for tables above
    MOST_BYTES.
    """
    g = Geometry.of_block(*block)
    if (size := table_bytes(shape, cluster)) > MOST_BYTES:
        raise ValueError(f"a sweep over {shape[0]}x{shape[1]} needs a table of {size} bytes, more than {MOST_BYTES}")
    nnz, device = col.numel(), col.device
    segments, fields = CONSUMERS * cluster, 4 if cluster == 1 else 8
    groups, chunks = -(-shape[0] // (ROWS * segments)), -(-shape[1] // CHUNK)
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
