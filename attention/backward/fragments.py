"""Rows and columns of each thread's dQ accumulators in a query tile."""

from dataclasses import dataclass

from cute_kernels.tile.ampere import WARP
from cute_kernels.tile.hopper import WARPGROUP

from .warps import MMA_ROWS, split_of_dq

ROWS = 64  # of a warpgroup's WGMMA


@dataclass(frozen=True)
class DqFragments:
    """Partition of dQ's tile across `groups_m` x `groups_n` groups of `threads` threads, groups_m fastest."""

    groups_m: int
    threads: int
    rows: int  # per group
    columns: int  # per group
    tiles_m: int = 1  # MMA tiles of 16 rows per warp

    def begin(self, tidx) -> tuple:
        """Return (first row, first column, tiles_m) of a thread; see store_o.store_rows."""
        group, thread = tidx // self.threads, tidx % self.threads
        row = group % self.groups_m * self.rows + thread // WARP * 16 * self.tiles_m + thread % WARP // 4
        return row, group // self.groups_m * self.columns, self.tiles_m


def fragments_of(path: str, config, head_dim: int) -> DqFragments:
    """The partition in a path's main kernel.

    sm_90: each warpgroup has 64 rows; warpgroups in excess of the rows split the columns. sm_80: groups are warps.
    """
    if path == "sm_90":
        groups_m = config.tile_m // ROWS
        return DqFragments(groups_m, WARPGROUP, ROWS, head_dim * groups_m // config.dq_groups)
    shared = split_of_dq(config, head_dim)
    rows = config.tile_m // shared.rows
    return DqFragments(shared.rows, WARP, rows, head_dim // shared.columns, rows // MMA_ROWS)
