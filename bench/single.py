"""`python -m bench single`: calls of real size as users make them, next to their kernels alone.

Two times per candidate, ours and the peer in turns:

    single    wall time per call, one call after another: eager or compiled, through autograd, without a CUDA graph.
              Host overhead counts wherever the host is slower than the GPU.
    kernels   time per call in a CUDA graph: kernels and the gaps between them, without the host.

Results go to bench/results/<card>/single.json; docs/tables.py shows both times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import attention, block_sparse_attention
from cute_kernels import gemm
from sparse_collective import bsr_linear, random_bsr
from sparse_collective.nn import BsrLinear, SwiGLU

from . import record
from .cases_layers import DenseSwiGLU
from .rows import OURS, reason
from .table import grid, make_console
from .timing import Flush, median

ROUNDS = 15
BURST_US = 20_000  # calls one after another take about this long between two synchronizations
WARM_S = 0.7
ON_GPU = {"device": "cuda", "dtype": torch.bfloat16}
CUBE = 8192
DENSITY = 1 / 8
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class SingleCase:
    """One row. `make` returns {OURS: call, name of the peer: call}; its tensors live as long as the calls."""

    name: str
    make: Callable[[], Calls]
    density: float = 1.0  # share of the peer's operations that ours has to do


def training_step(layer: Callable, leaves: tuple[Tensor, ...], dy: Tensor) -> Callable[[], None]:
    """layer(leaves[0]).backward(dy), with all gradients None before."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer(leaves[0]).backward(dy)

    return step


def no_grad(call: Callable, *inputs: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            call(*inputs)

    return run


# -- rows --------------------------------------------------------------------------------------------------------


def dense(size: int) -> SingleCase:
    def make() -> Calls:
        a, b = (torch.randn(size, size, **ON_GPU) for _ in range(2))
        return {OURS: no_grad(gemm, a, b), "torch.mm": no_grad(torch.mm, a, b)}

    return SingleCase(f"gemm {size}x{size}x{size}, eager", make)


def linear(tokens: int, size: int, density: float) -> SingleCase:
    def make() -> Calls:
        x, w = torch.randn(tokens, size, **ON_GPU), torch.randn(size, size, **ON_GPU)
        W = random_bsr((size, size), (128, 128), density=density, **ON_GPU)
        return {OURS: no_grad(bsr_linear, x, W), "nnf.linear": no_grad(nnf.linear, x, w)}

    return SingleCase(f"bsr_linear 128x128, {density}, {tokens} tokens, {size} squared, eager", make, density)


def layer(activation: bool, compiled: bool) -> SingleCase:
    """BsrLinear 8192 to 8192 with a bias, forward and backward."""

    def make() -> Calls:
        x, dy = torch.randn(CUBE, CUBE, **ON_GPU, requires_grad=True), torch.randn(CUBE, CUBE, **ON_GPU)
        more = {"activation": "gelu"} if activation else {}
        ours = BsrLinear(CUBE, CUBE, True, (128, 128), density=DENSITY, **more, **ON_GPU)
        theirs = nn.Sequential(nn.Linear(CUBE, CUBE, **ON_GPU), *([nn.GELU()] if activation else []))

        def step(module: nn.Module) -> Callable:
            return training_step(torch.compile(module) if compiled else module, (x, *module.parameters()), dy)

        return {OURS: step(ours), "nn.Linear": step(theirs)}

    form = ("bias, gelu, " if activation else "bias, ") + "forward and backward, "
    return SingleCase(
        f"BsrLinear 128x128, 0.125, {form}{'compiled' if compiled else 'eager'}", make, DENSITY
    )  # fmt: skip


def feed_forward(compiled: bool) -> SingleCase:
    """SwiGLU 4096 to 14336 of 5 % of its blocks, inference."""

    def make() -> Calls:
        x = torch.randn(CUBE, 4096, **ON_GPU)
        modules = {
            OURS: SwiGLU(4096, 14336, density=0.05, **ON_GPU).eval(),
            "dense": DenseSwiGLU(4096, 14336, **ON_GPU),
        }
        return {name: no_grad(torch.compile(m) if compiled else m, x) for name, m in modules.items()}

    return SingleCase(f"SwiGLU 4096 to 14336, 0.05, inference, {'compiled' if compiled else 'eager'}", make, 0.05)


def attend(shape: tuple[int, int, int, int], causal: bool, backward: bool) -> SingleCase:
    """Attention next to cuDNN's. Backward is timed alone, of one forward."""
    B, S, H, D = shape

    def make() -> Calls:
        q, k, v = (torch.randn(B, H, S, D, **ON_GPU, requires_grad=backward) for _ in range(3))
        do = torch.randn(B, H, S, D, **ON_GPU)

        def cudnn() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return nnf.scaled_dot_product_attention(q, k, v, is_causal=causal)

        forward = {OURS: lambda: attention(q, k, v, causal=causal), "SDPA cuDNN": cudnn}
        if not backward:
            return {name: no_grad(call) for name, call in forward.items()}
        outputs = {name: call() for name, call in forward.items()}

        def gradients(o: Tensor) -> Callable:
            return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

        return {name: gradients(o) for name, o in outputs.items()}

    what = "backward" if backward else "forward"
    return SingleCase(f"attention {what} B{B} S{S} H{H} D{D} {'causal' if causal else 'full'}, eager", make)


def masked(shape: tuple[int, int, int, int], window: int) -> SingleCase:
    """Forward and backward through a FlexAttention mask next to compiled flex_attention."""
    B, S, H, D = shape

    def make() -> Calls:
        q, k, v = (torch.randn(B, H, S, D, **ON_GPU, requires_grad=True) for _ in range(3))
        do = torch.randn(B, H, S, D, **ON_GPU)
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < window), None, None, S, S, device="cuda")
        flex = torch.compile(flex_attention)

        def step(call: Callable) -> Callable:
            return training_step(lambda q: call(q, k, v), (q, k, v), do)

        return {
            OURS: step(lambda q, k, v: block_sparse_attention(q, k, v, mask)),
            "flex_attention, compiled": step(lambda q, k, v: flex(q, k, v, block_mask=mask)),
        }

    name = f"block_sparse_attention of a FlexAttention mask, window {window}, B{B} S{S} H{H} D{D}"
    return SingleCase(f"{name}, forward and backward, eager", make)


