"""From wide numbers to 8-bit floats and their scales, in torch's own functions, on any device."""

import torch
from torch import Tensor

from .checks import check_tensor
from .dtypes import FLOAT8
from .reference import BLOCK, of_elements

AXES = {"tensor": None, "row": -1, "column": -2}  # what the largest magnitude is taken over, besides "tensor"
BLOCKS = {"1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK)}  # rows and columns of x that share a scale


def quantize(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, per: str = "tensor") -> tuple[Tensor, Tensor]:
    """(values, scale) such that x is about values * scale, with the largest magnitude at the end of dtype's range.

    Args:
        x: (..., rows, columns) of a floating-point dtype, on any device.
        dtype: float8_e4m3fn (magnitudes up to 448) or float8_e5m2 (57344, with two bits of mantissa instead of three).
        per: "tensor", one scale; "row", one for each row, as gemm's scale_a; "column", one for each column, as scale_b;
            "1x128", one for each row and 128 columns, as scale_a; "128x128", one for each so many rows and columns, as
            scale_b: of an (N, K) weight that is multiplied as values.mT with scale.mT.

    Returns:
        values: of x's shape, in dtype, each rounded to nearest from x / scale; contiguous along the mode that x is.
        scale: float32, (1,), (..., rows, 1) or (..., 1, columns); of blocks (..., rows, columns / 128) or
            (..., rows / 128, columns / 128), extents rounded up. 1 where all numbers are 0.

    NaN and infinities make the values of what shares their scale NaN. No gradient passes: values are detached.

    Raises:
        TypeError: x is no floating-point tensor, or dtype is no such type.
        ValueError: per is none of these, or x has fewer than two dimensions and per is not "tensor".
    """
    check_tensor("quantize: x", x)
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise TypeError(f"quantize: x is {x.dtype}; it must be torch.bfloat16, float16, float32 or float64")
    if dtype not in FLOAT8:
        raise TypeError(f"quantize: dtype is {dtype}; known are {', '.join(map(str, FLOAT8))}")
    if per not in AXES and per not in BLOCKS:
        raise ValueError(f"quantize: per is {per!r}; known are {', '.join(map(repr, (*AXES, *BLOCKS)))}")
    if per != "tensor" and x.dim() < 2:
        raise ValueError(f"quantize: x has {x.dim()} dimensions; a scale per {per} needs 2")
    with torch.no_grad():
        wide = x.to(torch.float32)
        if x.numel() == 0:
            return torch.empty_like(x, dtype=dtype), wide.new_ones(shape_of_scale(x.shape, per))
        largest = largest_of_blocks(wide, *BLOCKS[per]) if per in BLOCKS else largest_along(wide, AXES[per])
        # Division by the largest finite number; one that leaves no normal scale is as good as zeros.
        top = torch.finfo(dtype).max
        scale = largest / top
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
        each = of_elements(scale, x) if per in BLOCKS else scale
        values = (wide / each).clamp(-top, top)  # a quotient may round to above the range, of which e4m3fn makes NaN
        return values.to(dtype), scale


def shape_of_scale(shape, per: str) -> tuple:
    """Of a tensor of such a shape."""
    if per == "tensor":
        return (1,)
    *batch, rows, columns = shape
    if per in AXES:
        return (*batch, rows, 1) if per == "row" else (*batch, 1, columns)
    return *batch, -(-rows // BLOCKS[per][0]), -(-columns // BLOCKS[per][1])


def largest_along(x: Tensor, axis: int | None) -> Tensor:
    """The largest magnitude along an axis, which stays, or of all."""
    return x.abs().amax().reshape(1) if axis is None else x.abs().amax(axis, keepdim=True)


def largest_of_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """(..., R / rows, C / columns) of x (..., R, C), rounded up: the largest magnitude of each block."""
    padding = -x.shape[-1] % columns, -x.shape[-2] % rows
    x = torch.nn.functional.pad(x.abs(), (0, padding[0], 0, padding[1])) if any(padding) else x.abs()
    x = x.unflatten(-1, (-1, columns)).amax(-1)  # (..., R, C / columns)
    return x.unflatten(-2, (-1, rows)).amax(-2) if rows > 1 else x
