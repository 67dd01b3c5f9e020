"""The part of a layer that a rank holds, and how its inputs and outputs are placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.runtime.torch_compat import is_dtensor

from ..nn.module import BsrModule
from ..nn.parametrized import check_not_computed
from ..nn.shards import bounds, check_same
from ..pattern import Pattern
from ..splits import submatrix_index
from .exchange import columns_of, gather_columns

__all__ = [
    "Placed",
    "SumGradient",
    "as_placed",
    "check_alike",
    "check_whole",
    "column_output",
    "facts_of",
    "features",
    "features_of",
    "indices_of",
    "own_part",
    "padded",
    "replicate",
    "row_input",
    "split_of",
]


def check_whole(style: str, layer: Any) -> None:
    """Reject a layer of which this rank does not hold all values as a parameter.

    Raises:
        TypeError: its values are computed of another parameter, or it is sharded.
        ValueError: it is on the meta device.
    """
    check_not_computed(style, layer)
    if is_dtensor(layer.values):
        raise TypeError(f"{style}: the layer is sharded already; call parallelize_module before fully_shard")
    if layer.crow_indices.is_meta:
        raise ValueError(f"{style}: the layer is on the meta device, and has no pattern yet; make it on a device")


def check_alike(style: str, checked: Callable[[], int], mesh: Any) -> None:
    """Compare what ranks pass to parallelize_module, before anything moves; see check_same.

    checked: checks this rank's module and arguments, and returns their hash.
    """
    check_same(
        style, "an argument of the style (partition, layouts, ...) or the shape, dtype or pattern of the layer",
        checked, mesh,
        "pass the same arguments, and load one state on all ranks or seed them alike before the model is made",
    )  # fmt: skip


def facts_of(module: nn.Module) -> list[Any]:
    """The properties of a module, besides patterns, that must be the same on all ranks before it is split."""
    layers = [layer for layer in module.modules() if isinstance(layer, BsrModule)]
    return [
        [(type(layer).__name__, layer.matrix_shape, layer.blocksize, layer.activation) for layer in layers],
        [(name, tuple(t.shape), t.dtype) for name, t in module.named_parameters()],
    ]


@dataclass(frozen=True)
class Placed:
    """Part of a layer that a rank holds, and the placements of its input and output.

    dim: 0, block rows are split (column-wise parallel); 1, block columns (row-wise parallel).
    mesh: one-dimensional DeviceMesh.
    side: rows or columns of a block.
    blocks: for each rank, the block rows or columns that its weight has, in their order.
    in_order: True if ranks hold contiguous ranges in the order of ranks.
    inputs, outputs: placements of x and of the result.
    use_local_output: True if forward returns a torch.Tensor instead of a DTensor.
    overlap: True if communication runs during the GEMM.
    split: split_of the features; it is equal in layers whose ranks have the same features.
    indices: for each rank, index_of its blocks.
    """

    dim: int
    mesh: Any
    side: int
    blocks: tuple[tuple[int, ...], ...]
    in_order: bool
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    use_local_output: bool
    overlap: bool
    split: int
    indices: tuple[Tensor | None, ...] = field(compare=False, repr=False)

    @property
    def own(self) -> tuple[int, ...]:
        """The blocks of this rank."""
        return self.blocks[self.mesh.get_local_rank()]


def split_of(blocks: Sequence[Sequence[int]], side: int, rows: int) -> int:
    """A hash of the ranges of features that each rank has; it does not depend on how they are divided into blocks.

    blocks: for each rank, its block rows or columns.
    side: rows or columns of a block.
    rows: rows or columns per feature.
    """
    ends = [Counter(i for block in own for i in (block, block + 1)) for own in blocks]
    # A number that comes twice is inside a range.
    return hash(tuple(tuple(i * side // rows for i, times in own.items() if times == 1) for own in ends))


class SumGradient(torch.autograd.Function):
    """The same tensor; its gradient is summed over the ranks of a mesh."""

    @staticmethod
    def forward(ctx, t, mesh):
        ctx.mesh = mesh
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        torch.distributed.all_reduce(grad, group=ctx.mesh.get_group())
        return grad, None


def replicate() -> tuple:
    from torch.distributed.tensor import Replicate

    return (Replicate(),)


def as_placed(x: Any, place: Placed) -> Any:
    """x as a DTensor, placed as the style says if it is a local tensor."""
    from torch.distributed.tensor import DTensor

    return x if is_dtensor(x) else DTensor.from_local(x, place.mesh, place.inputs, run_check=False)


def column_output(y: Tensor, place: Placed) -> Any:
    """y: this rank's features."""
    from torch.distributed.tensor import DTensor, Shard

    wanted = place.outputs
    local = features(wanted[0], y.dim() - 1)
    if local and place.use_local_output:
        return y
    whole = DTensor.from_local(y, place.mesh, (Shard(y.dim() - 1),), run_check=False)
    whole = whole if local else whole.redistribute(placements=wanted)
    return whole.to_local() if place.use_local_output else whole


