"""Gated feed-forward layers: one, and a mixture of experts of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from cute_kernels.reference import GATE
from cute_kernels.runtime import front

from ..padded_rows import Padding, padding_of, spread, taken
from . import routed_rows
from .gated import GatedBsrLinear
from .grouped import BsrGroupedLinear
from .linear import BsrLinear

__all__ = ["BsrMixtureOfExperts", "SwiGLU", "check_routing", "combined", "routed", "routing_of", "sorted_choices"]


class SwiGLU(nn.Module):
    """Gated feed-forward layer: down(gate_up(x)), where gate_up computes silu(gate(x)) * up(x).

    Args:
        dim, hidden: input and hidden features, multiples of the block's sides; hidden is a multiple of 64.
        bias: True adds a bias to all three layers.
        blocksize: (bm, bk); for gate and up, of the matrix that holds both.
        density: of all layers, in [0, 1], with random blocks. For other patterns see `from_linears`.
        device, dtype: see BsrLinear.

    Attributes:
        gate_up: a GatedBsrLinear(dim, 2 * hidden). Any module that maps dim to hidden features can replace it, for
            example a GatedBsrLinear with another activation.
        down: a BsrLinear(hidden, dim), which any module with the same features can replace.

    Forward maps (..., dim) to (..., dim). Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Raises:
        TypeError, ValueError: as in BsrLinear, and if hidden is not a multiple of 64.

    Example:
        layer = SwiGLU(4096, 14336, blocksize=(128, 128), density=0.25, device="cuda", dtype=torch.bfloat16)
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        bias: bool = False,
        blocksize: Sequence[int] = (128, 128),
        *,
        density: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if operator.index(hidden) % GATE:
            raise ValueError(f"SwiGLU: hidden is {hidden}; use a multiple of {GATE}")
        more: Any = {"density": density, "device": device, "dtype": dtype}
        self.gate_up = GatedBsrLinear(dim, 2 * hidden, bias, blocksize, **more)
        self.down = BsrLinear(hidden, dim, bias, blocksize, **more)

    @classmethod
    def from_linears(
        cls,
        gate: nn.Linear,
        up: nn.Linear,
        down: nn.Linear,
        blocksize: Sequence[int] = (128, 128),
        density: float = 1.0,
    ) -> Self:
        """Create the layer from the blocks of largest norm of three dense ones; see BsrLinear.from_linear."""
        gate_up = GatedBsrLinear.from_linears(gate, up, blocksize, density)
        return cls.of(gate_up, BsrLinear.from_linear(down, blocksize, density))

    @classmethod
    def of(cls, gate_up: GatedBsrLinear, down: BsrLinear) -> Self:
        """The layer that holds these two, in the mode (training or evaluation) of gate_up."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.gate_up, layer.down = gate_up, down
        return layer.train(gate_up.training)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up, self.down
        if gate_up.__class__ is not GatedBsrLinear:
            kind = type(gate_up)  # of a tensor-parallel layer, see distributed/parallel.py
            if (check := getattr(kind, "check_next", None)) is not None:
                check(gate_up, down)
            both = getattr(kind, "feed_forward", None)
            if both is not None and (y := both(gate_up, down, x)) is not None:
                return y
        return down(gate_up(x))


def routing_of(choices: Tensor, experts: int, group_rows: int, elsewhere: bool = False) -> Padding:
    """The padded layout of tokens sorted by expert; nothing is read on the host.

    Args:
        choices: (T, k) int64, in [0, experts).
        group_rows: rows of a run.
        elsewhere: True if choices may also be `experts` and more, of which nothing is computed.

    Returns:
        rows: of the layout, an upper bound that depends on shapes alone.
        slots: (T * k,) int64, the row of each token's first, second, ... choice.
        groups: (rows / group_rows,) int32, the expert of each run.
    """
    keys, order = sorted_choices(choices, experts)
    ends = torch.searchsorted(keys, torch.arange(experts, device=keys.device, dtype=keys.dtype), right=True)  # (E,)
    rows, sorted_slots, groups = padding_of(ends, keys.shape[0], group_rows, tail=elsewhere)
    return Padding(rows, torch.empty_like(sorted_slots).scatter_(0, order, sorted_slots), groups)


def sorted_choices(choices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort choices (T, k), stably: (keys, order), each (T * k,), where key i is of choice order[i], order int64.

    Keys are -1 for negative choices and `experts` for those above, in 16 bits where they fit: a radix sort of these has
    two passes, of int64 eight.
    """
    if choices.dtype not in (torch.int32, torch.int64):  # -1 and `experts` may not be numbers of theirs
        choices = choices.int()
    keys = choices.flatten().clamp(-1, experts)
    return keys.to(torch.int16 if experts < 2**15 - 1 else torch.int32).sort(stable=True)


def routed(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    experts: int,
    group_rows: int,
    layers: Callable[[Tensor, Tensor], Tensor],
    elsewhere: bool = False,
) -> Tensor:
    """Each token through the experts that were chosen for it: (T, N) of x's dtype, summed in FP32 at least.

    Args:
        x: (T, K).
        choices: (T, k) int64, in [0, experts).
        weights: (T, k), by which the results of a token's choices are multiplied.
        group_rows: rows of a run.
        layers: of the padded tokens (rows, K) and the expert of each run, the result (rows, N).
        elsewhere: True if choices may also be `experts` and more; their weights must be 0.

    Raises:
        ValueError: the shapes of x, choices and weights do not fit each other.
    """
    check_routing(x, choices, weights)
    if routed_rows.served(x, choices, weights, experts):
        rows = routed_rows.rows_of(*sorted_choices(choices, experts), experts, choices.shape[1], group_rows)
        return routed_rows.sums(layers(*routed_rows.layout(x, rows)), weights, rows, x.dtype)
    padding = routing_of(choices, experts, group_rows, elsewhere)
    y = layers(spread(x, padding, choices.shape[1]), padding.groups)
    return combined(taken(y, padding).unflatten(0, choices.shape), weights, x.dtype)


