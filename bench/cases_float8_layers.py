"""A pruned, quantised feed-forward layer of a Llama, for inference, beside the dense layer of bfloat16 that torch
compiles. Both are captured in a CUDA graph, where there is one: of few tokens launches would take longer than kernels.

Each step of ours is compared with what its own operands make in fp32. Compared as a whole with the same layer in exact
sums, 8192 tokens were off by 0.0056 in norm and 0.024 at most on an H100, and no step was wrong: a sum of the first
product that errs by 2^-13 may round to the next bfloat16, and its hidden number to the next of e4m3, 2^-3 beside it;
where that is a row's largest one, the row's scale is another, and all its numbers round anew, 0.02 of the row's norm.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cute_kernels import quantize, quantize_gated
from cute_kernels.reference import gate
from sparse_collective.nn import Float8SwiGLU, SwiGLU
from tests.reference import truth

from .cases_models import DENSE_SWIGLU, DTYPE, DenseSwiGLU, sampled_rows
from .peers import Call, compare, verified
from .rows import Candidate, Case, Problem

HALF_STEP = 2.0**-4  # of a number: what rounding to e4m3 errs by at most


def in_graph(call: Callable[[], Tensor], device: str) -> Callable[[], Tensor]:
    """The call, captured; on a CPU itself."""
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


def feed_forward(
    dim: int, hidden: int, tokens: int, density: float, asked: float | None = None, *,
    block: tuple[int, int] = (128, 128), device: str = "cuda", backend: str = "inductor",
) -> Case:  # fmt: skip
    """quantize_(SwiGLU) of 8-bit floats, with `density` of its blocks at random places, over the dense layer.

    Useful are the products with stored blocks, which the dense layer is taken to do, too: the ratio is that of times.
    """
    blocks = hidden * dim // (block[0] * block[1])
    kept = round(density * blocks) / blocks
    problem = Problem("swiglu", hidden, tokens, dim, block, kept, dtype="float8_e4m3fn", products=3)
    x = functools.cache(lambda: torch.randn(tokens, dim, device=device, dtype=DTYPE))

    def call_of(run: Callable[[Tensor], Tensor]) -> Call:
        given = x()

        @torch.no_grad()
        def call() -> Tensor:
            return run(given)

        return Call(in_graph(call, device))

    @torch.no_grad()
    def expected(layer: Float8SwiGLU) -> tuple[Tensor, Tensor]:
        """Some rows of the output, of the hidden numbers that the layer has; raises where one of these is wrong."""
        rows, wide = sampled_rows(tokens, device), torch.float32
        both, down = (part.weight.to_dense().t() for part in (layer.gate_up, layer.down))
        values, scale = quantize(x()[rows], per="row")
        z = layer.gate_up._product(x())[rows]  # before the gate; a gate inside of the GEMM rounds as one after it
        compare(z, truth(values.to(wide) * scale, both, dtype=wide), where=" before the gate")
        values, scale = quantize_gated(z)
        hidden = values.to(wide) * scale
        compare(hidden, gate(z.to(wide), "silu"), HALF_STEP, " of the hidden numbers")
        return rows, truth(hidden, down, dtype=wide)

    def ours():
        layer = Float8SwiGLU(SwiGLU(dim, hidden, False, block, density=density, device=device, dtype=DTYPE))
        return verified(call_of(layer), lambda: expected(layer)), None

    def dense() -> Call:
        layer: nn.Module = DenseSwiGLU(dim, hidden, device=device, dtype=DTYPE)
        return call_of(torch.compile(layer, fullgraph=True, backend=backend))

    name = f"SwiGLU {dim} to {hidden}, {block[0]}x{block[1]}, {density:g}, e4m3fn, {tokens} tokens, inference"
    return Case("float8", name, problem, ours, [Candidate(DENSE_SWIGLU, problem.flops, dense)], DENSE_SWIGLU, asked)
