"""Context-parallel attention on more GPUs than there are: `python -m bench distributed --simulate N ...`.

A plan says how many blocks each rank computes and how many tiles it receives, from its own host and from others. The
time of the slowest rank follows from numbers that bench/results/<card>/distributed.json has measured: time of a block,
time of the shards' kernels over those of the whole (rows with one rank; 1 without them), and bandwidths of moving K and
V and of returning their gradients. Across hosts, which were not measured, each GPU has HOST_GBS.

On one host nothing overlaps, as in attention.distributed. Between hosts a call has stages of heads, and what moves
beside a kernel costs time only if it takes longer than the kernel (attention/distributed/stages.py). Masks are those of
cases_distributed_attention, of TOKENS tokens for each rank, and at least of the length that was measured. Each of their
query tiles needs one range of tiles of K and V and some first tiles, so that tiles of 128 tokens are counted exactly
for any number of ranks, without a table of blocks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.distributed import deal as dealing
from attention.distributed.plan import STAGES
from attention.distributed.stages import count_of

from .table import grid, make_console

PACKED = (1024, 2048, 4096, 4096, 5120, 6144, 7168, 8192, 8192, 9216, 10240, 10240, 11264, 12288, 15360, 16384)  # 128k
SHUFFLED = ", in random order"  # documents that are repeated in the measured order divide evenly among hosts
TILE = 128
PER_HOST = 8
HOST_GBS = 50  # of one GPU, each way: 400 Gbit/s
TOKENS = 32768
KV_HEADS = 8
TILE_MB = TILE * KV_HEADS * 128 * 2 * 2 / 1e6  # of a tile of K and V: D, two tensors, BF16


@dataclass(frozen=True)
class Ranges:
    """Tiles of K and V that query tiles need, of all heads together: those from begin to end, and the first ones.

    Each query tile needs its own tile. `begin` does not decrease.

    Attributes:
        begin, end: int64 (tiles,).
        first: number of first tiles that all query tiles need.
        share: share of these blocks that each head computes.
    """

    begin: Tensor
    end: Tensor
    first: int = 0
    share: float = 1.0

    def work(self) -> Tensor:
        """Blocks of each query tile, float64 (tiles,), if each head computes all."""
        return (self.end - self.begin + self.begin.clamp(max=self.first)).double()

    def unions(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Disjoint ranges (begin, end) of what ranks with these query tiles need, int64 (ranks, tiles + 1) each.

        tiles: int64 (ranks, tiles), ascending; those past the last one are empty.
        """
        begin, end = (pad(t, (0, tiles.numel() - len(t)))[tiles] for t in (self.begin, self.end))
        begin, end = pad(begin, (1, 0)), pad(end, (1, 0), value=self.first)
        begin = torch.maximum(begin, pad(end.cummax(1).values[:, :-1], (1, 0)))
        return begin, torch.maximum(begin, end)


@dataclass(frozen=True)
class Shares:
    """Blocks of a head that each rank computes, and tiles that it receives from its own host and from others."""

    deal: str
    blocks: Tensor
    near: Tensor
    far: Tensor

    def cost(self) -> float:
        """Time of the slowest rank as deal="auto" estimates it, see attention.distributed.deal.cost."""
        return float((self.blocks + dealing.BLOCKS_PER_TILE * (self.near + self.far)).max())


@dataclass(frozen=True)
class Measured:
    """A problem that was measured, and one GPU's times.

    Attributes:
        name: of the mask.
        length: tokens of the sequence.
        block_ms: milliseconds of a block of 128 x 128 of all heads, forward and backward.
        kernels: time of the shards' kernels over those of the whole, forward and backward.
        gather_gbs, reduce_gbs: bandwidths of K and V, and of their gradients.
    """

    name: str
    length: int
    block_ms: Sequence[float]
    kernels: Sequence[float]
    gather_gbs: float
    reduce_gbs: float


