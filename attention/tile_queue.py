"""Tiles drawn from a counter: whoever is done first gets the next one."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, pipeline, range_constexpr

SLOTS = 2  # numbers of tiles that the producer may be ahead


WORDS = 6  # of a slot: a number and up to five words about the tile


@dataclass(frozen=True)
class TileQueue:
    """Hands out the tiles after the first one of each CTA in the order in which CTAs ask for them.

    The producer warp draws a number from a counter in global memory and tells it to the consumers by shared memory,
    with what it has looked up of the tile (`words` of the scheduler), for which they then need not wait. A tile that is
    worked on means one draw, so there are as many draws as tiles, and the last one sets the counter back to 0 for the
    next launch. Which CTA gets a tile changes nothing in its result.
    """

    pipe: pipeline.PipelineAsync
    slots: cute.Tensor  # (WORDS, SLOTS) Int32 in shared memory
    counter: cute.Tensor  # (1,) Int32, 0 before and after

    @cute.jit
    def draw(self, ctas: Int32) -> Int32:
        """The next tile's number in lane 0 of the producer warp, which need not wait for it yet."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu") + ctas
        return number

    @cute.jit
    def drawn(self, number: Int32, count: Int32, ctas: Int32) -> Int32:
        """The number in all lanes."""
        if cute.arch.lane_idx() == 0:
            if number == count - 1 + ctas:
                self.counter[0] = Int32(0)
        return cute.arch.shuffle_sync(number, 0)

    @cute.jit
    def tell(self, number: Int32, words: tuple, state):
        """The producer warp tells the consumers."""
        self.pipe.producer_acquire(state)
        if cute.arch.lane_idx() == 0:
            self.slots[0, state.index] = number
            for i in range_constexpr(len(words)):
                self.slots[1 + i, state.index] = words[i]
        cute.arch.sync_warp()
        self.pipe.producer_commit(state)

    def hear(self, count: int, state) -> tuple:
        """(number, `count` words) that the producer warp told, in every thread of the consumers."""
        self.pipe.consumer_wait(state)
        number, *words = (cute.arch.make_warp_uniform(self.slots[i, state.index]) for i in range(1 + count))
        self.pipe.consumer_release(state)
        return number, tuple(words)
