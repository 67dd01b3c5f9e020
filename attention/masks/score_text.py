"""A score_mod inside of a registered op, from the text, numbers and tensors of function_text.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_kernels.traced.memo import traced
from cute_kernels.traced.record import Traced

from .function_text import read
from .score_mod import INPUTS, WHAT, BoundScore, check_callable, mod_of

WHOLE = (
    "score_mod computes something of a captured tensor as a whole, or reads it as a number, which under torch.compile "
    "is no part of the graph; compute that outside of the function, and index the result by b, h, q and kv inside"
)


def read_score(text: str, numbers: Sequence[int], tensors: Sequence[Tensor], device) -> tuple[BoundScore, list[int]]:
    """The score_mod that function_text.written wrote, for kernels, and for each tensor that it reads its number among
    `tensors`, -1 for others.

    Raises:
        TypeError: see score_mod.bound.
        RuntimeError: it computes something of a tensor as a whole; see function_text.read for others.
    """
    found, places = read(text, numbers, tensors, device, _trace, WHOLE)
    return BoundScore(mod_of(found.program, found.tensors), found.tensors, found.numbers), places


def _trace(function, device) -> Traced:
    check_callable(function)
    return traced(function, WHAT, INPUTS, (), device)
