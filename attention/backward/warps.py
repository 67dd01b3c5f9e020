"""Split of the matmuls of a backward step across the warps of the sm_80 path.

A matmul's output is split across `rows` x `columns` warps; warp w has row w % rows and column w // rows of them.
mma.sync computes 16 rows, and ldmatrix reads operands of 16 rows or columns.

A warp with 32 rows reads the other operand half as often as one with 16, but needs twice the accumulators.
"""

from dataclasses import dataclass

MMA_ROWS = 16


@dataclass(frozen=True)
class Split:
    """Number of warps along a matmul's rows and columns."""

    rows: int
    columns: int

    def of(self, warp) -> tuple:
        """(row, column) of a warp."""
        return warp % self.rows, warp // self.rows


@dataclass(frozen=True)
class Warps:
    """Splits of all matmuls.

    If each warp has all columns of its scores, P' and dS' are A operands in its registers. Otherwise they pass through
    shared memory.
    """

    scores: Split  # of S' and dP' (tile_n, tile_m)
    kv: Split  # of dK (tile_n, D) and dV (tile_n, Dv)
    dq: Split  # of dQ (tile_m, D)

    @property
    def in_registers(self) -> bool:
        """True if P' and dS' stay in registers."""
        return self.scores == self.kv and self.scores.columns == 1


def split(rows: int, widths: tuple, warps: int) -> Split:
    """Split `rows` rows across `warps` warps, 32 or else 16 rows each, and each width in parts that ldmatrix reads.

    Raises:
        ValueError: no such split exists.
    """
    for height in (2 * MMA_ROWS, MMA_ROWS):
        along = rows // height
        if along * height == rows and 0 < along <= warps and warps % along == 0:
            columns = warps // along
            if all(width % (16 * columns) == 0 for width in widths):
                return Split(along, columns)
    raise ValueError(f"cannot split {rows} rows and {' or '.join(map(str, widths))} columns across {warps} warps")


def split_of_dq(config, head_dim: int) -> Split:
    """The split of dQ's tile (tile_m, head_dim)."""
    return split(config.tile_m, (head_dim,), config.groups)


def warps_of(config, head_dim: int, head_dim_v: int) -> Warps:
    """The splits of a configuration of the sm_80 path across its `config.groups` warps.

    Raises:
        ValueError: the tiles cannot be split.
    """
    dq = split_of_dq(config, head_dim)
    height = config.tile_n // config.groups
    if height in (MMA_ROWS, 2 * MMA_ROWS):
        own = Split(config.groups, 1)
        return Warps(own, own, dq)
    scores = split(config.tile_n, (config.tile_m,), config.groups)
    return Warps(scores, split(config.tile_n, (head_dim, head_dim_v), config.groups), dq)
