"""Checks of the KV cache arguments, seqused_k and page_table, before any launch."""

import torch

from cute_kernels import checks as common
from cute_kernels.dtypes import FLOAT8

from .. import checks
from ..arguments import AttentionArgs

LEAST_PAGE = 16  # tokens


def check_cache(args: AttentionArgs) -> None:
    """Check q, k and v as checks.check_qkv does; k and v may be FP8, and with a page_table their batch is that of the
    pages.

    A q_descale raises TypeError, since q is 16-bit.
    """
    op, (q, k, v), seqused_k, page_table = args.op, args[:3], args.seqused_k, args.page_table
    narrow = checks.narrow(k, v)
    if narrow or args.k_descale is not None or args.v_descale is not None:
        check_float8(args)
    if args.q_descale is not None:
        raise TypeError(
            f"{op}: q_descale requires FP8 q, but with seqused_k or page_table q is 16-bit; multiply q or scale by it"
        )
    if page_table is None:
        checks.check_qkv(op, q, k, v, "" if narrow else "kv")
    else:
        parts = [t[:0] if isinstance(t, torch.Tensor) and t.dim() == 4 else t for t in (q, k, v)]
        checks.check_qkv(op, parts[0], parts[1], parts[2], "" if narrow else "kv")
        if k.shape[0] != v.shape[0]:
            raise ValueError(f"{op}: k and v must have the same number of pages, got {k.shape[0]} and {v.shape[0]}")
        rows = k.shape[2]
        if rows < LEAST_PAGE or rows & (rows - 1):
            raise ValueError(f"{op}: page size (k.shape[2]) must be a power of two, at least {LEAST_PAGE}, got {rows}")
        if k.shape[0] == 0:
            raise ValueError(f"{op}: k and v must have at least one page, got shape {tuple(k.shape)}")
        if seqused_k is None:
            raise ValueError(f"{op}: page_table requires seqused_k, the number of valid tokens in each sequence")
    for name, tensor, dim in (("seqused_k", seqused_k, 1), ("page_table", page_table, 2)):
        if tensor is None:
            continue
        common.check_tensor(f"{op}: {name}", tensor)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{op}: {name} must be torch.int32, got {tensor.dtype}")
        spans = dim == 1 and tensor.dim() == 2 and tensor.shape[1] == 2
        if (tensor.dim() != dim and not spans) or tensor.shape[0] != q.shape[0]:
            shape = f"({q.shape[0]},) or ({q.shape[0]}, 2)" if dim == 1 else f"({q.shape[0]}, pages per sequence)"
            raise ValueError(f"{op}: {name} must have shape {shape}, with q's batch, got {tuple(tensor.shape)}")
        common.check_device(op, q.device, **{name: tensor})
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} must be contiguous in its last dimension, got strides {tensor.stride()}; "
                "call .contiguous()"
            )


def check_float8(args: AttentionArgs) -> None:
    """Check that k and v have one FP8 dtype and q a 16-bit one, and check their dequantization scales."""
    op, (q, k, v) = args.op, args[:3]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        common.check_tensor(f"{op}: {name}", tensor)
    known = " or ".join(map(str, FLOAT8))
    if k.dtype not in FLOAT8 or v.dtype != k.dtype:
        raise TypeError(
            f"{op}: k and v of an FP8 cache, or one with k_descale or v_descale, must both be {known}, "
            f"got {k.dtype} and {v.dtype}"
        )
    if q.dtype in FLOAT8:
        raise TypeError(f"{op}: q must be torch.bfloat16 or torch.float16 with an FP8 cache, got {q.dtype}")
    for name, scale in (("k_descale", args.k_descale), ("v_descale", args.v_descale)):
        if scale is None:
            continue
        common.check_tensor(f"{op}: {name}", scale)
        if scale.dtype != torch.float32:
            raise TypeError(f"{op}: {name} must be torch.float32, got {scale.dtype}")
        common.check_device(op, q.device, **{name: scale})
        shape = q.shape[0], k.shape[1] if k.dim() > 1 else 0
        if scale.dim() > 2 or any(n not in (1, m) for n, m in zip(scale.shape[::-1], shape[::-1], strict=False)):
            reason = "; scales per block of tokens are not supported for a KV cache" if scale.dim() == 3 else ""
            raise ValueError(
                f"{op}: {name} must have shape (1,), (Hkv,) = ({shape[1]},) or (B, Hkv) = {shape}, "
                f"got {tuple(scale.shape)}{reason}"
            )


def of_heads(scale: torch.Tensor | None, q, k) -> torch.Tensor | None:
    """The scale expanded to (B, Hkv), with any strides."""
    return None if scale is None else scale.expand(q.shape[0], k.shape[1])


def capacity(k, page_table) -> int:
    """Maximum number of tokens per sequence in K and V."""
    return k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]


def with_unit_strides(args: AttentionArgs) -> AttentionArgs:
    """The call with seqused_k and page_table as the kernels read them."""
    seqused_k, page_table = unit_stride(args.seqused_k), unit_stride(args.page_table)
    if seqused_k is args.seqused_k and page_table is args.page_table:
        return args
    return args._replace(seqused_k=seqused_k, page_table=page_table)


def unit_stride(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with stride 1 in a last dimension of extent 1, where expand() may leave stride 0."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.shape[-1] != 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
