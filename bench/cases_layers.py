"""SwiGLU feed-forward layers of a Llama under inference, beside dense ones that torch compiles: block-sparse, FP8, 2:4.

Useful are the GEMMs with stored blocks or elements. Peers are taken to do the same, so ratios are those of times.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from cute_kernels import quantize, quantize_gated
from cute_kernels.reference import gate
from cute_kernels.testing.reference import truth
from sparse_collective.nn import Float8SwiGLU, Sparse24Config, SwiGLU, prune_2_4_

from . import peers
from .cases import DTYPE
from .peers import Call, compare, verified
from .rows import Candidate, Case, Problem

DENSE_SWIGLU = "SwiGLU of nn.Linear, compiled"
OUR_SWIGLU = "our SwiGLU without 2:4, compiled"
HALF_STEP = 2.0**-4  # of a number: the largest error of rounding to E4M3
FP32 = torch.float32


class DenseSwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) of torch's own layers."""

    def __init__(self, dim: int, hidden: int, **options) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False, **options) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nnf.silu(self.gate(x)) * self.up(x))


def sampled_rows(count: int, device: str) -> Tensor:
    """(peers.SAMPLE,) row numbers, evenly spread over `count`."""
    return torch.linspace(0, count - 1, min(count, peers.SAMPLE), dtype=torch.float64).long().to(device)


def in_graph(call: Callable[[], Tensor], device: str) -> Callable[[], Tensor]:
    """The call, captured in a CUDA graph; on a CPU the call itself."""
    if device == "cpu":
        return call
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay(keep=call) -> Tensor:  # the graph reads weights that `call` alone may hold
        graph.replay()
        return out

    return replay


def weight_of(part: nn.Module) -> Tensor:
    """(K, N) of a layer's weight."""
    return part.weight.to_dense().t()


def of_bf16(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a SwiGLU, block-sparse or dense, for a few rows of x; hidden numbers are rounded to BF16."""
    if isinstance(layer, DenseSwiGLU):
        first, second = (truth(x, weight_of(part), dtype=FP32).to(DTYPE) for part in (layer.gate, layer.up))
        hidden = nnf.silu(first) * second
    else:
        hidden = gate(truth(x, weight_of(layer.gate_up), dtype=FP32).to(DTYPE), "silu")
    return truth(hidden, weight_of(layer.down), dtype=FP32)


def of_float8(layer: Float8SwiGLU, x: Tensor) -> Tensor:
    """The output of an FP8 SwiGLU for a few rows of x, of the hidden numbers that the layer has.

    Raises WrongResult where one of these is wrong. As a whole the layer is not within a tolerance of exact arithmetic:
    a GEMM that errs by 2^-13 may round to the next BF16, that to the next E4M3, and where this is a row's largest
    number, its scale changes, and all its numbers round anew.
    """
    values, scale = quantize(x, per="row")
    z = layer.gate_up._product(x)  # before the gate; a gate in the GEMM's epilogue rounds as one after it
    compare(z, truth(values.to(FP32) * scale, weight_of(layer.gate_up), dtype=FP32), where=" before the gate")
    values, scale = quantize_gated(z)
    hidden = values.to(FP32) * scale
    compare(hidden, gate(z.to(FP32), "silu"), HALF_STEP, " of the hidden numbers")
    return truth(hidden, weight_of(layer.down), dtype=FP32)


def case(
    suite: str, name: str, problem: Problem, ours: Callable[[], nn.Module], expected: Callable,
    others: dict[str, Callable[[], nn.Module]], asked: float | None, *, device: str, backend: str, graph: bool,
) -> Case:  # fmt: skip
    """A layer beside others, the last of which it is held against; all but FP8 layers are compiled by torch.

    Args:
        graph: True to capture all in CUDA graphs: with few tokens launches would take longer than kernels.
    """
    x = functools.cache(lambda: torch.randn(problem.N, problem.K, device=device, dtype=DTYPE))

    def call_of(make: Callable[[], nn.Module]) -> tuple[nn.Module, Call]:
        layer, tokens = make().eval(), x()
        run = layer
        if not isinstance(layer, Float8SwiGLU):
            run = torch.compile(layer, fullgraph=True, backend=backend)

        @torch.no_grad()
        def call() -> Tensor:
            return run(tokens)

        return layer, Call(in_graph(call, device) if graph else call)

    def verified_ours() -> tuple:
        layer, call = call_of(ours)
        rows = sampled_rows(problem.N, device)
        with torch.no_grad():
            return verified(call, lambda: (rows, expected(layer, x()[rows]))), None

    candidates = [Candidate(name, problem.flops, lambda make=make: call_of(make)[1]) for name, make in others.items()]
    return Case(suite, name, problem, verified_ours, candidates, candidates[-1].name, asked)


def swiglu(
    kind: str, dim: int, hidden: int, tokens: int, density: float | None = None, asked: float | None = None, *,
    block: tuple[int, int] = (128, 128), device: str = "cuda", backend: str = "inductor",
) -> Case:  # fmt: skip
    """A SwiGLU of a kind: "bf16" with random blocks, "fp8" the same quantized, "2:4" pruned, with blocks or dense.

    Args:
        density: share of the blocks that are stored; None for a dense layer.
    """
    options, blocks = {"device": device, "dtype": DTYPE}, hidden * dim // (block[0] * block[1])
    kept = 1.0 if density is None else round(density * blocks) / blocks
    more = {"dtype": "float8_e4m3fn"} if kind == "fp8" else {"epilogue": "2:4"} if kind == "2:4" else {}
    share, stored = kept / 2 if kind == "2:4" else kept, None if density is None else block
    problem = Problem("swiglu", hidden, tokens, dim, stored, share, products=3, **more)

    def sparse() -> nn.Module:
        return SwiGLU(dim, hidden, False, block, density=density, **options)

    def dense() -> nn.Module:
        return DenseSwiGLU(dim, hidden, **options)

    def pruned() -> nn.Module:
        model = nn.Sequential(dense() if density is None else sparse())
        prune_2_4_(model, Sparse24Config(dense=density is None))
        return model[0]

    others, name = {DENSE_SWIGLU: dense}, f"SwiGLU {dim} to {hidden}, "
    name += "dense" if density is None else f"{block[0]}x{block[1]}, {density:g}"
    run = {"device": device, "backend": backend, "graph": kind != "bf16"}
    if kind == "bf16":
        return case("training", f"{name}, inference, compiled", problem, sparse, of_bf16, others, asked, **run)
    if kind == "fp8":
        name += f", e4m3fn, {tokens} tokens, inference"
        return case("float8", name, problem, lambda: Float8SwiGLU(sparse()), of_float8, others, asked, **run)
    if density is not None:
        others[OUR_SWIGLU] = sparse
    name += f", 2:4, {tokens} tokens, inference, over {list(others)[-1]}"
    return case("structured", name, problem, pruned, of_bf16, others, asked, **run)
