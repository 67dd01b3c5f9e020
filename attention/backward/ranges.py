"""Ranges of query rows: the lists of a KV block in parts, one for each range, and a work item for each part.

A block that nearly all tokens select, as the first one often is, has more query tiles than a CTA processes in the time
of the whole pass; as items it is shared by many CTAs. Items of one range follow each other, so that Q, dO and dq_accum
of its rows stay in L2. dK and dV of an item are added to FP32 accumulators.
"""

import torch
from torch import Tensor

from .config import BackwardFacts
from .sizes import bytes_of_a_row

# Of masks of selected blocks, whose lists are as short or as long as it happens
SELECTED_BYTES = 2**23  # of Q, dO and dq_accum of a range
SHARE = 64  # of all query tiles of a mask, those of the longest item are one in so many
FEWEST = 16  # rows of blocks of a range
# Of masks with equally many blocks a row, which have ranges for the sake of L2 alone: measured on an H100, whose L2 has
# 50 MB. On an H200 (60 MB, and faster memory) they cost 20 %.
MOST_BYTES = 2**25
MOST_L2 = 55 * 2**20
ENTRIES = 12  # fewest rows of blocks of an item, on average
LAST = 2**31 - 1


def rows_of_a_range(facts: BackwardFacts, rows: int, width: int, heads: int, heads_kv: int) -> int:
    """Rows of blocks of a range, of a mask with `rows` rows of blocks in each of `heads` heads (of all batches); all of
    them if ranges do not pay.

    width: mean length of the lists of KV blocks. It does not matter for masks of selected blocks.
    """
    kind = facts.blocks
    assert kind is not None
    bytes_of_a_block = bytes_of_a_row(facts) * kind.block_q * (heads // heads_kv)
    if facts.members is not None:
        return max(min(SELECTED_BYTES // bytes_of_a_block, rows * heads // SHARE), FEWEST)
    ranges = -(-rows * bytes_of_a_block // MOST_BYTES)
    return rows if ranges <= 2 or width < ENTRIES * ranges else -(-rows // ranges)


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
    keys = (section - lengths).masked_fill_(lengths == 0, LAST).flatten()
    listed = (keys != LAST).sum(dtype=torch.int32).view(1)
    return keys.sort().indices.to(torch.int32), listed