def row_input(x: Any, place: Placed) -> Tensor:
    """The columns of x that this rank's weight has.

    Raises:
        ValueError: x is a DTensor whose features are split, and ranks hold other ones of this layer.
    """
    placements, last = place.inputs, x.dim() - 1
    if is_dtensor(x):
        if features(placements[0], last) and not place.in_order:  # no placement describes their parts
            if features(x.placements[0], last):
                flat = [block for own in place.blocks for block in own]
                raise ValueError(
                    f"x is a DTensor placed as {x.placements}, whose parts are equal ranges of features; those of this "
                    f"layer's ranks are {'unequal' if flat == sorted(flat) else 'permuted'}; pass "
                    "input_layouts=Replicate() to the style, or this rank's features as a torch.Tensor"
                )
            placements = x.placements if x.placements[0].is_shard() else replicate()
        x = x if x.placements == placements else x.redistribute(placements=placements)
    wanted = placements[0]
    if features(wanted, last):
        return x.to_local() if is_dtensor(x) else x
    if wanted.is_replicate():
        from torch.distributed.tensor import Partial

        whole = as_placed(x, place).to_local(grad_placements=(Partial(),))
        return columns_of(whole, place.own, place.indices[place.mesh.get_local_rank()], place.side)
    dim = wanted.dim % x.dim()
    tokens = x.shape[dim] if is_dtensor(x) else place.mesh.size() * x.shape[dim]
    x = x.to_local() if is_dtensor(x) else x
    cuts = bounds(tokens, place.mesh.size())
    return gather_columns(x, dim, cuts, place.blocks, place.indices, place.side, place.mesh)


def features(placement: Any, last: int) -> bool:
    """True if a placement splits the last dimension."""
    return placement.is_shard() and placement.dim in (-1, last)


def own_part(t: Any, dim: int, size: int) -> Tensor:
    """The first `size` entries of this rank's part of a DTensor; the others are zeros that fill its room."""
    local = t.to_local() if is_dtensor(t) else t
    return local if local.shape[dim] == size else local.narrow(dim, 0, size).contiguous()


def indices_of(pattern: Pattern, place: Placed) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(crow_indices, col_indices, positions) of each rank's part of a pattern; see submatrix_index."""
    device = pattern.col_indices.device
    chosen = [torch.tensor(blocks, dtype=torch.int64, device=device) for blocks in place.blocks]
    return [submatrix_index(pattern, place.dim, blocks) for blocks in chosen]


def features_of(place: Placed, device: torch.device) -> list[Tensor]:
    """The rows or columns of the weight that each rank has."""
    each = torch.arange(place.side, device=device)
    chosen = [torch.tensor(blocks, dtype=torch.int64, device=device) for blocks in place.blocks]
    return [(blocks[:, None] * place.side + each).flatten() for blocks in chosen]


def padded(t: Tensor, dim: int, chosen: list[Tensor], most: int | None = None) -> Tensor:
    """The chosen entries of t along dim, rank after rank, each rank's filled up with zeros to `most`, or to as many."""
    most = max(map(len, chosen)) if most is None else most
    shape = list(t.shape)
    shape[dim] = most * len(chosen)
    out = t.new_zeros(shape)
    for rank, index in enumerate(chosen):
        out.narrow(dim, rank * most, len(index)).copy_(t.index_select(dim, index.to(t.device)))
    return out
