"""Checks of a cache's arguments, seqused_k and page_table, before any launch."""

import torch

from cute_kernels import checks as common
from cute_kernels.dtypes import FLOAT8

from .. import checks

LEAST_PAGE = 16  # rows


def check_cache(op: str, q, k, v, seqused_k, page_table, q_descale=None, k_descale=None, v_descale=None) -> None:
    """q, k and v as checks.check_qkv, where k and v have a batch of pages if there is a page_table, or 8 bits. A
    q_descale is refused: q has 16 bits."""
    narrow = checks.narrow(k, v)
    if narrow or k_descale is not None or v_descale is not None:
        check_float8(op, q, k, v, k_descale, v_descale)
    if q_descale is not None:
        raise TypeError(
            f"{op}: with seqused_k or page_table q is of 16 bits and has no q_descale; multiply q or `scale` by it"
        )
    if page_table is None:
        checks.check_qkv(op, q, k, v, "" if narrow else "kv")
    else:
        parts = (t[:0] if isinstance(t, torch.Tensor) and t.dim() == 4 else t for t in (q, k, v))
        checks.check_qkv(op, *parts, "" if narrow else "kv")
        if k.shape[0] != v.shape[0]:
            raise ValueError(f"{op}: with a page_table k and v have {k.shape[0]} and {v.shape[0]} pages")
        rows = k.shape[2]
        if rows < LEAST_PAGE or rows & (rows - 1):
            raise ValueError(f"{op}: pages of {rows} rows; a power of two from {LEAST_PAGE} on works")
        if k.shape[0] == 0:
            raise ValueError(f"{op}: k and v have no pages")
        if seqused_k is None:
            raise ValueError(f"{op}: a page_table needs seqused_k, how many rows of its pages each item has")
    for name, tensor, dim in (("seqused_k", seqused_k, 1), ("page_table", page_table, 2)):
        if tensor is None:
            continue
        common.check_tensor(f"{op}: {name}", tensor)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be torch.int32")
        spans = dim == 1 and tensor.dim() == 2 and tensor.shape[1] == 2
        if (tensor.dim() != dim and not spans) or tensor.shape[0] != q.shape[0]:
            shape = f"({q.shape[0]},) or ({q.shape[0]}, 2)" if dim == 1 else f"({q.shape[0]}, pages of an item)"
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; it must be {shape}, q's batch")
        common.check_device(op, q.device, **{name: tensor})
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{op}: {name}, strides {tensor.stride()}, is not contiguous; call .contiguous()")


def check_float8(op: str, q, k, v, k_descale, v_descale) -> None:
    """k and v of one 8-bit dtype, where q is wider, and scales of them."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        common.check_tensor(f"{op}: {name}", tensor)
    known = " and ".join(map(str, FLOAT8))
    if k.dtype not in FLOAT8 or v.dtype != k.dtype:
        given = f"k is {k.dtype} and v {v.dtype}"
        raise TypeError(
            f"{op}: {given}; a cache with k_descale or v_descale, or of 8 bits, is of {known}, k and v alike"
        )
    if q.dtype in FLOAT8:
        raise TypeError(f"{op}: q is {q.dtype}; with k and v of 8 bits it is torch.bfloat16 or torch.float16")
    for name, scale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if scale is None:
            continue
        common.check_tensor(f"{op}: {name}", scale)
        if scale.dtype != torch.float32:
            raise TypeError(f"{op}: {name} is {scale.dtype}; it must be torch.float32")
        common.check_device(op, q.device, **{name: scale})
        items = q.shape[0], k.shape[1] if k.dim() > 1 else 0
        if scale.dim() > 2 or any(n not in (1, m) for n, m in zip(scale.shape[::-1], items[::-1], strict=False)):
            why = ": caches have no scales of blocks of tokens" if scale.dim() == 3 else ""
            raise ValueError(
                f"{op}: {name} has shape {tuple(scale.shape)}; it must be (1,), (Hkv,) or (B, Hkv), here "
                f"({items[1]},) or {items}{why}"
            )


def of_heads(scale: torch.Tensor | None, q, k) -> torch.Tensor | None:
    """A scale as (B, Hkv), of any strides."""
    return None if scale is None else scale.expand(q.shape[0], k.shape[1])


def capacity(k, page_table) -> int:
    """Rows of K and V that an item can have."""
    return k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]


def unit_stride(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with a stride of 1 in its last dimension where that has one entry: expand() may leave 0 there."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.shape[-1] != 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
