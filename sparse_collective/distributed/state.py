"""Weight and state dicts of tensor- and expert-parallel layers: each rank's part, and one process's form of all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.runtime.torch_compat import is_dtensor

from ..bsr import BsrMatrix
from ..nn.module import BsrModule
from ..pattern import Pattern
from .place import features_of, indices_of, own_part, padded

__all__ = ["PlacedState", "full_state_dict"]


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
        kept: Any = self._weight
        fits = kept is not None and kept.crow_indices is self.crow_indices and kept.col_indices is self.col_indices
        if not fits or kept.stored.shape != values.shape:
            self._weight = kept = self._learn(values.detach())
        return kept.with_values(values)

    def _adopt(self) -> None:
        self._weight, self._checked = None, False  # `weight` checks the indices when it is first called

    def split_dim(self, name: str) -> int:
        """The dimension of `values` or `bias` that is split."""
        return -3 if name == "values" else -1

    def entries(self, name: str) -> list[Tensor] | None:
        """For each rank, the entries of one process's `values` or `bias` that it holds; None if it holds all."""
        if name == "values":
            indices = self.global_crow_indices, self.global_col_indices
            shape = [self.out_features, self.in_features]
            shape = shape if indices[0].dim() == 1 else [indices[0].shape[0], *shape]
            return [found[2] for found in indices_of(Pattern(*indices, tuple(shape), self.blocksize), self.place)]
        return None if self.place.dim else features_of(self.place, self.global_col_indices.device)

    def in_order(self, name: str, whole: Tensor) -> Tensor:
        """All ranks' parts of `values` or `bias`, with the room behind them, in the form of one process."""
        entries, dim = self.entries(name), self.split_dim(name)
        if entries is None:
            return whole
        shape = list(whole.shape)
        shape[dim] = sum(map(len, entries))
        out = whole.new_empty(shape)
        for index, part in zip(entries, whole.chunk(len(entries), dim), strict=True):
            out.index_copy_(out.dim() + dim, index, part.narrow(dim, 0, len(index)))
        return out

    def own_entry(self, name: str, whole: Tensor) -> Any:
        """One process's `values` or `bias` as this rank's DTensor; the inverse of in_order, without communication."""
        from torch.distributed.tensor import DTensor

        like: Any = getattr(self, name)
        entries, whole = self.entries(name), whole.to(like.device)
        if entries is not None:
            mine = entries[self.place.mesh.get_local_rank()]
            whole = padded(whole, self.split_dim(name), [mine], max(map(len, entries)))
        return DTensor.from_local(whole, like.device_mesh, like.placements, run_check=False)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """With the indices of all ranks, which are the same on each."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("crow_indices", "col_indices"):
            destination[prefix + name] = getattr(self, f"global_{name}")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Also of one process's form, from which each rank takes its part. The pattern must be this layer's."""
        state, where = dict(state_dict), prefix[:-1] or type(self).__name__
        for name in ("crow_indices", "col_indices"):
            found, mine = state.get(prefix + name), getattr(self, f"global_{name}")
            if found is not None and not (found.shape == mine.shape and torch.equal(found.to(mine), mine)):
                error_msgs.append(f"{where}: the state has another pattern; load it before parallelize_module")
                return
            if found is not None:
                state[prefix + name] = getattr(self, name)
        for name in ("values", "bias"):
            found = state.get(prefix + name)
            if found is None or is_dtensor(found) or getattr(self, name, None) is None:
                continue
            if is_sharded_twice(getattr(self, name)):
                error_msgs.append(f"{where}: load a full state before fully_shard, or the DTensors of state_dict()")
                return
            if found.shape[self.split_dim(name)] != self.whole_extent(name):
                error_msgs.append(f"{where}: {name} has shape {tuple(found.shape)}, for another number of entries")
                return
            state[prefix + name] = self.own_entry(name, found)
        super(BsrModule, self)._load_from_state_dict(  # past the resizing of a layer that is whole
            state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def whole_extent(self, name: str) -> int:
        return len(self.global_col_indices) if name == "values" else self.out_features


def is_sharded_twice(t: Any) -> bool:
    """True of a DTensor on more than the tensor-parallel mesh, as fully_shard makes it."""
    return t.device_mesh.ndim > 1


def full_state_dict(model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True) -> dict[str, Any]:
    """The state of a model in the form of one process, from tensor- and expert-parallel layers and fully_shard.

    model.state_dict() holds each rank's part: torch.distributed.checkpoint saves it, and loads it into the same mesh
    and partition. The full state loads into a model that is not parallelized, and into each rank of any other mesh by
    load_state_dict.

    Args:
        model: called on all ranks; one tensor at a time is all-gathered.
        rank0_only: True returns an empty dict on ranks other than 0.
        cpu_offload: True copies tensors to the CPU.

    Returns:
        name -> a copy of the tensor, with a BsrMatrix's blocks in their order.

    Example::

        state = full_state_dict(model)
        if torch.distributed.get_rank() == 0:
            torch.save(state, "model.pt")
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PlacedState)}
    kept = not rank0_only or torch.distributed.get_rank() == 0
    state, entries = {}, dict[str, Any](model.state_dict())
    for key, entry in entries.items():
        whole: Any = entry.full_tensor() if is_dtensor(entry) else entry
        if not kept:
            continue
        prefix, _, name = key.rpartition(".")
        if prefix in layers and name in ("values", "bias"):
            whole = layers[prefix].in_order(name, whole)
        if isinstance(whole, Tensor):  # a copy: full_tensor() of a replicated tensor has its memory
            whole = whole.detach().to("cpu" if cpu_offload else whole.device, copy=True)
        state[key] = whole
    return state
