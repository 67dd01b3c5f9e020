"""The metadata of torch's semi-structured tensors, as its CUTLASS backend stores them.

torch.sparse._semi_structured_conversions says so: of M rows and K columns of 16 bits meta is (M, K / 16) int16, a
word for each row and four groups of 4, two bits for the place of each stored element. Words are stored in another
order. Of float32 a group is two elements, and meta (M, K / 8): the places of the halves of the one that is stored.
"""

import torch
from torch import Tensor


def order_of_cutlass(M: int, words: int, device) -> Tensor:
    """(M * words,) where torch's CUTLASS tensors of 16 bits store the word of (row, 16 columns), row by row.

    Each word is that of four groups. Of 32 rows, row 8 j + g is stored as row 4 g + j; of every two rows and two words
    the upper right and the lower left one change places; and words are stored two columns at a time, all rows of those
    before the next two.
    """
    row = torch.arange(M, device=device)[:, None]
    column = torch.arange(words, device=device)[None]
    to = row // 32 * 32 + row % 8 * 4 + row % 32 // 8
    down, right = to % 2, column % 2
    to, column = to - down + right, column - right + down
    return (column // 2 * (2 * M) + to * 2 + column % 2).flatten()


def places_of_cutlass(meta: Tensor) -> Tensor:
    """The places (M, 4 * words, 2) int64 of a torch CUTLASS tensor's meta (M, words) int16."""
    M, words = meta.shape
    found = meta.flatten()[order_of_cutlass(M, words, meta.device)].to(torch.int64).view(M, words, 1)
    bits = (found >> 4 * torch.arange(4, device=meta.device)).flatten(1)
    return torch.stack((bits & 3, bits >> 2 & 3), -1)


def meta_of_cutlass(places: Tensor) -> Tensor:
    """(M, K / 16) int16, as torch's CUTLASS tensors have it, of the places (M, K / 4, 2)."""
    M, groups, _ = places.shape
    bits = (places[..., 0] | places[..., 1] << 2).view(M, groups // 4, 4)
    words = (bits << 4 * torch.arange(4, device=places.device)).sum(-1)
    words = (words - ((words >> 15) << 16)).to(torch.int16)
    meta = torch.empty_like(words).view(-1)
    meta[order_of_cutlass(M, groups // 4, places.device)] = words.flatten()
    return meta.view_as(words)
