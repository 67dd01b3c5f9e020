"""Lists of blocks, (..., Mq) counts and (..., Mq, width) ascending columns, and the equivalent bool tables (..., Mq,
Mk).

Everything is computed on the tensors' device, and only `first_error` synchronizes. masked_fill replaces torch.where
with a number, which may copy that number from the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.runtime.derived import Derived
from sparse_collective.checks import pair

from .element_mask import call

BLOCKS = (64, 128)
MOST = 2**29  # rows or columns: positions, window bounds and their sums are int32
CHUNK = 2**25  # elements of the score matrix computed at once
CONSTANTS = Derived()  # of lists whose rows are equally long


def lists_of(table: Tensor) -> tuple[Tensor, Tensor]:
    """The counts (..., Mq) and columns (..., Mq, Mk), both int32, of a bool table; unlisted columns follow the listed
    ones."""
    cols = torch.arange(table.shape[-1], dtype=torch.int32, device=table.device)
    before = table.cumsum(-1, dtype=torch.int32)  # listed columns up to and including this one
    count = table.sum(-1, dtype=torch.int32)
    # Each column's place: a permutation, so that the result does not depend on the order of the writes.
    place = torch.where(table, before - 1, count[..., None] + cols - before)
    index = torch.empty(table.shape, dtype=torch.int32, device=table.device)
    return count, index.scatter_(-1, place.long(), cols.expand_as(index))


def equal_counts(index: Tensor) -> tuple[Tensor, Tensor]:
    """Counts (..., Mq) int32 of rows that list all of `index`, and of rows that list nothing; of each shape once."""
    *shape, width = index.shape

    def make() -> tuple[Tensor, Tensor]:
        kind: dict[str, Any] = {"dtype": torch.int32, "device": index.device}
        return torch.full(shape, width, **kind), torch.zeros(shape, **kind)

    return make() if is_compiling() else CONSTANTS.get((index.device, *index.shape), index, make, tuple)


def table_of(count: Tensor, index: Tensor, cols: int) -> Tensor:
    """The bool table (..., Mq, cols) of a list; numbers that are no column are ignored."""
    table = torch.zeros(*count.shape, cols + 1, dtype=torch.bool, device=index.device)
    mark(table, count, index, cols)
    return table[..., :cols]


def mark(table: Tensor, count: Tensor, index: Tensor, cols: int) -> None:
    """Set the listed ones of the first `cols` columns of a bool table (..., Mq, more than cols) to True, and perhaps
    the one after them, too: entries that are unlisted or no column set it."""
    unlisted = torch.arange(index.shape[-1], dtype=torch.int32, device=index.device) >= count[..., None]
    columns = (index.long() & 0xFFFFFFFF).clamp_(max=cols)  # so negative ones are large
    table.scatter_(-1, columns.masked_fill_(unlisted, cols), True)


def check_columns(index: Tensor, cols: int) -> None:
    """Check that all entries of (B, H, Mq, width) lists are columns, if that needs no synchronization.

    Raises:
        IndexError: one is not.
    """
    if index.device.type != "cpu" or type(index) is not Tensor or is_compiling():
        return
    for b, h, r, i in ((index < 0) | (index >= cols)).nonzero()[:1].tolist():
        raise IndexError(
            f"indices[{b}, {h}, {r}, {i}] must be in [0, {cols}), the blocks of a row, got {index[b, h, r, i]}; pass "
            "padded=True if entries that are no block, such as -1, should be ignored"
        )


def chunks(total: int, each: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of parts of range(total) of about CHUNK elements, if each index stands for `each` elements."""
    step = max(1, CHUNK // max(each, 1))
    for begin in range(0, total, step):
        yield begin, min(begin + step, total)


def block_rows(begin: int, end: int, block: int, length: int, device) -> Tensor:
    """(end - begin, block) int32 row indices of these blocks, clamped to the last row, which is harmless."""
    rows = torch.arange(begin * block, end * block, dtype=torch.int32, device=device)
    return rows.clamp(max=length - 1).view(-1, block)


def tables_of_mask_mod(mask_mod, heads, lengths, blocksize, device) -> tuple[Tensor, Tensor]:
    """(any, all) over each block's elements, bool (B, H, Mq, Mk) with (B, H) = heads: evaluates the mask of every
    element.

    Blocks that extend past the last column are False in the second table.
    """
    (sq, sk), (block_q, block_k) = lengths, blocksize
    rows, cols = -(-sq // block_q), -(-sk // block_k)
    some, every = torch.zeros(2, *heads, rows, cols, dtype=torch.bool, device=device)
    b, h = (torch.arange(n, dtype=torch.int32, device=device) for n in heads)
    b, h = b.view(-1, 1, 1, 1, 1, 1), h.view(-1, 1, 1, 1, 1)
    each = heads[0] * heads[1] * block_q * block_k
    for c0, c1 in chunks(cols, each):
        kv = block_rows(c0, c1, block_k, sk, device)  # (columns of blocks, block_k)
        inside = torch.arange(c0 * block_k, c1 * block_k, device=device).view_as(kv) < sk
        for r0, r1 in chunks(rows, each * (c1 - c0)):
            q = block_rows(r0, r1, block_q, sq, device)[:, :, None, None]
            seen = call(mask_mod, b, h, q, kv) & inside
            seen = seen.expand(*seen.shape[:-4], r1 - r0, block_q, c1 - c0, block_k)
            some[:, :, r0:r1, c0:c1] = seen.any(-1).any(-2)
            every[:, :, r0:r1, c0:c1] = seen.all(-1).all(-2)
    return some, every


def tables_of_rows(begin, end, prefix, lengths, blocksize) -> tuple[Tensor, Tensor]:
    """The same tables, (Mq, Mk), if row q attends to columns [begin[q], end[q]) and [0, prefix[q]), all within [0, Sk).

    Computes one value per row and block, block_k times fewer than there are elements.
    """
    (sq, sk), (block_q, block_k) = lengths, blocksize
    rows, cols = -(-sq // block_q), -(-sk // block_k)
    merged = begin <= prefix
    end = torch.where(merged, torch.maximum(end, prefix), end)
    begin = begin.masked_fill(merged, 0)
    some, every = torch.zeros(2, rows, cols, dtype=torch.bool, device=begin.device)
    first = torch.arange(cols, dtype=torch.int32, device=begin.device) * block_k
    past = first + block_k
    for r0, r1 in chunks(rows, block_q * cols):
        q = block_rows(r0, r1, block_q, sq, begin.device)
        lo, hi, pre = (t[q.long()][..., None] for t in (begin, end, prefix))  # (rows of blocks, block_q, 1)
        some[r0:r1] = ((torch.maximum(lo, first) < torch.minimum(hi, past)) | (first < pre)).any(1)
        every[r0:r1] = (((lo <= first) & (hi >= past)) | (pre >= past)).all(1)
    return some, every


def grid(lengths: Sequence[int], blocksize: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int], int, int]:
    """(Sq, Sk), (block_q, block_k), Mq and Mk; raises ValueError for unsupported ones."""
    lengths, blocksize = pair(lengths, "lengths"), pair(blocksize, "blocksize")
    for name, side in zip(("block_q", "block_k"), blocksize, strict=True):
        if side not in BLOCKS:
            raise ValueError(f"{name} must be 64 or 128, got {side}")
    for name, length in zip(("Sq", "Sk"), lengths, strict=True):
        if not 0 <= length <= MOST:
            raise ValueError(f"{name} must be in [0, {MOST}], got {length}")
    (rows, cols), (block_q, block_k) = lengths, blocksize
    return lengths, blocksize, -(-rows // block_q), -(-cols // block_k)


def band_tables(lengths, blocksize, left: int | None, right: int | None, device) -> tuple[Tensor, Tensor]:
    """(any, all) tables, bool (Mq, Mk), of columns from `left` before to `right` after the row's position."""
    sq, sk = lengths
    position = torch.arange(sk - sq, sk, dtype=torch.int32, device=device)  # (Sq,)
    begin = torch.zeros_like(position) if left is None else (position - left).clamp(min=0)
    end = torch.full_like(position, sk) if right is None else (position + right + 1).clamp(0, sk)
    return tables_of_rows(begin, end, torch.zeros_like(begin), lengths, blocksize)


def flags(mask) -> Tensor:
    """Errors of a BlockMask's lists, (5,) bool, in the order of first_error."""
    cols = mask.n_block_cols
    parts: list[list[Tensor]] = [[], [], []]
    tables = []
    for count, index in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        width = index.shape[-1]
        listed = torch.arange(width, dtype=torch.int32, device=index.device) < count[..., None]
        outside = listed & ((index < 0) | (index >= cols))
        parts[0].append(((count < 0) | (count > width)).any())
        parts[1].append(outside.any())
        parts[2].append(((index[..., 1:] <= index[..., :-1]) & listed[..., 1:]).any())
        safe = index.masked_fill(~listed | outside, cols)
        table = torch.zeros(*count.shape, cols + 1, dtype=torch.bool, device=index.device)
        tables.append(table.scatter_(-1, safe.long(), True)[..., :cols])
    partial, full = tables
    cut = full[..., -1].any() if mask.lengths[1] % mask.blocksize[1] else full.new_zeros(())
    return torch.stack([*(torch.stack(p).any() for p in parts), (partial & full).any(), cut])


def first_error(mask) -> str:
    """Message of the first error of a BlockMask's lists. Copies them to the host."""
    cols, tables = mask.n_block_cols, []
    for prefix in ("", "full_"):
        names = f"{prefix}kv_num_blocks", f"{prefix}kv_indices"
        count, index = (getattr(mask, name).cpu() for name in names)
        width = index.shape[-1]
        for b, h, r in ((count < 0) | (count > width)).nonzero()[:1].tolist():
            return f"{names[0]}[{b}, {h}, {r}] must be in [0, {width}], got {count[b, h, r]}"
        listed = torch.arange(width, device="cpu") < count[..., None]
        for b, h, r, i in (listed & ((index < 0) | (index >= cols))).nonzero()[:1].tolist():
            return f"{names[1]}[{b}, {h}, {r}, {i}] must be in [0, {cols}), got {index[b, h, r, i]}"
        for b, h, r, i in ((index[..., 1:] <= index[..., :-1]) & listed[..., 1:]).nonzero()[:1].tolist():
            place, value, after = f"{names[1]}[{b}, {h}, {r}, {i + 1}]", index[b, h, r, i + 1], index[b, h, r, i]
            return f"{place} is {value} after {after}; the blocks of a row must be sorted and unique"
        tables.append(table_of(count, index, cols))
    partial, full = tables
    for b, h, r, c in (partial & full).nonzero()[:1].tolist():
        return f"block {c} of row {r} (batch {b}, head {h}) is both partial and full; list it once"
    if mask.lengths[1] % mask.blocksize[1]:
        for b, h, r in full[..., -1].nonzero()[:1].tolist():
            return (
                f"block {cols - 1} of row {r} (batch {b}, head {h}) is full but extends past the last of "
                f"{mask.lengths[1]} columns; list it as partial"
            )
    return "the lists were invalid when checked but have been modified since; do not write to them"
