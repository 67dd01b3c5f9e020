"""The attention ops as torch.library knows them, for torch.compile and opcheck; eager calls go around them.

Each op gives (out, lse), an lse of no element where none is asked for; its twin `.._out` gives lse alone. A BlockMask
crosses the schema as its lists, lengths and block size, its mask_mod as mask_text.py has it.
"""

import torch
from torch import Tensor

from . import mask_text
from .block_mask import TABLES, BlockMask


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
) -> tuple[Tensor, Tensor]:
    from .ops import attention

    terms = {"causal": causal, "window": _window(left, right), "softcap": softcap, "scale": scale}
    return _pair(q, attention(q, k, v, **terms, return_lse=return_lse), return_lse)


@attention_op.register_fake
def _(q, k, v, causal=False, left=None, right=None, softcap=None, scale=None, return_lse=False):
    return _fake("attention", q, k, v, return_lse)


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
) -> Tensor:
    from .ops import attention

    terms = {"causal": causal, "window": _window(left, right), "softcap": softcap, "scale": scale}
    return _pair(q, attention(q, k, v, **terms, return_lse=return_lse, out=out), return_lse)[1]


@attention_out_op.register_fake
def _(q, k, v, out, causal=False, left=None, right=None, softcap=None, scale=None, return_lse=False):
    return _fake("attention", q, k, v, return_lse)[1]


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


def traced_attention(q, k, v, causal, window, softcap, scale, return_lse, out):
    """attention inside a torch.compile trace."""
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise TypeError(f"window must be (left, right), each an int or None without bound, got {window!r}")
    left, right = (None, None) if window is None else window
    terms = causal, left, right, _float(softcap), _float(scale), return_lse
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


def _fake(op: str, q, k, v, return_lse: bool) -> tuple[Tensor, Tensor]:
    torch._check(q.dim() == k.dim() == v.dim() == 4, lambda: f"{op}: q, k and v must have 4 dimensions")
    torch._check(q.shape[3] == k.shape[3], lambda: f"{op}: q has head_dim {q.shape[3]} and k {k.shape[3]}")
    torch._check(k.shape[2] == v.shape[2], lambda: f"{op}: k has {k.shape[2]} rows and v {v.shape[2]}")
    lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _block_mask(lists, lengths, blocksize, *mask_mod) -> BlockMask:
    """A mask for one call, of lists that were checked, or trusted, where the caller's mask was made."""
    facts = {"lengths": tuple(lengths), "blocksize": tuple(blocksize)}
    return BlockMask(*lists, **facts, mask_mod=mask_text.read(*mask_mod), check=False)
