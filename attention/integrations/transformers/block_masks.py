"""Custom block masks for layers of a model."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from attention import BlockMask
from cute_kernels.runtime.graphs import lasting_memory
from cute_kernels.runtime.torch_compat import in_graph_trace

ATTRIBUTE = "_cute_kernels_block_mask"
MOST = 8  # cached masks of different lengths


class BlockMasks:
    """The user's mask, or the function that creates it for given lengths, with a cache."""

    def __init__(self, mask: BlockMask | FlexBlockMask | Callable):
        self.mask = mask
        self.cached: OrderedDict[tuple, BlockMask] = OrderedDict()

    def of(self, lengths: tuple[int, int], device: torch.device) -> BlockMask:
        """The mask for (rows, columns) of scores on a device."""
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and in_graph_trace():
            return self._make(lengths, device)
        mask = self.cached.get((lengths, device))
        if mask is None:
            with contextlib.nullcontext() if traced else lasting_memory(device):
                mask = self._make(lengths, device)
            if len(self.cached) >= MOST:
                self.cached.popitem(last=False)
            self.cached[lengths, device] = mask
        return mask

    def _make(self, lengths, device) -> BlockMask:
        mask: Any = self.mask
        fixed = isinstance(mask, (BlockMask, FlexBlockMask))
        if not fixed:
            mask = mask(lengths, device)
        if isinstance(mask, FlexBlockMask):
            mask = BlockMask.from_flex(mask)
        if not isinstance(mask, BlockMask):
            raise TypeError(f"set_block_mask: the function must return a BlockMask, got {type(mask).__name__}")
        if mask.lengths != lengths:
            hint = "; for calls of several lengths, as in generation, pass a function of (lengths, device)" * fixed
            raise ValueError(
                f"set_block_mask: the mask must have the lengths of this call, {lengths}, got {mask.lengths}{hint}"
            )
        return mask.to(device)


def set_block_mask(
    model: nn.Module,
    mask: BlockMask | FlexBlockMask | Callable | None,
    layers: Iterable[int] | None = None,
) -> None:
    """Restrict layers of a model to a block mask, in addition to their own mask (causal, padding, window).

        set_block_mask(model, lambda lengths, device: patterns.sliding_window(
            lengths, (1023, 0), global_columns=64, device=device))

    Args:
        model: a model with attn_implementation="cute_kernels".
        mask: a function of (lengths, device) that returns a BlockMask (attention.BlockMask or FlexAttention's) of
            lengths (rows, columns), with attention.patterns' convention: the last row is at the last column, also in
            decode, with one row. It is called once for all layers, and its latest masks are cached. Or a BlockMask, for
            calls of its lengths only. None removes the mask.
        layers: their `layer_idx`; None: all layers.

    Raises:
        TypeError: mask is none of these.
        ValueError: an index in `layers` matches no layer. In a call: lengths that differ from those of a fixed mask, a
            static cache in decode, whose length the host does not know, or a cache that only keeps a window.
    """
    if mask is not None and not isinstance(mask, (BlockMask, FlexBlockMask)) and not callable(mask):
        raise TypeError(
            "set_block_mask: mask must be a BlockMask, a function of (lengths, device) that returns one, or None, got "
            f"{type(mask).__name__}"
        )
    masks = None if mask is None else BlockMasks(mask)
    selected = None if layers is None else set(layers)
    matched = set()
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if selected is None or layer in selected:
            matched.add(layer)
            if masks is not None:
                setattr(module, ATTRIBUTE, masks)
            elif hasattr(module, ATTRIBUTE):
                delattr(module, ATTRIBUTE)
    if selected is not None and selected - matched:
        raise ValueError(
            f"set_block_mask: layers must be layer_idx of the model's layers, got {sorted(selected - matched)}"
        )
