"""Tensor-parallel layers: a layer whose weight is split over the ranks of a mesh, along its rows or its columns.

parallelize_module makes them of layers, with the styles of styles.py. `values` is a DTensor of which each rank holds
its own blocks. Ranks may hold different numbers of blocks: each has room for as many as the largest, with zeros behind
its own. Indices are plain buffers of the rank's part; kernels run on local tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.functions import ACTIVATIONS
from cute_kernels.gate.dispatch import gate
from cute_kernels.runtime import front
from cute_kernels.runtime.torch_compat import has_global_module_hook, is_dtensor

from ..bsr import BsrMatrix
from ..nn.gated import GatedBsrLinear, gated_linear
from ..nn.grouped import BsrGroupedLinear
from ..nn.linear import BsrLinear
from ..nn.module import BsrModule
from ..nn.shards import check_same, hash_of
from ..ops import bsr_grouped_linear, bsr_linear
from .exchange import index_of
from .overlap import captured, gated_into
from .partition import Partition, hidden_rows
from .place import (
    Placed,
    SumGradient,
    as_placed,
    check_alike,
    check_whole,
    column_output,
    facts_of,
    features,
    features_of,
    indices_of,
    own_part,
    padded,
    replicate,
    row_input,
    split_of,
)
from .sequence import FeedForward, GatherLinear, LinearScatter, feed_forward, gathered_result
from .state import PlacedState

__all__ = ["TensorParallel", "parallelize"]


class TensorParallel(PlacedState):
    """Mixin of the layers below. in_features and out_features are those of all ranks, `grid` is this rank's."""

    place: Placed
    bias: nn.Parameter | None
    tokens_compared: tuple | None = None  # the tokens' shape in the last call that compared it over the ranks

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        shape = [self.out_features, self.in_features]
        shape[self.place.dim] = self.local_extent
        return tuple(shape) if self.items is None else (self.items, *shape)

    @property
    def grid(self) -> tuple[int, int]:
        shape = self.matrix_shape
        return shape[-2] // self.blocksize[0], shape[-1] // self.blocksize[1]

    @property
    def local_extent(self) -> int:
        """Rows or columns of the weight that this rank holds."""
        return self.place.side * len(self.place.own)

    def local_forward(self, x: Tensor, *routing: Any, **options: Any) -> Tensor:
        """The result of this rank's part: some features of the output, or a summand of it without bias."""
        raise NotImplementedError

    def own_bias(self) -> Tensor | None:
        """The bias of this rank's features; None if it is added to the sum of all ranks."""
        bias = self.bias
        return None if bias is None or self.place.dim else own_part(bias, -1, self.local_extent)

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write local_forward(x) to out."""
        raise NotImplementedError

    def after(self, z: Tensor) -> Tensor:
        """Activation or gate of z = x @ W.T + bias."""
        return z if self.activation is None else ACTIVATIONS[self.activation](z)

    def overlapped(self, x: Tensor) -> Tensor:
        """Forward of 16-bit tokens (t, ..., K) or (ranks * t, ..., K) with communication during the GEMM."""
        W, group, bias = self.weight, self.place.mesh.get_group(), self.own_bias()
        flat, shape = x.flatten(0, -2), x.shape  # reshape(-1, 0) fails, and a rank may have no feature
        if self.place.dim:
            y = self.sum_after(LinearScatter.apply(flat, W.stored, W, group))
            return y.view(shape[0] // self.place.mesh.size(), *shape[1:-1], y.shape[-1])
        if requires_gradient(x, W, bias):
            y = self.after(GatherLinear.apply(flat, W.stored, bias, W, group))
        else:
            columns = self.local_extent // (2 if getattr(self, "gated", False) else 1)
            y = gathered_result(flat, group, columns, self.into)
        return y.view(shape[0] * self.place.mesh.size(), *shape[1:-1], y.shape[-1])

    def overlaps(self, x: Any, routing: tuple, options: dict) -> bool:
        """True if this call's communication runs beside its GEMM.

        Raises:
            ValueError: the number of tokens is not a multiple of the number of ranks.
        """
        if not self.place.overlap or is_dtensor(x) or routing or options or x.dtype is not self.values.dtype:
            return False
        if x.dim() < 2 or recorded(x) or torch.is_autocast_enabled(x.device.type) or front.hidden():
            return False
        if self.place.dim and x.shape[0] % self.place.mesh.size():
            raise ValueError(f"{x.shape[0]} tokens are not a multiple of {self.place.mesh.size()} ranks")
        return True

    def check_tokens(self, x: Any) -> None:
        """Check this rank's tokens. In the first call, and with overlap whenever their shape is new, also compare them
        on all ranks, which synchronizes: collectives take them to be equal, but for features that are split.

        Nothing is compared where shapes are those of a DTensor, and while torch.compile, CUDA graphs or fake tensors
        record a call. All ranks must compare together: a rank whose shape alone is new waits for the others.

        Raises:
            ValueError: this rank's tokens have the wrong number of features.
            RuntimeError: they differ, or another rank raised that; on all ranks.
        """
        place, known = self.place, self.tokens_compared
        same = x.shape[:-1] == known if place.overlap else known is not None
        if same or type(x) is not Tensor or recorded(x):
            self.check_features(x)
            return
        split = features(place.inputs[0], x.dim() - 1)
        shown = f"{tuple(x.shape[:-1] if split else x.shape)} of {x.dtype}"

        def checked() -> int:
            self.check_features(x)
            return zlib.crc32(shown.encode())

        check_same(
            type(self).__name__, f"the shape or dtype of the tokens, here {shown},", checked, place.mesh,
            "pad them to one shape, or pass x as a DTensor",
        )  # fmt: skip
        self.tokens_compared = x.shape[:-1]

    def check_features(self, x: Tensor) -> None:
        """Reject tokens without the number of features that this rank passes, before anything moves.

        Raises:
            ValueError: they have another one.
        """
        place = self.place
        wanted = self.in_features
        if features(place.inputs[0], x.dim() - 1) and not is_dtensor(x):  # of a column-parallel layer equal parts
            wanted = self.local_extent if place.dim else wanted // place.mesh.size()
        if x.shape[-1:] != (wanted,):
            raise ValueError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}, and with input_layouts={place.inputs[0]!r} this "
                f"rank passes {wanted} of the layer's {self.in_features} features"
            )

    def check_next(self, layer: Any) -> None:
        """Compare this layer's output features with the input features of the layer after it, rank by rank.

        Raises:
            ValueError: both layers split them, and ranks hold others in each.
        """
        place, after = self.place, getattr(layer, "place", None)
        if after is None or place.split == after.split:
            return
        if features(place.outputs[0], -1) and features(after.inputs[0], -1):
            raise ValueError(
                f"ranks hold other features of {type(self).__name__}'s output than of {type(layer).__name__}'s input; "
                "pass one partition, from partition_hidden, to the styles of both layers"
            )

    def forward(self, x: Tensor, *routing: Any, **options: Any) -> Tensor:
        place = self.place
        self.check_tokens(x)
        if self.overlaps(x, routing, options):
            return self.overlapped(x)
        if place.dim == 0:
            from torch.distributed.tensor import Partial

            x = as_placed(x, place).redistribute(placements=replicate()).to_local(grad_placements=(Partial(),))
            return column_output(self.local_forward(x, *routing, **options), place)
        y = self.local_forward(row_input(x, self.place), *routing, **options)
        return self.row_output(y)

    def row_output(self, y: Tensor) -> Tensor:
        """Sum the ranks' summands; then bias and activation, which apply to the sum."""
        from torch.distributed.tensor import DTensor, Partial

        place = self.place
        whole = DTensor.from_local(y, place.mesh, (Partial(),), run_check=False).redistribute(placements=place.outputs)
        bias: Any = self.bias
        if bias is None and self.activation is None:
            return whole.to_local() if place.use_local_output else whole
        z = self.sum_after(whole.to_local())
        if place.use_local_output:
            return z
        # Ranks may hold different numbers of tokens, so the shape cannot be inferred from this rank's.
        return DTensor.from_local(
            z, place.mesh, place.outputs, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def sum_after(self, z: Tensor) -> Tensor:
        """Bias and activation of the sum of all ranks."""
        bias, place = self.bias, self.place
        if bias is not None and bias.dim() == 1:
            own = own_part(bias, -1, bias.shape[-1])
            # Ranks that hold different tokens each have a summand of the gradient.
            own = own if place.outputs[0].is_replicate() else SumGradient.apply(own, place.mesh)
            z = z + (own if own.dtype is z.dtype else own.to(z.dtype))  # under autocast z has its dtype
        return z if self.activation is None else ACTIVATIONS[self.activation](z)


def recorded(x: Tensor) -> bool:
    """True if torch.compile or a CUDA graph records this call."""
    return torch.compiler.is_compiling() or captured(x)


def hooked(layer: Any) -> bool:
    """True if a call of a layer runs hooks, or a forward that was set on the instance."""
    own = layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks
    return any(own) or "forward" in layer.__dict__ or has_global_module_hook()


def requires_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class ParallelBsrLinear(TensorParallel, BsrLinear):
    """A BsrLinear over the ranks of a mesh."""

    def local_forward(self, x: Tensor) -> Tensor:
        return bsr_linear(x, self.weight, bias=self.own_bias(), activation=None if self.place.dim else self.activation)

    def into(self, x: Tensor, out: Tensor) -> None:
        bsr_linear(x, self.weight, bias=self.own_bias(), activation=self.activation, out=out)


class ParallelGatedBsrLinear(TensorParallel, GatedBsrLinear):
    """A GatedBsrLinear over the ranks of a mesh, whose hidden features are split."""

    def local_forward(self, x: Tensor) -> Tensor:
        W = self.weight
        fused = not (self.training and (W.requires_grad or x.requires_grad))
        return gated_linear(x, W, self.own_bias(), self.activation, fused)

    def into(self, x: Tensor, out: Tensor) -> None:
        self.into_of(self.weight)(x, out)

    def into_of(self, W: BsrMatrix) -> Callable[[Tensor, Tensor], Any]:
        """`into` with a weight that is looked up once for all parts of a call."""
        if self.bias is not None or self.training:
            return lambda x, out: out.copy_(self.local_forward(x))
        return partial(gated_into, W, self.activation)

    def after(self, z: Tensor) -> Tensor:
        return gate(z, self.activation)

    def feed_forward(self, down: Any, x: Tensor) -> Tensor | None:
        """down(self(x)) with one schedule for the communication of both layers; None if it does not support the call.

        Both layers must have overlap=True, the same mesh and features, no hooks, and their class's forward.
        """
        if type(down) is not ParallelBsrLinear or not down.place.overlap or down.place.mesh != self.place.mesh:
            return None
        if down.values.dtype is not self.values.dtype:
            return None
        if hooked(self) or hooked(down) or not self.overlaps(x, (), {}):
            return None
        self.check_tokens(x)
        W, down_W, bias, group = self.weight, down.weight, self.own_bias(), self.place.mesh.get_group()
        flat = x.flatten(0, -2)
        if requires_gradient(x, W, down_W, bias):
            y = FeedForward.apply(flat, W.stored, bias, down_W.stored, W, down_W, self.activation, group)
        else:
            y = feed_forward(flat, group, self.into_of(W), down_W)
        return down.sum_after(y).view(*x.shape[:-1], y.shape[-1])


class ParallelBsrGroupedLinear(TensorParallel, BsrGroupedLinear):
    """A BsrGroupedLinear over the ranks of a mesh: each rank holds a part of every expert."""

    def local_forward(
        self, x: Tensor, offs: Tensor | None = None, *, expert_ids: Tensor | None = None, group_rows: int | None = None
    ) -> Tensor:
        return bsr_grouped_linear(
            x, self.weight, offs=offs, expert_ids=expert_ids, group_rows=group_rows, bias=self.own_bias(),
            activation=None if self.place.dim else self.activation,
        )  # fmt: skip

    def own_bias(self) -> Tensor | None:
        """Also of row-wise layers: the first rank's summand has it, since each token takes its expert's."""
        if self.bias is None or self.place.dim == 0:
            return super().own_bias()
        mesh = self.place.mesh
        bias = SumGradient.apply(own_part(self.bias, -1, self.bias.shape[-1]), mesh)
        return bias if mesh.get_local_rank() == 0 else bias * 0


KINDS: dict[type, type] = {
    BsrLinear: ParallelBsrLinear,
    GatedBsrLinear: ParallelGatedBsrLinear,
    BsrGroupedLinear: ParallelBsrGroupedLinear,
}


def parallelize(layer: Any, dim: int, mesh: Any, style: Any) -> BsrModule:
    """Change a layer in place into its tensor-parallel form; every rank holds the whole layer before."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    name, inputs, outputs = type(style).__name__, tuple(style.input_layouts), tuple(style.output_layouts)

    def checked() -> int:
        partition = style._partition_of(layer, mesh.size())
        check_layer(name, layer, dim, partition, mesh.size())
        arguments = inputs, outputs, style.use_local_output, style.overlap, style.src_data_rank, partition
        return hash_of(layer.crow_indices, layer.col_indices, name, facts_of(layer), arguments)

    check_alike(name, checked, mesh)
    partition = style._partition_of(layer, mesh.size())
    side, blocks = layer.blocksize[dim], partition.blocks(layer.blocksize[dim])
    if dim and not inputs[0].is_shard(-1):  # empty block columns need no x
        stored = set(layer.col_indices.unique().tolist())
        blocks = [[block for block in own if block in stored] for own in blocks]
    place = Placed(
        dim, mesh, side, tuple(map(tuple, blocks)), partition.contiguous and partition.even, inputs,
        outputs, style.use_local_output, style.overlap,
        split_of(blocks, side, 1 if dim else hidden_rows(layer)),
        tuple(index_of(own, layer.col_indices.device) for own in blocks),
    )  # fmt: skip
    indices = indices_of(layer.pattern, place)
    values = padded(layer.values.detach(), -3, [positions for _, _, positions in indices])
    placed = distribute_tensor(values, mesh, [Shard(values.dim() - 3)], src_data_rank=style.src_data_rank)
    bias: Any = getattr(layer, "bias", None)
    if bias is not None:
        whole = padded(bias.detach(), -1, features_of(place, bias.device)) if dim == 0 else bias.detach()
        where = Shard(whole.dim() - 1) if dim == 0 else Replicate()
        bias = distribute_tensor(whole, mesh, [where], src_data_rank=style.src_data_rank)
    layer.register_buffer("global_crow_indices", layer.crow_indices, persistent=False)
    layer.register_buffer("global_col_indices", layer.col_indices, persistent=False)
    layer.__class__ = KINDS[type(layer)]
    layer.__dict__["place"] = place
    layer.crow_indices, layer.col_indices, _ = indices[mesh.get_local_rank()]
    layer.values = nn.Parameter(placed, requires_grad=layer.values.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
    layer._random, layer._kept_pattern = False, None
    layer._adopt()
    return layer


def check_layer(style: str, layer: Any, dim: int, partition: Partition, ranks: int) -> None:
    """Reject what cannot be split.

    Raises:
        TypeError: the layer is none of those in KINDS, its values are computed of another parameter, or it is sharded.
        ValueError: the layer is on the meta device, its features are not the partition's, the partition is not of as
            many ranks, or the layer is gated and its columns are split.
    """
    if type(layer) not in KINDS:
        known = ", ".join(kind.__name__ for kind in KINDS)
        raise TypeError(f"{style} takes {known}; got {type(layer).__name__}")
    check_whole(style, layer)
    if dim and getattr(layer, "gated", False):
        raise ValueError(f"{style}: the gate of a GatedBsrLinear applies to whole rows; use BsrColwiseParallel")
    extent = layer.in_features if dim else layer.out_features
    if partition.features != extent:
        what = "in_features" if dim else "rows of the weight"
        raise ValueError(f"{style}: the partition is of {partition.features}, the layer has {extent} {what}")
    if len(partition.units) != ranks:
        parts = len(partition.units)
        raise ValueError(
            f"{style}: the partition has {parts} parts; use partition_hidden(..., {ranks}), one for each rank"
        )
