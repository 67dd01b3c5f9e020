"""Values at addresses that kernels cannot read or write: those of a safetensors file, or of a slice."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cute_kernels.runtime.derived import Derived, captured, state_of

ALIGNMENT = 16  # bytes; what TMA and 128-bit loads need of a base address
_COPIES = WeakTensorKeyDictionary()  # values that are not aligned, with the Derived that keeps their copy


def note(name: str, tensor: Tensor, how: str) -> list[str]:
    """What a plan says of a tensor at such an address; nothing where it is aligned."""
    off = 0 if tensor.is_meta else tensor.data_ptr() % ALIGNMENT
    return [f"{name} begins {off} bytes off {ALIGNMENT}-byte alignment: {how}; clone() makes it aligned"] if off else []


def aligned(values: Tensor) -> Tensor:
    """Values at an address that is a multiple of ALIGNMENT: these, or a copy that is kept with this version of them.

    While a CUDA graph is captured the copy becomes part of the graph, so that a replay reads the values of its time.
    Not seen are writes of which torch knows nothing (see state_of): those through `.data`, NumPy or a kernel.
    """
    if values.data_ptr() % ALIGNMENT == 0:
        return values
    if captured(values):
        return values.detach().clone()
    kept = _COPIES.get(values)
    if kept is None:
        kept = _COPIES[values] = Derived(1)
    return kept.get("aligned", values, lambda: values.detach().clone(), lambda made: (made,), state_of(values))


def aligned_copy(out: Tensor, filled: bool) -> Tensor:
    """A contiguous tensor like `out` at an aligned address, with its contents if `filled`."""
    return out.clone() if filled else torch.empty_like(out)
