"""Which part of dQ's tile a thread has: the rows and columns of its accumulators."""

from dataclasses import dataclass

from cute_kernels.tile.ampere import WARP
from cute_kernels.tile.hopper import WARPGROUP

from .warps import MMA_ROWS, split_of_dq

ROWS = 64  # of a warpgroup's product


@dataclass(frozen=True)
class DqFragments:
    """dQ's tile is shared by `groups_m` x `groups_n` groups of `threads` threads, the former fastest."""

    groups_m: int
    threads: int
    rows: int  # of a group
    columns: int  # of a group
    tiles_m: int = 1  # 16 rows each, of a warp

    def begin(self, tidx) -> tuple:
        """(first row, first column, tiles_m) of a thread; see store_o.store_rows."""
        group, thread = tidx // self.threads, tidx % self.threads
        row = group % self.groups_m * self.rows + thread // WARP * 16 * self.tiles_m + thread % WARP // 4
        return row, group // self.groups_m * self.columns, self.tiles_m


def fragments_of(path: str, config, head_dim: int) -> DqFragments:
    """Of a path's main kernel.

    sm_90: warpgroups have 64 rows each, or where there are no more share their columns. sm_80: groups are warps.
    """
    if path == "sm_90":
        groups_m = config.tile_m // ROWS
        return DqFragments(groups_m, WARPGROUP, ROWS, head_dim * groups_m // config.dq_groups)
    shared = split_of_dq(config, head_dim)
    rows = config.tile_m // shared.rows
    return DqFragments(shared.rows, WARP, rows, head_dim // shared.columns, rows // MMA_ROWS)
