"""Values at addresses that kernels cannot read or write: those of a safetensors file, or of a slice."""

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; what TMA and 128-bit loads need of a base address


def note(name: str, tensor: Tensor, how: str) -> list[str]:
    """Note of a plan on a misaligned tensor; empty if it is aligned."""
    off = 0 if tensor.is_meta else tensor.data_ptr() % ALIGNMENT
    return [f"{name} begins {off} bytes off {ALIGNMENT}-byte alignment: {how}; clone() makes it aligned"] if off else []


def aligned(values: Tensor) -> Tensor:
    """Values at an address that is a multiple of ALIGNMENT: these, or a copy.

    The copy is made in each call. One that is kept would miss what optimizers write through `.data`, unseen by torch.
    """
    return values if values.data_ptr() % ALIGNMENT == 0 else values.detach().clone()


def aligned_copy(out: Tensor, filled: bool) -> Tensor:
    """A contiguous tensor like `out` at an aligned address, with its contents if `filled`."""
    return out.clone() if filled else torch.empty_like(out)
