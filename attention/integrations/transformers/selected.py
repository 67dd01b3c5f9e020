"""Layers whose query tokens attend to their own lists of KV blocks, by selected_attention.

The model's own indexer selects the blocks. MiniMax-M3 passes their indices, DeepSeek-V3.2 those of single keys, and
Qwen4-Exp a bool mask of the selected keys, from which the lists are made. The layer's mask and its number of query
tokens determine the call:

| mask | query tokens | call |
| --- | --- | --- |
| causal, or with padding on the right | more than 16, or gradients | selected_attention of whole sequences |
| the same | at most 16 | selected_attention with seqused_k: the KV cache's decode kernel |
| any other | at most 16 | the same, with a list of the unmasked keys of the blocks |
| any other | more than 16, or gradients | block_sparse_attention with the intersection of both masks |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attention import BlockMask, block_sparse_attention, selected_attention
from attention.masks.mask_mods import Elements, both
from attention.selected.blocks import BLOCK_SIZES, CHUNK, SIDE, Member, tables_of
from attention.selected.decode.dispatch import has_decode_kernel

from .block_masks import ATTRIBUTE
from .distributed import PlannedMask, check_none_active
from .masks import ORIGIN, Mask

ELSE = 'use attn_implementation="sdpa" or "eager"'
REFUSED = "is not supported in layers that select KV blocks"


def attend_blocks(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask, block_indices: Tensor, packed: tuple | None, options: dict
) -> Tensor:
    """(B, H, Sq, Dv) of a layer that passes block_indices, see block_lists. packed: cumulative sequence lengths."""
    restarts = isinstance(mask, Mask) and mask.kind is not None and mask.kind.sequences is not None
    if packed is not None or restarts:
        raise ValueError(
            f"{type(module).__name__}: packed sequences (cu_seq_lens, or position_ids that restart) are not supported: "
            "the layer's indexer counts blocks from the first key of a batch index, so it would select blocks of other "
            "sequences; pass one sequence per batch index, padded on the right"
        )
    lists, block_size = block_lists(module, block_indices, q.shape[1], k.shape[1])
    return attend_selected(module, q, k, v, mask, lists, block_size, options)


def attend_indices(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask, indices: Tensor, packed: tuple | None, options: dict
) -> Tensor:
    """(B, H, Sq, Dv) of a layer that passes the keys of each query token, (B, Sq, top), one list for all heads."""
    if packed is not None:
        raise ValueError(
            f"{type(module).__name__}: cu_seq_lens are not supported in layers that select keys; pass position_ids "
            "that restart in each sequence, and use_cache=False"
        )
    if indices.dim() != 3 or indices.shape[:2] != q.shape[::2][:2]:
        raise ValueError(
            f"{type(module).__name__}: indices must have shape (batch, queries, top), got {tuple(indices.shape)}; "
            f"{ELSE}"
        )
    check_integers(module, "indices", indices)
    return attend_selected(module, q, k, v, mask, indices[:, :, None].to(torch.int32).contiguous(), 1, options)


def selects_keys(module: nn.Module, mask) -> bool:
    """True if the mask is a tensor of the keys that the layer's indexer selected, as in Qwen4-Exp."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        return False
    indexer = getattr(module, "indexer", None)
    return hasattr(indexer, "token_budget") and hasattr(indexer, "compress_ratio")


