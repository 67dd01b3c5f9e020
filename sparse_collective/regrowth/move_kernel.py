"""Stored blocks at their new places, moved on the GPU by one kernel: in place, or into another tensor.

A lane is a run of places whose blocks stay within it. In place, a thread has 16 bytes of every block of a lane. Kept
blocks keep their order, so what is stored at a place is not needed any more when the places are taken in this order:

    from the lane's first place up      blocks that come from a later place
    from its last place down            blocks that come from an earlier one, and zeros where a block has grown

A few blocks are loaded before any of them is stored, so that their loads are under way together. Into another tensor
each thread moves 16 bytes of one block.

Works on every architecture: no TMA, no tensor cores.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.runtime.device import device_arch
from cute_kernels.runtime.families import function_for

from .config import BlockMoveFacts, written

THREADS = 128
VECTOR = 4  # words of 4 bytes
BATCH = 8  # blocks that are loaded before they are stored


class BlockMoveKernel:
    """Compiles to one kernel per `BlockMoveFacts`."""

    def __init__(self, facts: BlockMoveFacts):
        self.in_place = facts.in_place

    @cute.jit
    def __call__(
        self,
        blocks: cute.Tensor,  # (nnz, words of a block) int32
        result: cute.Tensor | None,  # the same; None: in place
        origin: cute.Tensor,  # (nnz,)
        lane: Int32,  # blocks of a lane
        stream: cuda.CUstream,
    ):
        nnz, words = blocks.shape
        threads = nnz // lane * (words // VECTOR)
        self.kernel(blocks, result, origin, lane).launch(
            grid=(cute.ceil_div(threads, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, blocks: cute.Tensor, result: cute.Tensor | None, origin: cute.Tensor, lane: Int32):
        nnz, words = blocks.shape
        vectors = words // VECTOR
        index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        number = index // vectors
        mine = index - number * vectors
        first, end = number * lane, number * lane + lane
        if first < nnz:
            if const_expr(self.in_place):
                batches = cute.ceil_div(lane, BATCH)
                for i in cutlass.range(batches):
                    self.move(blocks, blocks, origin, mine, first + i * BATCH, end, True)
                for i in cutlass.range(batches):
                    self.move(blocks, blocks, origin, mine, first + (batches - 1 - i) * BATCH, end, False)
            else:
                self.move_all(blocks, result, origin, mine, first)

    @cute.jit
    def move(
        self,
        source: cute.Tensor,
        result: cute.Tensor,
        origin: cute.Tensor,
        mine: Int32,
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
                    cute.autovec_copy(self.vector(source, come, mine), loaded[None, i])
            else:
                takes = come < place
                if takes and come >= 0:
                    cute.autovec_copy(self.vector(source, come, mine), loaded[None, i])
            taken.append(takes)
        for i in range_constexpr(BATCH):
            if taken[i]:
                cute.autovec_copy(loaded[None, i], self.vector(result, first + i, mine))

    @cute.jit
    def move_all(self, source: cute.Tensor, result: cute.Tensor, origin: cute.Tensor, mine: Int32, place: Int32):
        loaded = cute.make_rmem_tensor((VECTOR,), Int32)
        loaded.fill(0)
        come = Int32(origin[place])
        if come >= 0:
            cute.autovec_copy(self.vector(source, come, mine), loaded)
        cute.autovec_copy(loaded, self.vector(result, place, mine))

    @cute.jit
    def vector(self, blocks: cute.Tensor, block: Int32, number: Int32):
        """(VECTOR,)"""
        return cute.local_tile(blocks[block, None], (VECTOR,), (number,))


def fits(t: torch.Tensor) -> bool:
    """Whether the kernel can move the blocks of a contiguous tensor (nnz, ...): whole vectors, aligned."""
    size = t[0].numel() * t.element_size() if len(t) else 0
    return size > 0 and size % 16 == 0 and t.data_ptr() % 16 == 0 and len(t) * (size // 16) < 2**31


def move_blocks_on_gpu(t: torch.Tensor, origin: torch.Tensor, lane: int | None) -> None:
    """family.blocks_moved of a tensor that `fits`."""
    words = t.detach().view(len(t), -1).view(torch.int32)
    facts = BlockMoveFacts(device_arch(t.get_device())[0].target, lane is not None)
    result = None if lane is not None else torch.empty_like(words)
    function_for(facts)(words, result, origin, 1 if lane is None else lane)
    if result is None:
        written(t)
    else:
        words.copy_(result)