def check_routing(x: Tensor, choices: Tensor, weights: Tensor) -> None:
    if x.dim() != 2 or choices.dim() != 2 or weights.shape != choices.shape or x.shape[0] != choices.shape[0]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, choices, weights))
        raise ValueError(f"tokens (T, K) need choices and weights (T, k), got shapes {shapes}")


class WeightedSum(torch.autograd.Function):
    """Weighted sums of the choices in y (T, k, N), in FP32 at least; no copy of y in FP32 is written."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        weights = weights.to(torch.promote_types(torch.promote_types(y.dtype, weights.dtype), torch.float32))
        pairs = [(y[:, i], weights[:, i : i + 1]) for i in range(y.shape[1])]
        if len(pairs) == 1:
            return rounded(torch.mul, dtype, *pairs[0])
        total = pairs[0][0] * pairs[0][1]
        for pair in pairs[1:-1]:
            total = torch.addcmul(total, *pair)
        return rounded(torch.addcmul, dtype, total, *pairs[-1])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad: Tensor):
        y, weights = ctx.saved_tensors
        grad, wide = grad[:, None], torch.promote_types(torch.promote_types(y.dtype, weights.dtype), torch.float32)
        dy = dweights = None
        if ctx.needs_input_grad[0]:
            dy = rounded(torch.mul, y.dtype, grad, weights.to(wide)[..., None])
        if ctx.needs_input_grad[1]:
            dweights = (grad.to(wide) * y).sum(-1).to(weights.dtype)
        return dy, dweights, None


def rounded(op: Callable[..., Tensor], dtype: torch.dtype, *args: Tensor) -> Tensor:
    """op(*args) in `dtype`; where out= is possible, without a copy in the dtype of the operation."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or front.hidden():
        return op(*args).to(dtype)
    return op(*args, out=args[0].new_empty(torch.broadcast_shapes(*[t.shape for t in args]), dtype=dtype))


def combined(y: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sums (T, N) of the results (T, k, N) of each token's choices, in FP32 at least."""
    return WeightedSum.apply(y, weights, dtype)


class BsrMixtureOfExperts(nn.Module):
    """Mixture of experts: a router selects top_k of E gated feed-forward layers per token; no token is dropped.

    The router is a dense linear layer with a softmax over the top_k logits. Tokens are sorted by expert, each expert's
    tokens are padded to whole runs, and all experts run in one kernel per layer. The host reads nothing of the routing:
    shapes do not depend on it. sparse_collective.distributed.BsrExpertParallel distributes the experts over GPUs.

    Args:
        dim, hidden: input and hidden features of an expert, multiples of the block's sides.
        experts, top_k: E, and the number of experts per token.
        bias: True adds a bias to the experts' layers.
        blocksize, density, one_pattern: of the experts' weights, see BsrGroupedLinear.
        group_rows: tokens per run, a multiple of 64. Larger runs are faster if experts get many tokens, and pad more.
        device, dtype: of all parameters.

    Forward maps (..., dim) to (..., dim).

    Raises:
        TypeError, ValueError: as in BsrLinear, and if top_k or group_rows is out of range.

    Example:
        layer = BsrMixtureOfExperts(1024, 4096, experts=8, top_k=2, blocksize=(128, 128), density=0.25)
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        bias: bool = False,
        blocksize: Sequence[int] = (128, 128),
        *,
        density: float,
        one_pattern: bool = True,
        group_rows: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= operator.index(top_k) <= experts:
            raise ValueError(f"BsrMixtureOfExperts: top_k is {top_k}; it must be in [1, {experts}]")
        if operator.index(group_rows) < 64 or group_rows % 64:
            raise ValueError(f"BsrMixtureOfExperts: group_rows is {group_rows}; use a positive multiple of 64")
        self.experts, self.top_k, self.group_rows = experts, top_k, group_rows
        self.router = nn.Linear(dim, experts, bias=False, device=device, dtype=dtype)
        more: Any = {"one_pattern": one_pattern, "density": density, "device": device, "dtype": dtype}
        self.gate = BsrGroupedLinear(experts, dim, hidden, bias, blocksize, activation="silu", **more)
        self.up = BsrGroupedLinear(experts, dim, hidden, bias, blocksize, **more)
        self.down = BsrGroupedLinear(experts, hidden, dim, bias, blocksize, **more)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route x (T, dim): return weights (T, top_k) float32, which sum to 1, and experts (T, top_k) int64."""
        logits, choices = self.router(x).float().topk(self.top_k, dim=-1)
        return logits.softmax(-1), choices

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, choices = self.route(tokens)
        y = routed(tokens, choices, weights, self.experts, self.group_rows, self._layers)
        return y.view(x.shape)

    def _layers(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        for layer in (self.gate, self.up):
            if (check := getattr(type(layer), "check_next", None)) is not None:  # of a tensor-parallel layer
                check(layer, self.down)
        return self.down(self._hidden(x, expert_ids), expert_ids=expert_ids)

    def _hidden(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        return self.gate(x, expert_ids=expert_ids) * self.up(x, expert_ids=expert_ids)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, top_k={self.top_k}, group_rows={self.group_rows}"
