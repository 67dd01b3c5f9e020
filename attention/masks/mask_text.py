"""Serialization of a mask_mod for a registered op: the text, numbers and tensors of function_text.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from .element_mask import BoundMask, trace_mask
from .function_text import read, written
from .mask_mods import MaskMod

WHAT = "mask_mod"


def written_mask(mask_mod: MaskMod | None) -> tuple[str | None, list[int], list[Tensor]]:
    """(text, numbers, tensors) of a mask_mod; torch.compile traces this function.

    Raises:
        TypeError: see function_text.written.
    """
    return (None, [], []) if mask_mod is None else written(mask_mod, WHAT)


@overload
def read_mask(text: str, numbers: Sequence[int], tensors: Sequence[Tensor], device) -> BoundMask: ...


@overload
def read_mask(text: None, numbers: Sequence[int], tensors: Sequence[Tensor], device) -> None: ...


def read_mask(text: str | None, numbers: Sequence[int], tensors: Sequence[Tensor], device) -> BoundMask | None:
    """The mask_mod that written_mask serialized, in its state at that time.

    Raises:
        TypeError: see trace_mask.
        RuntimeError: see function_text.read.
    """
    if text is None:
        return None
    return BoundMask(read(text, numbers, tensors, device, trace_mask)[0])
