"""torch.nn.functional.scaled_dot_product_attention with the kernels of `attention`.

    from attention.integrations.torch import activate

    activate()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

torch has a registry of implementations of its flash attention backend,
torch.nn.attention.register_flash_attention_impl. An implementation replaces the CUDA kernels of the aten operators that
SDPA, nested tensors and torch.nn.attention.varlen call. Their autograd formulas and their meta functions stay torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention import attention, attention_backward
from attention.checks import tma_ready
from attention.operands import padded

NAME = "cute_kernels"
# Arguments of torch's flash attention operators that are not supported, and what works.
INSTEAD = {
    "dropout_p": (
        "pass dropout_p=0.0 (model.eval()), or choose another backend with "
        "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION)"
    ),
    "return_debug_mask": "pass return_debug_mask=False; no attention weights are stored",
    "alibi_slopes": "call attention.attention(score_mod=attention.score_mods.ALiBi(slopes))",
    "seqused_k": "call attention.attention(seqused_k=, page_table=) with q (B, H, Sq, D)",
    "block_table": "call attention.attention(seqused_k=, page_table=) with q (B, H, Sq, D)",
    "num_splits": "pass num_splits=None; attention chooses the number of splits",
}


def activate() -> None:
    """Let torch.nn.functional.scaled_dot_product_attention use these kernels on CUDA tensors.

    SDPA calls them wherever it selects its flash attention backend: bfloat16 or float16 q, k and v of one head
    dimension up to 256, without attn_mask (is_causal=True only with as many queries as keys), and nested tensors.
    enable_gqa=True is supported, and so are backward, torch.compile and CUDA graphs. torch selects another backend
    for other calls, which does not change. torch.nn.attention.varlen.varlen_attn uses these kernels, too.

    Head dimensions without a kernel (other than 64, 96, 128, 192 and 256) are padded with zeros in each call.

    Two settings of the process change. torch.nn.attention.restore_flash_attention_impl() restores both. Do not call
    activate inside torch.nn.attention.sdpa_kernel, which enables cuDNN attention again at its end.

    - The implementation "cute_kernels" is registered with torch and activated, in place of an earlier one.
    - cuDNN attention is disabled (torch.backends.cuda.enable_cudnn_sdp), which torch prefers to flash attention on
      Hopper.

    Raises:
        RuntimeError: torch has no registry of flash attention implementations. Call
            attention.scaled_dot_product_attention instead, which has the same arguments.
        NotImplementedError: in later calls, for arguments that these kernels do not support: dropout, and in
            varlen_attn seqused_k, block_table and num_splits. The message names an alternative.

    Example:
        >>> activate()
        >>> torch.nn.attention.current_flash_attention_impl()
        'cute_kernels'
        >>> torch.nn.attention.restore_flash_attention_impl()
    """
    import torch.nn.attention as registry

    if not hasattr(registry, "register_flash_attention_impl"):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; call "
            "attention.scaled_dot_product_attention instead of torch.nn.functional.scaled_dot_product_attention"
        )
    registry.register_flash_attention_impl(NAME, register_fn=Registration)
    registry.activate_flash_attention_impl(NAME)


class Registration:
    """The kernels, registered with torch's dispatcher until `remove` is called (torch's FlashAttentionHandle)."""

    def __init__(self, key: str = "CUDA"):
        self.library: Any = torch.library.Library("aten", "IMPL", key)
        for name, kernel in KERNELS.items():
            if hasattr(torch.ops.aten, name):  # not all versions of torch have all of them
                self.library.impl(name, kernel, key)
        self.cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        if self.library is not None:
            self.library = None  # its finalizer removes the kernels
            if not torch.backends.cuda.cudnn_sdp_enabled():  # otherwise the program has enabled it since
                torch.backends.cuda.enable_cudnn_sdp(self.cudnn)


# ---------------------------------------------------------------------- the operators


def _sdpa(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None) -> tuple:
    """aten::_scaled_dot_product_flash_attention, of (B, H, S, D) tensors."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    out, lse = _forward(query, key, value, torch.empty_like(query), causal=is_causal, scale=scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
) -> tuple:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward."""
    _refuse(dropout_p=dropout_p)
    return _backward(grad_out, query, key, value, out, logsumexp, causal=is_causal, scale=scale)


def _flash(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options
) -> tuple:
    """aten::_flash_attention_forward, of (B, S, H, D) tensors, or (total, H, D) packed ones."""
    out = torch.empty_like(query)
    lse = _flash_inplace(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options
    )
    return out, lse, *_unused(query)


def _flash_inplace(
    out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
) -> Tensor:  # fmt: skip
    """aten::_flash_attention_forward_no_dropout_inplace: writes out, and returns the LSE."""
    packed = cum_seq_q is not None
    _refuse(
        dropout_p=dropout_p, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes, seqused_k=seqused_k,
        block_table=block_table, num_splits=None if num_splits == 1 and packed else num_splits,
    )  # fmt: skip
    options = {"causal": is_causal, "scale": scale, "window_size": _window(window_size_left, window_size_right)}
    if packed:
        return _forward(query, key, value, out, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, **options)[1]
    return _forward(*(t.transpose(1, 2) for t in (query, key, value, out)), **options)[1]


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
) -> tuple:  # fmt: skip
    """aten::_flash_attention_backward."""
    _refuse(dropout_p=dropout_p)
    options = {"causal": is_causal, "scale": scale, "window_size": _window(window_size_left, window_size_right)}
    if cum_seq_q is not None:
        options |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
        return _backward(grad_out, query, key, value, out, logsumexp, **options)
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    return tuple(t.transpose(1, 2) for t in _backward(dout, q, k, v, o, logsumexp, **options))


KERNELS = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_inplace,
    "_flash_attention_backward": _flash_backward,
}


def _refuse(**options) -> None:
    for name, value in options.items():
        if isinstance(value, Tensor) or value:
            shown = "a tensor" if isinstance(value, Tensor) else value
            raise NotImplementedError(
                f"torch's flash attention with the kernels of cute_kernels does not support {name}, got {shown}; "
                f"{INSTEAD[name]}"
            )


def _window(left: int | None, right: int | None) -> tuple | None:
    bounds = tuple(None if n is None or n < 0 else n for n in (left, right))
    return None if bounds == (None, None) else bounds


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The random state and the debug mask, which nothing reads: there is no dropout."""
    return query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64), query.new_empty(0)


