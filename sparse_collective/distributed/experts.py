"""Expert-parallel mixtures of experts: a rank of a mesh holds some experts, and multiplies all ranks' tokens of them.

`values` and `bias` are DTensors of which each rank holds its experts' part. Experts with a pattern each may store
different numbers of blocks: then each rank has room for as many blocks as the largest, with zeros behind its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from cute_kernels.runtime.torch_compat import is_dtensor

from ..nn.experts import BsrExperts
from ..nn.feed_forward import BsrMixtureOfExperts, check_routing
from ..nn.grouped import BsrGroupedLinear
from ..nn.shards import hash_of
from ..ops import bsr_grouped_linear
from .dispatch import refuse, routed_over_ranks
from .parallel import hooked
from .place import check_alike, check_whole, facts_of, own_part, padded
from .state import PlacedState
from .styles import check_mesh

__all__ = ["BsrExpertParallel", "LocalExperts"]

Module = BsrMixtureOfExperts | BsrExperts


@dataclass(frozen=True)
class PlacedExperts:
    """The experts that a rank holds: as many as the others, in the order of ranks.

    mesh: one-dimensional DeviceMesh.
    each: experts of a rank.
    """

    mesh: Any
    each: int

    def cuts(self) -> list[int]:
        """(ranks + 1,) where each rank's experts begin."""
        return [rank * self.each for rank in range(self.mesh.size() + 1)]


class LocalExperts(PlacedState, BsrGroupedLinear):
    """A BsrGroupedLinear of which this rank has some experts. Forward takes their tokens, and numbers them from 0."""

    place: PlacedExperts

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.place.each, self.out_features, self.in_features

    def split_dim(self, name: str) -> int:
        """Experts, or the blocks of all experts if each has a pattern of its own."""
        if name == "bias":
            return -2
        return -4 if self.crow_indices.dim() == 1 else -3

    def entries(self, name: str) -> list[Tensor]:
        """See PlacedState; as each rank holds some experts, they are ranges."""
        crow, cuts = self.global_crow_indices, self.place.cuts()
        if name == "values" and crow.dim() == 2:  # an expert's first number is its first block
            cuts = [*crow[cuts[:-1], 0].tolist(), len(self.global_col_indices)]
        return [torch.arange(begin, end, device=crow.device) for begin, end in zip(cuts, cuts[1:], strict=False)]

    def forward(
        self, x: Tensor, offs: Tensor | None = None, *, expert_ids: Tensor | None = None,
        group_rows: int | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        bias = None if self.bias is None else own_part(self.bias, 0, self.place.each)
        return bsr_grouped_linear(
            x, self.weight, offs=offs, expert_ids=expert_ids, group_rows=group_rows, bias=bias,
            activation=self.activation, out=out,
        )  # fmt: skip


class OverRanks(nn.Module):
    """Mixin of mixtures of experts over the ranks of a mesh."""

    place: PlacedExperts

    def check_tokens(self, x: Any, layer: Any) -> None:
        """Reject tokens that this rank's experts do not take, before a router sees them.

        Args:
            layer: the first one of the experts, or what wraps it.
        """
        name = type(self).__name__
        if is_dtensor(x):
            raise TypeError(
                f"{name}: tokens are a DTensor placed as {x.placements}; pass this rank's tokens, x.to_local()"
            )
        if x.shape[-1:] != (layer.in_features,):
            raise ValueError(f"{name}: tokens have shape {tuple(x.shape)}, and experts {layer.in_features} features")
        values = layer.values
        sharded = is_dtensor(values) and values.device_mesh.ndim > 1  # by FSDP2, which may cast x and values
        if not sharded and x.dtype is not values.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name}: tokens are {x.dtype} but experts {values.dtype}; cast them: x.to({values.dtype})")

    @torch.compiler.disable(reason="it exchanges an error with other ranks")
    def refuse(self, layer: Any, experts: int) -> None:
        """Let all ranks raise, as this one has an error and will not call over_ranks."""
        refuse(experts, self.place.mesh, layer.values.device)

    def over_ranks(self, x: Tensor, choices: Tensor, weights: Tensor, experts: int) -> Tensor:
        """The experts' weighted results for tokens x (T, dim) of this rank."""
        module: Any = self

        def layers(rows: Tensor, expert_ids: Tensor, room: Callable[[], Tensor] | None) -> Tensor:
            hidden, down = module._hidden(rows, expert_ids), module.down
            out = None if room is None or hooked(down) else room()  # hooks may keep results, or change them
            return down(hidden, expert_ids=expert_ids, out=out)

        return routed_over_ranks(x, choices, weights, experts, module.group_rows, layers, self.place.mesh)


