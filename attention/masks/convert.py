"""Conversions of other formats to BlockMask, and back. No function synchronizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import noop_mask

from sparse_collective.bsr import BsrMatrix
from sparse_collective.checks import describe

from .block_lists import grid, lists_of, table_of
from .mask_mods import Elements


def blocks_of_bsr(pattern: BsrMatrix | Tensor, heads: int | None) -> tuple[Tensor, tuple[int, int]]:
    """Table of the stored blocks, bool (B, heads, Mq, Mk), and their blocksize; see BlockMask.from_bsr."""
    if isinstance(pattern, BsrMatrix):
        crow, col, blocksize = pattern.crow_indices, pattern.col_indices, pattern.blocksize
    elif isinstance(pattern, Tensor) and pattern.layout is torch.sparse_bsr:
        crow, col = pattern.crow_indices(), pattern.col_indices()  # (rows + 1,), (nnz,); in a batch (L, ...)
        if crow.dim() > 2:
            raise ValueError(f"pattern must have at most one batch dimension, got shape {tuple(pattern.shape)}")
        bm, bk = pattern.values().shape[crow.dim() : crow.dim() + 2]
        blocksize = bm, bk
    else:
        raise TypeError(f"pattern must be a BsrMatrix or a torch.sparse_bsr tensor, got {describe(pattern)}")
    return blocks_of_indices(crow, col, pattern.shape[-2:], blocksize, heads)


def blocks_of_indices(crow: Tensor, col: Tensor, shape, blocksize, heads: int | None) -> tuple:
    """The same from (rows + 1,) crow_indices and (nnz,) col_indices of matrices of (Sq, Sk) = shape.

    With a batch of patterns: (L, rows + 1) crow_indices, which may restart at 0 in each pattern or continue, and the
    columns of all patterns.
    """
    items = crow.shape[0] if crow.dim() == 2 else 1
    col = col.flatten()
    in_row = crow.diff().flatten()
    row = torch.arange(len(in_row), dtype=crow.dtype, device=crow.device)
    row = torch.repeat_interleave(row, in_row, output_size=col.numel())  # (nnz,)
    _, blocksize, rows, cols = grid(shape, blocksize)
    heads = items if heads is None else heads
    if heads < 1 or items % heads:
        raise ValueError(f"heads must divide the number of patterns, {items}, got {heads}")
    blocks = torch.zeros(items * rows * cols, dtype=torch.bool, device=col.device)
    blocks.index_fill_(0, row.long() * cols + col, True)
    return blocks.view(items // heads, heads, rows, cols), blocksize


def of_elements(seen: Tensor, lengths, blocksize) -> tuple[Tensor, Tensor, Elements | None]:
    """(partial, full), bool (B or 1, H or 1, Mq, Mk), and the mask_mod; see BlockMask.from_elements."""
    seen = seen[(None,) * (4 - seen.dim())]
    (sq, sk), (block_q, block_k) = lengths, blocksize
    if seen.numel() == 0 or sq == 0 or sk == 0:
        none = seen.new_zeros(1, 1, -(-sq // block_q), -(-sk // block_k))
        return none, none, None
    # Expanded dimensions (stride 0) are read once: one entry suffices.
    varies = tuple(n > 1 and stride != 0 for n, stride in zip(seen.shape, seen.stride(), strict=True))
    first = tuple(slice(None) if v else slice(0, 1) for v in varies)
    mask_mod = Elements(seen[tuple(slice(None) if v else 0 for v in varies)], *varies)
    small = seen[first]
    rows = small.shape[2] if varies[2] else 1
    small = small.expand(-1, -1, -1, sk)
    past_q, past_k = -rows % block_q if rows > 1 else 0, -sk % block_k
    small = torch.nn.functional.pad(small, (0, past_k, 0, past_q))  # columns past the last are masked
    high = block_q if rows > 1 else 1
    cut = small.unflatten(3, (-1, block_k))  # (B, H, rows, Mk, block_k)
    some = cut.any(-1).unflatten(2, (-1, high)).any(3)
    every = cut.all(-1)
    if past_q:
        every[:, :, rows:] = True  # rows past the last do not matter
    every = every.unflatten(2, (-1, high)).all(3)
    some, every = (t.expand(-1, -1, -(-sq // block_q), -1) for t in (some, every))
    return some & ~every, every, mask_mod


def lists_of_flex(mask) -> tuple[list, dict]:
    """The four tables of FlexAttention's mask, and lengths, blocksize and mask_mod; see BlockMask.from_flex."""
    if not isinstance(mask, FlexBlockMask):
        raise TypeError(f"mask must be FlexAttention's BlockMask, got {type(mask).__name__}")
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    mask_mod = None if mask.mask_mod is noop_mask else mask.mask_mod
    return tables_of_flex(*lists, lengths=mask.seq_lengths, blocksize=mask.BLOCK_SIZE, mask_mod=mask_mod)


def tables_of_flex(*given: Tensor | None, lengths, blocksize, mask_mod) -> tuple[list, dict]:
    """The same from its four lists, of which the last two may be None."""
    lists: list[Any] = []
    for tensor, dim in zip(given, (3, 4, 3, 4), strict=True):
        lists.append(None if tensor is None else tensor[(None,) * (dim - tensor.dim())].contiguous())
    lengths, blocksize, rows, cols = grid(lengths, blocksize)
    if lists[0].shape[2] != rows:
        raise ValueError(
            f"FlexAttention's mask must have {rows} rows of blocks of {blocksize[0]} for its seq_lengths, {lengths}, "
            f"got {lists[0].shape[2]}. A slice keeps the seq_lengths of the whole mask: set seq_lengths and mask_mod "
            "of the slice, or slice BlockMask.from_flex(whole), which sets both"
        )
    if lists[2] is not None and lengths[1] % blocksize[1]:
        partial, full = table_of(lists[0], lists[1], cols), table_of(lists[2], lists[3], cols)
        partial[..., -1] |= full[..., -1]
        full[..., -1] = False
        lists = [*lists_of(partial), *lists_of(full)]
    return lists, {"lengths": lengths, "blocksize": blocksize, "mask_mod": mask_mod}


def to_flex(mask) -> FlexBlockMask:
    """FlexAttention's mask of a BlockMask."""
    lists = list(mask.lists())
    for i in (0, 2):
        # FlexAttention uses the width as Mk when it transposes, and entries that are no column as columns
        if lists[i + 1].shape[-1] < mask.n_block_cols or mask.equal_rows:
            lists[i : i + 2] = lists_of(table_of(lists[i], lists[i + 1], mask.n_block_cols))
    facts = {"BLOCK_SIZE": mask.blocksize, "seq_lengths": mask.lengths, "mask_mod": mask.mask_mod}
    return FlexBlockMask.from_kv_blocks(*lists, **facts)
