"""selected_attention: every query token attends to its own list of KV blocks."""

from typing import Any, Literal, Unpack, overload

from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.checks import watched
from cute_kernels.explain import explains
from cute_kernels.runtime.autocast import any_autocast
from cute_kernels.runtime.front import NeedsDispatcher, dispatched

from .. import dispatch
from ..annotations import SelectedOptions
from ..arguments import AttentionArgs
from ..checks import check_deterministic, narrow
from ..operands import autocast
from ..ops import call
from ..plan import FlashPlan
from .blocks import SIDE, SelectedBlocks
from .checks import OP, check
from .decode.dispatch import NO_GRADIENT, CacheArgs, attend, plan_selected
from .gather import gathered
from .rows import in_rows


@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, *, return_lse: Literal[False] = False,
    **options: Unpack[SelectedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block_size: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[SelectedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, *, return_lse: bool,
    **options: Unpack[SelectedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block_size: int,
    *,
    causal: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which every query token has its own list of KV blocks, as in MSA, QSA, NSA and MoBA.

    Args:
        q, k, v: (B, H, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), see attention; bfloat16 or float16, on the CPU
            also float32 or float64.
        indices: (B, Sq, top) or (B, Sq, G, top) int32: the KV blocks of each query token, in any order. G is 1 for one
            list for all heads, Hkv for one per KV head, or H for one per head of q. Entry i is the keys from
            i * block_size to before (i + 1) * block_size; the last block may be shorter. Lists that are shorter than
            `top` are padded with -1. Other entries that are no block of the sequence are ignored as well, and a block
            that is listed twice counts once.
        block_size: tokens of a KV block: 1, 4, 16, 64 or 128.
        causal: True also masks keys after the token's position, inside selected blocks: row i is at position
            i + Sk - Sq.
        softcap, scale, return_lse, sinks: see attention. With sinks the block-sparse kernels, and so backward, have
            tiles of 128 tokens of one head instead of the heads of a KV head, and so the union of more lists.
        deterministic: True for gradients that are bitwise identical on every run; None follows
            torch.use_deterministic_algorithms.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 for packed sequences, see attention: q is (total_q, H, D), k and v
            are (total_k, Hkv, D or Dv), and indices are (total_q, top) or (total_q, G, top). Blocks are counted from
            the first key of each sequence.
        seqused_k, page_table, k_descale, v_descale: see attention: a KV cache, contiguous, (B, Hkv, capacity, D), or
            paged, (pages, Hkv, page_size, D), with seqused_k (B,). k and v may be FP8. Blocks are logical blocks of the
            sequence, the last q token is at key seqused_k - 1, and Sq is at most 16. Only keys of listed blocks are
            read, and a list must not contain a block twice, which is not checked. No gradients, and not head
            dimension 512.

    Returns:
        (B, H, Sq, Dv) with q's dtype; with cu_seqlens (total_q, H, Dv). With return_lse=True also lse, (B, H, Sq) or
        (H, total_q) float32. A token without an unmasked key gets 0, and an lse of -inf, or its sink.

    Differentiable once in q, k, v and sinks. Selection has no gradient.

    Where forward gathers blocks (sm_90, see explain), indices are saved with q, k, v, out and lse, and must not be
    written to before backward, which raises then. A kernel that gathers blocks computes the gradients of blocks of 1
    to 64 tokens, with head dimension 64, 128 or 256, no softcap and no gradient of sinks. Block lists serve other
    calls, and those that are deterministic. They need bits of membership, Sq * Sk / block_size / 8 bytes per list (B *
    G lists), for the time of the pass. Where forward uses block lists, the bits are saved.

    Unless deterministic, gradients are accumulated by FP32 atomics and nondeterministic: dk and dv by the kernel that
    gathers blocks, dq by block lists, with blocks of 64 and 128 tokens on sm_90 also dk and dv.

    On a GPU the tables that kernels read are built in each call, without synchronization, so a CUDA graph replays with
    the current contents of indices: union tiles for the kernels that gather blocks (sm_90, see explain), or
    block lists and bits for the kernels of block_sparse_attention.

    Raises:
        TypeError, ValueError: an argument has an unsupported type, dtype, device, shape or strides. Raised before any
            launch. The contents of indices are not checked.
        RuntimeError: an argument requires a gradient, and the head dimension is 512 on a GPU, or there is a KV cache;
            or the GPU is older than sm_80.

    Example:
        q = torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, 2, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        newest = torch.arange(1024, device="cuda", dtype=torch.int32)[None, :, None] // 64  # its own block of 64
        indices = torch.cat([newest, newest - 1, newest * 0], -1)  # and the one before, and the first
        out = selected_attention(q, k, v, indices, 64, causal=True)
    """
    if any_autocast():
        q, k, v = autocast(q, k, v)
    if _cached(k, v, seqused_k, page_table, k_descale, v_descale):
        _refuse_packed(cu_seqlens_q, cu_seqlens_k)
        terms: dict[str, Any] = {"softcap": softcap, "scale": scale, "return_lse": return_lse, "causal": causal}
        terms |= {"seqused_k": seqused_k, "page_table": page_table, "k_descale": k_descale, "v_descale": v_descale}
        check_deterministic(OP, deterministic)  # of backward, which a cache does not have
        out, lse = _decode(CacheArgs(q, k, v, sinks=sinks, **terms), indices, block_size)
        return out if lse is None else (out, lse)
    check(q, k, v, indices, block_size, causal, softcap, scale, return_lse, sinks, cu_seqlens_q, cu_seqlens_k)
    args = _block_sparse(q, k, v, indices, block_size, causal, sinks, cu_seqlens_q, cu_seqlens_k)
    args = args._replace(softcap=softcap, scale=scale, return_lse=return_lse, sinks=sinks, deterministic=deterministic)
    found = call(args)
    out, lse = (found, None) if isinstance(found, Tensor) else found
    if cu_seqlens_q is not None:
        out, lse = out[0].transpose(0, 1).contiguous(), None if lse is None else lse[0]
    return out if lse is None else (out, lse)


def _cached(k, v, *tensors) -> bool:
    """True if the arguments are those of a KV cache."""
    return any(t is not None for t in tensors) or narrow(k, v)


def _refuse_packed(cu_seqlens_q, cu_seqlens_k) -> None:
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        raise TypeError(
            f"{OP}: cu_seqlens_q and cu_seqlens_k are not supported with a KV cache (seqused_k, page_table, k_descale, "
            "v_descale or FP8 k and v); pass q as (B, H, Sq, D) with the same number of tokens per sequence"
        )


def _decode(args: CacheArgs, indices: Tensor, block_size: int) -> tuple[Tensor, Tensor | None]:
    """A call with a KV cache."""
    q, k, v = args[:3]
    if watched(q, k, v, args.sinks):
        raise RuntimeError(NO_GRADIENT)
    if not is_compiling():
        try:
            if not dispatched(OP, q, k, v, indices, args.seqused_k, args.page_table, args.sinks, *args.descales):
                return attend(args, indices, block_size)
        except NeedsDispatcher:
            pass
    from .decode.torch_op import traced  # imports torch's compiler, which takes seconds

    return traced(args, indices, block_size)


def _block_sparse(q, k, v, indices, block_size, causal, sinks, cu_seqlens_q, cu_seqlens_k) -> AttentionArgs:
    """The same as a call of block_sparse_attention, of packed sequences with B of 1.

    Heads that have a list in common become rows (rows.py), unless they have sinks, which the kernels read by head.
    """
    if cu_seqlens_q is not None:
        q, k, v, indices = *(t.transpose(0, 1)[None] for t in (q, k, v)), indices[None]
    lists = indices if indices.dim() == 4 else indices[:, :, None]
    (heads, kv_heads), packed = (q.shape[1], k.shape[1]), 1
    if sinks is None and lists.shape[2] in (1, kv_heads) and kv_heads < heads <= kv_heads * SIDE:
        if heads % kv_heads:
            raise ValueError(f"{OP}: the heads of q must be a multiple of those of k, got {heads} and {kv_heads}")
        packed = heads // kv_heads
    mask = SelectedBlocks(lists, block_size, causal, packed, cu_seqlens_q, cu_seqlens_k)
    return AttentionArgs(q, k, v, block_mask=mask)


def _plan(
    q, k, v, indices, block_size, *, causal=False, cu_seqlens_q=None, cu_seqlens_k=None, softcap=None, scale=None,
    return_lse=False, sinks=None, seqused_k=None, page_table=None, k_descale=None, v_descale=None, **options,
) -> FlashPlan:  # fmt: skip
    """The plan of the same call of selected_attention."""
    q, k, v = autocast(q, k, v)
    if _cached(k, v, seqused_k, page_table, k_descale, v_descale):
        _refuse_packed(cu_seqlens_q, cu_seqlens_k)
        tensors = {"seqused_k": seqused_k, "page_table": page_table, "k_descale": k_descale, "v_descale": v_descale}
        cached = {"softcap": softcap, "scale": scale, "return_lse": return_lse, "causal": causal}
        return plan_selected(CacheArgs(q, k, v, sinks=sinks, **tensors, **cached), indices, block_size)
    check(q, k, v, indices, block_size, causal, softcap, scale, return_lse, sinks, cu_seqlens_q, cu_seqlens_k)
    args = _block_sparse(q, k, v, indices, block_size, causal, sinks, cu_seqlens_q, cu_seqlens_k)
    terms = {"softcap": softcap, "scale": scale, "return_lse": return_lse, "sinks": sinks}
    args = args._replace(**terms, **options)
    return dispatch.plan_attention(args if gathered(args) else in_rows(args, kernel=False))


explains(selected_attention, _plan)
