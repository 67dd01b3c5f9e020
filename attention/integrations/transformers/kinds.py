"""Recognition of transformers' mask functions that are bands: causal, a window, and either in packed sequences.

They are nested closures, identified by their code objects; their parameters are read from the cells. An unknown
function is traced by torch instead (masks.py), which computes the same at a higher cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils


@dataclass(frozen=True)
class Kind:
    """The band of a mask function: columns from `left` before the row's position to `right` after it, None if
    unbounded, within the row's own sequence if `sequences` (B, S) contains sequence ids."""

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None
    restarts: bool = False  # positions restart in each sequence; differences are the same if sequences are separate

    def __and__(self, other: Kind) -> Kind | None:
        if self.sequences is not None and other.sequences is not None:
            return None
        left, right = _least(self.left, other.left), _least(self.right, other.right)
        sequences = other.sequences if self.sequences is None else self.sequences
        return Kind(left, right, sequences, self.restarts or other.restarts)


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _code(function: Callable):
    return function.__code__


CAUSAL, ALL = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
AND = _code(masking_utils.and_masks(CAUSAL))
SLIDING = _code(masking_utils.sliding_window_overlay(1))
SLIDING_BOTH = _code(masking_utils.sliding_window_bidirectional_overlay(1))
PACKED = _code(masking_utils.packed_sequence_mask_function(torch.zeros(1, 1, device="cpu")))
RESTARTED = None  # exists since transformers 5.18 or later; earlier, packed sequences are PACKED alone
if remap := getattr(masking_utils, "remap_positions_for_packed_sequence", None):
    RESTARTED = _code(remap(CAUSAL, torch.zeros(1, 1, device="cpu")))


def kind_of(function: Callable) -> Kind | None:
    """The Kind of a transformers function; None if it is not a band, or unknown."""
    kind = _kind_of(function)
    return None if kind is None or (kind.restarts and kind.sequences is None) else kind


def _kind_of(function: Any) -> Kind | None:
    if function is CAUSAL:
        return Kind(right=0)
    if function is ALL:
        return Kind()
    code = getattr(function, "__code__", None)
    if code is None or code not in (AND, SLIDING, SLIDING_BOTH, PACKED, RESTARTED):
        return None
    held = [cell.cell_contents for cell in function.__closure__]
    if code is AND:
        kind: Kind | None = Kind()
        for part in held[0]:
            part = _kind_of(part)
            kind = None if part is None or kind is None else kind & part
        return kind
    if code is RESTARTED:
        inner = dict(zip(function.__code__.co_freevars, held, strict=True))["mask_function"]
        kind = _kind_of(inner)
        return None if kind is None else kind & Kind(restarts=True)
    if code is PACKED:
        return Kind(sequences=held[0])
    return Kind(left=held[0] - 1) if code is SLIDING else Kind(left=held[0], right=held[0])
