"""A score_mod inside of a registered op, from the text, numbers and tensors of function_text.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_kernels.traced.memo import traced

from .function_text import rebuilt
from .score_mod import INPUTS, WHAT, BoundScore, check_callable, mod_of

OUTSIDE = "compute that outside of the function, and index the result by b, h, q and kv inside"


def read_score(text: str, numbers: Sequence[int], tensors: Sequence[Tensor], device) -> tuple[BoundScore, list[int]]:
    """The score_mod that function_text.written wrote, for kernels, and for each tensor that it reads its number among
    `tensors`, -1 for others.

    Raises:
        TypeError: see score_mod.bound.
        RuntimeError: it computes something of a tensor as a whole, or a tensor that requires a gradient is not among
            `tensors`.
    """
    function, stand_ins = rebuilt(text, numbers, tensors)
    check_callable(function)
    found = traced(function, WHAT, INPUTS, (), device)
    at = {id(t): i for i, t in enumerate(stand_ins)}
    if any(id(t) in at for t in found.read):
        raise RuntimeError(
            "score_mod computes something of a captured tensor as a whole, or reads it as a number, which under "
            f"torch.compile is no part of the graph; {OUTSIDE}"
        )
    places = [at.get(id(t), -1) for t in found.tensors]
    others = [t for t, place in zip(found.tensors, places, strict=True) if place < 0]
    if any(t.requires_grad for t in (*others, *found.read)):
        raise RuntimeError(
            "under torch.compile the gradient of a tensor that score_mod reads through a dict or a class that is a "
            "global would be lost; capture it: write the score_mod inside a function that has the tensor, or as a "
            "dataclass with it"
        )
    of_call = tuple(t if place < 0 else tensors[place] for t, place in zip(found.tensors, places, strict=True))
    return BoundScore(mod_of(found.program, of_call), of_call, found.numbers), places
