"""A feed-forward layer of a Llama with 2:4 sparse weights, for inference, beside the dense layer and, where its weights
are block-sparse, beside our own without 2:4. All are compiled by torch, and captured in a CUDA graph where there is a
GPU."""

import functools

import torch
from torch import Tensor, nn

from cute_kernels.reference import gate
from sparse_collective.nn import SwiGLU, prune_2_4_
from tests.reference import truth

from .cases_float8_layers import in_graph
from .cases_models import DENSE_SWIGLU, DTYPE, DenseSwiGLU, sampled_rows
from .peers import Call, verified
from .rows import Candidate, Case, Problem

OUR_SWIGLU = "our SwiGLU without 2:4, compiled"


def feed_forward(
    dim: int, hidden: int, tokens: int, density: float | None = None, asked: float | None = None, *,
    block: tuple[int, int] = (128, 128), device: str = "cuda", backend: str = "inductor",
) -> Case:  # fmt: skip
    """prune_2_4_ of SwiGLU with `density` of its blocks, over ours without 2:4; or of a dense one, over that.

    Useful are the products with stored elements, which the others are taken to do, too: ratios are those of times.
    """
    whole = density is None
    blocks = hidden * dim // (block[0] * block[1])
    kept = 1.0 if whole else round(density * blocks) / blocks
    problem = Problem("swiglu", hidden, tokens, dim, None if whole else block, kept / 2, epilogue="2:4", products=3)
    x = functools.cache(lambda: torch.randn(tokens, dim, device=device, dtype=DTYPE))

    def call_of(layer: nn.Module) -> Call:
        run, given = torch.compile(layer.eval(), fullgraph=True, backend=backend), x()

        @torch.no_grad()
        def call() -> Tensor:
            return run(given)

        return Call(in_graph(call, device))

    def of_blocks() -> nn.Module:
        return SwiGLU(dim, hidden, False, block, density=density, device=device, dtype=DTYPE)

    def dense() -> nn.Module:
        return DenseSwiGLU(dim, hidden, device=device, dtype=DTYPE)

    @torch.no_grad()
    def expected(layer: nn.Module) -> tuple[Tensor, Tensor]:
        rows, wide = sampled_rows(tokens, device), torch.float32

        def product(x: Tensor, part: nn.Module) -> Tensor:
            return truth(x, part.weight.to_dense().t(), dtype=wide)

        if whole:
            first, second = (product(x()[rows], part).to(DTYPE) for part in (layer.gate, layer.up))
            hidden_rows = nn.functional.silu(first) * second
        else:
            hidden_rows = gate(product(x()[rows], layer.gate_up).to(DTYPE), "silu")
        return rows, product(hidden_rows, layer.down)

    def ours():
        model = nn.Sequential(dense() if whole else of_blocks())
        prune_2_4_(model, dense=whole)
        return verified(call_of(model), lambda: expected(model[0])), None

    peers = [Candidate(DENSE_SWIGLU, problem.flops, lambda: call_of(dense()))]
    if not whole:
        peers.append(Candidate(OUR_SWIGLU, problem.flops, lambda: call_of(of_blocks())))
    kind = "dense" if whole else f"{block[0]}x{block[1]}, {density:g}"
    against = peers[-1].name
    name = f"SwiGLU {dim} to {hidden}, {kind}, 2:4, {tokens} tokens, inference, over {against}"
    return Case("structured", name, problem, ours, peers, against, asked)
