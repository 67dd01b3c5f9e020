"""A block mask between forward and backward.

Autograd saves the lists of blocks and the tensors that mask_mod read. So backward uses what forward used, or raises
torch's error if one of them was modified in place. The Python side of mask_mod is kept as the Program that was traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.runtime.derived import state_of
from cute_kernels.traced.record import Traced

from ..block_sparse import latest_trace, with_causal
from .block_mask import BlockMask
from .element_mask import BoundMask, trace_mask


@dataclass
class SavedMask:
    """The mask of a forward call. `state`: that of its tensors then, None if torch does not count writes to them."""

    mask: BlockMask
    causal: bool  # whether backward still has to add the causal mask
    traced: Traced | None
    tensors: tuple[Tensor, ...]
    state: tuple | None

    @property
    def count(self) -> int:
        """Number of tensors to save."""
        return len(self.tensors)

    def restored(self, saved: Sequence[Tensor]) -> BlockMask:
        """The mask of the forward call, from its tensors as autograd returns them.

        Hooks on saved tensors may return copies; then everything is derived from these again.

        Raises:
            RuntimeError: a tensor's `.data` was replaced since.
        """
        if self.state is not None and self.state == state_of(*saved):
            return self.mask if self.traced is None else self.mask.with_mask_mod(BoundMask(self.traced))
        if any(a is b for a, b in zip(saved, self.tensors, strict=True)) and self.state is not None:
            raise RuntimeError(
                "one of the tensors of a block mask, needed for gradient computation, has been modified by an inplace "
                "operation (its .data was replaced); clone() the mask for each step"
            )
        lists, tensors = saved[:4], tuple(saved[4:])
        mask_mod = None
        if self.traced is not None:
            traced = self.traced
            mask_mod = BoundMask(Traced(traced.program, tensors, (), numbers=traced.numbers, kind=traced.kind))
        lengths, blocksize = self.mask.lengths, self.mask.blocksize
        return self.mask._of_lists(lists, lengths=lengths, blocksize=blocksize, mask_mod=mask_mod)


def saved_mask(mask: BlockMask, causal: bool, kernel: bool) -> tuple[SavedMask, list[Tensor]]:
    """Return the mask that backward restores, after forward ran with it, and the tensors for save_for_backward.

    kernel: True if forward launched a kernel: its causal mask and the trace of its mask_mod exist then.
    """
    if kernel and causal:
        mask, causal = with_causal(mask), False
    traced = None
    if mask.mask_mod is not None:
        traced = latest_trace(mask) if kernel else None
        if traced is None:
            traced = trace_mask(mask.mask_mod, mask.device)
    tensors = mask.lists() if traced is None else (*mask.lists(), *traced.tensors)
    if any([t.is_inference() for t in tensors]):  # autograd saves none, and torch counts no writes to them
        with torch.inference_mode(False):
            return SavedMask(mask, causal, traced, tensors, None), [t.clone() for t in tensors]
    return SavedMask(mask, causal, traced, tensors, state_of(*tensors)), list(tensors)
