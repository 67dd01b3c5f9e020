"""Accumulation into dQ on sm_90, by warps of the producer warpgroup, one for each consumer warpgroup.

A consumer writes its part of a query tile's dQ to a buffer in shared memory and continues. Its warp waits for the
buffer, adds it to dq_accum in global memory, where `deterministic` in the order of turns.py, and releases the buffer
once it has been read.
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
from .dq_sums import sums_of
from .turns import TURN, end_turn, wait_for_turn

STORE_THREADS = WARPGROUP + WARP  # a consumer warpgroup and the warp that stores its part of dQ


def meeting(group: Int32, buffer: Int32 | int) -> Int32:
    """Number of their barrier of a buffer of sums, from the first one on."""
    return group + 2 * buffer


@dataclass(frozen=True)
class DqWork:
    """One head's query tiles, and where a consumer warpgroup's parts of dQ go."""

    tiles: Any
    first: Int32  # number of the head's first query tile, of those of all heads
    dq: Int64  # address of the sums of dQ of all heads' first query tile
    turns: Int64 | None  # address of this warpgroup's semaphore of the same tile; None unless deterministic

    def dq_of(self, number: Int32, size: int) -> Int64:
        """Address of the sums of the head's tile of a number, of `size` bytes a tile."""
        return self.dq + Int64(self.first + number) * size

    def turn_of(self, number: Int32, parts: int) -> Int64:
        """Address of this warpgroup's semaphore of it, of `parts` semaphores a tile (turns.py)."""
        return self.turns + Int64(self.first + number) * (parts * TURN)


class DqStore:
    """What a warp does with the parts of one consumer warpgroup, and where those are in shared memory."""

    def __init__(self, facts: BackwardFacts):
        self.facts, self.cfg = facts, facts.config
        self.sums = sums_of(facts.path, facts.config, facts.head_dim)

    def place_of(self, group: Int32, buffer: Int32 | int) -> Int32:
        """Bytes from the first buffer's begin on."""
        return group * self.part_bytes + buffer * (self.sums.size * FP32)

    @property
    def part_bytes(self) -> int:
        """Of a warpgroup's sums."""
        return self.sums.values * WARPGROUP * FP32

    @cute.jit
    def store(self, group: Int32, work: DqWork, sums: Int32, left: Int32, at):
        """Add a consumer warpgroup's parts of dQ of a head's query tiles, by a warp; returns (left, at).

        left: how many of all tiles come after those for which there are buffers. at: which buffer is next.
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
        """The same in one order, of two buffers.

        A tile's sums are on their way to memory while the next ones are given: a turn is ended when the next tile's
        addition has been started, or, where that has to wait for its own turn, before it does.
        """
        first, groups = cute.arch.lane_idx() == 0, self.cfg.groups
        begun = Int32(-1)  # the query tile whose turn is not ended; -1: none
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
            if (i > 0) & (left >= 0):  # there are as many to come after the tile before
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
        """Start to add a part of a query tile's dQ to memory; by one thread."""
        to = work.dq_of(number, self.sums.size * FP32) + group * self.part_bytes
        bulk_add(to, sums + self.place_of(group, buffer), self.part_bytes)
        cute.arch.cp_async_bulk_commit_group()

    def wait_for_full(self, group: Int32, buffer: Int32 | int):
        """Until a buffer of sums has been written."""
        cute.arch.barrier(barrier_id=BACKWARD_FULL + meeting(group, buffer), number_of_threads=STORE_THREADS)

    def free(self, group: Int32, buffer: Int32 | int):
        """A buffer of sums may be written."""
        cute.arch.barrier_arrive(barrier_id=BACKWARD_FREE + meeting(group, buffer), number_of_threads=STORE_THREADS)

    def buffer_of(self, at) -> Int32 | int:
        """Of the step whose state is `at`."""
        return at.index if self.cfg.sums > 1 else 0