class ParallelMixtureOfExperts(OverRanks, BsrMixtureOfExperts):
    """A BsrMixtureOfExperts over the ranks of a mesh. Its router is whole on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        routing = None
        try:
            self.check_tokens(x, self.gate)
            tokens = x.reshape(-1, x.shape[-1])
            if not torch.compiler.is_compiling():  # it leaves a `try` with a graph break in it to Python
                routing = self.route(tokens)
                check_routing(tokens, routing[1], routing[0])
        except Exception:
            self.refuse(self.gate, self.experts)
            raise
        weights, choices = self.route(tokens) if routing is None else routing
        return self.over_ranks(tokens, choices, weights, self.experts).view(x.shape)


class ParallelExperts(OverRanks, BsrExperts):
    """A BsrExperts over the ranks of a mesh."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        try:
            self.check_tokens(hidden_states, self.gate_up)
            check_routing(hidden_states, top_k_index, top_k_weights)
        except Exception:
            self.refuse(self.gate_up, self.num_experts)
            raise
        return self.over_ranks(hidden_states, top_k_index, top_k_weights, self.num_experts)


KINDS: dict[type, type] = {BsrMixtureOfExperts: ParallelMixtureOfExperts, BsrExperts: ParallelExperts}


class BsrExpertParallel(ParallelStyle):
    """Deal the experts of a mixture of experts to the ranks of a mesh.

    Takes BsrMixtureOfExperts and BsrExperts, of any density. Each rank holds experts / ranks of them, in the order of
    ranks, and passes its own tokens to forward. Tokens go to the ranks that hold their experts, and results come back;
    results and their order are those of one process. On GPUs of one host, kernels read both from other ranks' memory,
    in two buffers of each rank, as large as the largest layout of a rank so far; elsewhere all-to-alls move them.
    Numbers of tokens may differ between ranks, and be 0. All ranks call forward and backward together.

    `values` become DTensors placed as Shard(0). state_dict() is one process's, as of tensor-parallel layers. Other
    parameters stay as they are: the router is whole on each rank, and its gradient is that of this rank's tokens, as of
    any other layer of a model under data parallelism. Gradients of experts are summed over the tokens of all ranks.

    parallelize_module raises:
        TypeError: the module is of another type, or sharded already.
        ValueError: the number of experts is not a multiple of the number of ranks, the mesh has several dimensions or
            ranks that do not ascend, or the module is on the meta device.
        RuntimeError: ranks hold different modules or patterns, or pass other arguments.

    Example::

        mesh = init_device_mesh("cuda", (2,))
        parallelize_module(model, mesh, {"layers.*.moe": BsrExpertParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        check_mesh(self, device_mesh)
        name, layers = type(self).__name__, [m for m in module.modules() if isinstance(m, BsrGroupedLinear)]

        def checked() -> int:
            if type(module) not in KINDS:
                known = ", ".join(kind.__name__ for kind in KINDS)
                raise TypeError(f"{name} takes {known}; got {type(module).__name__}")
            for layer in layers:
                check_layer(name, layer, device_mesh.size())
            routing = [getattr(module, option, None) for option in ("top_k", "group_rows", "activation")]
            indices = [t for layer in layers for t in (layer.crow_indices, layer.col_indices)]
            return hash_of(*indices, name, type(module).__name__, facts_of(module), routing, self.src_data_rank)

        check_alike(name, checked, device_mesh)
        for layer in layers:
            localize(layer, device_mesh, self.src_data_rank)
        if (router := getattr(module, "router", None)) is not None and self.src_data_rank is not None:
            for parameter in router.parameters():
                group = device_mesh.get_group()
                torch.distributed.broadcast(parameter.data, group=group, group_src=self.src_data_rank)
        module.__class__ = KINDS[type(module)]
        module.__dict__["place"] = layers[0].place
        return module


def check_layer(style: str, layer: Any, ranks: int) -> None:
    """Reject a layer whose experts cannot be dealt.

    Raises:
        TypeError: its values are computed of another parameter, or it is sharded.
        ValueError: it is on the meta device, or its experts are no multiple of the ranks.
    """
    if type(layer) is not BsrGroupedLinear:
        raise TypeError(f"{style} needs layers that are BsrGroupedLinear, got {type(layer).__name__}")
    check_whole(style, layer)
    if layer.items is None or layer.items % ranks:
        raise ValueError(f"{style}: {layer.items} experts are not a multiple of {ranks} ranks")


def localize(layer: Any, mesh: Any, src_data_rank: int | None) -> None:
    """Change a BsrGroupedLinear in place into LocalExperts; every rank holds the whole layer before."""
    from torch.distributed.tensor import Shard, distribute_tensor

    place, crow, col = PlacedExperts(mesh, layer.items // mesh.size()), layer.crow_indices, layer.col_indices
    layer.register_buffer("global_crow_indices", crow, persistent=False)
    layer.register_buffer("global_col_indices", col, persistent=False)
    layer.__class__ = LocalExperts
    layer.__dict__["place"] = place
    rank = mesh.get_local_rank()
    for name in ("values", "bias"):
        if (whole := getattr(layer, name)) is not None:
            dim = layer.split_dim(name) + whole.dim()
            placed = padded(whole.detach(), dim, layer.entries(name))
            placed = distribute_tensor(placed, mesh, [Shard(dim)], src_data_rank=src_data_rank)
            setattr(layer, name, nn.Parameter(placed, requires_grad=whole.requires_grad))
    if crow.dim() == 2:
        layer.col_indices = col[layer.entries("values")[rank]]
        own = crow[rank * place.each : (rank + 1) * place.each]
        layer.crow_indices = own - own[0, 0]
    layer._random, layer._kept_pattern = False, None
    layer._adopt()
