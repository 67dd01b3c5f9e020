"""Checks of a cache's arguments, seqlens_k and block_table, before any launch."""

import torch

from cute_kernels import checks as common

from .. import checks

LEAST_PAGE = 16  # rows


def check_cache(op: str, q, k, v, seqlens_k, block_table) -> None:
    """q, k and v as checks.check_qkv, where k and v have a batch of pages if there is a block_table."""
    if block_table is None:
        checks.check_qkv(op, q, k, v)
    else:
        checks.check_qkv(op, *(t[:0] if isinstance(t, torch.Tensor) and t.dim() == 4 else t for t in (q, k, v)))
        if k.shape[0] != v.shape[0]:
            raise ValueError(f"{op}: with a block_table k and v have {k.shape[0]} and {v.shape[0]} pages")
        rows = k.shape[2]
        if rows < LEAST_PAGE or rows & (rows - 1):
            raise ValueError(f"{op}: pages of {rows} rows; a power of two from {LEAST_PAGE} on works")
        if k.shape[0] == 0:
            raise ValueError(f"{op}: k and v have no pages")
        if seqlens_k is None:
            raise ValueError(f"{op}: a block_table needs seqlens_k, how many rows of its pages each item has")
    for name, tensor, dim in (("seqlens_k", seqlens_k, 1), ("block_table", block_table, 2)):
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


def capacity(k, block_table) -> int:
    """Rows of K and V that an item can have."""
    return k.shape[2] if block_table is None else block_table.shape[1] * k.shape[2]


def unit_stride(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with a stride of 1 in its last dimension where that has one entry: expand() may leave 0 there."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.shape[-1] != 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
