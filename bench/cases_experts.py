"""Experts of a mixture of experts, block-sparse, beside dense ones of transformers.

Useful are the GEMMs with stored blocks. Peers are taken to do the same, so ratios are those of times.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_collective.nn import BsrExperts, BsrGroupedLinear

from .cases import DTYPE
from .cases_layers import sampled_rows
from .peers import Call, verified
from .rows import Candidate, Case, Problem

GROUPED_MM = "transformers grouped_mm, dense"
OURS_DENSE = "our grouped GEMM, dense"
IMPLEMENTATIONS = {OURS_DENSE: "cute_kernels", GROUPED_MM: "grouped_mm"}


def dense_experts(dim: int, hidden: int, experts: int, implementation: str, device: str) -> nn.Module:
    """Mixtral's experts with random weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from attention.integrations.transformers import register

    register()
    config = MixtralConfig(hidden_size=dim, intermediate_size=hidden, num_local_experts=experts)
    config._experts_implementation = implementation
    with torch.device("meta"):
        layer = MixtralExperts(config).to(DTYPE)
    layer = layer.to_empty(device=device)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return layer


def routed_experts(
    dim: int, hidden: int, tokens: int, density: float, *, experts: int = 8, top_k: int = 2,
    block: tuple[int, int] = (128, 128), asked: float | None = None, device: str = "cuda",
) -> Case:  # fmt: skip
    """Forward of BsrExperts with a pattern for each expert, with the sort of its tokens, beside dense experts."""
    blocks = hidden * dim // (block[0] * block[1])
    density = round(density * blocks) / blocks
    problem = Problem("experts", hidden, tokens * top_k, dim, block, density, items=experts, products=3)

    @functools.cache
    def operands() -> tuple[Tensor, Tensor, Tensor]:
        """(x, experts of each token, their weights)"""
        x = torch.randn(tokens, dim, device=device, dtype=DTYPE)
        weights, index = torch.rand(tokens, experts, device=device).topk(top_k)
        return x, index, weights

    def call_of(layer: nn.Module) -> Callable[[], Tensor]:
        @torch.no_grad()
        def call() -> Tensor:
            return layer(*operands())

        return call

    def ours():
        more = {"one_pattern": False, "density": density, "device": device, "dtype": DTYPE}
        gate_up = BsrGroupedLinear(experts, dim, 2 * hidden, False, block, **more)
        layer = BsrExperts(gate_up, BsrGroupedLinear(experts, hidden, dim, False, block, **more))

        @torch.no_grad()
        def sample() -> tuple[Tensor, Tensor]:
            rows, must = sampled_rows(tokens, device), []
            up, down = layer.gate_up.weight.to_dense(), layer.down.weight.to_dense()
            for x, chosen, weights in zip(*(t[rows] for t in operands()), strict=True):
                y = torch.zeros(dim, device=device)
                for e, weight in zip(chosen.tolist(), weights, strict=True):
                    g, u = (up[e].float() @ x.float()).to(DTYPE).chunk(2)
                    y += weight * (down[e].float() @ (nnf.silu(g) * u).float())
                must.append(y)
            return rows, torch.stack(must)

        return verified(Call(call_of(layer)), sample), None

    def peer(implementation: str) -> Call:
        return Call(call_of(dense_experts(dim, hidden, experts, implementation, device)))

    others = [Candidate(n, problem.flops, functools.partial(peer, i)) for n, i in IMPLEMENTATIONS.items()]
    name = f"{experts} experts {dim} to {hidden}, {block[0]}x{block[1]}, {density:.3g}, inference"
    return Case("training", name, problem, ours, others, GROUPED_MM, asked)
