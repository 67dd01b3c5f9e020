"""The work tiles of an SDDMM: the stored blocks that each computes. Made once per pattern, without synchronizing."""

import torch

from ..pattern import Pattern


def rows_of(pattern) -> torch.Tensor:
    """crow_indices (rows + 1,); for a batch with a pattern for each item, those of all items one after the other."""
    crow = pattern.crow_indices
    return crow if crow.dim() == 1 else torch.cat([crow[:, :-1].flatten(), crow[-1, -1:]])


def box_groups(crow: torch.Tensor, nnz: int, parts: int, boxes: int) -> torch.Tensor:
    """(groups, 3) int32: block row, index of the first box, and number of boxes of every work tile.

    A stored block is `parts` boxes side by side: box q is part q % parts of block q // parts. A group is up to `boxes`
    consecutive boxes of a block row. Full groups come first, then the remainder of each row, the largest first, so that
    workers finish together. Rows without a remainder, and unused places of full groups, have a group of no boxes.
    """
    rows = len(crow) - 1
    begins = crow.long() * parts
    first, counts = begins[:-1], begins.diff()
    full, left = counts // boxes, counts % boxes
    ends = full.cumsum(0)  # of the full groups of each row
    number = torch.arange(nnz * parts // boxes, device=crow.device)
    row = torch.searchsorted(ends, number, right=True).clamp_(max=max(rows - 1, 0))
    there = number < ends[-1:]
    box = first[row] + (number - ends[row] + full[row]) * boxes
    groups = [torch.stack([row, torch.where(there, box, 0), there * boxes], 1)]
    if boxes > 1:
        left, row = left.sort(descending=True, stable=True)
        box = first[row] + full[row] * boxes
        groups.append(torch.stack([row, torch.where(left > 0, box, 0), left], 1))
    return torch.cat(groups).int()


def groups_of(pattern: Pattern, parts: int, boxes: int) -> torch.Tensor:
    """box_groups of a pattern, cached with it."""

    def make() -> tuple[torch.Tensor]:
        return (box_groups(rows_of(pattern), pattern.nnz, parts, boxes),)

    return pattern.derived(("boxes", parts, boxes), make, rows_alone=True)[0]
