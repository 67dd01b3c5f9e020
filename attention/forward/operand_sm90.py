"""Operands of attention on sm_90: the ring of Q, K or V in shared memory, its pipeline, and the loads of its tiles.

The kernel and its mainloop use Q, K and V through this interface. A V in another format is a subclass of Values
(fp8/values.py).

    layout()                     the ring in shared memory, with its stages
    make_load(tensor)            the TMA atom and its tensor, on the host
    make_ring(barriers)          the pipeline
    partition(..), tiles(..)     one head's tiles
    load(tiles, n, ..)           loads the n-th of them, by the producer warp
"""

import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.tile.barriers import Arrivals
from cute_kernels.tile.hopper import smem_layout

from .config import FlashFacts


@cute.jit
def load_tile(tma: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor, pipe, state):
    """Load a tile (TMA,) into a ring (TMA, PIPE), as soon as its stage is free."""
    pipe.producer_acquire(state)
    cute.copy(tma, gX, sX[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))


class Operand:
    """Tiles (rows, columns) that TMA loads into a ring of `stages`. packed: tensors of packed sequences."""

    def __init__(self, dtype, tile: tuple, stages: int, arrivals: Arrivals, packed: bool, row_major: bool = True):
        self.dtype, self.tile, self.stages = dtype, tile, stages
        self.arrivals, self.packed, self.row_major = arrivals, packed, row_major

    def layout(self):
        """Layout of the ring, (rows, columns, PIPE)."""
        return smem_layout(self.dtype, *self.tile, self.stages, self.row_major)

    def make_load(self, tensor: cute.Tensor) -> tuple:
        """TMA load of its tiles: (atom, tensor)."""
        return make_load(tensor, self.layout(), self.tile)

    def make_ring(self, barriers) -> pipeline.PipelineAsync:
        """Pipeline of the ring; its barriers are not yet visible to all threads."""
        rows, columns = self.tile
        return make_ring(barriers, self.stages, rows * columns * self.dtype.width // 8, self.arrivals)

    def partition(self, tma: cute.CopyAtom, smem: cute.Tensor, tensor: cute.Tensor, begin: tuple) -> tuple:
        """(TMA, PIPE) and (TMA, rest_0, rest_1, heads, batch); tiles of a packed sequence start at `begin`."""
        if self.packed:
            tensor = cute.domain_offset((*begin, 0, 0), tensor)
        tiles = cute.local_tile(tensor, self.tile, (None, None, None, None))
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    def load(self, tiles: tuple, n: Int32, pipe, state):
        """Load the n-th of (TMA atom, (TMA, tiles), (TMA, PIPE)), as soon as its stage is free."""
        tma, gX, sX = tiles
        load_tile(tma, gX[None, n], sX, pipe, state)


class Values(Operand):
    """V as (Dv, tile_n), the B operand of P V. Tensor cores transpose only 16-bit operands."""

    converters = 0  # warps of the producer warpgroup that convert the loaded tiles
    staging_bytes = staging_stages = 0  # of the ring that TMA fills if V is converted
    registers = None  # per thread of (producer, consumers); None: the kernel's own

    def __init__(self, dtype, facts: FlashFacts, arrivals: Arrivals):
        tile = facts.head_dim_v, facts.config.tile_n
        super().__init__(dtype, tile, facts.config.stages, arrivals, facts.packed, not facts.values_element.transposes)
        self.facts = facts

    @property
    def rings(self) -> dict[str, Arrivals]:
        """Arrivals at each of V's pipelines."""
        return {"V": self.arrivals}

    def view(self, mV: cute.Tensor) -> cute.Tensor:
        """V (B, Hkv, Sk, Dv) as (Dv, Sk, Hkv, B)."""
        return permuted(mV, (3, 2, 1, 0))

    def loads(self, storage, sV: cute.Tensor, pipe) -> tuple:
        """Destination of the producer warp's loads: (ring, pipeline, stages)."""
        return sV, pipe, self.stages

    def tiles(self, tma: cute.CopyAtom, sV: cute.Tensor, mV: cute.Tensor, tile, seqlen) -> tuple:
        """Tiles of a query tile's head, for `load`."""
        tVsV, tVgV = self.partition(tma, sV, mV, (0, seqlen.k0))
        return tma, tVgV[None, 0, None, tile.h_kv, seqlen.b], tVsV


def make_load(tensor: cute.Tensor, layout, tile: tuple) -> tuple:
    """TMA load of tiles into a ring with stages: (atom, tensor)."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), tensor, cute.slice_(layout, (None, None, 0)), tile
    )


def make_ring(barriers, stages: int, tx_bytes: int, arrivals: Arrivals) -> pipeline.PipelineAsync:
    """Pipeline whose stages receive `tx_bytes` by TMA; its barriers are not yet visible to all threads."""
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.full),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals.empty),
        tx_count=tx_bytes,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )


def permuted(tensor: cute.Tensor, modes: tuple) -> cute.Tensor:
    """The tensor with its modes permuted."""
    shape, stride = (tuple(v[i] for i in modes) for v in (tensor.shape, tensor.stride))
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
