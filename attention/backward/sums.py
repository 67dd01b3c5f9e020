"""FP32 accumulators of dK and dV, to which CTAs add by vector instructions.

Within 16 columns of a row, columns 8 j + 2 l + c are at 4 l + 2 j + c: the four values of a thread in an accumulator of
WGMMA are adjacent, and one instruction adds them.
"""

import torch
from torch import Tensor


def zero_sums(tensor: Tensor) -> Tensor:
    """An accumulator for the gradient of a tensor, whose last extent is a multiple of 16."""
    return torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)


def convert(total: Tensor, factor: float, to: Tensor) -> None:
    """Round an accumulator times `factor` to a gradient with its shape."""
    columns = total.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2)
    torch.mul(columns, factor, out=to.unflatten(-1, (-1, 2, 4, 2)))
