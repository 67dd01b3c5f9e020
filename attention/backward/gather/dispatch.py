"""Backward of selected_attention by the kernel with gathered KV tiles; other calls make a block mask."""

from torch import Tensor

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.call_plan import CallPlan
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for

from ...arguments import AttentionArgs
from ...decode.checks import unit_stride
from ...plan import gradient_of, scalars_of, view_of
from ...selected.blocks import SelectedBlocks
from ...selected.gather import serves as forward_serves
from ...selected.gather import tables
from ..sums import convert, zero_sums
from .config import BLOCK_SIZES, HEAD_DIMS, GatherBackwardFacts

OP = "selected_attention's backward"


def serves(args: AttentionArgs, deterministic: bool) -> bool:
    """True if the kernel computes the gradients of a call. args.sinks is None unless sinks need a gradient.

    deterministic: True if gradients must be; dK and dV are accumulated by atomics.
    """
    mask = args.block_mask
    return (
        isinstance(mask, SelectedBlocks)
        and not deterministic
        and args.sinks is None
        and args.softcap is None
        and args.q.shape[-1] in HEAD_DIMS
        and mask.block_size in BLOCK_SIZES
        and forward_serves(args)
    )


def facts_of(args: AttentionArgs, lse_gradient: bool) -> GatherBackwardFacts:
    """The kernel of a call."""
    q, mask = args.q, args.block_mask
    spec, _ = device_arch(q.get_device())
    return GatherBackwardFacts(
        spec.target, NAMES[q.dtype], q.shape[-1], mask.block_size, mask.causal, lse_gradient
    )  # fmt: skip


def backward(
    args: AttentionArgs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) of a call that `serves`, with the shapes and dtypes of q, k and v.

    out, lse: the results of forward, (B, H, Sq, D) and (B, H, Sq) FP32; dout, dlse: their gradients.
    """
    q, k, v = args[:3]
    plan = CallPlan(OP, tuple(q.shape), q.dtype, q.device)
    gradients = gradient_of(q), gradient_of(k), gradient_of(v)
    named: tuple[tuple[str, Tensor], ...] = (("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout))
    operands = [_readable(plan, name, t) for name, t in named]
    sums = zero_sums(k, v)
    dlse = None if dlse is None else unit_stride(dlse.contiguous())
    scale = q.shape[-1] ** -0.5 if args.scale is None else args.scale
    function = function_for(facts_of(args, dlse is not None))
    rows = unit_stride(lse.contiguous()), dlse
    function(*operands, *rows, gradients[0], *sums, tables(args), scalars_of(scale, None)[0], scale)
    convert(sums, scale, gradients[1:])
    return gradients


def _readable(plan: CallPlan, name: str, tensor: Tensor) -> Tensor:
    """The tensor, or a view or copy whose strides the kernel supports."""
    view = view_of(plan, name, tensor)
    return tensor if view is None else view(tensor)
