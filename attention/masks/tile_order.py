"""The order of query tiles in forward, and of KV tiles in backward, of a block mask."""

import torch
from torch import Tensor

NEAR_BYTES = 2**23  # of what tiles read that are near each other: a quarter of what stays in L2


def order_of_tiles(lengths: Tensor, begins: Tensor, near: int, sms: int, group: int = 1) -> Tensor:
    """The order in which tiles begin, int64 (tiles of all heads,), for a GPU with `sms` multiprocessors.

    Groups of `group` heads follow each other, and in a group tiles that begin within `near` blocks, the longest first:
    tiles that run at the same time then read the same rows at the same time, also where each has rows of its own. But
    the last tiles, as many as the longest tile takes on all multiprocessors, come longest first, so that all
    multiprocessors end at the same time.

    lengths, begins: (heads, tiles), numbers of blocks of each tile and the first of them.
    """
    lengths, section = lengths.long(), begins.long().clamp(min=0) // near
    heads = torch.arange(len(lengths), device=lengths.device)[:, None]
    section += heads // group * (section.amax() + 1)
    longest = lengths.amax()
    order = (section * (longest + 1) + longest - lengths).flatten().sort(stable=True).indices
    lengths = lengths.flatten()[order]
    begun_after = lengths.flip(0).cumsum(0).flip(0)  # blocks of a tile and of all that begin after it
    last = begun_after <= longest * sms
    return order[torch.where(last, longest + 1 - lengths, 0).sort(stable=True).indices]


def first_blocks(lists: tuple, none: int) -> Tensor:
    """The first block that each row of a BlockMask's lists has, or each column of transposed ones; `none` without any.

    lists: counts (B, H, rows) and indices (B, H, rows, width) of partial blocks, and the same of full ones.
    """
    first = torch.full_like(lists[0], none)
    for counts, indices in (lists[:2], lists[2:]):
        if indices.shape[-1]:
            first = torch.where(counts > 0, torch.minimum(indices[..., 0], first), first)
    return first
