"""scaled_dot_product_attention: a drop-in replacement for torch's function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels import checks
from cute_kernels.explain import explains, planner_of

from .masks.cache import ElementTensor
from .masks.score_mods import Bias
from .operands import autocast, padded
from .ops import attention, block_sparse_attention

OP = "scaled_dot_product_attention"
ADDITIVE = (torch.float32, torch.bfloat16, torch.float16)
NO_DROPOUT = (
    "the kernels do not drop attention probabilities. Pass dropout_p=0.0 (dropout=0.0 of nn.MultiheadAttention and "
    "nn.TransformerEncoderLayer, attention_dropout=0 of a config, or model.eval()), or use "
    "torch.nn.functional.scaled_dot_product_attention"
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in replacement for torch.nn.functional.scaled_dot_product_attention, with its arguments and shapes.

    Args:
        query: (..., H, L, E) bfloat16 or float16, with any leading dimensions, or (L, E). On the CPU also float32 and
            float64.
        key, value: (..., Hkv, S, E) and (..., Hkv, S, Ev). Leading dimensions broadcast as in torch.
        attn_mask: at least 2 dimensions that broadcast to (..., H, L, S).

            - bool: True where a score takes part. Fully masked blocks of 128 x 128 are not computed. The list of blocks
              is built on the GPU, without synchronization, and cached with the tensor until it is written to, so pass
              the same tensor to all layers.
            - float32, bfloat16 or float16: added to the scaled scores in FP32; may be -inf. It gets a gradient if it
              requires one. Every score is computed, so for a mask of only 0 and -inf `attn_mask == 0` is faster.
              float64 with a float64 query, except under torch.compile.
        dropout_p: must be 0.0; dropout is not supported.
        is_causal: True lets row i attend to columns up to i, counted from the first row and column. (`causal` of
            `attention` is aligned to the last ones, which differs if L and S do.) Not together with attn_mask.
        scale: positive; 1 / sqrt(E) by default.
        enable_gqa: True allows H to be a multiple of Hkv: head h of query uses head h // (H / Hkv). Otherwise the
            numbers of heads must be equal, or 1.

    Returns:
        (..., H, L, Ev) with query's dtype. Fully masked rows are 0, as in torch since 2.5. Differentiable in query,
        key, value and an additive attn_mask, like `attention`.

    Under torch.autocast, operands narrower than 64 bits are cast to its dtype, as in torch. On a GPU, E or Ev other
    than 64, 96, 128, 192, 256, and 512 for both, is padded with zeros to the next of these, which copies the tensor.
    Above 256 there are no gradients.

    Raises:
        TypeError, ValueError: an argument has an unsupported type, dtype, device, shape or value. Raised before any
            launch.

    Example:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    """
    op, arguments, options, shape = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    out = op(*arguments, **options)
    if out.shape[-1] != shape[-1]:
        out = out[..., : shape[-1]]
    return out if out.shape == shape else out.reshape(shape)


