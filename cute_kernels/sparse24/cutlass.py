"""Metadata of torch's semi-structured tensors in the layout of its CUTLASS backend.

As torch.sparse._semi_structured_conversions has it: for M rows and K columns of 16-bit elements, meta is (M, K / 16)
int16, a word per row and four groups of 4, with two bits for the position of each stored element. Words are permuted.
For float32 a group is two elements and meta is (M, K / 8): the positions of the two halves of the stored element.
"""

import torch
from torch import Tensor


def order_of_cutlass(M: int, words: int, device) -> Tensor:
    """(M * words,) positions at which torch's CUTLASS tensors of 16-bit elements store the word of (row, 16 columns).

    Row 8 j + g of every 32 rows is stored as row 4 g + j. In every 2x2 words, the upper right and the lower left one
    are swapped. Words are stored two columns at a time, all rows of two columns before the next two.
    """
    row = torch.arange(M, device=device)[:, None]
    column = torch.arange(words, device=device)[None]
    to = row // 32 * 32 + row % 8 * 4 + row % 32 // 8
    down, right = to % 2, column % 2
    to, column = to - down + right, column - right + down
    return (column // 2 * (2 * M) + to * 2 + column % 2).flatten()


def places_of_cutlass(meta: Tensor) -> Tensor:
    """The places (M, 4 * words, 2) int64 from a torch CUTLASS tensor's meta (M, words) int16."""
    M, words = meta.shape
    found = meta.flatten()[order_of_cutlass(M, words, meta.device)].to(torch.int64).view(M, words, 1)
    bits = (found >> 4 * torch.arange(4, device=meta.device)).flatten(1)
    return torch.stack((bits & 3, bits >> 2 & 3), -1)


def meta_of_cutlass(places: Tensor) -> Tensor:
    """meta (M, K / 16) int16 of a torch CUTLASS tensor, from the places (M, K / 4, 2)."""
    M, groups, _ = places.shape
    bits = (places[..., 0] | places[..., 1] << 2).view(M, groups // 4, 4)
    words = (bits << 4 * torch.arange(4, device=places.device)).sum(-1)
    words = (words - ((words >> 15) << 16)).to(torch.int16)
    meta = torch.empty_like(words).view(-1)
    meta[order_of_cutlass(M, groups // 4, places.device)] = words.flatten()
    return meta.view_as(words)
