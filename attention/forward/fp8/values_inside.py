"""Conversion of E4M3 V to FP16 in the forward kernel, by the producer warps that issue no loads.

    TMA -> E4M3 ring, STAGING_STAGES stages -> CONVERTERS warps -> V's FP16 ring, in WGMMA's layout

    ring        producer arrives              consumers arrive (per stage)
    V, E4M3     1 thread + bytes of TMA       1 thread for each converting warp
    V, FP16     1 thread per converting warp  1 thread for each consumer warp

The FP16 ring has V in lines as wide as its swizzle: the first columns of all rows, one line each, then the next
columns. The E4M3 ring has lines of as many columns in the same order, without a swizzle. So byte x of an E4M3 tile is
converted to byte 2x of the FP16 tile, except for the swizzle, which permutes 16-byte chunks by address bits from 128 to
512.

A lane converts 16 neighboring values at a time, and a warp 512, which are 1024 bytes of FP16. So a lane's swizzle is
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

CONVERTERS = 3  # warps: all of the producer warpgroup but the first
PIECE = 32 * VECTOR_BYTES  # values that a warp converts at a time
WORDS = VECTOR_BYTES // 4


@dataclass(frozen=True)
class ValuesInside:
    """Geometry of a tile of V as it is loaded and as it is converted."""

    facts: Float8Facts

    @property
    def arrivals(self) -> dict[str, Arrivals]:
        """Arrivals at the two rings of V."""
        return {
            "V": Arrivals(CONVERTERS, 4 * self.facts.config.groups),
            "FP8 V": Arrivals(1, 0, others=CONVERTERS),
        }

    @property
    def size(self) -> int:
        """Values per tile, which are bytes of E4M3."""
        return self.facts.config.tile_n * self.facts.head_dim_v

    @property
    def span(self) -> int:
        """Bytes of an FP16 line: smem_layout's swizzle."""
        return next(span for span in SWIZZLES if self.facts.head_dim_v * 2 % span == 0)

    @property
    def prefetched(self) -> int:
        """Pieces that a warp loads before it converts any. With two CTAs per SM it has 24 registers per thread."""
        return 2 if self.facts.config.ctas == 1 else 1

    def layout(self):
        """Layout of the E4M3 ring (Dv, tile_n, PIPE)."""
        dim, rows, columns = self.facts.head_dim_v, self.facts.config.tile_n, self.span // 2
        return cute.make_layout(
            ((columns, dim // columns), rows, STAGING_STAGES), stride=((1, columns * rows), columns, self.size)
        )

    def ring(self, storage) -> cute.Tensor:
        """The E4M3 ring in shared memory."""
        start = cute.recast_ptr(storage.staging.data_ptr(), dtype=Float8E4M3FN)
        return cute.make_tensor(start, self.layout())

    @cute.jit
    def convert(self, source: Int32, to: Int32, warp: Int32):
        """Convert a tile of E4M3 at address `source` to FP16 at `to`; each warp converts every third piece."""
        pieces = const_expr(self.size // PIECE)
        number = warp * 32 + read_special_register("laneid")  # read again rather than held in registers
        source, first = source + number * VECTOR_BYTES, to + swizzled(number * (2 * VECTOR_BYTES), self.span)
        second = first ^ VECTOR_BYTES
        for begin in range_constexpr(0, pieces // CONVERTERS, self.prefetched):
            here = range(begin, min(begin + self.prefetched, pieces // CONVERTERS))
            loaded = [load(source + i * (CONVERTERS * PIECE)) for i in here]
            for i, words in zip(here, loaded, strict=True):
                store(words, first, second, i * (CONVERTERS * PIECE * 2))
        if const_expr(pieces % CONVERTERS):
            if warp < pieces % CONVERTERS:
                done = const_expr(pieces // CONVERTERS * (CONVERTERS * PIECE))
                store(load(source + done), first, second, 2 * done)


def swizzled(place, span: int):
    """Address of a byte after smem_layout's swizzle of lines of `span` bytes."""
    return place ^ (place >> 3 & (span - VECTOR_BYTES))


def load(at: Int32) -> cute.Tensor:
    """Load 16 bytes from shared memory."""
    words = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(shared(at), words)
    return words


def store(words: cute.Tensor, first: Int32, second: Int32, offset: int):
    """Store 16 E4M3 values as FP16, in two halves."""
    for half, to in enumerate((first, second)):
        vector = cute.make_rmem_tensor(WORDS, Int32)
        for i in range(2):
            vector[2 * i], vector[2 * i + 1] = float8_to_fp16(words[2 * half + i], "float8_e4m3fn", False)
        cute.autovec_copy(vector, shared(to + offset))


def shared(at: Int32) -> cute.Tensor:
    """View of 16 bytes at a shared memory address."""
    return cute.make_tensor(make_ptr(Int32, at, AddressSpace.smem, assumed_align=VECTOR_BYTES), cute.make_layout(WORDS))


@dataclass(frozen=True)
class Conversion:
    """State of a converting warp for all of its tiles."""

    inside: ValuesInside
    warp: Int32  # among the converting warps
    staging: tuple  # address of the E4M3 ring, its pipeline
    converted: tuple  # address of V's FP16 ring, its pipeline

    def states(self) -> tuple:
        """Initial states of both pipelines."""
        return (
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGING_STAGES),
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.inside.facts.config.stages),
        )

    @cute.jit
    def convert(self, count: Int32, at_in, at_out):
        """Convert the next `count` tiles; returns the states of both pipelines."""
        size = const_expr(self.inside.size)
        (source, pipe_in), (to, pipe_out) = self.staging, self.converted
        for _ in cutlass.range(count, unroll=1):
            pipe_in.consumer_wait(at_in)
            pipe_out.sync_object_empty.wait(at_out.index, at_out.phase)
            self.inside.convert(source + at_in.index * size, to + at_out.index * (2 * size), self.warp)
            cute.arch.fence_view_async_shared()  # WGMMA reads V through the async proxy
            cute.arch.sync_warp()
            if read_special_register("laneid") == 0:
                cute.arch.mbarrier_arrive(pipe_out.producer_get_barrier(at_out))
            pipe_in.consumer_release(at_in)
            at_in.advance()
            at_out.advance()
        return at_in, at_out
