"""A block mask of the user's for layers of a model."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from attention import BlockMask
from cute_kernels.runtime.graphs import lasting_memory
from cute_kernels.runtime.torch_compat import in_graph_trace

ATTRIBUTE = "_cute_kernels_block_mask"
MOST = 8  # masks of different lengths that are kept


class BlockMasks:
    """The user's mask, or what makes it for given lengths."""

    def __init__(self, given: BlockMask | FlexBlockMask | Callable):
        self.given = given
        self.kept: OrderedDict[tuple, BlockMask] = OrderedDict()

    def of(self, lengths: tuple[int, int], device: torch.device) -> BlockMask:
        """For (rows, columns) of scores there."""
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and in_graph_trace():
            return self._make(lengths, device)
        found = self.kept.get((lengths, device))
        if found is None:
            with contextlib.nullcontext() if traced else lasting_memory(device):
                found = self._make(lengths, device)
            if len(self.kept) >= MOST:
                self.kept.popitem(last=False)
            self.kept[lengths, device] = found
        return found

    def _make(self, lengths, device) -> BlockMask:
        found = self.given
        fixed = isinstance(found, (BlockMask, FlexBlockMask))
        if not fixed:
            found = found(lengths, device)
        if isinstance(found, FlexBlockMask):
            found = BlockMask.from_flex(found)
        if not isinstance(found, BlockMask):
            raise TypeError(f"set_block_mask: the function must return a BlockMask, got {type(found).__name__}")
        if found.lengths != lengths:
            hint = "; for calls of several lengths, as in generation, give a function of (lengths, device)" * fixed
            raise ValueError(
                f"set_block_mask: the block mask is of lengths {found.lengths}, this call of {lengths}{hint}"
            )
        return found.to(device)


def set_block_mask(
    model: nn.Module,
    mask: BlockMask | FlexBlockMask | Callable | None,
    layers: Iterable[int] | None = None,
) -> None:
    """Let layers of a model see only what a block mask sees, of what their own mask does (causal, padding, window).

        set_block_mask(model, lambda lengths, device: patterns.sliding_window(
            lengths, (1023, 0), global_columns=64, device=device))

    Args:
        model: with attn_implementation="cute_kernels".
        mask: a function of (lengths, device) that returns a BlockMask (attention.BlockMask or FlexAttention's) of
            lengths (rows, columns), as attention.patterns have them: the last row is at the last column, also in
            decoding, where there is one row. It is called once for all layers, and its latest masks are kept. Or a
            BlockMask, for calls of its lengths alone. None takes the mask away.
        layers: their `layer_idx`; all where it is None.

    Raises:
        TypeError: mask is none of these.
        ValueError: a number of `layers` is that of no layer. In a call: lengths that a fixed mask does not have, a
            static cache in decoding, whose length the host does not know, or a cache that keeps a window alone.
    """
    if mask is not None and not isinstance(mask, (BlockMask, FlexBlockMask)) and not callable(mask):
        raise TypeError(
            "set_block_mask: mask must be a BlockMask, a function of (lengths, device) that returns one, or None, got "
            f"{type(mask).__name__}"
        )
    masks = None if mask is None else BlockMasks(mask)
    wanted = None if layers is None else set(layers)
    found = set()
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if wanted is None or layer in wanted:
            found.add(layer)
            if masks is not None:
                setattr(module, ATTRIBUTE, masks)
            elif hasattr(module, ATTRIBUTE):
                delattr(module, ATTRIBUTE)
    if wanted is not None and wanted - found:
        raise ValueError(f"set_block_mask: the model has no layers {sorted(wanted - found)}")