# ---------------------------------------------------------------------- calls of attention


@torch.no_grad()  # torch's autograd formula records the operator
def _forward(q, k, v, out, *, scale, **options) -> tuple[Tensor, Tensor]:
    """(out, lse) of (B, H, S, D) or packed (total, H, D) tensors; writes out."""
    d = q.shape[-1]
    options |= {"scale": d**-0.5 if scale is None else scale, "return_lse": True}
    q, k, v = padded(*(_unit_stride(t) for t in (q, k, v)))
    if q.shape[-1] == d and tma_ready(out):
        return attention(q, k, v, out=out, **options)
    result, lse = attention(q, k, v, **options)
    return out.copy_(result[..., :d]), lse


@torch.no_grad()
def _backward(dout, q, k, v, out, lse, *, scale, **options) -> tuple[Tensor, ...]:
    """(dq, dk, dv), of the strides that torch.compile expects: those of torch.empty_like."""
    d = q.shape[-1]
    options["scale"] = d**-0.5 if scale is None else scale
    inputs = q, k, v
    q, k, v, dout, out = (_unit_stride(t) for t in (q, k, v, dout, out))
    q, k, v = padded(q, k, v)
    if v.shape[-1] != d:
        dout, out = (pad(t, (0, v.shape[-1] - d)) for t in (dout, out))
    found = attention_backward(dout, q, k, v, out, lse, **options)
    return tuple(
        g if g.stride() == t.stride() and g.shape == t.shape else torch.empty_like(t).copy_(g[..., :d])
        for g, t in zip(found, inputs, strict=True)
    )


def _unit_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()
