"""Moves activations between ranks: the columns of x that a rank's blocks read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["columns_of", "gather_columns", "index_of"]


def index_of(blocks: Sequence[int], device: torch.device) -> Tensor | None:
    """Ascending blocks as int64 (blocks,), made once per layer: copying it to a GPU synchronizes. None for a range."""
    if not blocks or blocks[-1] - blocks[0] + 1 == len(blocks):
        return None
    return torch.tensor(blocks, dtype=torch.int64, device=device)


def columns_of(x: Tensor, blocks: Sequence[int], index: Tensor | None, side: int) -> Tensor:
    """Some blocks of `side` features of x (..., K): a view if they are one range. index: see index_of."""
    if index is None:
        return x.narrow(-1, blocks[0] * side if blocks else 0, len(blocks) * side)
    return x.unflatten(-1, (-1, side)).index_select(-2, index).flatten(-2)


class GatherColumns(torch.autograd.Function):
    """All tokens of some columns, from ranks that hold all columns of some tokens; see gather_columns."""

    @staticmethod
    def forward(ctx, x, dim, cuts, blocks, indices, side, mesh):
        ctx.call, ctx.columns = (dim, cuts, blocks, indices, side, mesh), x.shape[-1]
        rank, ranks = mesh.get_local_rank(), range(mesh.size())
        tokens, own = [end - begin for begin, end in itertools.pairwise(cuts)], len(blocks[rank]) * side
        outgoing = [columns_of(x, blocks[r], indices[r], side) for r in ranks]
        shapes = [[*x.shape[:dim], tokens[r], *x.shape[dim + 1 : -1], own] for r in ranks]
        return torch.cat(exchange(outgoing, shapes, mesh), dim)

    @staticmethod
    def backward(ctx, dy):
        dim, cuts, blocks, indices, side, mesh = ctx.call
        rank = mesh.get_local_rank()
        outgoing = [dy[(slice(None),) * dim + (slice(begin, end),)] for begin, end in itertools.pairwise(cuts)]
        columns = [len(own) * side for own in blocks]
        shapes = [[*outgoing[rank].shape[:-1], width] for width in columns]
        # Columns that no rank reads have no gradient. All others belong to one rank.
        dx = dy.new_zeros(*outgoing[rank].shape[:-1], ctx.columns // side, side)
        for own, index, part in zip(blocks, indices, exchange(outgoing, shapes, mesh), strict=True):
            part = part.unflatten(-1, (len(own), side))
            if index is not None:
                dx.index_copy_(-2, index, part)
            elif own:
                dx.narrow(-2, own[0], len(own)).copy_(part)
        return dx.flatten(-2), None, None, None, None, None, None


def exchange(outgoing: list[Tensor], shapes: list[list[int]], mesh: Any) -> list[Tensor]:
    """Send outgoing[r] to rank r of the mesh; returns what each rank sent, of these shapes."""
    import torch.distributed as dist

    flat = torch.cat([t.flatten() for t in outgoing])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    arrived = flat.new_empty(sum(sizes))
    raw = [t.view(torch.uint8) for t in (arrived, flat)]
    item = flat.element_size()
    dist.all_to_all_single(
        raw[0], raw[1], [n * item for n in sizes], [t.numel() * item for t in outgoing], group=mesh.get_group()
    )
    return [t.view(shape) for t, shape in zip(arrived.split(sizes), shapes, strict=True)]


def gather_columns(
    x: Tensor,
    dim: int,
    cuts: Sequence[int],
    blocks: Sequence[Sequence[int]],
    indices: Sequence[Tensor | None],
    side: int,
    mesh: Any,
) -> Tensor:
    """All tokens of this rank's columns; each rank is sent the columns that it reads, and no others.

    Args:
        x: (..., K), this rank's tokens, all columns.
        dim: the dimension of x that counts tokens, not negative.
        cuts: (ranks + 1,) where each rank's tokens begin.
        blocks: for each rank, the blocks of `side` columns that it reads; no column is read by two ranks.
        indices: index_of each rank's blocks.
        mesh: one-dimensional.

    Returns:
        (..., columns of this rank) with cuts[-1] tokens. Differentiable.
    """
    return GatherColumns.apply(x, dim, list(cuts), blocks, indices, side, mesh)
