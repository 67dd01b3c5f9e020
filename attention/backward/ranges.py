"""Ranges of query rows, for masks of selected blocks: a work item is a KV tile and a range.

A KV block that nearly all tokens select, as the first one often is, has more query tiles than a CTA processes in the
time of the whole pass. As items it is shared by many CTAs. Items of one range follow each other, so that Q, dO and
dq_accum of its rows stay in L2. dK and dV of an item are added to FP32 accumulators (sums.py).
"""

import torch
from torch import Tensor

from .config import BackwardFacts
from .sizes import bytes_of_a_row

BYTES = 2**23  # of Q, dO and dq_accum of a range
SHARE = 64  # an item has at most one in so many of all query tiles
FEWEST = 16  # rows of blocks of a range
NO_ITEM = 2**31 - 1  # the sort key of a KV block that no row of a range lists


def rows_of_a_range(facts: BackwardFacts, block_q: int, rows: int, heads: int, heads_kv: int) -> int:
    """Rows of blocks of a range, of a mask with `rows` rows of blocks in each of `heads` heads (of all batches)."""
    per_head = heads // heads_kv
    in_l2 = BYTES // (bytes_of_a_row(facts) * block_q * per_head)
    return max(min(in_l2, rows * heads_kv // SHARE), FEWEST)


def items_of(counts: Tensor, length: int, batch: int, heads: int, heads_kv: int) -> tuple[Tensor, Tensor]:
    """The order of work items as problem.RangedKvScheduler reads it, and their number, both int32.

    Items of one range and KV head follow each other, the longest first.

    counts: (B, H, R, Mk) int32, lengths of lists, at most `length`. A batch or head extent of 1 is broadcast.
    """
    _, _, ranges, blocks = counts.shape
    per_head = heads // heads_kv
    lengths = counts.expand(batch, heads, ranges, blocks)
    if per_head > 1:
        lengths = lengths.unflatten(1, (heads_kv, per_head)).sum(2, dtype=torch.int32)
    lengths = lengths.permute(2, 0, 1, 3).reshape(-1, blocks)  # (R * B * Hkv, Mk)
    span = length * per_head + 1
    section = torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=counts.device)[:, None] * span
    keys = (section - lengths).masked_fill_(lengths == 0, NO_ITEM).flatten()
    listed = (keys != NO_ITEM).sum(dtype=torch.int32).view(1)
    return keys.sort().indices.to(torch.int32), listed
