"""Launch the kernels that move rows of a mixture of experts. None of them synchronizes.

`source` is the memory that rows are read from: (ranks,) int64, addresses of all ranks' buffers on the device, or the
tensor itself where one rank has all tokens and experts. The order of choices and weights lie behind a rank's tokens:
`order` and `weights` are bytes from there; or the tensors.
"""

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


def takes_rows(dtype: torch.dtype, width: int) -> bool:
    """True if the kernels take rows of so many elements of this dtype."""
    return dtype in NAMES and width % VECTOR == 0 and width > 0


def supports(x: Tensor, weights: Tensor, experts: int) -> bool:
    """True if the kernels take tokens x (T, N) and these weights; the same for all ranks of a mesh."""
    return takes_rows(x.dtype, x.shape[1]) and weights.dtype in NAMES and experts <= MOST_EXPERTS


def places_of(
    table: Tensor, order: Tensor, rank: int, k: int, group_rows: int, tokens: int | None = None
) -> tuple[Tensor, Segments]:
    """The place of each choice, and the segments of this rank's layout.

    Args:
        table: see Segments.
        order: (T * k,) int64, the choice of each of this rank's sorted rows.
        tokens: if a rank has more, segments are empty, so that nothing is read of ranks.

    Returns:
        (T * k,) int64, rank << 32 | row of its layout, or -1 for choices of no expert; the segments.
    """
    ranks, each = table.shape[0], (table.shape[1] - 2) // table.shape[0]
    places, firsts = torch.empty_like(order), order.new_empty(each * ranks + 1, dtype=torch.int32)
    most = 2**31 if tokens is None else tokens * k
    _function(order, "places")[0](table, order, places, firsts, rank, each, group_rows, most)
    return places, Segments(table, firsts, rank * each, k, group_rows)


def to_layout(
    source: Tensor, segments: Segments, rows: int, columns: int, dtype: torch.dtype, order: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens in the layout of this rank's experts, zeros in padding.

    Args:
        source: tokens (T, columns) of this dtype.
        rows: of the layout; those behind its last run get the number of experts in expert_ids.
        order: (T * k,) int64.

    Returns:
        (rows, columns), and (rows / group_rows,) int32, the expert of each run, numbered from this rank's first.
    """
    out = source.new_empty(rows, columns, dtype=dtype)
    expert_ids = source.new_empty(rows // segments.group_rows, dtype=torch.int32)
    if rows:
        function, sms = _function(source, "dispatch", dtype, dtype)
        weights = 0 if isinstance(order, int) else None
        _dispatch(function, sms, source, segments, out, expert_ids, None, None, order, weights)
    return out, expert_ids


def gradient_of_layout(
    source: Tensor, segments: Segments, dtype: torch.dtype, order: int | Tensor, weights: int | Tensor,
    out: Tensor, y: Tensor | None, dots: Tensor | None,
) -> Tensor:  # fmt: skip
    """Gradients of the rows (rows, N) of which `from_layouts` made weighted sums, written to `out`.

    Args:
        source: gradients of the sums (T, N), of this dtype.
        order, weights: (T * k,) int64 and float32.
        y: the rows, for gradients of weights; or None.
        dots: (rows,) float32 to be filled with the gradient of each row's weight, or None.
    """
    if len(out):
        function, sms = _function(source, "gradient", dtype, out.dtype, dots is not None)
        y = None if y is None else aligned(y)
        _dispatch(function, sms, source, segments, out, None, y, dots, order, weights)
    return out


def from_layouts(
    source: Tensor, places: Tensor, weights: Tensor | None, dtype: torch.dtype, out: Tensor, k: int
) -> Tensor:
    """Weighted sums of the rows of each token's choices, in FP32 and in their order, rounded once to `out` (T, N).

    Args:
        source: layouts (rows, N) of this dtype.
        weights: (T, k) float32; None is 1.
    """
    if len(out):
        function, _ = _function(source, "combine", dtype, out.dtype, weights is not None)
        function(source, places, weights, out, k)
    return out


def values_of(source: Tensor, places: Tensor) -> Tensor:
    """(T * k,) float32: for each choice the value of its row, of `source`, (rows,) float32."""
    out = places.new_empty(places.shape, dtype=torch.float32)
    if len(out):
        _function(source, "values", torch.float32, torch.float32)[0](source, places, out)
    return out


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at an address that the kernels take."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % (VECTOR * x.element_size()) else x


def _dispatch(
    function: Any, sms: int, source: Tensor, segments: Segments, out: Tensor, expert_ids: Tensor | None,
    y: Tensor | None, dots: Tensor | None, order: int | Tensor, weights: int | Tensor | None,
) -> None:  # fmt: skip
    table, firsts, *numbers = segments
    ctas = min(-(-len(out) // WARPS), sms * RESIDENT)
    function(source, table, firsts, out, expert_ids, y, dots, order, weights, *numbers, ctas)


def _function(
    source: Tensor, step: str, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype = torch.bfloat16,
    weighted: bool = False,
) -> tuple[Any, int]:  # fmt: skip
    """The kernel's function, and the multiprocessors of the device of `source`."""
    spec, sms = device_arch(source.get_device())
    local = source.dtype is not torch.int64
    return families.function_for(RowsFacts(spec.target, step, NAMES[dtype], NAMES[out_dtype], weighted, local)), sms
