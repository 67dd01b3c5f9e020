"""Checks of attention's arguments, before any launch; each raises with what is wrong and what would work."""

import torch

from cute_kernels import checks

from .heuristics import HEAD_DIMS

MOST_ELEMENTS = 2**31 - 1  # of a length or a count of tiles


check_tensor = checks.check_tensor


def check_qkv(op: str, q, k, v) -> None:
    """q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), of one 16-bit dtype and device, D and Dv contiguous."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.check_tensor(f"{op}: {name}", tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}; it must be (batch, heads, length, head_dim)"
            )
    checks.check_operands(op, q=q, k=k, v=v)
    (B, H, _, D), (Bk, heads, _, Dk) = q.shape, k.shape
    if Bk != B or v.shape[0] != B:
        raise ValueError(f"{op}: q, k and v have batches of {B}, {Bk} and {v.shape[0]} items")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"{op}: k {tuple(k.shape)} and v {tuple(v.shape)} differ in heads or length")
    if Dk != D:
        raise ValueError(f"{op}: q has head_dim {D} and k {Dk}")
    if heads == 0 or H % heads:
        raise ValueError(f"{op}: {H} heads of q share {heads} of k and v: the first must be a multiple of the second")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.device.type == "cuda" and tensor.shape[-1] not in HEAD_DIMS:
            raise ValueError(
                f"{op}: {name} has head_dim {tensor.shape[-1]}; kernels exist for {', '.join(map(str, HEAD_DIMS))}: "
                "pad it with zeros (torch.nn.functional.pad) and pass scale"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{op}: {name}'s last dimension, strides {tensor.stride()}, is not contiguous; call .contiguous()"
            )


def check_scale(op: str, scale, softcap) -> None:
    """Numbers above 0: the kernels look for a row's largest score before they scale it."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None:
            continue
        checks.check_scalar(op, name, value)
        if not 0 < value < float("inf"):
            raise ValueError(f"{op}: {name} is {value}; it must be above 0 and finite")


def window_bounds(op: str, causal, window) -> tuple[int | None, int | None]:
    """(left, right): how many columns before and after its own a row sees; None for all of them."""
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be True or False, got {causal!r}")
    left, right = (None, None)
    if window is not None:
        if not isinstance(window, tuple) or len(window) != 2:
            raise TypeError(f"{op}: window must be (left, right), each a number of columns or None, got {window!r}")
        for name, bound in zip(("left", "right"), window, strict=True):
            if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
                raise ValueError(f"{op}: window's {name} bound is {bound!r}; it must be 0 or more, or None")
        left, right = window
    if causal:
        right = 0
    return left, right


def check_out(op: str, out, shape, dtype, device, operands) -> None:
    """out has the result's shape and dtype, contiguous head dims, and no memory of an operand."""
    if out is None:
        return
    checks.check_result(op, "out", out, shape, dtype)
    checks.check_device(op, device, out=out)
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ValueError(f"{op}: out's last dimension, strides {out.stride()}, is not contiguous")
    if not tma_ready(out):
        raise ValueError(f"{op}: out's address and strides {out.stride()} must be multiples of 16 bytes")
    checks.check_out(op, out, *operands)


def tma_ready(tensor: torch.Tensor) -> bool:
    """Whether the address and all strides of dimensions above 1 are multiples of 16 bytes, and none is 0."""
    if tensor.data_ptr() % 16:
        return False
    strides = (s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1)
    return all(s > 0 and s % 8 == 0 for s in strides)
