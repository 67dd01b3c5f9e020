"""Rows sorted by expert, and the padded layout that the grouped GEMM reads: every expert's rows fill whole runs.

All of it is computed on the device from the offsets. Extents depend on shapes alone, so nothing synchronizes, a CUDA
graph may replay it with other offsets, and torch.compile traces it with a dynamic number of rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import checks
from cute_kernels.dtypes import FLOAT8
from cute_kernels.runtime.front import dispatched
from cute_kernels.runtime.torch_compat import functorch_active

from .checks import RUN_MULTIPLE

GROUP_ROWS = 128  # rows of a run where the caller does not say


class Padding(NamedTuple):
    """A padded layout of T rows.

    rows: of the layout, a multiple of group_rows; an upper bound that depends on shapes alone.
    slots: (T,) int64, the place of each row in the layout.
    groups: (rows / group_rows,) int32, the expert of each run; at least the number of experts for padding.
    """

    rows: int
    slots: Tensor
    groups: Tensor


def padding_of(ends: Tensor, total: int, group_rows: int, tail: bool) -> Padding:
    """The padded layout of rows sorted by expert.

    Args:
        ends: (E,) int64, ascending, in [0, total]: where each expert's rows end.
        total: T, the number of rows.
        tail: True if rows may follow the last expert's. They get runs that belong to no expert.
    """
    begins = torch.nn.functional.pad(ends, (1, 0))  # (E + 1,) with the tail's
    padding = (begins[:-1] - ends) % group_rows  # after each expert's rows
    shift = torch.nn.functional.pad(padding.cumsum(0), (1, 0))  # from a row to its place, by expert
    numbers = torch.arange(total, device=ends.device)
    slots = numbers + shift[torch.searchsorted(ends, numbers, right=True)]
    # At most T / group_rows whole runs, and one that is partly filled for each expert with rows. The builtin min of a
    # symbolic integer is traced by torch 2.11, which torch.sym_min is not.
    runs = total // group_rows + min(total, ends.shape[0] + int(tail))
    firsts = torch.arange(runs, device=ends.device) * group_rows
    groups = torch.searchsorted(ends + shift[1:], firsts, right=True, out_int32=True)
    return Padding(runs * group_rows, slots, groups)


def padding_for(op: str, x: Tensor, W, offs: Tensor, group_rows: int | None) -> Padding:
    """The padded layout of a call's rows, after checks of x, offs and group_rows.

    Offsets beyond T count as T, and one that is smaller than the one before it is an empty expert.
    """
    checks.check_tensor(f"{op}: offs", offs)
    if not torch.compiler.is_compiling():
        dispatched(op, x, offs)  # refuses what the copies below would not, such as a DTensor
    if offs.dim() != 1 or offs.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: offs must be (E,) torch.int32 or torch.int64, got {tuple(offs.shape)} {offs.dtype}")
    if group_rows is None:
        group_rows = GROUP_ROWS
    if isinstance(group_rows, bool) or not isinstance(group_rows, int) or group_rows < 1 or group_rows % RUN_MULTIPLE:
        raise ValueError(
            f"{op}: group_rows must be a positive multiple of {RUN_MULTIPLE}, got {group_rows!r}; leave it out for "
            f"{GROUP_ROWS}"
        )
    if x.dim() != 2:
        raise ValueError(f"{op}: x must be (T, K), got {tuple(x.shape)}; flatten its leading dimensions")
    shape: tuple[int, ...] = getattr(W, "shape", ())
    if len(shape) == 3 and (offs.shape[0], x.shape[1]) != (shape[0], shape[2]):
        raise ValueError(
            f"{op}: W is {tuple(shape)}, so x must be (T, {shape[2]}) and offs ({shape[0]},), one for each of its "
            f"items; got {tuple(x.shape)} and {tuple(offs.shape)}"
        )
    if not (x.is_meta and offs.is_meta):  # of these the registered op makes a result without memory
        checks.check_device(op, x.device, offs=offs)
    ends = offs.long().clamp(0, x.shape[0]).cummax(0).values
    return padding_of(ends, x.shape[0], group_rows, tail=True)


def spread(x: Tensor, padding: Padding, each: int = 1) -> Tensor:
    """Rows of x (T, ...) in the padded layout, zeros between them.

    Args:
        each: places of a row, which follow each other in padding.slots (T * each,).
    """
    if x.dtype in FLOAT8:  # index_copy has no kernel for them; bits of zero are zero
        return spread(x.view(torch.uint8), padding, each).view(x.dtype)
    if torch.jit.is_tracing():  # which fails on a Function with setup_context
        return _copied(x, padding.slots, padding.rows, each)
    return _Spread.apply(x, padding.slots, padding.rows, each)


def _copied(x: Tensor, slots: Tensor, rows: int, each: int) -> Tensor:
    """_Spread by differentiable torch ops, which copy the result once more for each place of a row."""
    out = x.new_zeros(rows, *x.shape[1:])
    for places in slots.unflatten(0, (-1, each)).unbind(1):
        out = out.index_copy(0, places, x)
    return out


def spread_scale(op: str, scale: Tensor | None, x: Tensor, padding: Padding) -> Tensor | None:
    """Scales of x's rows, one element or (T,) or (T, 1), in the padded layout."""
    if scale is None:
        return None
    checks.check_tensor(f"{op}: scale_x", scale)
    if scale.numel() == 1:
        return scale
    T = x.shape[0]
    if tuple(scale.shape) not in ((T,), (T, 1)):
        raise ValueError(f"{op}: scale_x must have one element, or be ({T},) or ({T}, 1), got {tuple(scale.shape)}")
    return spread(scale, padding)


class _Spread(torch.autograd.Function):
    """Rows of x (T, ...) in the places `slots` (T * each,), which differ; backward sums each row's, in their order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, slots: Tensor, rows: int, each: int) -> Tensor:
        # vmap has no rule for index_copy_, and torch.compile of torch 2.11 loses it in the backward of _Taken
        if functorch_active() or torch.compiler.is_compiling():
            return _copied(x, slots, rows, each)
        out = x.new_zeros(rows, *x.shape[1:])
        for places in slots.unflatten(0, (-1, each)).unbind(1):
            out.index_copy_(0, places, x)
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, slots, _, ctx.each = inputs
        ctx.save_for_backward(slots)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (slots,) = ctx.saved_tensors
        dx = _Taken.apply(dy, slots)
        return dx if ctx.each == 1 else dx.unflatten(0, (-1, ctx.each)).sum(1), None, None, None


class _Taken(torch.autograd.Function):
    """y.index_select(0, slots) for slots that differ: backward writes each row once, without atomics."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, slots: Tensor) -> Tensor:
        return y.index_select(0, slots)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        y, slots = inputs
        ctx.save_for_backward(slots)
        ctx.rows = y.shape[0]

    @staticmethod
    def backward(ctx, dy: Tensor):
        (slots,) = ctx.saved_tensors
        return _Spread.apply(dy, slots, ctx.rows, 1), None


def taken(y: Tensor, padding: Padding) -> Tensor:
    """(T, ...): the rows of y in the padded layout, without the padding."""
    return _Taken.apply(y, padding.slots)