def ranges_of(name: str, length: int, measured: int = sum(PACKED)) -> Ranges:
    """The tiles that the mask of a row of the benchmark needs.

    measured: the length of the measured sequence. A longer one has more documents, of the same lengths, repeated in the
        measured order, or SHUFFLED.
    """
    rows = torch.arange(-(-length // TILE))
    if name.startswith("causal"):
        return Ranges(torch.zeros_like(rows), rows + 1)
    if name.startswith("packed"):
        documents = torch.tensor(PACKED * -(-length // measured))
        if name.endswith(SHUFFLED):
            documents = documents[torch.randperm(len(documents), generator=torch.Generator().manual_seed(0))]
        ends = documents.cumsum(0) * measured // sum(PACKED)
        starts = torch.cat([ends.new_zeros(1), ends])
        return Ranges(starts[torch.searchsorted(ends, rows * TILE, right=True)] // TILE, rows + 1)
    if name.startswith("window"):
        return Ranges((rows * TILE - 4095).clamp(min=0) // TILE, rows + 1, first=1)
    return Ranges(torch.zeros_like(rows), torch.full_like(rows, len(rows)), share=0.125)  # together they need all


def shares_of(ranges: Ranges, size: int) -> Shares:
    """Shares of each of `size` ranks by the deal that plan_context_parallel takes."""
    work, candidates = ranges.work(), []
    for deal in dealing.DEALS:
        tiles = dealing.dealt(work, size, deal)
        blocks = pad(work, (0, tiles.numel() - len(work)))[tiles].sum(1) * ranges.share
        begin, end = ranges.unions(tiles)
        of_host = []
        for own, first, last in zip(*(t.split(PER_HOST) for t in (tiles, begin, end)), strict=True):
            before = tiles.new_zeros(tiles.numel() + 1).index_fill_(0, own.flatten() + 1, 1).cumsum(0)
            of_host.append((before[last] - before[first]).sum(1))
        near = torch.cat(of_host)
        candidates.append(Shares(deal, blocks, near - (tiles < len(work)).sum(1), (end - begin).sum(1) - near))
    return candidates[dealing.best([shares.cost() for shares in candidates])]


def predicted(measured: Measured, length: int, size: int) -> dict:
    """Efficiencies of one GPU's rate, forward and backward, of a sequence of this length, and what limits them."""
    ranges = ranges_of(measured.name, length, measured.length)
    shares = shares_of(ranges, size)
    near, far = shares.near * TILE_MB, shares.far * TILE_MB  # MB / (GB/s) is ms
    gather = near / measured.gather_gbs + far / HOST_GBS
    reduce = 2 * (near / measured.reduce_gbs + far / HOST_GBS)
    alone = float(ranges.work().sum()) * ranges.share / size
    kernels = [shares.blocks * ms * over for ms, over in zip(measured.block_ms, measured.kernels, strict=True)]
    stages = count_of(STAGES if size > PER_HOST else 1, int(1e6 * float((near + far).max())), KV_HEADS)
    times = forward_ms(kernels[0], gather, stages), backward_ms(kernels[1], gather, reduce, stages)
    forward, backward = (alone * ms / float(of.max()) for ms, of in zip(measured.block_ms, times, strict=True))
    return {
        "name": measured.name, "ranks": size, "length": length, "deal": shares.deal,
        "moved_mb": round(float((near + far).max()), 1), "forward": round(forward, 3), "backward": round(backward, 3),
    }  # fmt: skip


def forward_ms(kernel: Tensor, gather: Tensor, stages: int) -> Tensor:
    """Time of a forward pass of each rank, from those of its kernels and of moving K and V; in milliseconds."""
    return (gather + (stages - 1) * torch.maximum(kernel, gather) + kernel) / stages


def backward_ms(kernel: Tensor, gather: Tensor, reduce: Tensor, stages: int) -> Tensor:
    """Time of a backward pass of each rank, from which gradients return as well, by the timeline of stages.py."""
    if stages == 1:
        return gather + kernel + reduce
    beside = [gather, *[gather + reduce] * (stages - 2), reduce]
    return (gather + sum(torch.maximum(kernel, moving) for moving in beside) + reduce) / stages


def measured_rows(path: Path) -> list[dict]:
    """Rows of context-parallel attention in a distributed.json, with `kernels` of their shards on one GPU."""
    rows = json.loads(path.read_text())["rows"]
    kernels = {problem_of(row): row["over_whole"] for row in rows if "over_whole" in row}
    found = [row for row in rows if row["name"].startswith("attention") and "gather_ms" in row]
    return [row | {"kernels": kernels.get(problem_of(row), [1.0, 1.0])} for row in found]


def problem_of(row: dict) -> str:
    return row["name"].rpartition(", ")[0]


def of_row(row: dict) -> Measured:
    """The problem of a row of measured_rows, with one GPU's times."""
    name, tokens = problem_of(row).removeprefix("attention, ").rsplit(", ", 1)
    length = int(tokens.removesuffix("k tokens")) * 1024
    ranges = ranges_of(name, length, length)
    count, moved = ranges.share * float(ranges.work().sum()), row["moved_mb"]
    block_ms = [ms / count for ms in row["one_gpu_ms"]]
    return Measured(name, length, block_ms, row["kernels"], moved / row["gather_ms"], 2 * moved / row["reduce_ms"])


def simulate(path: Path, ranks: list[int]) -> list[dict]:
    """Print and return predictions: for the numbers of ranks that were measured beside the measurement, and others.

    Others follow from the row with most ranks.
    """
    rows = measured_rows(path)
    console, table = make_console(110), grid(["mask", "deal"], ["ranks", "tokens", "MB moved", "forward", "backward"])
    found = []
    for row in rows:
        problem = of_row(row)
        entry = predicted(problem, problem.length, row["ranks"])
        found.append(entry | {"measured": [row["forward"], row["backward"]]})
    if not rows:
        console.print("no rows of context-parallel attention; python -m bench distributed measures them")
        return []
    for row in rows:
        problem = of_row(row)
        if row["ranks"] == max(other["ranks"] for other in rows if of_row(other).name == problem.name):
            problems = [problem]
            if problem.name.startswith("packed"):
                problems.append(replace(problem, name=problem.name + SHUFFLED))
            found += [predicted(each, max(each.length, TOKENS * size), size) for each in problems for size in ranks]
    for entry in found:
        pair = [
            f"{entry[way]:.3f}" + (f" (measured {entry['measured'][i]:.3f})" if "measured" in entry else "")
            for i, way in enumerate(("forward", "backward"))
        ]
        table.add_row(
            entry["name"], entry["deal"], str(entry["ranks"]), str(entry["length"]), f"{entry['moved_mb']:.0f}", *pair
        )
    console.print(table)
    return found
