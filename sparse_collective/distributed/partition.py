"""Assignment of the hidden features of a feed-forward layer to ranks."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cute_kernels.reference import GATE

from ..conversions import Balance
from ..nn.module import BsrModule
from ..splits import block_counts, even_sizes

__all__ = ["Partition", "partition_hidden"]


@dataclass(frozen=True)
class Partition:
    """The units of a dimension that each rank holds.

    unit: features of a unit.
    units: for each rank, its units in ascending order. A rank's features are those of its units, one after another.
    """

    unit: int
    units: tuple[tuple[int, ...], ...]

    @property
    def contiguous(self) -> bool:
        """True if ranks hold ranges of features, in the order of ranks."""
        flat = [unit for units in self.units for unit in units]
        return flat == list(range(len(flat)))

    @property
    def even(self) -> bool:
        """True if all ranks hold equally many features."""
        return len({len(units) for units in self.units}) == 1

    @property
    def features(self) -> int:
        """Features of all ranks."""
        return self.unit * sum(map(len, self.units))

    def blocks(self, side: int) -> list[list[int]]:
        """For each rank, the blocks of `side` features that it holds.

        Raises:
            ValueError: a unit is not whole blocks.
        """
        if self.unit % side:
            raise ValueError(
                f"a unit of {self.unit} features is not a multiple of blocks of {side}; see partition_hidden"
            )
        each = self.unit // side
        return [[unit * each + i for unit in units for i in range(each)] for units in self.units]

    def of_rows(self, layer: BsrModule) -> Partition:
        """The same partition of the rows of a layer's weight; a gated layer has two rows per output feature."""
        return Partition(self.unit * hidden_rows(layer), self.units)


def evenly(units: int, unit: int, parts: int) -> Partition:
    """Contiguous ranges of units whose sizes differ by at most one."""
    ends = list(itertools.accumulate(even_sizes(units, parts), initial=0))
    return Partition(unit, tuple(tuple(range(begin, end)) for begin, end in itertools.pairwise(ends)))


def _first_layers(first: BsrModule | Sequence[BsrModule]) -> Sequence[BsrModule]:
    return [first] if isinstance(first, BsrModule) else list(first)


def partition_hidden(
    first: BsrModule | Sequence[BsrModule], second: BsrModule, parts: int, *, balance: Balance = "blocks"
) -> Partition:
    """Split the hidden features between two layers over ranks, for BsrColwiseParallel and BsrRowwiseParallel.

    With balance="blocks" ranks get about equally many stored blocks: units are assigned longest first to the rank
    with the least work. This permutes hidden features over ranks. Both layers take the same partition, so that the pair
    needs no communication in between, and its result is that of one process.

    Args:
        first: the layer, or layers, whose outputs are the hidden features: BsrLinear, GatedBsrLinear, BsrGroupedLinear.
        second: the layer whose inputs they are.
        parts: number of ranks.
        balance: "blocks", or "extent" for contiguous ranges of equal width.

    Returns:
        The Partition. Units are the smallest that are whole blocks in all layers. Ranks hold equally many of them, or
        one more. Synchronizes.

    Raises:
        ValueError: the layers do not have the same number of hidden features, parts is not positive, or balance is
            unknown.

    Example::

        partition = partition_hidden(ffn.gate_up, ffn.down, mesh.size())
        plan = {"gate_up": BsrColwiseParallel(partition=partition), "down": BsrRowwiseParallel(partition=partition)}
        parallelize_module(ffn, mesh, plan)
    """
    layers = _first_layers(first)
    if operator.index(parts) < 1:
        raise ValueError(f"partition_hidden: parts is {parts}; pass the number of ranks")
    if balance not in ("extent", "blocks"):
        raise ValueError(f"partition_hidden: balance is {balance!r}; use 'extent' or 'blocks'")
    widths = [layer.out_features // hidden_rows(layer) for layer in layers]
    if any(width != second.in_features for width in widths):
        raise ValueError(
            f"partition_hidden: the first layers have {widths} outputs, the second {second.in_features} inputs"
        )
    sides = [least_unit(layer) for layer in layers]
    unit = math.lcm(*sides, second.blocksize[1])
    if second.in_features % unit:
        raise ValueError(
            f"partition_hidden: {second.in_features} hidden features are not a multiple of {unit}, whole blocks of all "
            "layers"
        )
    count = second.in_features // unit
    if balance == "extent":
        return evenly(count, unit, parts)
    work = torch.zeros(count, dtype=torch.int64, device="cpu")
    for layer in (*layers, second):
        counts = block_counts(layer.pattern, 1 if layer is second else 0).cpu().long()
        work += counts.view(count, -1).sum(1) * math.prod(layer.blocksize)
    most = even_sizes(count, parts)[0]
    assigned: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, rank) for rank in range(parts)]
    for i in sorted(range(count), key=lambda i: (-int(work[i]), i)):
        total, rank = heapq.heappop(heap)
        assigned[rank].append(i)
        if len(assigned[rank]) < most:
            heapq.heappush(heap, (total + int(work[i]), rank))
    return Partition(unit, tuple(tuple(sorted(units)) for units in assigned))


def hidden_rows(layer: BsrModule) -> int:
    """Rows of the weight for each output feature: 2 of a gated layer."""
    return 2 if getattr(layer, "gated", False) else 1


def least_unit(layer: BsrModule) -> int:
    """The smallest number of output features that are whole blocks, and of a gated layer whole runs of gate and up."""
    rows = hidden_rows(layer)
    return math.lcm(layer.blocksize[0], rows * GATE if rows > 1 else 1) // rows
