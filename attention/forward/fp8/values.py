"""FP8 V as an operand: transposed by a kernel before this one, or converted to FP16 in this one.

V that another kernel has converted to FP16, and a 16-bit V, are plain Values.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, pipeline

from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.ptx import bulk_load, read_special_register

from ..config import STAGING_STAGES, Float8Facts
from ..operand_sm90 import Values, make_load, make_ring
from ..tile_queue import SLOTS
from .transposed_values import first_column
from .values_inside import CONVERTERS, Conversion, ValuesInside

# Registers per thread of (producer, consumers) if producer warps convert V, by consumer warpgroups and CTAs per SM.
REGISTERS = {(1, 2): (24, 232), (1, 1): (40, 240), (2, 1): (40, 232), (3, 1): (32, 160)}


def values_of(facts: Float8Facts) -> type[Values]:
    """Class of V's operand."""
    return TransposedValues if facts.fast else ConvertedValues if facts.converts else Values


class TransposedValues(Values):
    """V as stored by transposed_values, in tiles in shared memory's layout: bulk copies instead of TMA tensor loads."""

    def view(self, mV: cute.Tensor) -> cute.Tensor:
        return mV

    def make_load(self, tensor: cute.Tensor) -> tuple:
        return None, tensor

    def tiles(self, tma: None, sV: cute.Tensor, mV: cute.Tensor, tile, seqlen) -> tuple:
        """(address of the first tile, address of the ring)."""
        gV = mV[seqlen.b, tile.h_kv, None, None]  # (tiles, Dv * tile_n)
        tile_n = self.facts.config.tile_n
        first = first_column(seqlen.k0, tile.b, tile_n) // tile_n if self.packed else 0
        return gV.iterator.toint() + Int64(first) * gV.stride[0], sV.iterator.toint()

    @cute.jit
    def load(self, tiles: tuple, n: Int32, pipe, state):
        size = const_expr(self.facts.head_dim_v * self.facts.config.tile_n)
        pipe.producer_acquire(state)
        with cute.arch.elect_one():
            barrier = pipe.producer_get_barrier(state)
            bulk_load(tiles[1] + state.index * size, tiles[0] + Int64(n) * size, size, barrier.toint())


class ConvertedValues(Values):
    """E4M3 V that warps of the producer warpgroup convert to FP16: TMA fills a staging ring (values_inside)."""

    converters = CONVERTERS
    staging_stages = STAGING_STAGES

    def __init__(self, dtype, facts: Float8Facts, arrivals: Arrivals):
        super().__init__(dtype, facts, arrivals)
        self.inside = ValuesInside(facts)
        self.staging_bytes = STAGING_STAGES * self.inside.size
        self.registers = REGISTERS[facts.config.groups, facts.config.ctas]

    @property
    def rings(self) -> dict[str, Arrivals]:
        return self.inside.arrivals

    def make_load(self, tensor: cute.Tensor) -> tuple:
        return make_load(tensor, self.inside.layout(), self.tile)

    def make_ring(self, barriers) -> pipeline.PipelineAsync:
        return make_ring(barriers, self.stages, 0, self.inside.arrivals["V"])

    def loads(self, storage, sV: cute.Tensor, pipe) -> tuple:
        arrivals = self.inside.arrivals["FP8 V"]
        pipe = make_ring(storage.barriers_staging, STAGING_STAGES, self.inside.size, arrivals)
        return self.inside.ring(storage), pipe, STAGING_STAGES

    @cute.jit
    def convert(self, storage, rings: tuple, queue, source, scheduler, seqlens, step: Int32):
        """Convert the tiles of V of this CTA's query tiles, in the order in which the producer loads them.

        rings: (`loads`, V's pipeline).
        """
        (_, pipe_in, _), pipe_out = rings
        conversion = Conversion(
            self.inside,
            cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 1,
            (storage.staging.data_ptr().toint(), pipe_in),
            (storage.sV.data_ptr().toint(), pipe_out),
        )
        at_in, at_out = conversion.states()
        state_queue = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        index = read_special_register("ctaid.x")
        fields = scheduler.fields(index)
        while index < scheduler.count:
            tile = scheduler.of_fields(fields)
            tiles = source.for_tile(tile, seqlens.of(tile.b))
            at_in, at_out = conversion.convert(tiles.count, at_in, at_out)
            if const_expr(self.facts.config.dynamic):
                index, fields = queue.consume(len(fields), state_queue)
                state_queue.advance()
            else:
                index += step
                fields = scheduler.fields(index)
