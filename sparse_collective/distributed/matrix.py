"""A BsrMatrix over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from ..bsr import BsrMatrix
from ..conversions import Balance
from ..nn.shards import check_same, hash_of

__all__ = ["distribute_bsr"]


def distribute_bsr(W: BsrMatrix, mesh: Any, placements: Sequence[Any], *, balance: Balance = "extent") -> BsrMatrix:
    """Return this rank's part of a matrix that every rank holds, as torch's distribute_tensor places a tensor.

    Nothing is sent but a hash of the pattern and of the arguments. Ranks must hold the same W: load it, or make it from
    one seed.

    Args:
        W: (M, K) or (L, M, K), the same on all ranks of the mesh.
        mesh: DeviceMesh.
        placements: one for each mesh dimension. Shard(0) gives each rank some block rows, Shard(1) some block columns
            (of a batch Shard(1) and Shard(2)), contiguous and in the order of ranks; Replicate() all of them.
        balance: see BsrMatrix.split.

    Returns:
        A BsrMatrix, differentiable with respect to W.values: x @ part.T for Shard(0) is this rank's part of the
        features, for Shard(1) a summand of the result.

    Raises:
        TypeError: mesh is no DeviceMesh, or placements are not a sequence.
        ValueError: the number of placements is not the mesh's dimension, a placement is neither Replicate nor Shard of
            rows or columns, or balance is unknown.
        RuntimeError: ranks hold different patterns, or pass other placements or another balance.

    Example::

        mesh = init_device_mesh("cuda", (2,))
        part = distribute_bsr(W, mesh, [Shard(0)])
        y = bsr_linear(x, part)  # (..., M / 2): the features of this rank
    """
    if not hasattr(mesh, "get_local_rank"):
        raise TypeError(f"distribute_bsr: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"distribute_bsr: this rank is not in the mesh, {mesh!r}")

    def checked() -> int:
        check_arguments(W, mesh, placements, balance)
        return hash_of(*W.indices, tuple(W.shape), W.blocksize, W.dtype, list(placements), balance)

    check_same(
        "distribute_bsr", "an argument (placements, balance) or the shape, dtype or pattern of W", checked, mesh,
        "pass the same arguments, and load one matrix on all ranks or make it from one seed",
    )  # fmt: skip
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            W = W.split(placement.dim, mesh.size(dim), balance=balance)[mesh.get_local_rank(dim)]
    return W


def check_arguments(W: BsrMatrix, mesh: Any, placements: Sequence[Any], balance: Balance | None) -> None:
    """Reject arguments of distribute_bsr.

    Raises:
        TypeError: W is no BsrMatrix, or placements are no sequence.
        ValueError: see distribute_bsr.
    """
    from torch.distributed.tensor import Replicate, Shard

    if not isinstance(placements, Sequence):
        raise TypeError(f"distribute_bsr: placements must be a list, one for each dimension, got {placements!r}")
    if not isinstance(W, BsrMatrix):
        raise TypeError(f"distribute_bsr: W must be a BsrMatrix, got {type(W).__name__}")
    if len(placements) != mesh.ndim:
        raise ValueError(f"distribute_bsr: {len(placements)} placements for a mesh of {mesh.ndim} dimensions")
    if balance not in get_args(Balance):
        raise ValueError(f"distribute_bsr: balance is {balance!r}; use one of {get_args(Balance)}")
    rows = len(W.shape) - 2
    for placement in placements:
        sharded = type(placement) is Shard and placement.dim in (rows, rows + 1, -2, -1)
        if not (sharded or isinstance(placement, Replicate)):
            raise ValueError(
                f"distribute_bsr: {placement!r} is not supported; use Replicate(), Shard({rows}) for rows or "
                f"Shard({rows + 1}) for columns"
            )
