"""The attention function called by transformers' layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from attention import attention, block_sparse_attention, score_mods
from attention.masks.cache import ElementTensor
from attention.operands import autocast, padded
from cute_kernels.checks import watched

from .block_masks import ATTRIBUTE
from .distributed import PlannedMask, check_none_active
from .masks import Mask
from .selected import attend_blocks, attend_indices, attend_keys, selects_keys

ELSE = 'use attn_implementation="sdpa" or "eager"'
PAGED = 'paged caches of continuous batching are not supported; use generate() or attn_implementation="sdpa"'
# Keywords that would change the result, and the reason why they are not supported. Flags may be False.
REFUSED = {
    "head_mask": f"head masks are not supported; {ELSE}",
    "output_attentions": 'no attention weights are stored; use attn_implementation="eager" for output_attentions',
    "cache": PAGED,
    "block_table": PAGED,
    "sinks": f"attention sinks that depend on the query are not supported; {ELSE}",  # Inkling-2
}
# Keywords that affect no implementation's result, or that repeat information of the mask: models forward their
# forward() arguments, so these are mostly inputs of other layers. Keywords in neither table raise ValueError.
HARMLESS = frozenset(
    """
    cache_params cache_position image_grid_thw image_sizes input_features input_ids inputs_embeds
    interpolate_pos_encoding labels logits_to_keep max_length_k max_length_q mm_token_type_ids num_items_in_batch
    output_hidden_states output_router_logits past_key_value past_key_values pixel_values pixel_values_videos
    position_embeddings position_ids return_dict return_loss seq_idx shift_labels token_type_ids use_cache
    video_grid_thw
    """.split()
)
# Layers that do not add the mask to their own one if it is a BlockMask, which `Mask` subclasses.
DROPPING = ("DogeAttention",)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | FlexBlockMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    score_mod: Callable | None = None,
    deterministic: bool | None = None,
    block_indices: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """softmax(query @ key.T) @ value of a layer, under its mask.

    Args:
        query: (B, H, Sq, D) bfloat16 or float16; on the CPU also float32 and float64.
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), H a multiple of Hkv.
        attention_mask: the result of `make_mask`; FlexAttention's BlockMask; a bool tensor (B or 1, H or 1, Sq, Sk),
            True where a score is unmasked; a float tensor (B or 1, H or 1, Sq or 1, Sk), added to the scores,
            differentiable; or None: causal if `is_causal`, or else the module's attribute of that name, is True.
        dropout: must be 0: set attention_dropout to 0 in the config for training.
        scaling, softcap: scale and softcap of the scores; 1 / sqrt(D) and none by default.
        sliding_window: ignored with a mask, which includes the window.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,), cumulative lengths of sequences packed along the flattened
            batch, as for flash attention; the mask then only determines causality and the window.
        s_aux: (H,), attention sinks, as in gpt-oss.
        position_bias: (B or 1, H or 1, Sq, Sk), added to the scores, as in T5; differentiable; not with
            context_parallel.
        score_mod: FlexAttention's function of (score, b, h, q, kv); excludes position_bias. With context_parallel q and
            kv are positions in the whole sequence.
        deterministic: True for a gradient of query that is bitwise identical on every run; None: torch's setting.
        block_indices: (B, lists per token, Sq, top), the KV blocks that each query token attends to, padded with -1, of
            module.indexer.block_size keys, as in MiniMax-M3; excludes cu_seq_lens, packed sequences and biases.
        indices: (B, Sq, top), the keys that each query token attends to, padded with -1, as in DeepSeek-V3.2; excludes
            cu_seq_lens and biases.
        kwargs: None, or one of HARMLESS.

    Under torch.autocast operands of less than 64 bits are cast to its dtype. On a GPU an unsupported D or Dv (MiniLM's
    32, 80) is zero-padded to the next of 64, 96, 128, 192, 256 and 512 at each call: query, key and value are copied,
    in decode the whole cache, and the kernel computes the padded dimension.

    Returns:
        ((B, Sq, H, Dv) of query's dtype, None): no attention weights. Fully masked rows are 0.

    Raises:
        ValueError, TypeError: for unsupported arguments, with an alternative: dropout, attention weights, paged caches,
            and every keyword that is not known to be harmless; and for errors of the ops.
    """
    _refuse(module, dropout, kwargs)
    if isinstance(attention_mask, PlannedMask):
        attention_mask.check(kwargs.get("position_ids"))
        if position_bias is not None:
            raise ValueError(
                f"{type(module).__name__}: a position_bias, as in T5, is not supported with context_parallel, since "
                "the layer computes it as if this rank's tokens were the whole sequence; run the model on one GPU, or "
                "pass a score_mod of positions in the whole sequence, such as attention.score_mods.Alibi"
            )
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:  # Inkling's keys, after a convolution
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    options = {"scale": head_dim**-0.5 if scaling is None else scaling, "softcap": softcap, "sinks": s_aux}
    bias = position_bias
    if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
        if type(module).__name__ in DROPPING:
            raise ValueError(f"{type(module).__name__}: the layer drops the causal mask of this implementation; {ELSE}")
        bias = _added(attention_mask, position_bias, query, key)
        if cu_seq_lens_q is not None:
            raise ValueError("a float attention_mask is not supported with cu_seq_lens; pass attention_mask=None")
        attention_mask, sliding_window, is_causal = None, None, False  # included in the mask
    if bias is not None:
        if score_mod is not None:
            raise ValueError(
                "a position_bias or float attention_mask is not supported with score_mod; add the bias in score_mod"
            )
        score_mod = score_mods.Bias(bias)
    if score_mod is not None:
        options["score_mod"] = score_mod
    if deterministic:
        options["deterministic"] = True
    operands = autocast(query, key, value)
    packed = None if cu_seq_lens_q is None else (cu_seq_lens_q, cu_seq_lens_k)
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must both be given or both be None")
    if block_indices is not None:
        out = attend_blocks(module, *padded(*operands), attention_mask, block_indices, packed, options)
    elif indices is not None:
        out = attend_indices(module, *padded(*operands), attention_mask, indices, packed, options)
    elif packed is None and selects_keys(module, attention_mask):
        out = attend_keys(module, *padded(*operands), attention_mask, options)
    else:
        out = _attend(module, *padded(*operands), attention_mask, packed, sliding_window, is_causal, options)
    out = out.transpose(1, 2)
    if out.shape[-1] != head_dim_v:
        out = out[..., :head_dim_v]
    return out.contiguous(), None


def _attend(module: nn.Module, q, k, v, mask, packed, sliding_window, is_causal, options: dict) -> Tensor:
    """(B, H, Sq, Dv), dispatched on the kind of mask."""
    blocks = getattr(module, ATTRIBUTE, None)
    if isinstance(mask, PlannedMask):
        if blocks is not None or packed is not None:
            raise ValueError(
                "a block mask (set_block_mask) and cu_seq_lens are not supported with context_parallel; plan with them"
            )
        return mask.attend(q, k, v, **options)
    check_none_active()
    if packed is not None:
        if blocks is not None:
            raise ValueError(
                "a block mask (set_block_mask) is not supported with cu_seq_lens; call set_block_mask(model, None)"
            )
        return _packed(q, k, v, packed, _bounds(module, mask, is_causal), options)
    if isinstance(mask, Mask):
        return _masked(q, k, v, mask.to(q.device), blocks, options)
    if blocks is not None:
        raise ValueError(
            "a block mask (set_block_mask) requires the model's own mask, which was replaced or not created"
        )
    if mask is None:
        return _unmasked(module, q, k, v, sliding_window, is_causal, options)
    return block_sparse_attention(q, k, v, _block_mask(mask, k), **options)


def _added(mask: Tensor, bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """(B or 1, H or 1, Sq or 1, Sk): the mask plus the position bias, unless it is None."""
    mask = mask[..., : key.shape[2]]
    expected = *query.shape[:3], key.shape[2]
    if mask.dim() != 4 or any(n not in (1, extent) for n, extent in zip(mask.shape, expected, strict=True)):
        raise ValueError(
            f"attention_mask must broadcast to (batch, heads, queries, keys) = {expected}, got shape "
            f"{tuple(mask.shape)}; {ELSE} for layers that append keys to those of the mask"
        )
    return mask if bias is None else mask + bias


def _refuse(module: nn.Module, dropout: float, kwargs: dict) -> None:
    if dropout:
        raise ValueError(
            f"dropout of attention weights must be 0, got {dropout}. Set the config's attention dropout to 0 "
            '(attention_dropout, attention_probs_dropout_prob), call model.eval(), or use attn_implementation="sdpa"'
        )
    if getattr(getattr(module, "config", None), "output_attentions", False):
        raise ValueError(f"{type(module).__name__}: {REFUSED['output_attentions']}")
    for name, value in kwargs.items():
        if value is None or name in HARMLESS or (value is False and name in REFUSED):
            continue
        reason = REFUSED.get(name, f"the attention keyword {name!r} is unknown and may change the result; {ELSE}")
        raise ValueError(f"{type(module).__name__}: {reason}")


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Mask, blocks, options: dict) -> Tensor:
    """Attention under a mask of make_mask, and the user's block mask."""
    (rows, columns), lengths = mask.lengths, (q.shape[2], k.shape[2])
    if lengths != mask.lengths or mask.batch not in (1, q.shape[0]):
        raise ValueError(
            f"the mask must have the batch size {q.shape[0]} and lengths {lengths} of the layer, got {mask.batch} and "
            f"{mask.lengths}; {ELSE} for layers that append keys to those of the mask"
        )
    last = mask.shift + rows  # the column after the last row's
    if blocks is not None:
        return _within(q, k, v, mask, blocks, options)
    decodes = not watched(q, k, v)  # the decode kernel has no backward
    if mask.begin is not None and decodes:
        return attention(q, k, v, window_size=(mask.kind.left, 0), seqused_k=mask.spans_k(q.shape[0]), **options)
    if not mask.is_band():
        return block_sparse_attention(q, k, v, mask.block_mask(), **options)
    left, right = mask.kind.left, mask.kind.right
    if left is None and right is None:
        return attention(q, k, v, out=_transposed(q, k, v, options), **options)
    if left is not None and left >= columns - 1:
        left = None
    if isinstance(last, Tensor):
        if right != 0:
            return block_sparse_attention(q, k, v, mask.block_mask(), **options)
        return attention(q, k, v, window_size=(left, 0), seqused_k=mask.seqused_k(q.shape[0]), **options)
    if last < columns and right == 0:  # a static cache that is not full yet
        if rows == 1 and decodes:  # the same kernel, and under torch.compile the same graph, at each step
            return attention(q, k, v, window_size=(left, 0), seqused_k=mask.seqused_k(q.shape[0]), **options)
        k, v, columns = k[:, :, :last], v[:, :, :last], last
    if last != columns:
        return block_sparse_attention(q, k, v, mask.block_mask(), **options)
    return attention(q, k, v, window_size=(left, right), out=_transposed(q, k, v, options), **options)


def _within(q: Tensor, k: Tensor, v: Tensor, mask: Mask, blocks, options: dict) -> Tensor:
    """Attention under both masks."""
    rows, columns = mask.lengths
    if mask.skipped:
        raise ValueError(
            "a block mask (set_block_mask) requires a cache of the whole sequence, got one of a sliding window; "
            "generate with DynamicCache() without the model's config"
        )
    last = mask.shift + rows
    if not isinstance(last, int):
        raise ValueError(
            "a block mask (set_block_mask) requires the cache's length on the host, and a static cache keeps it on "
            "the device; generate with a dynamic cache"
        )
    if last < columns:
        if mask.kind is None or mask.kind.right != 0 or mask.padding is not None:
            raise ValueError(
                "a block mask (set_block_mask) supports a static cache only in causal prefill without padding; "
                "generate with a dynamic cache"
            )
        k, v = k[:, :, :last], v[:, :, :last]
        mask = mask.up_to(last)
    return block_sparse_attention(q, k, v, mask.within(blocks.of(mask.lengths, q.device)), **options)


def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple, bounds: tuple, options: dict) -> Tensor:
    """Attention of sequences packed along the flattened batch."""
    (batch, _, rows, _), flat = q.shape, (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    cu_q, cu_k = (t.to(device=q.device, dtype=torch.int32) for t in cu_seqlens)
    out = attention(*flat, window_size=bounds, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    return out.unflatten(0, (batch, rows)).transpose(1, 2)


def _bounds(module: nn.Module, mask, is_causal: bool | None) -> tuple[int | None, int | None]:
    """(left, right) of the window in each packed sequence."""
    if isinstance(mask, Mask) and mask.kind is not None and mask.padding is None:
        return mask.kind.left, mask.kind.right
    if mask is not None:
        raise ValueError(
            "with cu_seq_lens attention_mask must be a causal mask or a window without padding, or None, got another "
            "mask; pass attention_mask=None"
        )
    return None, 0 if _is_causal(module, is_causal) else None


def _unmasked(module: nn.Module, q, k, v, sliding_window, is_causal, options: dict) -> Tensor:
    """Attention of models that create no mask."""
    rows, columns = q.shape[2], k.shape[2]
    if sliding_window is not None and sliding_window < columns:
        raise ValueError(
            f"{type(module).__name__} requires a mask for its sliding_window of {sliding_window}, got None; create it "
            "with transformers.masking_utils.create_sliding_window_causal_mask, or the bidirectional one"
        )
    causal = rows > 1 and _is_causal(module, is_causal)
    if causal and rows != columns:
        raise ValueError(
            f"{type(module).__name__} is causal and requires a mask if queries and keys differ in length, got {rows} "
            f"and {columns}; create it with transformers.masking_utils.create_causal_mask"
        )
    return attention(q, k, v, causal=causal, out=_transposed(q, k, v, options), **options)


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _block_mask(mask, key: Tensor):
    """Convert a mask that the user, or the model itself, created."""
    if isinstance(mask, FlexBlockMask):
        return mask
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise TypeError(f"attention_mask must be a 4-D tensor or a BlockMask here, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask must be bool, True where a score is unmasked, or floating-point, added to the scores, got "
            f"{mask.dtype}; pass attention_mask.bool()"
        )
    return ElementTensor(mask[..., : key.shape[2]] if mask.shape[-1] > key.shape[2] else mask)


def _transposed(q: Tensor, k: Tensor, v: Tensor, options: dict) -> Tensor | None:
    """An output (B, H, Sq, Dv) for ops without gradient, with (B, Sq, H, Dv) contiguous; None if not applicable."""
    batch, heads, rows, _ = q.shape
    if (
        is_compiling()
        or watched(q, k, v, options["sinks"])
        or "score_mod" in options
        or v.shape[-1] * q.element_size() % 16
    ):
        return None
    return q.new_empty(batch, rows, heads, v.shape[-1]).transpose(1, 2)
