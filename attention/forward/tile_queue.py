"""Dynamic tile scheduling: CTAs fetch their next tile from an atomic counter."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, pipeline, range_constexpr

SLOTS = 2  # tiles by which the producer may be ahead of the consumers
FIELDS = 6  # per slot: a tile index and up to five fields of the tile


@dataclass(frozen=True)
class TileQueue:
    """Distributes the tiles after the first one of each CTA, in the order in which CTAs fetch them.

    The producer warp fetches a tile index from a counter in global memory. It publishes the index to the consumers in
    shared memory, with the tile's fields (`fields` of the scheduler), so that they do not wait for look-ups. Each
    computed tile causes one fetch, so there are as many fetches as tiles. The last one resets the counter to 0 for the
    next launch. A tile's result does not depend on the CTA that computes it.
    """

    pipe: pipeline.PipelineAsync
    slots: cute.Tensor  # (FIELDS, SLOTS) Int32 in shared memory
    counter: cute.Tensor  # (1,) Int32, 0 before and after

    @cute.jit
    def fetch(self, ctas: Int32) -> Int32:
        """Start fetching the next tile index, to lane 0 of the producer warp; `fetched` waits for it."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu") + ctas
        return number

    @cute.jit
    def fetched(self, number: Int32, count: Int32, ctas: Int32) -> Int32:
        """Return the fetched index in all lanes."""
        if cute.arch.lane_idx() == 0:
            if number == count - 1 + ctas:
                self.counter[0] = Int32(0)
        return cute.arch.shuffle_sync(number, 0)

    @cute.jit
    def publish(self, number: Int32, fields: tuple, state):
        """Publish a tile to the consumers; called by the producer warp."""
        self.pipe.producer_acquire(state)
        if cute.arch.lane_idx() == 0:
            self.slots[0, state.index] = number
            for i in range_constexpr(len(fields)):
                self.slots[1 + i, state.index] = fields[i]
        cute.arch.sync_warp()
        self.pipe.producer_commit(state)

    def consume(self, count: int, state) -> tuple:
        """Return (index, `count` fields) published by the producer warp; called by every consumer thread."""
        self.pipe.consumer_wait(state)
        number, *fields = (cute.arch.make_warp_uniform(self.slots[i, state.index]) for i in range(1 + count))
        self.pipe.consumer_release(state)
        return number, tuple(fields)
