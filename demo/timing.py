"""Timing on a GPU: our sparse product, torch's dense one and torch's own sparse one, called in turn."""

import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_collective import BsrMatrix, bsr_linear

from .accuracy import relative_error, rounding
from .layer import FeedForward
from .prune import prune

DENSE, TORCH_BSR, OURS = "dense", "torch BSR", "ours"
ROUNDS = 30
CHECKED_TOKENS = 256  # rows compared with fp32; all of them would take longer than the timing
LARGE_TOKENS = 8192
LARGE_LAYERS = {
    "up": (14336, 4096),
    "down": (4096, 14336),
}  # (M, K): the feed-forward of an 8-billion-weight model


@dataclass(frozen=True)
class Timing:
    """Medians of one product y = x W^T (+ bias), W of shape (M, K) with a part of its blocks kept."""

    layer: str
    tokens: int
    shape: tuple[int, int]
    blocksize: tuple[int, int]
    density: float
    error: float  # of ours, relative to fp32 on the same pruned weight; NaN if ours failed
    bound: float  # what rounding the output explains of it
    micros: dict[str, float | str]  # by DENSE, TORCH_BSR, OURS: the median in us, or the error it ended in

    @property
    def agrees(self) -> bool:
        """Whether ours errs no more than rounding explains; False where it failed."""
        return self.error <= self.bound

    @property
    def speedup(self) -> float | None:
        """How many times faster than the dense product of the unpruned weight."""
        dense, ours = self.micros[DENSE], self.micros[OURS]
        return None if isinstance(dense, str) or isinstance(ours, str) else dense / ours

    @property
    def useful_tflops(self) -> float | None:
        """Arithmetic on kept blocks alone, over the time."""
        ours = self.micros[OURS]
        if isinstance(ours, str):
            return None
        return 2 * self.tokens * self.shape[0] * self.shape[1] * self.density / ours * 1e-6


def explain(error: Exception) -> str:
    """The first line of an error, short enough for a note under a table."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line[:150]}"


def interleaved(calls: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float | str]:
    """Median device time of each call in us, or its error. They run in turn: a warming card is fair to all.

    The cache is overwritten before each call. That also gives the host time to enqueue the call, so that the
    device's work is timed and not the launch.
    """
    result: dict[str, float | str] = {}
    for name, call in calls.items():
        try:  # the first call compiles, and shows whether the call works at all
            for _ in range(3):
                call()
            torch.cuda.synchronize()
        except Exception as error:
            result[name] = explain(error)
    working = {name: call for name, call in calls.items() if name not in result}

    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(max(4 * cache_bytes, 64 << 20), dtype=torch.uint8, device="cuda")
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in working}
    for _ in range(rounds):
        for name, call in working.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            call()
            end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    for name, pairs in spans.items():
        result[name] = 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in pairs)
    return result


def check(x: Tensor, w: BsrMatrix, bias: Tensor | None) -> float:
    """Relative error of ours on the first tokens, NaN if it cannot run; the whole product is computed."""
    try:
        ours = bsr_linear(x, w, bias=bias)[:CHECKED_TOKENS]
    except Exception:  # its text stands in the timing
        return float("nan")
    truth = F.linear(x[:CHECKED_TOKENS].float(), w.to_dense().float(), None if bias is None else bias.float())
    return relative_error(ours, truth)


def time_product(
    layer: str, x: Tensor, weight: Tensor, bias: Tensor | None, blocksize: tuple[int, int], density: float
) -> Timing:
    """One row: x (tokens, K), weight (M, K) pruned here. torch's sparse product is timed without the bias."""
    w = prune(weight, blocksize, density)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse BSR tensor support is in beta")
        w_torch = w.to_torch()
    calls: dict[str, Callable[[], object]] = {
        DENSE: lambda: F.linear(x, weight, bias),
        TORCH_BSR: lambda: F.linear(x, w_torch),
        OURS: lambda: bsr_linear(x, w, bias=bias),
    }
    return Timing(
        layer=layer,
        tokens=len(x),
        shape=(weight.shape[0], weight.shape[1]),
        blocksize=blocksize,
        density=w.density,
        error=check(x, w, bias),
        bound=rounding(x.dtype),
        micros=interleaved(calls),
    )


def time_layer(
    layer: FeedForward, blocksizes: Iterable[tuple[int, int]], densities: Iterable[float]
) -> Iterator[Timing]:
    """Both products of the real layer."""
    hidden = F.gelu(F.linear(layer.x, layer.w1, layer.b1))  # (tokens, 1536)
    products = {
        "intermediate": (layer.x, layer.w1, layer.b1),
        "output": (hidden, layer.w2, layer.b2),
    }
    densities = tuple(densities)
    for blocksize in blocksizes:
        for name, (x, weight, bias) in products.items():
            for density in densities:
                yield time_product(name, x, weight, bias, blocksize, density)


def time_large(blocksizes: Iterable[tuple[int, int]], densities: Iterable[float]) -> Iterator[Timing]:
    """Products of a large model's size, random normal weights and inputs, bf16, no bias."""
    blocksizes, densities = tuple(blocksizes), tuple(densities)
    generator = torch.Generator("cuda").manual_seed(0)
    facts = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    for name, (m, k) in LARGE_LAYERS.items():
        x = torch.randn(LARGE_TOKENS, k, **facts)
        weight = torch.randn(m, k, **facts).mul_(k**-0.5)
        for blocksize in blocksizes:
            for density in densities:
                yield time_product(name, x, weight, None, blocksize, density)
