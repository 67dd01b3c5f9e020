"""Destinations of the rows of a call of expert parallelism, which ranks exchange."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.runtime.torch_compat import all_gather_single

from ..nn.feed_forward import sorted_choices

__all__ = ["Layers", "Routing"]

# (padded rows (rows, K), expert of each run, numbered from this rank's first, room for results or None): the results
Layers = Callable[[Tensor, Tensor, Callable[[], Tensor] | None], Tensor]


class Routing:
    """The rows of a call, sorted by expert, and where each rank's rows of each expert begin.

    each: experts of a rank.
    order: (T * k,) int64, the choice that each sorted row is of; choice i is of token i // k.
    starts: (ranks, experts + 2) int64 on the device, where each rank's rows of each expert begin. Before the first, and
        behind the last one, are choices of no expert.

    After `wait`:

    table: starts, as lists.
    totals: (experts + 2) their sums over ranks.
    """

    table: list[list[int]]
    totals: list[int]

    def __init__(self, choices: Tensor, experts: int, mesh: Any) -> None:
        self.group, self.rank, self.experts, self.k = mesh.get_group(), mesh.get_local_rank(), experts, choices.shape[1]
        self.each = experts // mesh.size()
        keys, self.order = sorted_choices(choices, experts)
        numbers = torch.arange(experts + 2, device=keys.device, dtype=keys.dtype)
        begins = torch.searchsorted(keys, numbers)  # (experts + 2,)
        gathered = begins.new_empty(mesh.size() * len(begins))
        all_gather_single(gathered, begins, self.group)
        self.starts = gathered.view(mesh.size(), -1)
        self._table = self.starts.to("cpu", non_blocking=True)
        self._copied = None if keys.device.type == "cpu" else torch.get_device_module(keys.device).Event()
        if self._copied is not None:
            self._copied.record(torch.get_device_module(keys.device).current_stream(keys.device))

    def wait(self) -> None:
        """Wait for the table of all ranks. Synchronizes.

        Raises:
            ValueError: a choice of a rank is not an expert; on all ranks, so that none waits for those that raised.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self.table = table = self._table.tolist()
        self.totals = totals = [sum(column) for column in zip(*table, strict=True)]
        if totals[0] or totals[-1] != totals[-2]:
            wrong = {rank: n for rank, line in enumerate(table) if (n := line[0] + line[-1] - line[-2])}
            ranks = dist.get_process_group_ranks(self.group)
            invalid = ", ".join(f"{n} of {table[rank][-1]} on rank {ranks[rank]}" for rank, n in wrong.items())
            text = f"choices must be in [0, {self.experts}), the experts of all ranks; {invalid} are not"
            if refused := [ranks[rank] for rank, n in wrong.items() if n == table[rank][-1] == 1]:  # as by `refuse`
                text = f"ranks {refused} raised an error of their tokens or router, or {text}"
            raise ValueError(text)

    def read(self) -> list[list[int]]:
        """Wait for the table, and return the numbers of rows from each rank to each. Raises as `wait` does."""
        self.wait()
        cuts = [line[0 : self.experts + 1 : self.each] for line in self.table]
        return [[end - begin for begin, end in itertools.pairwise(line)] for line in cuts]
