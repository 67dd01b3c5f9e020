"""Block-sparse attention as a plugin of vllm-omni's SPARSE_ATTN backend."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attention import BlockMask, block_sparse_attention, patterns
from attention.block_sparse import as_block_mask
from attention.masks.block_lists import tables_of_rows
from attention.masks.mask_mods import RowRange
from attention.operands import padded

OP = "vllm-omni's sparse attention by cute_kernels"
PATTERNS = "window_size", "frame_window", "block_mask"
BLOCKS = 128, 128


@torch.compiler.disable(reason="block masks are looked up by Python values that change between calls")
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, params: dict[str, Any], is_causal: bool, softmax_scale: float
) -> Tensor:
    """Self-attention over the blocks of scores that `params` selects, as vllm-omni's SPARSE_ATTN backend calls it.

    Args:
        query, key, value: (B, S, H, D), (B, S, Hkv, D) and (B, S, Hkv, Dv) bfloat16 or float16.
        params: the configured parameters, and vllm-omni's own for each call. One of these selects the blocks:

            - window_size: (left, right) tokens before and after each one that it attends to; None is unbounded.
              global_columns: number of first tokens that all tokens attend to.
            - frame_window: frames before and after each one that it attends to; requires patches_per_frame, which
              vllm-omni computes for videos.
            - block_mask: whatever block_sparse_attention accepts.

            attn_mask: bool (B, S), True for keys that take part, or one that broadcasts to (B, H, S, S).
        is_causal: True masks later tokens.
        softmax_scale: factor of the scores.

    Returns:
        (B, S, H, Dv) of query's dtype.

    Raises:
        ValueError: not exactly one of window_size, frame_window and block_mask is in params, or patches_per_frame is
            missing or does not divide S.
        TypeError: attn_mask is not a bool tensor.

    Example:
        >>> sparse_attention(q, k, v, {"window_size": (4096, 4096)}, is_causal=False, softmax_scale=128**-0.5)
    """
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    lengths, dv = (q.shape[2], k.shape[2]), v.shape[-1]
    mask = _pattern(params, lengths, str(q.device))
    seen = params.get("attn_mask")
    if seen is not None:
        mask = as_block_mask(q, k, mask)
        mask = mask & BlockMask.from_elements(_elements(seen, q), mask.blocksize, lengths=lengths)
    q, k, v = padded(q, k, v)
    out = block_sparse_attention(q, k, v, mask, causal=is_causal, scale=softmax_scale)
    return out[..., :dv].transpose(1, 2)


sparse_attention.capabilities = {"supports_attention_mask": True}  # vllm-omni reads it


def _pattern(params: dict[str, Any], lengths: tuple[int, int], device: str):
    """The block mask of params: the user's, or one that all layers and steps share."""
    given = [name for name in PATTERNS if params.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"{OP}: params must have one of {', '.join(PATTERNS)}, got {', '.join(given) or 'none'}")
    (name,) = given
    if name == "block_mask":
        return params[name]
    if name == "window_size":
        left, right = params[name]
        return _window(left, right, int(params.get("global_columns", 0)), lengths, device)
    patches = int(params.get("patches_per_frame") or 0)
    if patches < 1 or lengths[0] != lengths[1] or lengths[0] % patches:
        raise ValueError(
            f"{OP}: frame_window requires patches_per_frame that divides the length {lengths[0]}, got {patches or None}"
            "; pass window_size=(left, right) in tokens"
        )
    return _frames(int(params[name]), patches, lengths, device)


@lru_cache(maxsize=32)
def _window(left, right, global_columns: int, lengths: tuple[int, int], device: str) -> BlockMask:
    return patterns.sliding_window(lengths, (left, right), BLOCKS, global_columns=global_columns, device=device)


@lru_cache(maxsize=32)
def _frames(window: int, patches: int, lengths: tuple[int, int], device: str) -> BlockMask:
    """Each token attends to the tokens of its frame and of `window` frames before and after it."""
    frame = torch.arange(lengths[0], dtype=torch.int32, device=device) // patches
    begin, end = (((frame + n) * patches).clamp(0, lengths[1]).int() for n in (-window, window + 1))
    some, every = tables_of_rows(begin, end, torch.zeros_like(begin), lengths, BLOCKS)
    return BlockMask.from_blocks(some, BLOCKS, lengths=lengths, partial=~every, mask_mod=RowRange(begin, end))


def _elements(seen: Tensor, q: Tensor) -> Tensor:
    """attn_mask as bool (B or 1, H or 1, S or 1, S or 1)."""
    if seen.dtype is not torch.bool:
        raise TypeError(f"{OP}: attn_mask must be a bool tensor, got {seen.dtype}; pass attn_mask.bool()")
    if seen.shape == (q.shape[0], q.shape[2]):
        return seen[:, None, None]
    return seen[(None,) * (4 - seen.dim())]
