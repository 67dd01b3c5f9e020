"""Stored blocks at their new places, moved on the GPU by one kernel for several tensors: in place, or into another one.

A lane is a run of places whose blocks stay within it. In place, a thread has 16 bytes of every block of a lane. Kept
blocks keep their order, so what is stored at a place is not needed any more when the places are taken in this order:

    from the lane's first place up      blocks that come from a later place
    from its last place down            blocks that come from an earlier one, and zeros where a block has grown

A few blocks are loaded before any of them is stored, so that their loads are under way together. Into another tensor
each thread moves 16 bytes of one block. The grid's second mode counts the tensors: values, and an optimizer's moments.

Works on every architecture: no TMA, no tensor cores.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute import AddressSpace, make_ptr

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.derived import written
from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for
from cute_kernels.runtime.torch_compat import foreach_copy_

from .config import MOST_TENSORS, BlockMoveFacts

THREADS = 128
VECTOR = 4  # words of 4 bytes
BATCH = 8  # blocks that are loaded before they are stored


class BlockMoveKernel:
    """Compiles to one kernel per `BlockMoveFacts`."""

    def __init__(self, facts: BlockMoveFacts):
        self.tensors, self.in_place = facts.tensors, facts.in_place

    @cute.jit
    def __call__(
        self,
        t0: cute.Tensor,  # (nnz, bm, bk), as are those that follow; None: there are no more
        t1: cute.Tensor | None,
        t2: cute.Tensor | None,
        t3: cute.Tensor | None,
        result: cute.Tensor | None,  # (tensors, nnz, bm, bk); None: in place
        origin: cute.Tensor,  # (nnz,)
        lane: Int32,  # blocks of a lane
        stream: cuda.CUstream,
    ):
        tensors = [t0, t1, t2, t3][: self.tensors]
        nnz, bm, bk = t0.shape
        words = bm * bk * t0.element_type.width // 32  # of a block
        threads = nnz // lane * (words // VECTOR)
        self.kernel(tensors, result, origin, words, lane).launch(
            grid=(cute.ceil_div(threads, THREADS), self.tensors, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tensors: list[cute.Tensor],
        result: cute.Tensor | None,
        origin: cute.Tensor,
        words: Int32,
        lane: Int32,
    ):
        nnz = origin.shape[0]
        vectors = words // VECTOR
        index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        tensor = cute.arch.block_idx()[1]
        number = index // vectors
        mine = index - number * vectors
        first, end = number * lane, number * lane + lane
        address = tensors[0].iterator.toint()
        for i in range_constexpr(1, self.tensors):
            if tensor == i:
                address = tensors[i].iterator.toint()
        stride = Int64(words) * 4
        here = address + mine * (4 * VECTOR)  # of what a thread has of block 0
        if first < nnz:
            if const_expr(self.in_place):
                batches = cute.ceil_div(lane, BATCH)
                for i in cutlass.range(batches):
                    self.move(here, stride, origin, first + i * BATCH, end, True)
                for i in cutlass.range(batches):
                    self.move(here, stride, origin, first + (batches - 1 - i) * BATCH, end, False)
            else:
                to = result.iterator.toint() + tensor * nnz * stride + mine * (4 * VECTOR)
                self.move_all(here, to, stride, origin, first)

    @cute.jit
    def move(
        self,
        here: Int64,
        stride: Int64,  # bytes of a block
        origin: cute.Tensor,
        first: Int32,
        end: Int32,
        upward: cutlass.Constexpr[bool],
    ):
        """A batch of places from `first` on: those whose blocks come from later places (`upward`), or the others."""
        loaded = cute.make_rmem_tensor(((VECTOR, BATCH)), Int32)
        loaded.fill(0)
        taken = []
        for i in range_constexpr(BATCH):
            place = first + i
            come = place  # no move
            if place < end:
                come = Int32(origin[place])
            if const_expr(upward):
                takes = come > place
                if takes:
                    cute.autovec_copy(self.vector(here + come * stride), loaded[None, i])
            else:
                takes = come < place
                if takes and come >= 0:
                    cute.autovec_copy(self.vector(here + come * stride), loaded[None, i])
            taken.append(takes)
        for i in range_constexpr(BATCH):
            if taken[i]:
                cute.autovec_copy(loaded[None, i], self.vector(here + (first + i) * stride))

    @cute.jit
    def move_all(self, here: Int64, to: Int64, stride: Int64, origin: cute.Tensor, place: Int32):
        loaded = cute.make_rmem_tensor((VECTOR,), Int32)
        loaded.fill(0)
        come = Int32(origin[place])
        if come >= 0:
            cute.autovec_copy(self.vector(here + come * stride), loaded)
        cute.autovec_copy(loaded, self.vector(to + place * stride))

    @cute.jit
    def vector(self, address: Int64):
        """(VECTOR,) words"""
        return cute.make_tensor(make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4 * VECTOR), VECTOR)


def fits(t: torch.Tensor) -> bool:
    """Whether the kernel can move a tensor's blocks (nnz, ...): without gaps, whole vectors, aligned."""
    nnz, bytes_ = t.shape[0], t.nbytes
    whole = bytes_ > 0 and bytes_ % (16 * nnz) == 0 and t.data_ptr() % 16 == 0
    return whole and bytes_ < 2**35 and t.is_contiguous()  # vectors are counted by 32 bits


def move_blocks_on_gpu(tensors: list[torch.Tensor], origin: torch.Tensor, lane: int | None) -> None:
    """family.blocks_moved of tensors that `fits`: those of one shape and dtype together, a few in each launch."""
    target, rest = device_arch(origin.get_device())[0].target, tensors
    while rest:
        dtype, shape = rest[0].dtype, rest[0].shape
        group = [t for t in rest if t.dtype is dtype and t.shape == shape]
        rest = [] if len(group) == len(rest) else [t for t in rest if t.dtype is not dtype or t.shape != shape]
        if len(shape) != 3 or dtype not in NAMES or shape[2] * dtype.itemsize % 16:
            group = [t.detach().view(shape[0], 1, -1).view(torch.int32) for t in group]
        for first in range(0, len(group), MOST_TENSORS):
            some = group[first : first + MOST_TENSORS]
            facts = BlockMoveFacts(target, NAMES.get(some[0].dtype, "int32"), len(some), lane is not None)
            blocks = *some, *(None,) * (MOST_TENSORS - len(some))
            if lane is not None:
                function_for(facts)(*blocks, None, origin, lane)
            else:
                result = torch.empty((len(some), *some[0].shape), dtype=some[0].dtype, device=origin.device)
                function_for(facts)(*blocks, result, origin, 1)
                foreach_copy_([t.detach() for t in some], list(result.unbind()))
    if lane is not None:
        written(*tensors)
