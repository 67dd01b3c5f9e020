"""Conversions of FlexAttention's BlockMask, bool tensors and BSR patterns to BlockMask, each made once.

The BlockMask lives as long as the object that it was made of, and so does what block_sparse.py derives from it. It is
made again when a tensor of the object was written to or replaced, as far as torch counts that: see
runtime.derived.state_of. Tensors that were made in inference mode are converted at each call, since torch counts
no writes to them. While a CUDA graph is captured, so is everything that may be written to: then replays see what was
written. Of a BsrMatrix, whose indices must not be written to, a graph uses the conversion that exists.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from cute_kernels.runtime.derived import Derived, captured, of_tensor, state_of
from sparse_collective.bsr import BsrMatrix

from .block_mask import BlockMask

MOST_LENGTHS = 8  # conversions of one bool tensor
_ATTRIBUTE = "_attention_block_mask"  # of FlexAttention's masks


def of_flex(mask: FlexBlockMask) -> BlockMask:
    """BlockMask.from_flex(mask), made once.

    It is kept as an attribute of the mask, and not in a table: its mask_mod may refer to the mask, or to what holds it,
    and a table would then keep all of them alive for ever.
    """
    parts = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, mask.mask_mod
    count, _, full_count, full_index, _ = parts
    lists = parts[:2] if full_count is None or full_index is None else parts[:4]
    state = state_of(*lists)
    if state is None or captured(count):
        return BlockMask.from_flex(mask)
    cached = mask.__dict__.get(_ATTRIBUTE)
    if cached is None or not all(map(operator.is_, cached.facts, parts)):
        cached = mask.__dict__[_ATTRIBUTE] = Derived()
        cached.facts = parts
    state = state, mask.seq_lengths, mask.BLOCK_SIZE
    return cached.get("mask", count, lambda: (BlockMask.from_flex(mask), memory_of(*lists)), _tables, state)[0]


def of_blocks(blocks: Tensor, lengths: tuple[int, int]) -> BlockMask:
    """BlockMask.from_blocks(blocks, lengths=lengths) of a bool tensor, made once for each lengths."""
    state = state_of(blocks)
    if state is None or captured(blocks):
        return BlockMask.from_blocks(blocks, lengths=lengths)

    def make() -> tuple:
        return BlockMask.from_blocks(blocks, lengths=lengths), memory_of(blocks)

    state = state, blocks.shape, blocks.stride(), blocks.dtype
    return of_tensor(blocks, MOST_LENGTHS).get(lengths, blocks, make, _tables, state)[0]


class ElementTensor(NamedTuple):
    """A bool tensor of elements, of shape (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), where a bool tensor alone means
    blocks: what other interfaces hand to block_sparse_attention."""

    seen: Tensor


def of_elements(seen: Tensor, lengths: tuple[int, int]) -> BlockMask:
    """BlockMask.from_elements(seen, lengths=lengths), made once for each lengths."""
    state = state_of(seen)
    if state is None or captured(seen):
        return BlockMask.from_elements(seen, lengths=lengths)

    def make() -> tuple:
        (alias,) = memory_of(seen)  # a mask that held the tensor itself would keep it alive for ever
        return (BlockMask.from_elements(alias, lengths=lengths),)

    state = state, seen.shape, seen.stride(), seen.dtype
    return of_tensor(seen, MOST_LENGTHS).get(("elements", *lengths), seen, make, _tables, state)[0]


def of_bsr(pattern: BsrMatrix) -> BlockMask:
    """BlockMask.from_bsr(pattern), made once for all matrices that share the pattern by with_values."""
    return pattern.derived(("block mask", pattern.shape), lambda: BlockMask.from_bsr(pattern), BlockMask.lists)


def of_torch_bsr(pattern: Tensor) -> BlockMask:
    """BlockMask.from_bsr(pattern) of a torch.sparse_bsr tensor, made once.

    Its indices share the version counter of the tensor, but not that of the tensors that the user built it from.
    """
    indices = pattern.crow_indices(), pattern.col_indices()  # new aliases each time
    state = state_of(*indices)
    if state is None or captured(indices[0]):
        return BlockMask.from_bsr(pattern)

    def make() -> tuple:
        return BlockMask.from_bsr(pattern), memory_of(*indices)

    return of_tensor(pattern).get("mask", indices[0], make, _tables, (state, pattern.shape))[0]


def memory_of(*tensors: Tensor) -> list[Tensor]:
    """Their memory, to be held beside what was made of it, so that its address means no other memory.

    The tensors themselves die all the same.
    """
    return [t.detach() for t in tensors]


def _tables(value: tuple) -> tuple:
    return value[0].lists()


def of_op_tensors(tensors: list[Tensor], key: tuple, make: Callable, watched: bool) -> BlockMask:
    """`make(*aliases)` of the tensors of a mask that come to a registered op, made once while they live.

    Args:
        tensors: what it is made of. torch.compile hands on the very objects that the graph was called with.
        key: what else it depends on.
        watched: whether writes to `tensors` count; a BlockMask's lists must not be written to.
    """
    first, *others = tensors

    def make_of_aliases() -> tuple:
        memory = memory_of(*tensors)
        return make(*memory), memory

    versions = state_of(*tensors) if watched else ()
    if versions is None:
        return make(*tensors)
    # Of tensors with these ids: two references are equal if they are one object, and one to a dead tensor equals none.
    state = *[weakref.ref(t) for t in others], *versions
    key = *key, *[id(t) for t in others]
    return of_tensor(first).get(key, first, make_of_aliases, _tables, state)[0]
