"""The attention ops as torch.library knows them, for torch.compile and opcheck; eager calls go around them.

Each op gives (out, lse), an lse of no element where none is asked for; its twin `.._out` gives lse alone. A BlockMask
crosses the schema as its lists, lengths and block size, its mask_mod as mask_text.py has it.
"""

import weakref

import torch
from torch import Tensor

from . import mask_text
from .block_mask import TABLES, BlockMask

MOST_MASKS = 64
_MASKS: dict[tuple, tuple] = {}  # ids of its tensors, and the rest of a mask -> (weak references to them, the mask)


@torch.library.custom_op("attention::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from .ops import attention

    terms = {"causal": causal, "window": _window(left, right), "softcap": softcap, "scale": scale}
    terms |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    terms |= {"seqlens_k": seqlens_k, "block_table": block_table}
    return _pair(q, attention(q, k, v, **terms, return_lse=return_lse), return_lse)


@attention_op.register_fake
def _(q, k, v, causal=False, left=None, right=None, softcap=None, scale=None, return_lse=False, *tensors):
    return _fake("attention", q, k, v, return_lse, *tensors)


@torch.library.custom_op("attention::attention_out", mutates_args=("out",))
def attention_out_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    from .ops import attention

    terms = {"causal": causal, "window": _window(left, right), "softcap": softcap, "scale": scale}
    terms |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    terms |= {"seqlens_k": seqlens_k, "block_table": block_table}
    return _pair(q, attention(q, k, v, **terms, return_lse=return_lse, out=out), return_lse)[1]


@attention_out_op.register_fake
def _(q, k, v, out, causal=False, left=None, right=None, softcap=None, scale=None, return_lse=False, *tensors):
    return _fake("attention", q, k, v, return_lse, *tensors)[1]


@torch.library.custom_op("attention::block_sparse_attention", mutates_args=())
def block_sparse_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: list[Tensor],
    lengths: list[int],
    blocksize: list[int],
    mask_mod: str | None,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    causal: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    from .ops import block_sparse_attention

    mask = _block_mask(lists, lengths, blocksize, mask_mod, mask_numbers, mask_tensors)
    terms = {"causal": causal, "softcap": softcap, "scale": scale}
    return _pair(q, block_sparse_attention(q, k, v, mask, **terms, return_lse=return_lse), return_lse)


@block_sparse_op.register_fake
def _(
    q,
    k,
    v,
    lists,
    lengths,
    blocksize,
    mask_mod,
    mask_numbers,
    mask_tensors,
    causal=False,
    softcap=None,
    scale=None,
    return_lse=False,
):
    return _fake("block_sparse_attention", q, k, v, return_lse)


@torch.library.custom_op("attention::block_sparse_attention_out", mutates_args=("out",))
def block_sparse_out_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: list[Tensor],
    lengths: list[int],
    blocksize: list[int],
    mask_mod: str | None,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    out: Tensor,
    causal: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor:
    from .ops import block_sparse_attention

    mask = _block_mask(lists, lengths, blocksize, mask_mod, mask_numbers, mask_tensors)
    terms = {"causal": causal, "softcap": softcap, "scale": scale}
    return _pair(q, block_sparse_attention(q, k, v, mask, **terms, return_lse=return_lse, out=out), return_lse)[1]


@block_sparse_out_op.register_fake
def _(
    q,
    k,
    v,
    lists,
    lengths,
    blocksize,
    mask_mod,
    mask_numbers,
    mask_tensors,
    out,
    causal=False,
    softcap=None,
    scale=None,
    return_lse=False,
):
    return _fake("block_sparse_attention", q, k, v, return_lse)[1]


def traced_attention(q, k, v, causal, window, softcap, scale, return_lse, out, *tensors):
    """attention inside a torch.compile trace; tensors are cu_seqlens_q, cu_seqlens_k, seqlens_k and block_table."""
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise TypeError(f"window must be (left, right), each an int or None without bound, got {window!r}")
    left, right = (None, None) if window is None else window
    terms = causal, left, right, _float(softcap), _float(scale), return_lse, *tensors
    if out is None:
        out, lse = torch.ops.attention.attention(q, k, v, *terms)
    else:
        lse = torch.ops.attention.attention_out(q, k, v, out, *terms)
    return (out, lse) if return_lse else out


def traced_block_sparse(q, k, v, block_mask, causal, softcap, scale, return_lse, out):
    """block_sparse_attention inside a torch.compile trace."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            "block_sparse_attention: under torch.compile block_mask must be a BlockMask; make it outside, with "
            "BlockMask.from_blocks, from_bsr or from_flex"
        )
    lists = [getattr(block_mask, name) for name in TABLES]
    mask = lists, list(block_mask.lengths), list(block_mask.blocksize), *mask_text.written(block_mask.mask_mod)
    terms = causal, _float(softcap), _float(scale), return_lse
    if out is None:
        out, lse = torch.ops.attention.block_sparse_attention(q, k, v, *mask, *terms)
    else:
        lse = torch.ops.attention.block_sparse_attention_out(q, k, v, *mask, out, *terms)
    return (out, lse) if return_lse else out


def _float(value):
    return None if value is None else float(value)


def _window(left: int | None, right: int | None) -> tuple | None:
    return None if left is None and right is None else (left, right)


def _pair(q, result, return_lse: bool) -> tuple[Tensor, Tensor]:
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _fake(
    op: str, q, k, v, return_lse: bool, cu_q=None, cu_k=None, seqlens_k=None, block_table=None
) -> tuple[Tensor, Tensor]:
    packed = cu_q is not None or cu_k is not None
    rank = 3 if packed else 4
    torch._check(q.dim() == k.dim() == v.dim() == rank, lambda: f"{op}: q, k and v must have {rank} dimensions")
    torch._check(q.shape[-1] == k.shape[-1], lambda: f"{op}: q has head_dim {q.shape[-1]} and k {k.shape[-1]}")
    rows = 0 if packed else 2
    torch._check(k.shape[rows] == v.shape[rows], lambda: f"{op}: k has {k.shape[rows]} rows and v {v.shape[rows]}")
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    lse = q.new_empty(shape if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _block_mask(lists, lengths, blocksize, *mask_mod) -> BlockMask:
    """A mask of lists that were checked, or trusted, where the caller's mask was made.

    The latest ones are kept, while their lists live, for what is made of a mask once (sparse_plan) is kept with it.
    """
    tensors = (*lists, *mask_mod[2])
    key = *(id(t) for t in tensors), *lengths, *blocksize, mask_mod[0], *mask_mod[1]
    refs, mask = _MASKS.get(key, ((), None))
    if mask is not None and all(ref() is t for ref, t in zip(refs, tensors, strict=True)):
        return mask
    facts = {"lengths": tuple(lengths), "blocksize": tuple(blocksize)}
    # Of aliases, since what is kept must not keep the caller's tensors alive
    mask = BlockMask(*(t.detach() for t in lists), **facts, mask_mod=mask_text.read(*mask_mod), check=False)
    if len(_MASKS) >= MOST_MASKS:
        _MASKS.pop(next(iter(_MASKS)))
    _MASKS[key] = tuple(weakref.ref(t) for t in tensors), mask
    return mask