def attend_keys(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seen: Any, options: dict) -> Tensor:
    """(B, H, Sq, Dv) of a layer that passes its selected keys, bool (B, 1, Sq, Sk).

    The indexer selects blocks of compress_ratio visible keys, and the keys after the last whole one. If the layer's own
    mask is causal, such blocks begin at multiples of compress_ratio. Otherwise the lists have single keys.
    """
    check_supported(module, seen, options)
    check_none_active()
    indexer: Any = module.indexer
    mask, ratio, columns = getattr(seen, ORIGIN, None), indexer.compress_ratio, k.shape[2]
    whole = indexer.token_budget // ratio
    if mask is not None and _is_causal(mask) and mask.lengths == seen.shape[2:]:
        size = _divisor(ratio)
        blocks = pad(seen, (0, -columns % size)).unflatten(-1, (-1, size)).any(-1)
        lists = true_columns(blocks, (whole + 1) * (ratio // size))
        return attend_selected(module, q, k, v, mask, lists, size, options)
    lists = true_columns(seen[..., :columns].expand(q.shape[0], -1, -1, -1), whole * ratio + ratio - 1)
    if has_decode_kernel(q.shape[2], q, k, v, options["sinks"]):
        options = options | {"seqused_k": torch.full(q.shape[:1], columns, dtype=torch.int32, device=q.device)}
    return selected_attention(q, k, v, lists, 1, **options)


def true_columns(seen: Tensor, most: int) -> Tensor:
    """(B, Sq, 1, most) int32: the columns that are True in (B, 1, Sq, columns), ascending, then -1."""
    batch, _, rows, columns = seen.shape
    found = torch.full((batch, rows, most + 1), -1, dtype=torch.int32, device=seen.device)
    column = torch.arange(columns, dtype=torch.int32, device=seen.device)
    step = max(1, CHUNK // max(1, 8 * batch * columns))
    for begin in range(0, rows, step):
        part = seen[:, 0, begin : begin + step]
        place = (part.cumsum(-1) - 1).masked_fill(~part, most)
        found[:, begin : begin + step].scatter_(-1, place, column.expand_as(place))
    return found[:, :, None, :most].contiguous()


def _divisor(size: int) -> int:
    """The largest supported size of blocks that divides `size`."""
    return max(n for n in BLOCK_SIZES if size % n == 0)


def _is_causal(mask: Mask) -> bool:
    """True if all rows of tokens have a causal mask: later keys of padding are masked by it, too."""
    kind = mask.kind
    causal = kind is not None and kind.left is None and kind.right == 0 and kind.sequences is None
    return causal and (mask.padding is None or mask.trailing)


def block_lists(module: nn.Module, block_indices: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, int]:
    """(lists, block_size) of selected_attention from the indices that a layer passes.

    Args:
        module: the layer; its indexer's block_size is the number of keys of a block, any positive number.
        block_indices: (B, lists per token, Sq, top) integers, padded with -1.

    Returns:
        (B, Sq, G, top) int32, with G of 1, kv_heads or heads, and the largest supported divisor of the block size;
        a larger block is several entries.
    """
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"{type(module).__name__}: block_indices require indexer.block_size of the layer, a positive int, got "
            f"{size!r}; {ELSE}"
        )
    if block_indices.dim() != 4 or not block_indices.shape[1] or heads % block_indices.shape[1]:
        raise ValueError(
            f"{type(module).__name__}: block_indices must have shape (batch, lists, queries, top), with a number of "
            f"lists that divides the {heads} heads, got {tuple(block_indices.shape)}; {ELSE}"
        )
    check_integers(module, "block_indices", block_indices)
    lists = block_indices.transpose(1, 2).to(torch.int32, memory_format=torch.contiguous_format)
    groups = lists.shape[2]
    if groups not in (1, kv_heads, heads):
        lists = lists.repeat_interleave((heads if kv_heads % groups else kv_heads) // groups, 2)
    block_size = _divisor(size)
    return (lists if block_size == size else parts_of(lists, size // block_size)), block_size


def check_integers(module: nn.Module, name: str, indices: Tensor) -> None:
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{type(module).__name__}: {name} must be int32 or int64, got {indices.dtype}")


def parts_of(lists: Tensor, count: int) -> Tensor:
    """Lists (..., top * count) of blocks that are `count` times smaller; parts of -1 are negative, too."""
    part = torch.arange(count, dtype=lists.dtype, device=lists.device)
    return torch.where(lists[..., None] < 0, -1, lists[..., None] * count + part).flatten(-2)


def attend_selected(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask, lists: Tensor, block_size: int, options: dict
) -> Tensor:
    """(B, H, Sq, Dv): attention to the blocks of lists (B, Sq, G, top) that the mask leaves.

    mask: the result of make_mask; a bool tensor (B or 1, H or 1, Sq, Sk); or None, which is causal.
    """
    name, lengths = type(module).__name__, (q.shape[2], k.shape[2])
    check_supported(module, mask, options)
    check_none_active()
    if mask is None:
        if lengths[0] not in (1, lengths[1]):
            raise ValueError(
                f"{name}: a layer with selected blocks requires a mask if queries and keys differ in length, got "
                f"{lengths[0]} and {lengths[1]}; create it with transformers.masking_utils.create_causal_mask"
            )
        return selected_attention(q, k, v, lists, block_size, causal=True, **options)
    if isinstance(mask, Tensor):
        return _under_elements(q, k, v, mask[..., : lengths[1]], lists, block_size, options)
    mask = mask.to(q.device)
    if lengths != mask.lengths or mask.batch not in (1, q.shape[0]) or mask.skipped:
        raise ValueError(
            f"{name}: the mask must have the batch size {q.shape[0]} and lengths {lengths} of the layer, and a cache "
            f"must have all keys, got {mask.batch}, {mask.lengths} and {mask.skipped} dropped keys; {ELSE}"
        )
    return _masked(q, k, v, mask, lists, block_size, options)


def check_supported(module: nn.Module, mask, options: dict) -> None:
    """Refuse what cannot be combined with selected blocks."""
    if getattr(module, ATTRIBUTE, None) is not None:
        raise ValueError(f"a block mask (set_block_mask) {REFUSED}; call set_block_mask(model, None)")
    if isinstance(mask, PlannedMask):
        raise ValueError(f"context_parallel {REFUSED}; call the model outside of it")
    if "score_mod" in options:
        raise ValueError(f"a score_mod, position_bias or float attention_mask {REFUSED}; pass a bool attention_mask")
    if mask is not None and not isinstance(mask, Mask) and not (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        raise TypeError(
            f"attention_mask must be bool, (batch, 1 or heads, queries, keys), for a layer with selected blocks, got "
            f"{mask.dtype if isinstance(mask, Tensor) else type(mask).__name__}; {ELSE}"
        )


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Mask, lists: Tensor, block_size: int, options: dict) -> Tensor:
    """Attention under a mask of make_mask."""
    last, decodes = mask.shift + mask.lengths[0], has_decode_kernel(q.shape[2], q, k, v, options["sinks"])
    causal = _is_causal(mask)
    if causal and decodes:
        seqused_k = mask.seqused_k(q.shape[0])
        return selected_attention(q, k, v, lists, block_size, causal=True, seqused_k=seqused_k, **options)
    if causal and isinstance(last, int) and last <= mask.lengths[1]:
        k, v = k[:, :, :last], v[:, :, :last]  # a static cache that is not full yet
        return selected_attention(q, k, v, lists, block_size, causal=True, **options)
    if decodes:
        return _keys(q, k, v, mask.elements(), lists, block_size, options)
    blocks = blocks_of(lists, block_size, q.shape[1], mask.lengths)
    return block_sparse_attention(q, k, v, mask.intersection(blocks), **options)


def blocks_of(lists: Tensor, block_size: int, heads: int, lengths: tuple[int, int]) -> BlockMask:
    """The lists as a block mask of one query head per tile, whose mask_mod can be combined with another."""
    words, listed = tables_of(lists, block_size, None, None, lengths[1], 1)
    groups = lists.shape[2]
    if 1 < groups < heads:
        listed = listed.repeat_interleave(heads // groups, 1)
    mask_mod = Member(words, heads // groups, block_size, None)
    return BlockMask.from_blocks(listed, (SIDE, SIDE), lengths=lengths, mask_mod=mask_mod)


def _under_elements(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, lists: Tensor, block_size, options: dict) -> Tensor:
    """Attention under a bool tensor."""
    shape = *q.shape[:3], k.shape[2]
    if seen.dim() != 4 or any(n not in (1, extent) for n, extent in zip(seen.shape, shape, strict=True)):
        raise ValueError(
            f"attention_mask must broadcast to (batch, heads, queries, keys) = {shape}, got shape {tuple(seen.shape)}"
        )
    if seen.shape[1] == 1 and has_decode_kernel(q.shape[2], q, k, v, options["sinks"]):
        return _keys(q, k, v, seen, lists, block_size, options)
    blocks = blocks_of(lists, block_size, q.shape[1], shape[2:])
    partial, full = blocks.tables()
    mask_mod = both(blocks.mask_mod, Elements(seen.expand(shape)))
    mask = BlockMask.from_blocks(partial | full, blocks.blocksize, lengths=blocks.lengths, mask_mod=mask_mod)
    return block_sparse_attention(q, k, v, mask, **options)


def _keys(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, lists: Tensor, block_size: int, options: dict) -> Tensor:
    """Attention to the keys of the selected blocks that are True in `seen`, (B or 1, 1, Sq, Sk), without gradients."""
    columns = k.shape[2]
    keys = parts_of(lists, block_size)  # (B, Sq, G, top * block_size)
    seen = seen.transpose(1, 2).expand(*keys.shape[:3], columns)
    masked = ~seen.gather(-1, keys.clamp(0, columns - 1).long()) | (keys >= columns)
    seqused_k = torch.full(q.shape[:1], columns, dtype=torch.int32, device=q.device)
    return selected_attention(q, k, v, keys.masked_fill(masked, -1), 1, seqused_k=seqused_k, **options)
