"""Accumulation into dQ on sm_90, by warps of the producer warpgroup, one for each consumer warpgroup.

A consumer writes its part of a query tile's dQ to a buffer in shared memory and continues. Its warp waits for the
buffer, adds it to dq_accum in global memory, ordered by semaphores.py if `deterministic`, and releases the
buffer once it has been read.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.tile.ampere import WARP
from cute_kernels.tile.barriers import BACKWARD_FREE, BACKWARD_FULL
from cute_kernels.tile.hopper import WARPGROUP
from cute_kernels.tile.ptx import bulk_add, load_acquire

from .config import FP32, BackwardFacts
from .dq_accum import sums_of
from .semaphores import TURN, end_turn, wait_for_turn

STORE_THREADS = WARPGROUP + WARP  # a consumer warpgroup and the warp that stores its part of dQ


def barrier_offset(group: Int32, buffer: Int32 | int) -> Int32:
    """Offset of a warpgroup's barrier for a dQ buffer from BACKWARD_FULL or BACKWARD_FREE."""
    return group + 2 * buffer


@dataclass(frozen=True)
class DqWork:
    """One head's query tiles, and the addresses of a consumer warpgroup's parts of dq_accum."""

    tiles: Any
    first: Int32  # index of the head's first query tile among those of all heads
    dq: Int64  # address of dq_accum, that of query tile 0
    turns: Int64 | None  # address of this warpgroup's semaphore of tile 0; None unless deterministic

    def dq_of(self, number: Int32, size: int) -> Int64:
        """Address of dq_accum of the head's tile `number`, at `size` bytes per tile."""
        return self.dq + Int64(self.first + number) * size

    def turn_of(self, number: Int32, parts: int) -> Int64:
        """Address of this warpgroup's semaphore of tile `number`, at `parts` semaphores per tile (semaphores.py)."""
        return self.turns + Int64(self.first + number) * (parts * TURN)


class DqStore:
    """Accumulates the dQ of one consumer warpgroup, by a warp, from buffers in shared memory."""

    def __init__(self, facts: BackwardFacts):
        self.facts, self.cfg = facts, facts.config
        self.sums = sums_of(facts.path, facts.config, facts.head_dim)

    def place_of(self, group: Int32, buffer: Int32 | int) -> Int32:
        """Byte offset of a warpgroup's part of a buffer from the first buffer."""
        return group * self.part_bytes + buffer * (self.sums.size * FP32)

    @property
    def part_bytes(self) -> int:
        """Bytes of a warpgroup's part of a dQ buffer."""
        return self.sums.values * WARPGROUP * FP32

    @cute.jit
    def store(self, group: Int32, work: DqWork, sums: Int32, left: Int32, at):
        """Add a consumer warpgroup's parts of dQ of a head's query tiles, by a warp; returns (left, at).

        left: number of remaining tiles beyond those that have a buffer already. at: state of the next buffer.
        """
        first, groups = cute.arch.lane_idx() == 0, self.cfg.groups
        for i in cutlass.range(work.tiles.count, unroll=1):
            number, buffer, turn = work.tiles.at(i), self.buffer_of(at), Int32(0)
            if const_expr(self.facts.deterministic):
                turn = work.tiles.turn(number)
            self.wait_for_full(group, buffer)
            if first:
                if const_expr(self.facts.deterministic):
                    wait_for_turn(work.turn_of(number, groups), turn)
                self.add(group, work, number, sums, buffer)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            if left > 0:
                self.free(group, buffer)
            if const_expr(self.facts.deterministic):
                if first:
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    end_turn(work.turn_of(number, groups), True)
            left -= 1
            at.advance()
        return left, at

    @cute.jit
    def store_in_turn(self, group: Int32, work: DqWork, sums: Int32, left: Int32, at):
        """`store` in a deterministic order, with two buffers.

        A tile's bulk addition overlaps with the wait for the next buffer. Its semaphore is incremented once the next
        tile's addition has been issued, or before the wait for the next tile's semaphore.
        """
        first, groups = cute.arch.lane_idx() == 0, self.cfg.groups
        begun = Int32(-1)  # the query tile whose semaphore is not incremented yet; -1: none
        for i in cutlass.range(work.tiles.count, unroll=1):
            number, buffer = work.tiles.at(i), self.buffer_of(at)
            self.wait_for_full(group, buffer)
            if first:
                turn, mine = work.turn_of(number, groups), work.tiles.turn(number)
                seen = load_acquire(turn)
                while seen != mine:
                    if begun >= 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=False)
                        end_turn(work.turn_of(begun, groups), True)
                        begun = Int32(-1)
                    seen = load_acquire(turn)
                self.add(group, work, number, sums, buffer)
                cute.arch.cp_async_bulk_wait_group(1, read=False)
                if begun >= 0:
                    end_turn(work.turn_of(begun, groups), True)
                begun = number
            cute.arch.sync_warp()
            if (i > 0) & (left >= 0):  # a later tile will need the previous tile's buffer
                self.free(group, 1 - buffer)
            left -= 1
            at.advance()
        if work.tiles.count > 0:
            if first:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                end_turn(work.turn_of(begun, groups), True)
            cute.arch.sync_warp()
            if left >= 0:
                self.free(group, 1 - self.buffer_of(at))
        return left, at

    @cute.jit
    def add(self, group: Int32, work: DqWork, number: Int32, sums: Int32, buffer: Int32 | int):
        """Issue the bulk addition of a part of a query tile's dQ to memory; called by one thread."""
        to = work.dq_of(number, self.sums.size * FP32) + group * self.part_bytes
        bulk_add(to, sums + self.place_of(group, buffer), self.part_bytes)
        cute.arch.cp_async_bulk_commit_group()

    def wait_for_full(self, group: Int32, buffer: Int32 | int):
        """Wait until a dQ buffer has been written."""
        cute.arch.barrier(barrier_id=BACKWARD_FULL + barrier_offset(group, buffer), number_of_threads=STORE_THREADS)

    def free(self, group: Int32, buffer: Int32 | int):
        """Release a dQ buffer to the consumer warpgroup."""
        barrier = BACKWARD_FREE + barrier_offset(group, buffer)
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=STORE_THREADS)

    def buffer_of(self, at) -> Int32 | int:
        """The dQ buffer of the step with ring state `at`."""
        return at.index if self.cfg.sums > 1 else 0
