"""A pruned, quantised feed-forward layer of a Llama, for inference, beside the dense layer of bfloat16 that torch
compiles. Both are captured in a CUDA graph, where there is one: of few tokens launches would take longer than kernels.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cute_kernels import quantize, quantize_gated
from sparse_collective.nn import Float8SwiGLU, SwiGLU
from tests.reference import truth

from .cases_models import DENSE_SWIGLU, DTYPE, DenseSwiGLU, sampled_rows
from .peers import Call, verified
from .rows import Candidate, Case, Problem


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
        rows, wide = sampled_rows(tokens, device), torch.float32
        both, down = (part.weight.matrix.to_dense().t() for part in (layer.gate_up, layer.down))
        values, scale = quantize(x()[rows], per="row")
        z = truth(values.to(wide) * scale, both, dtype=wide).to(DTYPE)
        values, scale = quantize_gated(z)
        return rows, truth(values.to(wide) * scale, down, dtype=wide)

    def ours():
        layer = Float8SwiGLU(SwiGLU(dim, hidden, False, block, density=density, device=device, dtype=DTYPE))
        return verified(call_of(layer), lambda: expected(layer)), None

    def dense() -> Call:
        layer: nn.Module = DenseSwiGLU(dim, hidden, device=device, dtype=DTYPE)
        return call_of(torch.compile(layer, fullgraph=True, backend=backend))

    name = f"SwiGLU {dim} to {hidden}, {block[0]}x{block[1]}, {density:g}, e4m3fn, {tokens} tokens, inference"
    return Case("float8", name, problem, ours, [Candidate(DENSE_SWIGLU, problem.flops, dense)], DENSE_SWIGLU, asked)
