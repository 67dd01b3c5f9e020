"""Layout of dq_accum: maps the FP32 values of a tile to threads and their accumulator registers.

CTAs accumulate into a query tile's dQ without its rows and columns: values are in the order of threads and their
registers, those of `span` threads together. One bulk copy then adds a whole warpgroup's part on sm_90, and one
instruction adds a warp's 32 adjacent values on the sm_80 path.

    offset of value r of thread t   (t // span) * span * values + (r // vector * span + t % span) * vector + r % vector
"""

from dataclasses import dataclass

from cute_kernels.tile.ampere import WARP
from cute_kernels.tile.hopper import WARPGROUP


@dataclass(frozen=True)
class DqSums:
    """Layout of a tile (tile_m, head_dim) across `threads` threads."""

    tile_m: int
    head_dim: int
    threads: int
    span: int
    vector: int  # adjacent values of one thread

    @property
    def values(self) -> int:
        """Values per thread."""
        return self.tile_m * self.head_dim // self.threads

    @property
    def size(self) -> int:
        """Values per tile."""
        return self.tile_m * self.head_dim

    def offset(self, thread, r: int):
        begin = thread // self.span * (self.span * self.values)
        return begin + (r // self.vector * self.span + thread % self.span) * self.vector + r % self.vector


def sums_of(path: str, config, head_dim: int) -> DqSums:
    """The layout of dq_accum in a path's main kernel."""
    if path == "sm_90":
        return DqSums(config.tile_m, head_dim, WARPGROUP * config.dq_groups, WARPGROUP, 4)
    return DqSums(config.tile_m, head_dim, WARP * config.groups, WARP, 1)
