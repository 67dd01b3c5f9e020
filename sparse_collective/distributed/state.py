"""Weight and state dict of tensor- and expert-parallel layers.

A state dict holds one process's `values`, `bias` and indices, whatever the number of ranks: what ranks hold otherwise
(permuted, or with room behind) is a DTensor in the order of one process there, split evenly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.runtime.torch_compat import is_dtensor

from ..bsr import BsrMatrix
from ..nn.module import BsrModule
from ..nn.shards import bounds
from ..pattern import Pattern
from .place import features_of, indices_of, own_part, padded

__all__ = ["PlacedState"]

OWN_PARAMETER = (
    "{0} in the state is the parameter itself, in this rank's order. set_model_state_dict(broadcast_from_rank0=True) "
    "wrote to it in another order; use sparse_collective.distributed.load_full_state_dict. state_dict(keep_vars=True) "
    "returns it; use state_dict()"
)


class PlacedState(BsrModule):
    """Weight and state of a layer whose `values` and `bias` are split over a mesh; see TensorParallel, LocalExperts."""

    place: Any
    global_crow_indices: Tensor  # buffers, not in the state under these names: the pattern of all ranks
    global_col_indices: Tensor

    @property
    def _pattern_shape(self) -> tuple[int, ...]:
        shape = self.matrix_shape
        return shape if self.crow_indices.dim() == 2 else shape[-2:]

    @property
    def weight(self) -> BsrMatrix:
        """This rank's part of the weight; gradients of its values go to the DTensor."""
        values = own_part(self.values, -3, self.nnz)
        if torch.compiler.is_compiling():
            return self._traced(values)
        kept: Any = self._weight
        fits = kept is not None and kept.crow_indices is self.crow_indices and kept.col_indices is self.col_indices
        if not fits or kept.stored.shape != values.shape:
            self._weight = kept = self._learn(values.detach())
        return kept.with_values(values)

    def _adopt(self) -> None:
        if torch.distributed.is_initialized():
            super()._adopt()
        else:  # a layer is unpickled, and its mesh has no process groups
            self._weight, self._checked = None, False

    def split_dim(self, name: str) -> int:
        """The dimension of `values` or `bias` that is split."""
        return -3 if name == "values" else -1

    def entries(self, name: str) -> list[Tensor] | None:
        """For each rank, the entries of one process's `values` or `bias` that it holds; None if it holds all."""
        if name == "values":
            indices = self.global_crow_indices, self.global_col_indices
            shape = [self.out_features, self.in_features]
            shape = shape if indices[0].dim() == 1 else [indices[0].shape[0], *shape]
            pattern = Pattern(*indices, tuple(shape), self.blocksize)
            return [positions for _, _, positions in indices_of(pattern, self.place)]
        return None if self.place.dim else features_of(self.place, self.global_col_indices.device)

    def whole_shape(self, name: str) -> list[int]:
        """The shape of one process's `values` or `bias`."""
        shape, entries = list(getattr(self, name).shape), self.entries(name)
        if entries is not None:
            shape[self.split_dim(name)] = sum(map(len, entries))
        return shape

    def held_in_order(self, name: str) -> bool:
        """True if the DTensor is one process's `values` or `bias`: ranks hold equal ranges in the order of ranks."""
        entries = self.entries(name)
        if entries is None or len({len(index) for index in entries}) > 1:
            return entries is None
        order = torch.cat(entries)
        return torch.equal(order, torch.arange(len(order), device=order.device))

    def in_order(self, name: str, own: Any) -> Any:
        """A tensor placed as the parameter `values` or `bias`, as a DTensor that is one process's, split evenly.

        It is all-gathered, unless ranks hold it in this order; also if fully_shard has split each rank's part again.
        """
        from torch.distributed.tensor import Shard, distribute_tensor

        entries, dim, mesh = self.entries(name), self.split_dim(name), own.device_mesh
        if entries is None or (mesh.ndim == 1 and self.held_in_order(name)):
            return own
        room: Any = own.to(mesh.device_type).full_tensor()
        whole = room.new_empty(self.whole_shape(name))
        for index, part in zip(entries, room.chunk(len(entries), dim), strict=True):
            whole.index_copy_(whole.dim() + dim, index, part.narrow(dim, 0, len(index)))
        placements = [p if p.is_replicate() else Shard(whole.dim() + dim) for p in own.placements]
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to(own.device)

    def own_entry(self, name: str, whole: Any) -> Any:
        """One process's `values` or `bias`, a DTensor or a tensor, as this rank's DTensor; the inverse of in_order.

        Raises:
            ValueError: it has another shape.
        """
        from torch.distributed.tensor import DTensor

        like: Any = getattr(self, name)
        entries, dim, mesh, shape = self.entries(name), self.split_dim(name), like.device_mesh, self.whole_shape(name)
        if list(whole.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(whole.shape)} in the state, and {tuple(shape)} in the whole layer; if "
                "parameters were saved in this form, save model.state_dict(), or that of an optimizer with "
                "register_optimizer_hooks"
            )
        if is_dtensor(whole):
            if self.held_in_order(name) and (whole.device_mesh, whole.placements) == (mesh, like.placements):
                return whole
            whole = whole.to(whole.device_mesh.device_type).full_tensor()
        whole = whole.to(like.device)
        if entries is not None:
            mine = entries[self.place.mesh.get_local_rank()]
            whole = padded(whole, dim, [mine], like.shape[dim] // len(entries))
        for i, placement in enumerate(like.placements[:-1]):  # of fully_shard, in front of the tensor-parallel mesh
            if not placement.is_replicate():
                begin, end = bounds(whole.shape[placement.dim], mesh.size(i))[mesh.get_local_rank(i) :][:2]
                whole = whole.narrow(placement.dim, begin, end - begin)
        return DTensor.from_local(
            whole.contiguous(), mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save one process's state, on all ranks together; with keep_vars=True, the parameters as they are."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("crow_indices", "col_indices"):  # a copy: a checkpoint of another pattern is read into it
            destination[prefix + name] = getattr(self, f"global_{name}").clone()
        for name in ("values", "bias"):
            if not keep_vars and (own := destination.get(prefix + name)) is not None:
                destination[prefix + name] = self.in_order(name, own)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load one process's state, from which each rank takes its part. The pattern must be this layer's."""
        state, where = dict(state_dict), prefix[:-1] or type(self).__name__
        for name in ("crow_indices", "col_indices"):
            loaded, own = state.get(prefix + name), getattr(self, f"global_{name}")
            if loaded is not None and not (loaded.shape == own.shape and torch.equal(loaded.to(own), own)):
                error_msgs.append(
                    f"{where}: the state has another pattern; load it before parallelize_module, or for a "
                    "distributed checkpoint call sparse_collective.distributed.load_patterns before"
                )
                return
            if loaded is not None:
                state[prefix + name] = getattr(self, name)
        for name in ("values", "bias"):
            loaded, own = state.get(prefix + name), getattr(self, name, None)
            if loaded is None or own is None:
                continue
            if loaded is own and not self.held_in_order(name):
                error_msgs.append(f"{where}: {OWN_PARAMETER.format(name)}")
                return
            try:
                state[prefix + name] = self.own_entry(name, loaded)
            except ValueError as error:
                error_msgs.append(f"{where}: {error}")
                return
        super(BsrModule, self)._load_from_state_dict(  # past the resizing of a layer that is whole
            state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
