"""Launch the kernels that move rows of a mixture of experts. None of them synchronizes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime import families
from cute_kernels.runtime.device import device_arch

from . import family  # noqa: F401 (importing it registers the family)
from .config import MOST_EXPERTS, RESIDENT, VECTOR, WARPS, RowsFacts


class Segments(NamedTuple):
    """The rows of each expert and rank in the layout of one rank.

    table: (ranks, experts + 2) int64, where each rank's sorted rows of each expert begin.
    firsts: (experts of a rank * ranks + 1,) int32, the row of the layout where those of (expert, rank) begin.
    first_expert: of this rank.
    k: choices of a token.
    group_rows: rows of a run.
    """

    table: Tensor
    firsts: Tensor
    first_expert: int
    k: int
    group_rows: int


def supports(x: Tensor, weights: Tensor, experts: int) -> bool:
    """True if the kernels take tokens x (T, N) and these weights; the same for all ranks of a mesh."""
    rows = x.dtype in NAMES and x.shape[1] % VECTOR == 0 and x.shape[1] > 0
    return rows and weights.dtype in NAMES and experts <= MOST_EXPERTS


def places_of(table: Tensor, order: Tensor, rank: int, k: int, group_rows: int) -> tuple[Tensor, Segments]:
    """The place of each choice, and the segments of this rank's layout.

    Args:
        table: see Segments.
        order: (T * k,) int64, the choice of each of this rank's sorted rows.

    Returns:
        (T * k,) int64, rank << 32 | row of its layout, or -1 for choices of no expert; the segments.
    """
    ranks, each = table.shape[0], (table.shape[1] - 2) // table.shape[0]
    places, firsts = torch.empty_like(order), order.new_empty(each * ranks + 1, dtype=torch.int32)
    _function(order, "places")[0](table, order, places, firsts, rank, each, group_rows)
    return places, Segments(table, firsts, rank * each, k, group_rows)


def to_layout(
    pointers: Tensor, segments: Segments, rows: int, columns: int, dtype: torch.dtype, order_at: int
) -> tuple[Tensor, Tensor]:
    """Tokens in the layout of this rank's experts, zeros in padding.

    Args:
        pointers: (ranks,) int64, addresses of each rank's tokens, of `columns` elements of this dtype.
        rows: of the layout.
        order_at: bytes from a rank's tokens to its order.

    Returns:
        (rows, columns), and (rows / group_rows,) int32, the expert of each run, numbered from this rank's first.
    """
    out = pointers.new_empty(rows, columns, dtype=dtype)
    expert_ids = pointers.new_empty(rows // segments.group_rows, dtype=torch.int32)
    if rows:
        function, sms = _function(pointers, "dispatch", dtype, dtype)
        _dispatch(function, sms, pointers, segments, out, expert_ids, None, None, order_at, 0)
    return out, expert_ids


def gradient_of_layout(
    pointers: Tensor, segments: Segments, dtype: torch.dtype, order_at: int, weights_at: int, out: Tensor,
    y: Tensor | None, dots: Tensor | None,
) -> Tensor:  # fmt: skip
    """Gradients of the rows (rows, N) of which `from_layouts` made weighted sums, written to `out`.

    Args:
        pointers: (ranks,) int64, addresses of the gradients of each rank's sums, of this dtype.
        order_at, weights_at: bytes from them to a rank's order and its weights, (T * k,) float32.
        y: the rows, for gradients of weights; or None.
        dots: (rows,) float32 to be filled with the gradient of each row's weight, or None.
    """
    if len(out):
        function, sms = _function(out, "gradient", dtype, out.dtype, dots is not None)
        y = None if y is None else y.contiguous()
        _dispatch(function, sms, pointers, segments, out, None, y, dots, order_at, weights_at)
    return out


def from_layouts(
    pointers: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype, out: Tensor, k: int
) -> Tensor:
    """Weighted sums of the rows of each token's choices, in FP32 and in their order, rounded once to `out` (T, N).

    Args:
        pointers: (ranks,) int64, addresses of each rank's layout, of N elements of this dtype.
        weights: (T, k) float32; None is 1.
    """
    if len(out):
        function, _ = _function(out, "combine", dtype, out.dtype, weights is not None)
        function(pointers, places, weights, out, k)
    return out


def values_of(pointers: Tensor, places: Tensor) -> Tensor:
    """(T * k,) float32: for each choice the value of its row; pointers: addresses of each rank's (rows,) float32."""
    out = places.new_empty(places.shape, dtype=torch.float32)
    if len(out):
        _function(places, "values", torch.float32, torch.float32)[0](pointers, places, out)
    return out


def _dispatch(
    function: Any, sms: int, pointers: Tensor, segments: Segments, out: Tensor, expert_ids: Tensor | None,
    y: Tensor | None, dots: Tensor | None, order_at: int, weights_at: int,
) -> None:  # fmt: skip
    table, firsts, *numbers = segments
    ctas = min(-(-len(out) // WARPS), sms * RESIDENT)
    function(pointers, table, firsts, out, expert_ids, y, dots, order_at, weights_at, *numbers, ctas)


def _function(
    x: Tensor, step: str, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype = torch.bfloat16,
    weighted: bool = False,
) -> tuple[Any, int]:  # fmt: skip
    """The kernel's function, and the multiprocessors of the device of x."""
    spec, sms = device_arch(x.get_device())
    return families.function_for(RowsFacts(spec.target, step, NAMES[dtype], NAMES[out_dtype], weighted)), sms
