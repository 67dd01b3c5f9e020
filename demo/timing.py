"""Timing on a GPU: our sparse product, torch's dense one and torch's own sparse one, called in turn."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from bench import timing
from bench.rows import reason
from bench.table import grid
from sparse_collective import BsrMatrix, bsr_linear

from .accuracy import block_name, relative_error, rounding
from .layer import FeedForward

DENSE, TORCH_BSR, OURS = "dense", "torch BSR", "ours"
ROUNDS, WARM_S = 30, 0.2
CHECKED_TOKENS = 256  # rows compared with fp32; all of them would take longer than the timing
LARGE_TOKENS = 8192
LARGE_LAYERS = {"up": (14336, 4096), "down": (4096, 14336)}  # (M, K): the feed-forward of an 8-billion-weight model


@dataclass(frozen=True)
class Compared:
    """What was computed and timed. `micros` has medians in us, or the errors that calls ended in, by name."""

    error: float  # of ours, relative to fp32; NaN if ours failed
    bound: float  # what rounding the output explains of it
    micros: dict[str, float | str]

    @property
    def agrees(self) -> bool:
        """Whether ours errs no more than rounding explains; False where it failed."""
        return self.error <= self.bound

    @property
    def shown_error(self) -> str:
        return f"{self.error:.1e}" if self.agrees else f"[bold red]{self.error:.1e}[/]"

    def speedup(self, dense: str = DENSE, ours: str = OURS) -> float | None:
        """How many times faster than dense; None where one of them has no time."""
        times = self.micros.get(dense, ""), self.micros.get(ours, "")
        return None if any(isinstance(us, str) for us in times) else times[0] / times[1]


@dataclass(frozen=True)
class Timing(Compared):
    """One product y = x W^T (+ bias), W of shape (M, K) with a part of its blocks kept."""

    layer: str
    tokens: int
    shape: tuple[int, int]
    blocksize: tuple[int, int]
    density: float


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float | str]:
    """Median device time of each call in us, all of them timed in turns; or its error."""
    working, found = {}, {}
    for name, call in calls.items():
        try:  # the first call compiles, and shows whether the call works at all
            call()
            torch.cuda.synchronize()
            working[name] = call
        except Exception as error:
            found[name] = reason(error)
    times = timing.interleaved(working, warm_s=WARM_S, rounds=ROUNDS)
    return found | {name: timing.median(us) for name, us in times.items()}


def check(x: Tensor, w: BsrMatrix, bias: Tensor | None) -> float:
    """Relative error of ours on the first tokens, NaN if it cannot run; the whole product is computed."""
    try:
        ours = bsr_linear(x, w, bias=bias)[:CHECKED_TOKENS]
    except Exception:  # its text stands in the timing
        return float("nan")
    truth = F.linear(x[:CHECKED_TOKENS].float(), w.to_dense().float(), None if bias is None else bias.float())
    return relative_error(ours, truth)


def time_product(layer: str, x: Tensor, weight: Tensor, bias: Tensor | None, blocksize, density: float) -> Timing:
    """One row: x (tokens, K), weight (M, K) pruned here. torch's sparse product is timed without the bias."""
    w = BsrMatrix.from_dense(weight, blocksize, density=density)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse BSR tensor support is in beta")
        w_torch = w.to_torch()
    calls = {
        DENSE: lambda: F.linear(x, weight, bias),
        TORCH_BSR: lambda: F.linear(x, w_torch),
        OURS: lambda: bsr_linear(x, w, bias=bias),
    }
    found = check(x, w, bias), rounding(x.dtype), medians(calls)
    return Timing(*found, layer, len(x), tuple(weight.shape), blocksize, w.density)


def time_layer(layer: FeedForward, blocksizes: Sequence, densities: Sequence[float]) -> Iterator[Timing]:
    """Both products of the real layer."""
    hidden = F.gelu(F.linear(layer.x, layer.w1, layer.b1))  # (tokens, 1536)
    first, second = ("intermediate", layer.x, layer.w1, layer.b1), ("output", hidden, layer.w2, layer.b2)
    for blocksize, operands, density in product(blocksizes, (first, second), densities):
        yield time_product(*operands, blocksize, density)


def time_large(blocksizes: Sequence, densities: Sequence[float]) -> Iterator[Timing]:
    """Products of a large model's size, random normal weights and inputs, bf16, no bias."""
    generator = torch.Generator("cuda").manual_seed(0)
    facts = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    for name, (m, k) in LARGE_LAYERS.items():
        x = torch.randn(LARGE_TOKENS, k, **facts)
        weight = torch.randn(m, k, **facts).mul_(k**-0.5)
        for blocksize, density in product(blocksizes, densities):
            yield time_product(name, x, weight, None, blocksize, density)


def timing_table(title: str, rows: Sequence[Timing]) -> tuple[Table, list[str]]:
    """The table, and the notes that its failures refer to."""
    columns = ["M x K", "blocks", "kept", "dense", "torch BSR", "ours", "speed-up"]
    table = grid(["layer"], columns, title=f"{title}: µs")
    notes: list[str] = []

    def micros(value: float | str) -> str:
        if not isinstance(value, str):
            return f"{value:.1f}"
        if value not in notes:
            notes.append(value)
        return f"failed ({notes.index(value) + 1})"

    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or (rows[i + 1].layer, rows[i + 1].blocksize) != (row.layer, row.blocksize)
        speedup = row.speedup()
        cells = [row.layer, f"{row.shape[0]} x {row.shape[1]}", block_name(row.blocksize), f"{row.density:.1%}"]
        cells += [micros(row.micros[name]) for name in (DENSE, TORCH_BSR, OURS)]
        cells += [
            "" if speedup is None else f"{speedup:.2f}x" if row.agrees else f"[bold red]wrong: {row.error:.1e}[/]"
        ]
        table.add_row(*cells, end_section=last)
    return table, [f"({i + 1}) {note}" for i, note in enumerate(notes)]
