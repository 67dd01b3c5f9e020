"""Tiles drawn from a counter: whoever is done first gets the next one."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, pipeline

SLOTS = 2  # numbers of tiles that the producer may be ahead


@dataclass(frozen=True)
class TileQueue:
    """Hands out the tiles after the first one of each CTA in the order in which CTAs ask for them.

    The producer warp draws a number from a counter in global memory and tells it to the consumers by shared memory. A
    tile that is worked on means one draw, so there are as many draws as tiles, and the last one sets the counter back
    to 0 for the next launch. Which CTA gets a tile changes nothing in its result.
    """

    pipe: pipeline.PipelineAsync
    slots: cute.Tensor  # (SLOTS,) Int32 in shared memory
    counter: cute.Tensor  # (1,) Int32, 0 before and after

    @cute.jit
    def draw(self, count: Int32, ctas: Int32) -> Int32:
        """The next tile's number, in lane 0 of the producer warp."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            before = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            if before == count - 1:
                self.counter[0] = Int32(0)
            number = before + ctas
        return number

    @cute.jit
    def tell(self, number: Int32, state) -> Int32:
        """The producer warp tells the consumers, and itself, what lane 0 has drawn."""
        self.pipe.producer_acquire(state)
        if cute.arch.lane_idx() == 0:
            self.slots[state.index] = number
        cute.arch.sync_warp()
        self.pipe.producer_commit(state)
        return cute.arch.shuffle_sync(number, 0)

    @cute.jit
    def hear(self, state) -> Int32:
        """What the producer warp told, in every thread of the consumers."""
        self.pipe.consumer_wait(state)
        number = self.slots[state.index]
        self.pipe.consumer_release(state)
        return number
