"""FP32 accumulators of dK and dV, to which CTAs add by vector instructions.

Within 16 columns of a row, columns 8 j + 2 l + c are at 4 l + 2 j + c: the four values of a thread in an accumulator of
WGMMA are adjacent, and one instruction adds them.
"""

import torch
from torch import Tensor


def zero_sums(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Accumulators for the gradients of k and v, whose last extents are multiples of 16."""
    of_k, of_v = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
    return of_k, of_v


def convert(sums: tuple[Tensor, Tensor], scale: float, gradients: tuple[Tensor, Tensor]) -> None:
    """Round the accumulators, that of dK times `scale`, to (dK, dV)."""
    for total, factor, gradient in zip(sums, (scale, 1.0), gradients, strict=True):
        columns = total.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2)
        torch.mul(columns, factor, out=gradient.unflatten(-1, (-1, 2, 4, 2)))
