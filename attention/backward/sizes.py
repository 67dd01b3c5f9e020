"""Sizes of backward's arrays, as kernels and the host compute them. Does not import CuTe DSL."""

from .config import FP32, BackwardFacts


def tiles_of_a_head(rows: int, tile: int, sequences: int | None = None, block: int | None = None):
    """Maximum number of tiles per head, for `rows` rows in total, optionally in `sequences` packed sequences.

    block: block_q of a block mask. Its last block is processed as a whole, including tiles past the last row.
    """
    if block is not None:
        return (rows + block - 1) // block * (block // tile)
    return (rows + tile - 1) // tile if sequences is None else rows // tile + sequences + 1


def bytes_of_a_row(facts: BackwardFacts) -> int:
    """Bytes per row of Q, dO and dq_accum, which all KV tiles of a head access."""
    return (facts.head_dim + facts.head_dim_v) * facts.element.width + facts.head_dim * FP32
