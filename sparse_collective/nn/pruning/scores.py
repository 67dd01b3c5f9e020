"""Importance scores of a weight's blocks, by magnitude, gradient or inputs; and gradients of absent blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from cute_kernels.gate.dispatch import gate
from cute_kernels.gradients import saved_of, through_epilogue
from cute_kernels.ops import gemm
from cute_kernels.runtime.torch_compat import is_dtensor

from ...conversions import block_view
from ...ops import bsr_linear
from ..gated import GatedBsrLinear, GatedLinear
from ..linear import BsrLinear
from ..shards import gathered, local_part, shard_range

__all__ = [
    "Blocks",
    "DenseGradients",
    "InputNorms",
    "Scores",
    "gradient_block_norms",
    "gradient_times_weight",
    "magnitude",
]

CHUNK_BYTES = 64 << 20  # of the dense gradient that exists at a time
Group = Any  # torch.distributed.ProcessGroup | None, which not every build of torch has
KINDS_16 = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Blocks:
    """Blocks of a layer's weight, the argument of a function of scores.

    Attributes:
        module: a BsrLinear, with its stored blocks; or an nn.Linear, with all blocks in row-major order.
        weight: (n, bm, bk).
        gradient: (n, bm, bk) of the weight's gradient; None without one.
        columns: (n,) int64, the block column of each block.
        shards: the DTensor that weight is this rank's part of; None if weight has all blocks.

    Example:
        prune_(layer, 0.25, scores=lambda blocks: blocks.weight.float().abs().amax((1, 2)))
    """

    module: Any
    weight: Tensor
    gradient: Tensor | None
    shards: Any = None

    @functools.cached_property
    def columns(self) -> Tensor:
        """Made when first asked for, as the pattern is then."""
        if isinstance(self.module, BsrLinear):
            columns = self.module.col_indices.long()
            return columns if self.shards is None else columns[slice(*shard_range(self.shards))]
        columns = self.module.weight.shape[1] // self.weight.shape[-1]
        return torch.arange(columns, device=self.weight.device).repeat(len(self.weight) // max(columns, 1))

    @classmethod
    def of(cls, module: nn.Module, blocksize: Sequence[int] | None = None) -> Blocks:
        """Return the stored blocks of a BsrLinear, or all blocks of `blocksize` of an nn.Linear.

        For a BsrLinear whose values fully_shard has split, these are the blocks of this rank.

        Raises:
            TypeError: the module is neither, or an nn.Linear whose weight is sharded.
        """
        if isinstance(module, BsrLinear):
            values = module.values
            gradient = None if values.grad is None else local_part(values.grad)
            return cls(module, local_part(values), gradient, values if is_dtensor(values) else None)
        if isinstance(module, nn.Linear) and blocksize is not None:
            weight, gradient = plain(module.weight), module.weight.grad
            blocks = block_view(weight.detach(), blocksize)
            gradient = None if gradient is None else block_view(gradient, blocksize).flatten(0, 1)
            return cls(module, blocks.flatten(0, 1), gradient)
        raise TypeError(f"blocks are scored of a BsrLinear, or of an nn.Linear and a blocksize; got {type(module)}")

    def score(self, scores: str | Tensor | Scores) -> Tensor:
        """Return scores (nnz,) float32 of all stored blocks; those of other ranks are all-gathered.

        Args:
            scores: "magnitude", "gradient" (see SCORES), a function of Blocks, or a tensor of scores (nnz,).

        Raises:
            TypeError, ValueError: `scores` is none of these, or has another shape.
        """
        return self._of_all_ranks(self._own_scores(scores), scores)

    def _of_all_ranks(self, own: Tensor, scores: str | Tensor | Scores) -> Tensor:
        """Return _own_scores(scores) of all ranks; a tensor of scores has them already."""
        return own if self.shards is None or isinstance(scores, Tensor) else gathered(own, self.shards)

    def _own_scores(self, scores: str | Tensor | Scores) -> Tensor:
        """Return scores of this rank's blocks, but of all ranks' if scores is a tensor; communicates nothing."""
        if isinstance(scores, str):
            if scores not in SCORES:
                raise ValueError(f"scores={scores!r}; use one of {', '.join(SCORES)}, a function or a tensor")
            scores = SCORES[scores]
        if not isinstance(scores, Tensor):
            if not callable(scores):
                raise TypeError(f"scores must be a name, a tensor or a function of Blocks, got {type(scores).__name__}")
            return checked(scores(self), len(self.weight)).to(self.weight.device)
        total = len(self.weight) if self.shards is None else len(self.shards)
        return checked(scores, total).to(self.weight.device)


Scores = Callable[[Blocks], Tensor]


def checked(scores: Tensor, blocks: int) -> Tensor:
    """(blocks,) float32

    Raises:
        ValueError: there are not as many.
    """
    if scores.numel() != blocks or scores.is_complex():
        raise ValueError(f"scores have shape {tuple(scores.shape)}; there are {blocks} blocks")
    return scores.detach().flatten().to(torch.float32)


def plain(t: Tensor) -> Tensor:
    """`t`, the weight of an nn.Linear, which must be whole.

    Raises:
        TypeError: it is sharded.
    """
    if type(t) is not nn.Parameter and type(t) is not Tensor and type(t.data) is not Tensor:
        raise TypeError(f"the weight is a {type(t.data).__name__}; unshard the layer, or choose blocks before that")
    return t


def magnitude(blocks: Blocks) -> Tensor:
    """(n,) Frobenius norms."""
    return magnitude_of(blocks.weight)


def magnitude_of(weight: Tensor) -> Tensor:
    """(n,) float32 Frobenius norms of (n, bm, bk)."""
    dtype = torch.float64 if weight.dtype is torch.float64 else torch.float32  # torch narrows nothing here
    return torch.linalg.vector_norm(weight, dim=(-2, -1), dtype=dtype).float()


def gradient_times_weight(blocks: Blocks) -> Tensor:
    """(n,) |sum of gradient * weight|: how much the loss changes without the block, to first order.

    Source: Molchanov et al., "Importance Estimation for Neural Network Pruning", 2019.

    Raises:
        ValueError: there is no gradient yet.
    """
    if blocks.gradient is None:
        raise ValueError('scores="gradient" needs a gradient of the weight; call backward() first')
    return (blocks.weight.float() * blocks.gradient.float()).sum((-2, -1)).abs()


SCORES: dict[str, Scores] = {"magnitude": magnitude, "gradient": gradient_times_weight}


class _Hooks:
    """Forward hooks on the linear layers of a model, for as long as the `with` block lasts."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[nn.Module, str] = {
            m: n for n, m in model.named_modules() if isinstance(m, (nn.Linear, BsrLinear))
        }
        if not self.names:
            raise ValueError(f"{type(self).__name__}: the model has no nn.Linear and no BsrLinear")
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [module.register_forward_hook(self._hook, with_kwargs=True) for module in self.names]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
        self._see(module, args[0] if args else next(iter(kwargs.values())), output)

    def _see(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        raise NotImplementedError


class InputNorms(_Hooks):
    """Record the norm of every input feature of a model's linear layers; a function of scores, that of Wanda.

        with InputNorms(model) as norms:
            model(batch)
        prune_(layer, 0.5, scores=norms)

    A block's score is the sum of |W| times the norm of the input feature that it multiplies.
    Source: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (Wanda), 2023.

    Attributes:
        squares: module -> (K,) float32 sums of squares. Multiple processes must all_reduce them to prune alike.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.squares: dict[nn.Module, Tensor] = {}

    @torch.no_grad()
    def _see(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        squares = x.detach().reshape(-1, x.shape[-1]).float().square().sum(0)
        before = self.squares.get(module)
        self.squares[module] = squares if before is None else before.add_(squares)

    def norms(self, module: nn.Module) -> Tensor:
        """Return the norms (K,) float32 of a module's input features.

        Raises:
            KeyError: the module has had no input.
        """
        if module not in self.squares:
            raise KeyError(f"{self.names.get(module) or type(module).__name__} has seen no input")
        return self.squares[module].sqrt()

    def __call__(self, blocks: Blocks) -> Tensor:
        norms = self.norms(blocks.module).unflatten(0, (-1, blocks.weight.shape[-1]))  # (block columns, bk)
        return (blocks.weight.float().abs().sum(1) * norms[blocks.columns]).sum(1)


class DenseGradients(_Hooks):
    """Record the factors of a weight's dense gradient, in forward and backward passes inside the `with` block.

        with DenseGradients(model) as gradients:
            loss_of(batch).backward()
        change_pattern_(layer, 0.3, grow=gradients.block_norms(layer))

    Holds x (tokens, K) and dz (tokens, M) of each call until it is cleared or deleted. Hooks run in eager calls only:
    do such a step outside of torch.compile, as RigL does every few hundred steps.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def _see(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        if not output.requires_grad:
            return
        x, y = x.detach(), output.detach()

        @torch.no_grad()
        def keep(dy: Tensor) -> None:
            dz = self._before_activation(module, x, y, dy)
            pair = x.reshape(-1, x.shape[-1]).to(dz.dtype), dz.reshape(-1, dz.shape[-1])
            self.calls.setdefault(module, []).append(pair)

        output.register_hook(keep)

    @staticmethod
    def _before_activation(module: Any, x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
        """The gradient of x @ W.T + bias, by that of the output y.

        Raises:
            TypeError: a subclass overrides the forward of a layer with an activation or a gate.
        """
        ours = isinstance(module, (BsrLinear, GatedLinear))
        activation, gated = (module.activation, module.gated) if ours else (None, False)
        if activation is None and not gated:
            return dy
        if type(module).forward not in (BsrLinear.forward, GatedBsrLinear.forward, GatedLinear.forward):
            raise TypeError(
                f"DenseGradients: {type(module).__name__} overrides forward and has an activation, so that the "
                "gradient before it is not known; use activation=None and apply the activation in your forward"
            )
        if gated or saved_of(activation, None) == "z":
            W, bias = module.weight, None if module.bias is None else module.bias.detach().to(dy.dtype)
            if isinstance(module, GatedLinear):
                y = nn.functional.linear(x.to(dy.dtype), W.detach().to(dy.dtype), bias)
            else:
                y = bsr_linear(x.to(dy.dtype), W.with_values(W.values.detach().to(dy.dtype)), bias=bias)
        if not gated:
            return through_epilogue(dy, activation, None, y, None)[0]
        with torch.enable_grad():
            return torch.autograd.grad(gate(y.requires_grad_(), activation), y, dy)[0]

    def clear(self) -> None:
        """Remove all recorded calls."""
        self.calls.clear()

    def block_norms(self, module: nn.Module, blocksize: Sequence[int] | None = None, *, group: Group = None) -> Tensor:
        """Return the norms (M / bm, K / bk) float32 of all blocks, stored or not, of the weight's dense gradient.

        Args:
            module: a BsrLinear, or an nn.Linear with a blocksize.
            blocksize: (bm, bk) for an nn.Linear.
            group: a torch.distributed process group over which gradients are summed first.

        Raises:
            KeyError: the module has had no gradient.
        """
        if module not in self.calls:
            raise KeyError(f"no gradient has come to {self.names.get(module) or type(module).__name__}")
        blocksize = module.blocksize if isinstance(module, BsrLinear) else blocksize
        if blocksize is None:
            raise ValueError("block_norms of an nn.Linear needs a blocksize")
        return gradient_block_norms(self.calls[module], blocksize, group=group)


@torch.no_grad()
def gradient_block_norms(
    calls: Sequence[tuple[Tensor, Tensor]], blocksize: Sequence[int], *, group: Group = None
) -> Tensor:
    """(M / bm, K / bk) float32 Frobenius norms of the blocks of sum(dz.T @ x), some block rows at a time.

    Args:
        calls: (x, dz) pairs of one dtype, (tokens, K) and (tokens, M).
        blocksize: (bm, bk).
        group: a torch.distributed process group that sums each chunk.
    """
    bm, bk = blocksize
    (x, dz), norms = calls[0], []
    step = bm * max(1, CHUNK_BYTES // max(1, 4 * bm * x.shape[1]))
    for first in range(0, dz.shape[1], step):
        total: Any = None
        for x, dz in calls:
            part = dz[:, first : first + step].t()
            fast = part.dtype in KINDS_16
            found = gemm(part, x, out_dtype=torch.float32) if fast else part.float() @ x.float()
            total = found if total is None else total.add_(found)
        if group is not None:
            torch.distributed.all_reduce(total, group=group)
        norms.append(torch.linalg.vector_norm(block_view(total, blocksize), dim=(2, 3)))
    return torch.cat(norms) if norms else torch.zeros(0, x.shape[1] // bk, device=x.device)
