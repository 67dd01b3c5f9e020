"""A cache of conversions of FlexAttention's BlockMask, bool tensors and BSR patterns to BlockMask.

A cached BlockMask lives as long as its source object, and so do the tensors that block_sparse.py derives from it. It is
converted again when a tensor of the object was written to or replaced, according to torch's version counters: see
runtime.derived.state_of. Tensors created in inference mode are converted at each call, since they have no version
counter. During CUDA graph capture, conversions of writable tensors are captured too: then replays read the current
contents. For a BsrMatrix, whose indices must not be written to, a graph uses the cached conversion.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from cute_kernels.runtime.derived import Derived, captured, of_tensor, state_of
from sparse_collective.bsr import BsrMatrix

from .block_mask import BlockMask

MOST_LENGTHS = 8  # cached conversions per bool tensor
_ATTRIBUTE = "_attention_block_mask"  # of FlexAttention's masks


def of_flex(mask: FlexBlockMask) -> BlockMask:
    """Cached BlockMask.from_flex(mask).

    It is cached in an attribute of the mask, not in a table: its mask_mod may refer to the mask, or to an object that
    holds it, and a table would then keep all of them alive forever.
    """
    parts = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, mask.mask_mod
    count, _, full_count, full_index, _ = parts
    lists = parts[:2] if full_count is None or full_index is None else parts[:4]
    state = state_of(*lists)
    if state is None or captured(count):
        return BlockMask.from_flex(mask)
    cached = mask.__dict__.get(_ATTRIBUTE)
    if cached is None:
        cached = mask.__dict__[_ATTRIBUTE] = Derived()

    def make() -> tuple:
        return BlockMask.from_flex(mask), memory_of(*lists), parts

    state = *map(id, parts), state, mask.seq_lengths, mask.BLOCK_SIZE
    return cached.get("mask", count, make, _tables, state)[0]


def of_blocks(blocks: Tensor, lengths: tuple[int, int]) -> BlockMask:
    """Cached BlockMask.from_blocks(blocks, lengths=lengths) of a bool tensor, one per lengths."""
    state = state_of(blocks)
    if state is None or captured(blocks):
        return BlockMask.from_blocks(blocks, lengths=lengths)

    def make() -> tuple:
        return BlockMask.from_blocks(blocks, lengths=lengths), memory_of(blocks)

    state = state, blocks.shape, blocks.stride(), blocks.dtype
    return of_tensor(blocks, MOST_LENGTHS).get(lengths, blocks, make, _tables, state)[0]


class ElementTensor(NamedTuple):
    """A bool tensor of elements, (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), which other interfaces pass to
    block_sparse_attention. A plain bool tensor there is a tensor of blocks."""

    seen: Tensor


def of_elements(seen: Tensor, lengths: tuple[int, int]) -> BlockMask:
    """Cached BlockMask.from_elements(seen, lengths=lengths), one per lengths."""
    state = state_of(seen)
    if state is None or captured(seen):
        return BlockMask.from_elements(seen, lengths=lengths)

    def make() -> tuple:
        (alias,) = memory_of(seen)  # a mask that held the tensor itself would keep it alive forever
        return (BlockMask.from_elements(alias, lengths=lengths),)

    state = state, seen.shape, seen.stride(), seen.dtype
    return of_tensor(seen, MOST_LENGTHS).get(("elements", *lengths), seen, make, _tables, state)[0]


def of_bsr(W: BsrMatrix) -> BlockMask:
    """Cached BlockMask.from_bsr(W), shared by all matrices with the same pattern (with_values)."""
    return W.pattern.derived(("block mask", W.shape), lambda: BlockMask.from_bsr(W), BlockMask.lists)


def of_torch_bsr(pattern: Tensor) -> BlockMask:
    """Cached BlockMask.from_bsr(pattern) of a torch.sparse_bsr tensor.

    Its indices share the version counter of the tensor, but not that of the tensors that the user created it from.
    """
    indices = pattern.crow_indices(), pattern.col_indices()  # new aliases each time
    state = state_of(*indices)
    if state is None or captured(indices[0]):
        return BlockMask.from_bsr(pattern)

    def make() -> tuple:
        return BlockMask.from_bsr(pattern), memory_of(*indices)

    return of_tensor(pattern).get("mask", indices[0], make, _tables, (state, pattern.shape))[0]


def memory_of(*tensors: Tensor) -> list[Tensor]:
    """Aliases that keep the tensors' memory alive next to a cached value, so that its address is not reused.

    They do not keep the tensor objects alive.
    """
    return [t.detach() for t in tensors]


def _tables(value: tuple) -> tuple:
    return value[0].lists()


def of_op_tensors(tensors: list[Tensor], key: tuple, make: Callable, versioned: bool) -> BlockMask:
    """Cached `make(*aliases)` for the tensors of a mask in a registered op, valid while they are alive.

    Args:
        tensors: the sources. torch.compile passes the same objects that the graph was called with.
        key: other values that the result depends on.
        versioned: True if writes to `tensors` invalidate the result; a BlockMask's lists must not be written to.
    """
    first, *others = tensors

    def make_of_aliases() -> tuple:
        memory = memory_of(*tensors)
        return make(*memory), memory

    versions = state_of(*tensors) if versioned else ()
    if versions is None:
        return make(*tensors)
    # References to the tensors with these ids: two are equal if they refer to one object; one to a dead tensor equals
    # none.
    state = *[weakref.ref(t) for t in others], *versions
    key = *key, *[id(t) for t in others]
    return of_tensor(first).get(key, first, make_of_aliases, _tables, state)[0]