def cases() -> Iterator[SingleCase]:
    for size in (1024, 4096, CUBE):
        yield dense(size)
    yield linear(1, 16384, 0.25)
    yield linear(128, CUBE, DENSITY)
    yield linear(CUBE, CUBE, DENSITY)
    for activation, compiled in ((False, False), (True, False), (True, True)):
        yield layer(activation, compiled)
    for compiled in (False, True):
        yield feed_forward(compiled)
    for backward in (False, True):
        for shape in ((4, 1024, 16, 64), (2, 8192, 16, 128)):
            for causal in (False, True):
                yield attend(shape, causal, backward)
    yield masked((2, 8192, 16, 128), 1024)


# -- measuring ---------------------------------------------------------------------------------------------------


def in_turns(calls: Calls, rounds: int) -> dict[str, float]:
    """Median wall microseconds of each call, one after another in bursts of about BURST_US."""
    counts, times = {}, {name: [] for name in calls}
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end or len(times[OURS]) < rounds:
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            count = counts.get(name, 4)
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / count * 1e6)
            counts.setdefault(name, min(200, max(4, round(BURST_US / times[name][-1]))))
    return {name: median(each[-rounds:]) for name, each in times.items()}


def kernels(calls: Calls, rounds: int, stream: torch.cuda.Stream) -> dict[str, float]:
    """Median GPU microseconds of each call in a CUDA graph of some calls, L2 flushed before each graph."""
    graphs, counts, flush = {}, {}, Flush()
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        counts[name] = min(20, max(3, round(BURST_US / ((time.perf_counter() - start) * 1e6))))
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            for _ in range(counts[name]):
                call()
    times = {name: [] for name in calls}
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end or len(times[OURS]) < rounds:
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * start.elapsed_time(stop) / counts[name])
    return {name: median(each[-rounds:]) for name, each in times.items()}


def measure(case: SingleCase, rounds: int) -> dict:
    """One row: {"name", "density", "peer", "single": {name: us}, "kernels": {name: us}}, or "error".

    All calls are made on one stream that is not the default, since a backward runs on its forward's stream, and only
    such a stream can be captured. A call that cannot be captured has "kernels_error" in place of "kernels".
    """
    torch.compiler.reset()
    row, stream = {"name": case.name, "density": case.density}, torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            calls = case.make()
            for call in calls.values():
                for _ in range(3):
                    call()
            row |= {"peer": next(name for name in calls if name != OURS), "single": in_turns(calls, rounds)}
            try:
                row["kernels"] = kernels(calls, rounds, stream)
            except Exception as error:
                row["kernels_error"] = reason(error)
    except Exception as error:
        row["error"] = reason(error)
    return row


def speed(row: dict, kind: str) -> float:
    """How many times as fast ours is as the peer."""
    times = row[kind]
    return times[row["peer"]] / times[OURS]


def run(args: argparse.Namespace) -> int:
    """The command; 1 if a row of ours failed."""
    if not torch.cuda.is_available():
        print("no CUDA GPU: nothing can be timed here")
        return 0
    rows = []
    for case in cases():
        if args.only in case.name:
            rows.append(measure(case, args.rounds))
            torch.cuda.empty_cache()
    table = grid(["call", "peer"], ["ours, µs", "peer's, µs", "speed", "kernels: ours, µs", "peer's, µs", "speed"])
    for row in rows:
        cells = []
        for kind in ("single", "kernels"):
            shown = kind in row
            cells += [f"{row[kind][OURS]:.1f}", f"{row[kind][row['peer']]:.1f}"] if shown else ["–", "–"]
            cells.append(f"{speed(row, kind):.3f}" if shown else "–")
        table.add_row(row["name"], row.get("peer", row.get("error", "")), *cells)
    make_console().print(table)
    for row in rows:
        for key in ("error", "kernels_error"):
            if key in row:
                print(f"{key} of {row['name']}: {row[key]}")
    if not args.only:
        where = record.environment()
        data = {"suite": "single", "environment": where, "rows": rows}
        print("written:", record.save(args.out, where["card"], "single", data))
    return int(any("error" in row for row in rows))


def add_command(subparsers) -> None:
    """Add `single` to the subcommands of an argparse parser."""
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sub = subparsers.add_parser("single", help="calls as users make them, and their kernels alone", **options)
    sub.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this; writes no file")
    sub.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"timed rounds (default {ROUNDS})")
    sub.add_argument("--out", type=Path, default=record.RESULTS, metavar="FOLDER", help="folder of the results")
    sub.set_defaults(run=run)
