"""The order of query tiles in forward, and of KV tiles in backward, of a block mask."""

import torch
from torch import Tensor

NEAR_BYTES = 2**23  # of what tiles read that are near each other: a quarter of what stays in L2


def order_of_tiles(
    lengths: Tensor, most: int, sms: int, group: int = 1, count: int = 1, sections: Tensor | None = None
) -> Tensor:
    """The order in which tiles begin, int64 (tiles of all heads,), for a GPU with `sms` multiprocessors.

    Groups of `group` heads follow each other, and in a group the sections, of which each has the longest tiles first.
    Tiles of a section begin near each other: those that run at the same time then read the same rows at the same time,
    also where each tile has rows of its own. But the last tiles, as many as the longest one takes on all
    multiprocessors, come by length alone, so that all multiprocessors end at the same time.

    lengths: (heads, tiles), numbers of blocks, up to `most`.
    sections: (heads, tiles), below `count`, from sections_of; None: one.
    """
    section = torch.arange(len(lengths), device=lengths.device)[:, None] // group * count
    section = section if sections is None else section + sections
    order = (section * (most + 1) - lengths).flatten().sort(stable=True).indices
    lengths = lengths.flatten()[order]
    begun_after = lengths.flip(0).cumsum(0).flip(0)  # blocks of a tile and of all that begin after it
    last = begun_after <= lengths.amax() * sms
    return order[torch.where(last, most + 1 - lengths, 0).sort(stable=True).indices]


def sections_of(lists: tuple, blocks: int, near: int) -> list[Tensor]:
    """The section, up to blocks // near, of each row of a BlockMask's lists, or each column of transposed ones: its
    first block, or `blocks` without any, // near. Empty if all are near each other.

    lists: counts (B, H, rows) and indices (B, H, rows, width) of partial blocks, and the same of full ones.
    """
    if blocks <= near:
        return []
    first = torch.full_like(lists[0], blocks)
    for counts, indices in (lists[:2], lists[2:]):
        if indices.shape[-1]:
            first = torch.where(counts > 0, torch.minimum(indices[..., 0], first), first)
    return [first.clamp_(min=0) // near]
