"""V of e4m3 converted to FP16 inside of the forward kernel, by the producer warps that issue no loads.

    TMA -> ring of e4m3, STAGING_STAGES stages -> CONVERTERS warps -> V's ring of FP16, as WGMMA takes it

    ring        producer arrives          consumers arrive (per stage)
    V, e4m3     1 thread + bytes of TMA   1 thread of each warp that converts
    V, fp16     1 thread of each of them  1 thread of each consumer warp

The fp16 ring has V in lines as wide as its swizzle: the first columns of all rows, one line below the other, then the
next columns. The ring of e4m3 has lines of as many columns in the same order, without a swizzle. So what lies at byte x
of a tile of e4m3 comes to byte 2x of the fp16 tile, but for the swizzle, which moves pieces of 16 bytes by bits of the
address from 128 to 512.

A lane converts 16 neighbouring values at a time, and a warp 512, which are 1024 bytes of fp16. So a lane's swizzle is
the same each time, and the other addresses are constants. Eight lanes read 128 bytes in a row. They write the first
halves of their 32 bytes to one half of each of two or four lines, which the swizzle puts into different banks, and then
the other halves.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, const_expr, pipeline, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.element import SWIZZLES, VECTOR_BYTES
from cute_kernels.tile.ptx import float8_to_fp16, read_special_register

from ..config import STAGING_STAGES, Float8Facts

CONVERTERS = 3  # warps: all of the producer's warpgroup but the first
PIECE = 32 * VECTOR_BYTES  # values that a warp converts at a time
WORDS = VECTOR_BYTES // 4


@dataclass(frozen=True)
class ValuesInside:
    """A tile of V as it is loaded, and what becomes of it."""

    facts: Float8Facts

    @property
    def arrivals(self) -> dict[str, Arrivals]:
        """Of the two rings of V."""
        return {
            "V": Arrivals(CONVERTERS, 4 * self.facts.config.groups),
            "V of 8 bits": Arrivals(1, 0, others=CONVERTERS),
        }

    @property
    def size(self) -> int:
        """Values of a tile, which are bytes of e4m3."""
        return self.facts.config.tile_n * self.facts.head_dim_v

    @property
    def span(self) -> int:
        """Bytes of a line of fp16: smem_layout's swizzle."""
        return next(span for span in SWIZZLES if self.facts.head_dim_v * 2 % span == 0)

    @property
    def ahead(self) -> int:
        """Pieces that a warp loads before it converts any. With two CTAs an SM it has 24 registers a thread."""
        return 2 if self.facts.config.ctas == 1 else 1

    def layout(self):
        """The ring of e4m3 (Dv, tile_n, PIPE)."""
        dim, rows, columns = self.facts.head_dim_v, self.facts.config.tile_n, self.span // 2
        return cute.make_layout(
            ((columns, dim // columns), rows, STAGING_STAGES), stride=((1, columns * rows), columns, self.size)
        )

    def ring(self, storage) -> cute.Tensor:
        """The same in shared memory."""
        start = cute.recast_ptr(storage.staging.data_ptr(), dtype=Float8E4M3FN)
        return cute.make_tensor(start, self.layout())

    @cute.jit
    def convert(self, source: Int32, to: Int32, warp: Int32):
        """Convert a tile of e4m3 at the address `source` to fp16 at `to`; this warp has each third piece of it."""
        pieces = const_expr(self.size // PIECE)
        number = warp * 32 + read_special_register("laneid")  # read anew: no register is held for what comes of it
        source, first = source + number * VECTOR_BYTES, to + swizzled(number * (2 * VECTOR_BYTES), self.span)
        second = first ^ VECTOR_BYTES
        for begin in range_constexpr(0, pieces // CONVERTERS, self.ahead):
            here = range(begin, min(begin + self.ahead, pieces // CONVERTERS))
            loaded = [load(source + i * (CONVERTERS * PIECE)) for i in here]
            for i, words in zip(here, loaded, strict=True):
                store(words, first, second, i * (CONVERTERS * PIECE * 2))
        if const_expr(pieces % CONVERTERS):
            if warp < pieces % CONVERTERS:
                done = const_expr(pieces // CONVERTERS * (CONVERTERS * PIECE))
                store(load(source + done), first, second, 2 * done)


def swizzled(place, span: int):
    """Where a byte of a ring is, of lines as wide as so many bytes: smem_layout's swizzle."""
    return place ^ (place >> 3 & (span - VECTOR_BYTES))


def load(at: Int32) -> cute.Tensor:
    """16 bytes of shared memory."""
    words = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(shared(at), words)
    return words


def store(words: cute.Tensor, first: Int32, second: Int32, offset: int):
    """16 values of e4m3 as fp16, in two halves."""
    for half, to in enumerate((first, second)):
        vector = cute.make_rmem_tensor(WORDS, Int32)
        for i in range(2):
            vector[2 * i], vector[2 * i + 1] = float8_to_fp16(words[2 * half + i], "float8_e4m3fn", False)
        cute.autovec_copy(vector, shared(to + offset))


def shared(at: Int32) -> cute.Tensor:
    """16 bytes at an address of shared memory."""
    return cute.make_tensor(make_ptr(Int32, at, AddressSpace.smem, assumed_align=VECTOR_BYTES), cute.make_layout(WORDS))


@dataclass(frozen=True)
class Conversion:
    """What a warp that converts needs for all of its tiles."""

    inside: ValuesInside
    warp: Int32  # among those that convert
    given: tuple  # address of the ring of e4m3, its pipeline
    made: tuple  # the same of V's ring

    def states(self) -> tuple:
        """Where it begins in both rings."""
        return (
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGING_STAGES),
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.inside.facts.config.stages),
        )

    @cute.jit
    def convert(self, count: Int32, at_given, at_made):
        """Convert the next `count` tiles; returns where it is in both rings."""
        size = const_expr(self.inside.size)
        (given, pipe_given), (made, pipe_made) = self.given, self.made
        for _ in cutlass.range(count, unroll=1):
            pipe_given.consumer_wait(at_given)
            pipe_made.sync_object_empty.wait(at_made.index, at_made.phase)
            self.inside.convert(given + at_given.index * size, made + at_made.index * (2 * size), self.warp)
            cute.arch.fence_view_async_shared()  # what reads V is WGMMA
            cute.arch.sync_warp()
            if read_special_register("laneid") == 0:
                cute.arch.mbarrier_arrive(pipe_made.producer_get_barrier(at_made))
            pipe_given.consumer_release(at_given)
            at_given.advance()
            at_made.advance()
        return at_given, at_made
