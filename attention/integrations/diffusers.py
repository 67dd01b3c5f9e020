"""Attention of diffusers' models with the kernels of `attention`.

    from attention.integrations.diffusers import register

    register()
    pipeline.transformer.set_attention_backend("cute_kernels")

diffusers' models call attention through a dispatcher with a registry of backends
(diffusers.models.attention_dispatch). Written for diffusers 0.42, whose registry is private and accepts only members of
an enum, which `register` extends.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from attention import BlockMask, block_sparse_attention, scaled_dot_product_attention
from attention.sdpa import NO_DROPOUT


def register(name: str = "cute_kernels") -> None:
    """Register an attention backend with diffusers, for the whole process.

    Afterwards `model.set_attention_backend(name)` and diffusers' context manager `attention_backend(name)` accept it.
    Supported are bool and additive masks, key padding masks (batch, keys), is_causal, enable_gqa and training, and
    with attention_kwargs or a processor of your own also block masks as attn_mask. Head dimensions without a kernel
    are padded with zeros in each call. A mask that is passed to all layers as one 4-D tensor is converted once; a 2-D
    mask is converted in each layer.

    Args:
        name: the backend's name. A repeated call with the same name has no effect.

    Raises:
        ValueError: the name is empty, not lowercase, or the name of one of diffusers' backends.
        NotImplementedError: in later calls, for dropout, return_lse and context parallelism.

    Example:
        >>> register()
        >>> pipeline.transformer.set_attention_backend("cute_kernels")
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    if not name or name != name.lower():  # set_attention_backend converts names to lowercase
        raise ValueError(f"name must be lowercase and not empty, got {name!r}; use 'cute_kernels'")
    member = AttentionBackendName._value2member_map_.get(name)
    if member is None:
        member = _new_member(AttentionBackendName, name)
    elif _AttentionBackendRegistry._backends.get(member) is not attend:
        raise ValueError(f"name {name!r} is one of diffusers' backends; use 'cute_kernels'")
    _AttentionBackendRegistry.register(member)(attend)


def _new_member(enum: Any, value: str):
    """Add a member to a string enum, which has no public way to do so."""
    member = str.__new__(enum, value)
    member._name_, member._value_ = value.upper(), value
    setattr(enum, member._name_, member)
    enum._member_map_[member._name_] = enum._value2member_map_[value] = member
    enum._member_names_.append(member._name_)
    return member


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | FlexBlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config=None,
) -> Tensor:
    """Attention of (batch, length, heads, head_dim) tensors, as diffusers' dispatcher calls it.

    Args:
        attn_mask: a mask of scaled_dot_product_attention; (batch, keys), a mask of keys; or a BlockMask.
        dropout_p, is_causal, scale, enable_gqa: see scaled_dot_product_attention.
        return_lse, _parallel_config: must be False and None.

    Returns:
        (batch, length, heads, head_dim).
    """
    if return_lse or _parallel_config is not None:
        what = "return_lse=True" if return_lse else "context parallelism"
        raise NotImplementedError(
            f"attention backend cute_kernels: {what} is not supported; use set_attention_backend('_native_flash')"
        )
    if dropout_p:
        raise NotImplementedError(f"attention backend cute_kernels: dropout_p is {dropout_p}; {NO_DROPOUT}")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if isinstance(attn_mask, (BlockMask, FlexBlockMask)):
        if is_causal:
            raise ValueError("attention backend cute_kernels: attn_mask and is_causal exclude each other")
        out = block_sparse_attention(q, k, v, attn_mask, scale=scale)
    else:
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        out = scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)
