"""How the warps of the sm_80 path share the products of a step of backward.

A product's result is shared by `rows` x `columns` warps, warp number w having row w % rows and column w // rows of
them. mma.sync computes 16 rows, and ldmatrix reads operands of 16 rows or columns.

A warp with 32 rows reads the other operand half as often as one with 16, but needs twice the accumulators.
"""

from dataclasses import dataclass

MMA_ROWS = 16


@dataclass(frozen=True)
class Split:
    """How many warps share a product's rows, and its columns."""

    rows: int
    columns: int

    def of(self, warp) -> tuple:
        """(row, column) of a warp."""
        return warp % self.rows, warp // self.rows


@dataclass(frozen=True)
class Warps:
    """Who computes what.

    Where each warp has all columns of its scores, P' and dS' are A operands in its registers. Otherwise they pass
    through shared memory.
    """

    scores: Split  # of S' and dP' (tile_n, tile_m)
    kv: Split  # of dK (tile_n, D) and dV (tile_n, Dv)
    dq: Split  # of dQ (tile_m, D)

    @property
    def in_registers(self) -> bool:
        """Whether P' and dS' stay in the registers of who computed them."""
        return self.scores == self.kv and self.scores.columns == 1


def split(rows: int, widths: tuple, warps: int) -> Split:
    """`warps` warps share `rows` rows: 32 each if that leaves them all of each width in parts that ldmatrix reads.

    Raises:
        ValueError: there is no such way to share them.
    """
    for height in (2 * MMA_ROWS, MMA_ROWS):
        along = rows // height
        if along * height == rows and 0 < along <= warps and warps % along == 0:
            columns = warps // along
            if all(width % (16 * columns) == 0 for width in widths):
                return Split(along, columns)
    raise ValueError(f"{warps} warps cannot share products of {rows} rows and {' or '.join(map(str, widths))} columns")


def split_of_dq(config, head_dim: int) -> Split:
    """Of dQ's tile (tile_m, head_dim)."""
    return split(config.tile_m, (head_dim,), config.groups)


def warps_of(config, head_dim: int, head_dim_v: int) -> Warps:
    """Of a configuration of the sm_80 path: `config.groups` warps.

    Raises:
        ValueError: they cannot share its tiles.
    """
    dq = split_of_dq(config, head_dim)
    height = config.tile_n // config.groups
    if height in (MMA_ROWS, 2 * MMA_ROWS):
        own = Split(config.groups, 1)
        return Warps(own, own, dq)
    scores = split(config.tile_n, (config.tile_m,), config.groups)
    return Warps(scores, split(config.tile_n, (head_dim, head_dim_v), config.groups), dq)
