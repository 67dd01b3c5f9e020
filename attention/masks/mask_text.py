"""A mask_mod inside of a registered op, from the text, numbers and tensors of function_text.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_kernels.traced.record import Traced

from ..function_text import rebuilt, written
from .element_mask import BoundMask, trace_mask
from .mask_mods import MaskMod

WHAT = "mask_mod"


def written_mask(mask_mod: MaskMod | None) -> tuple[str | None, list[int], list[Tensor]]:
    """(text, numbers, tensors) of a mask_mod; torch.compile traces it.

    Raises:
        TypeError: see function_text.written.
    """
    return (None, [], []) if mask_mod is None else written(mask_mod, WHAT)


def read_mask(text: str | None, numbers: Sequence[int], tensors: Sequence[Tensor], device) -> BoundMask | None:
    """The mask_mod that written_mask wrote, as it is now.

    Raises:
        TypeError: see trace_mask.
    """
    if text is None:
        return None
    function, stand_ins = rebuilt(text, numbers, tensors)
    found = trace_mask(function, device)
    at = {id(t): i for i, t in enumerate(stand_ins)}
    if any(id(t) in at for t in found.read):  # it depends on what a tensor holds
        return BoundMask(trace_mask(rebuilt(text, numbers, tensors, tensors)[0], device))
    of_call = tuple(tensors[at[id(t)]] if id(t) in at else t for t in found.tensors)
    return BoundMask(Traced(found.program, of_call, (), numbers=found.numbers))
