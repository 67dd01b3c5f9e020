"""Lists of selected blocks between forward and backward; masks/saved_mask.py has the block masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.runtime.derived import state_of

from .blocks import SelectedBlocks


@dataclass
class SavedLists:
    """The selected blocks of a forward call, whose lists autograd saves. It has the interface of SavedMask."""

    selected: SelectedBlocks
    state: tuple | None  # of the lists then; None if torch does not count writes to them
    causal: bool = False  # backward has no causal mask to add: that of `selected` is part of it
    count: int = 1  # number of tensors to save

    def restored(self, saved: Sequence[Tensor]) -> SelectedBlocks:
        """The selected blocks of the forward call, from their lists as autograd returns them.

        Raises:
            RuntimeError: the `.data` of the lists was replaced since.
        """
        [indices] = saved
        if indices is self.selected.indices and self.state is not None and self.state != state_of(indices):
            raise RuntimeError(
                "the lists of selected blocks, needed for gradient computation, have been modified by an inplace "
                "operation (their .data was replaced); clone() them for each step"
            )
        return self.selected._replace(indices=indices)


def saved_lists(selected: SelectedBlocks) -> tuple[SavedLists, list[Tensor]]:
    """Return what backward restores, and the tensors for save_for_backward."""
    if selected.indices.is_inference():  # autograd saves none, and torch counts no writes to them
        with torch.inference_mode(False):
            return SavedLists(selected, None), [selected.indices.clone()]
    return SavedLists(selected, state_of(selected.indices)), [selected.indices]
