"""Dense weights of experts as a batch of block-sparse matrices with one block each, which shares their memory."""

import torch
from torch import Tensor

from cute_kernels.runtime.torch_compat import without_modes

from .bsr import BsrMatrix

INDICES: dict[torch.device, tuple[Tensor, Tensor]] = {}  # of a matrix that is one block; plans are found by them


@torch.compiler.assume_constant_result
def make_indices(device: torch.device) -> bool:
    """Add a device to INDICES; at once where torch.compile traces this, so that its graphs read the same tensors."""
    if device not in INDICES:
        with torch.inference_mode(False), without_modes():
            numbers = torch.tensor([0, 1, 0], dtype=torch.int32, device=device)
            INDICES[device] = numbers[:2].clone(), numbers[2:].clone()
    return True


def one_block(weight: Tensor) -> BsrMatrix:
    """The matrices (E, M, K) of which each is one block, weight[e]; M and K are multiples of 16. Differentiable."""
    make_indices(weight.device)
    return BsrMatrix._make(*INDICES[weight.device], weight[:, None], weight.shape, even=True)
