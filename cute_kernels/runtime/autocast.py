"""torch.autocast in front of the public ops: operands are cast as torch casts those of F.linear and SDPA.

Casts are differentiable, so gradients have the dtype of the tensor that the user passed. Biases, attention sinks and
captured tensors are not cast: kernels read them in float32. Calls with out= are not cast either, as in torch.
"""

from __future__ import annotations

import torch

from .torch_compat import any_autocast

__all__ = ["any_autocast", "autocast_dtype", "cast", "cast_product"]

ELIGIBLE = (torch.float32, torch.bfloat16, torch.float16)  # float64 is never cast, and FP8 has scales


def autocast_dtype(operand) -> torch.dtype | None:
    """The dtype of torch.autocast on the operand's device type; None where autocast is disabled."""
    if not any_autocast():
        return None
    device = getattr(operand, "device", None)  # None: not a tensor; the op's checks raise
    if device is None or device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast(operand, dtype: torch.dtype):
    """The operand, a tensor or a matrix with `to`, in this dtype, if torch.autocast casts its dtype."""
    return operand.to(dtype) if getattr(operand, "dtype", None) in ELIGIBLE and operand.dtype is not dtype else operand


def cast_product(a, b, residual, out_dtype: torch.dtype | None) -> tuple:
    """(a, b, residual) of a GEMM in the dtype of torch.autocast, the residual in that of the result, as torch.addmm's.

    Nothing is cast if one operand is of float64 or FP8.
    """
    dtype = autocast_dtype(b)
    if dtype is None or not all(getattr(t, "dtype", None) in ELIGIBLE for t in (a, b)):
        return a, b, residual
    return cast(a, dtype), cast(b, dtype), cast(residual, out_dtype or dtype)
