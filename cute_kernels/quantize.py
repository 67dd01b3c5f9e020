"""From wide numbers to 8-bit floats and their scales, in torch's own functions, on any device."""

import torch
from torch import Tensor

from .checks import check_tensor
from .dtypes import FLOAT8

AXES = {"tensor": None, "row": -1, "column": -2}  # what the largest magnitude is taken over, besides "tensor"


def quantize(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, per: str = "tensor") -> tuple[Tensor, Tensor]:
    """(values, scale) such that x is about values * scale, with the largest magnitude at the end of dtype's range.

    Args:
        x: (..., rows, columns) of a floating-point dtype, on any device.
        dtype: float8_e4m3fn (magnitudes up to 448) or float8_e5m2 (57344, with two bits of mantissa instead of three).
        per: "tensor", one scale; "row", one for each row, as gemm's scale_a; "column", one for each column, as scale_b.

    Returns:
        values: of x's shape, in dtype, each rounded to nearest from x / scale; contiguous along the mode that x is.
        scale: float32, (1,), (..., rows, 1) or (..., 1, columns). 1 where all numbers are 0.

    NaN and infinities make the values of what shares their scale NaN. No gradient passes: values are detached.

    Raises:
        TypeError: x is no floating-point tensor, or dtype is no such type.
        ValueError: per is none of these, or x has fewer than two dimensions and per is "row" or "column".
    """
    check_tensor("quantize: x", x)
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise TypeError(f"quantize: x is {x.dtype}; it must be torch.bfloat16, float16, float32 or float64")
    if dtype not in FLOAT8:
        raise TypeError(f"quantize: dtype is {dtype}; known are {', '.join(map(str, FLOAT8))}")
    if per not in AXES:
        raise ValueError(f"quantize: per is {per!r}; known are {', '.join(map(repr, AXES))}")
    if per != "tensor" and x.dim() < 2:
        raise ValueError(f"quantize: x has {x.dim()} dimensions; a scale per {per} needs 2")
    with torch.no_grad():
        wide = x.to(torch.float32)
        axis = AXES[per]
        if x.numel() == 0:
            shape = (1,) if axis is None else tuple(1 if i == x.dim() + axis else n for i, n in enumerate(x.shape))
            return torch.empty_like(x, dtype=dtype), wide.new_ones(shape)
        largest = wide.abs().amax().reshape(1) if axis is None else wide.abs().amax(axis, keepdim=True)
        # Division by the largest finite number; one that leaves no normal scale is as good as zeros.
        top = torch.finfo(dtype).max
        scale = largest / top
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
        values = (wide / scale).clamp(-top, top)  # a quotient may round to above the range, of which e4m3fn makes NaN
        return values.to(dtype), scale
