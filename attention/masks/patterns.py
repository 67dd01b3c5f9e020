"""Common block masks: causal, sliding windows, documents, dilated, top-k blocks, vertical and slash.

No function synchronizes. Rows are aligned to the end: row q is at position q + Sk - Sq. Unless stated otherwise
`lengths` is (Sq, Sk), `blocksize` (block_q, block_k), and a result without batch or heads has B = H = 1. All functions
raise ValueError for lengths or block sizes that BlockMask does not support.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_collective.checks import describe, is_strided

from .block_lists import grid, tables_of_rows
from .block_mask import BlockMask, create_block_mask
from .mask_mods import And, Band, Dilated, GlobalTokens, MaskMod, Or, RowRange, SameDocument, both, window_bounds

__all__ = ["causal", "dilated", "dilated_blocks", "documents", "packed_documents", "sliding_window", "top_k"]
__all__ += ["vertical_slash"]

Pair = Sequence[int]
Device = torch.device | str | None


def causal(lengths: Pair, blocksize: Pair = (128, 128), *, device: Device = None) -> BlockMask:
    """Causal mask: row q attends to the columns up to its position, q + Sk - Sq.

    Example:
        mask = patterns.causal((1024, 1024), device="cuda")
    """
    return sliding_window(lengths, (None, 0), blocksize, device=device)


def sliding_window(
    lengths: Pair,
    window_size: Sequence[int | None],
    blocksize: Pair = (128, 128),
    *,
    global_columns: int = 0,
    global_rows: int = 0,
    causal: bool = False,
    device: Device = None,
) -> BlockMask:
    """Window: row q, at position p, attends to columns p - left to p + right, (left, right) = window_size.

    Args:
        window_size: (left, right); None, or -1, is unbounded.
        global_columns: number of first columns that all rows attend to (attention sinks).
        global_rows: number of first positions whose rows attend to all columns.
        causal: True masks all columns past the row's position.

    Raises:
        TypeError: window_size is not a pair of ints or None.
        ValueError: a bound or a number of tokens is negative.

    Example:
        mask = patterns.sliding_window((4096, 4096), (1023, 0), global_columns=4, device="cuda")
    """
    (sq, sk), blocksize, _, _ = grid(lengths, blocksize)
    left, right = window_bounds(window_size, causal)
    for name, n in (("global_columns", global_columns), ("global_rows", global_rows)):
        if operator.index(n) < 0:
            raise ValueError(f"{name} must be at least 0, got {n}")
    offset = sk - sq
    position = torch.arange(offset, sk, dtype=torch.int32, device=device)  # (Sq,)
    last = position + 1 if causal else torch.full_like(position, sk)
    begin = torch.zeros_like(position) if left is None else position - left
    end = last if right is None else position + right + 1
    sees_all = (position >= 0) & (position < global_rows)
    begin, end = begin.masked_fill(sees_all, 0).clamp(min=0), torch.where(sees_all, last, end).clamp(0, sk)
    prefix = last.clamp(0, min(global_columns, sk))
    mask_mod: MaskMod | None = None if left is None and right is None else Band(left, right, offset)
    if mask_mod is not None and (global_columns or global_rows):
        mask_mod = Or(mask_mod, GlobalTokens(global_columns, global_rows, offset))
        mask_mod = both(mask_mod, Band(None, 0, offset) if causal else None)
    return _of_rows(begin, end, prefix, (sq, sk), blocksize, mask_mod)


def packed_documents(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    lengths: Pair,
    blocksize: Pair = (128, 128),
    window_size: Sequence[int | None] | None = None,
    causal: bool = False,
) -> BlockMask:
    """Packed documents: rows attend to the columns of their own document only.

    Args:
        cu_seqlens_q: (documents + 1,) int32 or int64, cumulative lengths: the first row of each document, then the end
            of the last one. Rows past that are fully masked.
        cu_seqlens_k: the same for columns; None: cu_seqlens_q.
        lengths: (Sq, Sk), at least the last entries of cu_seqlens, which are not read.
        window_size, causal: within each document, aligned to its end (see mask_mods.window_bounds).

    Raises:
        TypeError: cu_seqlens are not strided tensors of int32 or int64.
        ValueError: they do not have one shape (documents + 1,) and one device.

    Example:
        cu_seqlens = torch.tensor([0, 300, 1024], dtype=torch.int32, device="cuda")
        mask = patterns.packed_documents(cu_seqlens, lengths=(1024, 1024), causal=True)
    """
    (sq, sk), blocksize, _, _ = grid(lengths, blocksize)
    cu_q, cu_k = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not is_strided(t) or t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be a strided tensor of int32 or int64, got {describe(t)}")
        if t.dim() != 1 or len(t) < 2 or t.shape != cu_q.shape or t.device != cu_q.device:
            raise ValueError(
                f"{name} must have one dimension of at least 2 entries"
                f"{', as many as cu_seqlens_q and on its device' if t is not cu_q else ''}, "
                f"got {tuple(t.shape)} on {t.device}"
            )
    left, right = window_bounds(window_size, causal)
    cu_q, cu_k = cu_q.int(), cu_k.int()
    row = torch.arange(sq, dtype=torch.int32, device=cu_q.device)
    document = (torch.searchsorted(cu_q, row, right=True) - 1).clamp(0, len(cu_q) - 2)
    begin, end = cu_k[document], cu_k[document + 1]
    position = row - cu_q[document + 1] + end  # the document's last row is at its last column position
    if left is not None:
        begin = torch.maximum(begin, position - left)
    if right is not None:
        end = torch.minimum(end, position + right + 1)
    begin = begin.clamp(0, sk)
    end = end.masked_fill((row < cu_q[0]) | (row >= cu_q[-1]), 0).clamp(0, sk)
    return _of_rows(begin, end, torch.zeros_like(begin), (sq, sk), blocksize, RowRange(begin, end))


def documents(
    q_ids: Tensor, kv_ids: Tensor | None = None, *, blocksize: Pair = (128, 128), causal: bool = False
) -> BlockMask:
    """Rows attend to the columns with their own document's id. Evaluates all pairs; packed_documents is much cheaper.

    Args:
        q_ids: (Sq,) or (B, Sq) int32 or int64, not necessarily sorted; compared as int32.
        kv_ids: (Sk,) or (B, Sk); None: q_ids.
        causal: True masks columns after the row's position in the whole sequence.

    Raises:
        TypeError: ids are not strided tensors of int32 or int64.
        ValueError: they do not have 1 or 2 dimensions, or their batch sizes or devices differ.

    Example:
        mask = patterns.documents(torch.arange(1024, device="cuda") // 300)
    """
    kv_ids = q_ids if kv_ids is None else kv_ids
    for name, t in (("q_ids", q_ids), ("kv_ids", kv_ids)):
        if not is_strided(t) or t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be a strided tensor of int32 or int64, got {describe(t)}")
        if t.dim() not in (1, 2) or t.shape[:-1] != q_ids.shape[:-1] or t.device != q_ids.device:
            got = f"{tuple(t.shape)} on {t.device}, and q_ids {tuple(q_ids.shape)} on {q_ids.device}"
            raise ValueError(f"{name} must be (S,) or (B, S), as q_ids and on its device, got {got}")
    lengths, batched = (q_ids.shape[-1], kv_ids.shape[-1]), q_ids.dim() == 2
    mask_mod: MaskMod = SameDocument(q_ids.int(), kv_ids.int(), batched)
    if causal:
        mask_mod = And(mask_mod, Band(None, 0, lengths[1] - lengths[0]))
    batch = len(q_ids) if batched else 1
    return create_block_mask(mask_mod, batch, None, *lengths, device=q_ids.device, BLOCK_SIZE=blocksize)


def dilated(
    lengths: Pair,
    step: int,
    blocksize: Pair = (128, 128),
    *,
    window_size: Sequence[int | None] | None = None,
    causal: bool = False,
    device: Device = None,
) -> BlockMask:
    """Columns whose distance from the row's position is a multiple of `step`, within the window.

    For steps up to the block size every block in the window is partial, which saves no work; use dilated_blocks
    instead.

    Raises:
        ValueError: step is less than 1.
    """
    (sq, sk), blocksize, _, _ = grid(lengths, blocksize)
    if operator.index(step) < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    bounds = window_bounds(window_size, causal)
    mask_mod: MaskMod = Dilated(step, sk - sq)
    if bounds != (None, None):
        mask_mod = And(mask_mod, Band(*bounds, sk - sq))
    return create_block_mask(mask_mod, None, None, sq, sk, device=device, BLOCK_SIZE=blocksize)


def dilated_blocks(
    lengths: Pair,
    step: int,
    blocksize: Pair = (128, 128),
    *,
    reach: int | None = None,
    causal: bool = False,
    device: Device = None,
) -> BlockMask:
    """Every `step`-th block of each row of blocks, counted from the one at the position of the row's last element.

    Args:
        reach: maximum number of blocks on each side of that one; None: all.
        causal: True masks all columns past the row's position.

    Raises:
        ValueError: step is less than 1, or reach is negative.

    Example:
        mask = patterns.dilated_blocks((4096, 4096), 4, causal=True, device="cuda")
    """
    (sq, sk), blocksize, rows, cols = grid(lengths, blocksize)
    if operator.index(step) < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    if reach is not None and operator.index(reach) < 0:
        raise ValueError(f"reach must be at least 0, got {reach}")
    last = (torch.arange(1, rows + 1, device=device) * blocksize[0]).clamp(max=sq) - 1 + (sk - sq)
    away = torch.arange(cols, device=device) - (last // blocksize[1])[:, None]
    blocks = away % step == 0
    if reach is not None:
        blocks &= away.abs() <= reach * step
    return BlockMask.from_blocks(blocks, blocksize, lengths=(sq, sk), causal=causal)


def top_k(
    scores: Tensor,
    k: int,
    blocksize: Pair = (128, 128),
    *,
    lengths: Pair | None = None,
    causal: bool = False,
) -> BlockMask:
    """The k blocks of largest score in each row of blocks, among equals the earlier ones. Score -inf excludes a block.

    Args:
        scores: (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk), floating-point, without NaN.
        lengths: None: the extent of the blocks.
        causal: True selects among blocks up to the row's position, and masks columns past it.

    Raises:
        TypeError: scores is not a strided floating-point tensor.
        ValueError: k is negative.

    Example:
        scores = q.unflatten(2, (-1, 128)).mean(3) @ k.unflatten(2, (-1, 128)).mean(3).mT  # (B, H, Mq, Mk)
        mask = patterns.top_k(scores, 8, causal=True)
    """
    if not is_strided(scores) or not scores.is_floating_point():
        raise TypeError(f"scores must be a strided floating-point tensor, got {describe(scores)}")
    if operator.index(k) < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    allowed = scores > float("-inf")
    if causal:
        whole = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        partial, full = BlockMask.from_blocks(whole, blocksize, lengths=lengths, causal=True).tables()
        allowed = allowed & (partial | full)[0, 0]
    best = scores.masked_fill(~allowed, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True)
    return BlockMask.from_blocks(chosen & allowed, blocksize, lengths=lengths, causal=causal)


def vertical_slash(
    vertical: Tensor, slash: Tensor, *, lengths: Pair, blocksize: Pair = (128, 128), causal: bool = True
) -> BlockMask:
    """The blocks that contain an element of a vertical line (a column) or of a slash (a diagonal); they are unmasked.

    Args:
        vertical: (..., n) int32 or int64 columns, with up to two leading dimensions: (H, n) or (B, H, n).
        slash: (..., m) distances of columns before the row's position, with the same leading dimensions. In both,
            values out of range are ignored, so that -1 pads short rows.
        causal: True masks columns past the row's position.

    Raises:
        TypeError: they are not strided tensors of int32 or int64.
        ValueError: their dimensions or devices do not match.

    Example:
        vertical, slash = (torch.tensor([0, 1, 2], device="cuda") for _ in range(2))
        mask = patterns.vertical_slash(vertical, slash, lengths=(1024, 1024), causal=True)
    """
    for name, t in (("vertical", vertical), ("slash", slash)):
        if not is_strided(t) or t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be a strided tensor of int32 or int64, got {describe(t)}")
        if not 1 <= t.dim() <= 3 or t.shape[:-1] != vertical.shape[:-1] or t.device != vertical.device:
            got = f"{tuple(vertical.shape)} on {vertical.device} and {tuple(slash.shape)} on {slash.device}"
            raise ValueError(
                f"vertical and slash must be (n,), (H, n) or (B, H, n), with equal leading dimensions and on one "
                f"device, got {got}"
            )
    (sq, sk), (block_q, block_k), rows, cols = grid(lengths, blocksize)
    lead, device = vertical.shape[:-1], vertical.device
    column = (vertical.long() // block_k).masked_fill((vertical < 0) | (vertical >= sk), cols)
    columns = torch.zeros(*lead, cols + 1, dtype=torch.bool, device=device).scatter_(-1, column, True)[..., None, :cols]
    # A slash crosses the columns of blocks from `begin` to `end` of each row of blocks: +1 and -1 at its ends, summed
    # over slashes and then along the row.
    first = torch.arange(rows, device=device)[:, None] * block_q + (sk - sq)  # (Mq, 1)
    last = (first + block_q).clamp(max=sk) - 1
    distance = slash.long()[..., None, :]  # (..., 1, m)
    begin, end = (first - distance).clamp(min=0), (last - distance).clamp(max=sk - 1)
    crosses = (begin <= end) & (distance >= 0)  # (..., Mq, m)
    steps = torch.zeros(*lead, rows, cols + 2, dtype=torch.int32, device=device)
    for edge, change in ((begin // block_k, 1), (end // block_k + 1, -1)):
        place = edge.masked_fill(~crosses, cols + 1)
        steps.scatter_add_(-1, place, torch.full_like(place, change, dtype=torch.int32))
    crossed = steps.cumsum(-1)[..., :cols] > 0
    return BlockMask.from_blocks(crossed | columns, (block_q, block_k), lengths=(sq, sk), causal=causal)


def _of_rows(begin, end, prefix, lengths, blocksize, mask_mod) -> BlockMask:
    some, every = tables_of_rows(begin, end, prefix, lengths, blocksize)
    return BlockMask._of_tables(some & ~every, every, lengths, blocksize, mask_mod)
