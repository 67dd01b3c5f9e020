"""How the sums of dQ go to memory on sm_90: by warps of the producer's warpgroup, one for each consumer warpgroup.

A consumer writes its part of a query tile's dQ to a buffer in shared memory, and goes on. Its warp waits for that,
stores the part or adds it (turns.py), and gives the buffer back when it has been read.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.tile.ampere import WARP
from cute_kernels.tile.barriers import BACKWARD_FREE, BACKWARD_FULL
from cute_kernels.tile.hopper import WARPGROUP
from cute_kernels.tile.ptx import bulk_add, bulk_store, load_acquire

from .config import FP32, BackwardFacts
from .dq_sums import sums_of
from .turns import NONE, STORING, THERE, TURN, claim, end_turn, wait_for_turn

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
    turns: Int64 | None  # address of this warpgroup's number of the same tile, where there is one

    def dq_of(self, number: Int32, size: int) -> Int64:
        """Address of the sums of the head's tile of a number, of `size` bytes a tile."""
        return self.dq + Int64(self.first + number) * size

    def turn_of(self, number: Int32, parts: int) -> Int64:
        """Address of this warpgroup's number of it, of `parts` numbers a tile (turns.py)."""
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

        A tile's number is asked for while its sums are waited for, and that of the tile before is moved on after that.

        left: how many of all tiles come after those for which there are buffers. at: which buffer is next.
        """
        first, groups = cute.arch.lane_idx() == 0, self.cfg.groups
        number, found, count = Int32(0), Int32(NONE), work.tiles.count
        if count > 0:
            number = work.tiles.at(0)
            if first:
                found = self.ask(work, number)
        for i in cutlass.range(count, unroll=1):
            buffer = self.buffer_of(at)
            self.wait_for_full(group, buffer)
            if first:
                if const_expr(self.facts.deterministic):
                    wait_for_turn(work.turn_of(number, groups), found)
                elif found == STORING:
                    wait_for_turn(work.turn_of(number, groups), Int32(THERE))
                self.store_or_add(group, work, number, sums, buffer, found == NONE)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            if left > 0:
                self.free(group, buffer)
            following, found_next = number, found
            if i + 1 < count:
                following = work.tiles.at(i + 1)
                if first:
                    found_next = self.ask(work, following)
            if first:
                if const_expr(self.facts.deterministic) or found == NONE:
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    end_turn(work.turn_of(number, groups), True)
            number, found = following, found_next
            left -= 1
            at.advance()
        return left, at

    def ask(self, work: DqWork, number: Int32) -> Int32:
        """What a query tile's number says, in one order what it is to say. Who finds NONE has to store."""
        if self.facts.deterministic:
            return work.tiles.turn(number)
        return claim(work.turn_of(number, self.cfg.groups))

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
                self.store_or_add(group, work, number, sums, buffer, mine == 0)
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
    def store_or_add(
        self, group: Int32, work: DqWork, number: Int32, sums: Int32, buffer: Int32 | int, store
    ):  # fmt: skip
        """Start to store a part of a query tile's dQ, or to add it; by one thread."""
        to = work.dq_of(number, self.sums.size * FP32) + group * self.part_bytes
        source = sums + self.place_of(group, buffer)
        if store:
            bulk_store(to, source, self.part_bytes)
        else:
            bulk_add(to, source, self.part_bytes)
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