def _plan(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # the signature of the op
    op, arguments, options, _ = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return planner_of(op)(*arguments, **options)


explains(scaled_dot_product_attention, _plan)


def _call(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa) -> tuple[Callable, tuple, dict, tuple]:
    """The op that computes it, its arguments and options, and the shape of the result."""
    _check(q, k, v, mask, dropout_p, is_causal, enable_gqa)
    q, k, v = autocast(q, k, v)  # here, so that what is padded is as small as the op's operands
    q, k, v, shape = _four_dimensions(q, k, v, enable_gqa)
    (rows, d), cols = q.shape[2:], k.shape[2]
    options = {"scale": d**-0.5 if scale is None and d else scale}
    q, k, v = padded(q, k, v)
    if mask is not None:
        mask = _mask(mask, q, k, shape)
        if mask.dtype != torch.bool:
            options["score_mod"] = Bias(mask[(None,) * (4 - mask.dim())])
            return attention, (q, k, v), options, shape
        return block_sparse_attention, (q, k, v, ElementTensor(mask)), options, shape
    if is_causal and cols >= rows:  # what comes after column `rows` is seen by none
        return attention, (q, k[:, :, :rows], v[:, :, :rows]), options | {"causal": True}, shape
    if is_causal:  # the window is aligned to the last row and column
        options["window_size"] = (None, rows - cols)
    return attention, (q, k, v), options, shape


def _check(q, k, v, mask, dropout_p, is_causal, enable_gqa) -> None:
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        checks.check_tensor(f"{OP}: {name}", tensor)
        if tensor.dim() < 2:
            raise ValueError(f"{OP}: {name} has shape {tuple(tensor.shape)}; it must be (..., length, head_dim)")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{OP}: {name} must be True or False, got {flag!r}")
    checks.check_scalar(OP, "dropout_p", dropout_p)
    if dropout_p != 0:
        raise ValueError(f"{OP}: dropout_p is {dropout_p}; {NO_DROPOUT}")
    if mask is None:
        return
    checks.check_tensor(f"{OP}: attn_mask", mask)
    exact = mask.dtype == q.dtype == torch.float64 and not is_compiling()  # on the CPU, where no kernel is compiled
    if mask.dtype != torch.bool and mask.dtype not in ADDITIVE and not exact:
        cast = "attn_mask.to(torch.float32)" if mask.is_floating_point() else "attn_mask.bool(), True where it is not 0"
        raise TypeError(f"{OP}: attn_mask is {mask.dtype}; it must be bool, float32, bfloat16 or float16; pass {cast}")
    if is_causal:
        how = "pass attn_mask & its lower triangle" if mask.dtype == torch.bool else "add -inf above its diagonal"
        raise ValueError(f"{OP}: attn_mask and is_causal exclude each other; {how}")
    if not (q.is_meta and mask.is_meta):
        checks.check_device(OP, q.device, attn_mask=mask)


def _four_dimensions(q, k, v, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, tuple]:
    """q (B, H, L, E), k and v (B, Hkv, S, ..), and the shape (..., H, L, Ev) of the result."""
    dims = max(q.dim(), k.dim(), v.dim())
    if enable_gqa and dims < 3:
        raise ValueError(f"{OP}: enable_gqa needs a dimension of heads, (..., heads, length, head_dim)")
    rank = max(dims, 4)
    batch, heads = q.shape[:-3], tuple(t.shape[-3] if t.dim() > 2 else 1 for t in (q, k, v))
    if not q.dim() == k.dim() == v.dim() == 4 or not batch == k.shape[:-3] == v.shape[:-3]:
        try:
            batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        except RuntimeError:
            shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
            raise ValueError(f"{OP}: query, key and value of shapes {shapes} have batches that do not agree") from None
    h, hk, hv = heads
    if enable_gqa:
        if not h == hk == hv and (min(heads) < 1 or h % hk or h % hv):
            raise ValueError(f"{OP}: {h} heads of query must be a multiple of {hk} of key and of {hv} of value")
        kv_heads = hk if hk == hv else h
        k, v = (t if n == kv_heads else t.repeat_interleave(h // n, -3) for t, n in ((k, hk), (v, hv)))
    else:
        h = max(heads) if 0 not in heads else 0
        if any(n not in (1, h) for n in heads):
            raise ValueError(
                f"{OP}: query, key and value have {heads[0]}, {hk} and {hv} heads; they must be equal, or 1. "
                "enable_gqa=True lets heads of query share those of key and value"
            )
        kv_heads = 1 if hk == hv == 1 else h
    shape = (*batch, *((h,) if dims > 2 else ()), q.shape[-2], v.shape[-1])
    q, k, v = (
        _of_shape(t, (*(batch or (1,)), n, *t.shape[-2:]), rank) for t, n in ((q, h), (k, kv_heads), (v, kv_heads))
    )
    return q, k, v, shape


def _of_shape(t: Tensor, shape: tuple, rank: int) -> Tensor:
    """(B, H, S, D) of a tensor that broadcasts to (..., H, S, D)."""
    if t.shape != shape:
        t = t[(None,) * (len(shape) - t.dim())].expand(shape)
    t = t if rank == 4 else t.flatten(0, rank - 4)
    return t if t.stride(-1) == 1 else t.contiguous()


def _mask(mask: Tensor, q: Tensor, k: Tensor, shape: tuple) -> Tensor:
    """The mask, of at most 4 dimensions that broadcast to (B, H, L, S); the very tensor where that is possible."""
    lengths, before = (q.shape[2], k.shape[2]), shape[:-2]
    if mask.dim() < 2:
        raise ValueError(f"{OP}: attn_mask has shape {tuple(mask.shape)}; it must have 2 dimensions or more")
    ends = zip(reversed(mask.shape), reversed((*before, *lengths)))  # mask may have fewer
    if mask.dim() > len(before) + 2 or any(have not in (1, want) for have, want in ends):
        raise ValueError(
            f"{OP}: attn_mask has shape {tuple(mask.shape)}, which does not broadcast to {(*before, *lengths)}"
        )
    if mask.dim() > 4 or (mask.dim() == 4 and len(before) > 2):
        mask = mask.expand(*before[:-1], *mask.shape[-3:]).flatten(0, -4)
    return mask
