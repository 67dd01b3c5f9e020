"""Full state dicts to and from rank 0, patterns of a checkpoint, and optimizer states of any number of ranks."""

from __future__ import annotations

import itertools
import os
import re
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.runtime.torch_compat import is_dtensor, root_mesh

from ..nn.module import BsrModule
from ..nn.parametrized import name_of_values
from ..nn.shards import reasons
from .state import PlacedState

__all__ = ["full_state_dict", "load_full_state_dict", "load_patterns", "register_optimizer_hooks"]

HOOKED: weakref.WeakSet = weakref.WeakSet()  # optimizers with hooks: two conversions would permute entries twice


def full_state_dict(model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True) -> dict[str, Any]:
    """The state of a model in the form of one process, from tensor- and expert-parallel layers and fully_shard.

    The full state loads into a model that is not parallelized, and into any mesh and partition by
    load_full_state_dict, or by load_state_dict on each rank.

    Args:
        model: called on all ranks; one tensor at a time is all-gathered.
        rank0_only: True returns an empty dict on ranks other than the first one that shares the layers with this rank:
            rank 0, or the first rank of another pipeline stage or data-parallel replica.
        cpu_offload: True copies tensors to the CPU.

    Returns:
        name -> a copy of the tensor, with a BsrMatrix's blocks in their order.

    Example::

        state = full_state_dict(model)
        if torch.distributed.get_rank() == 0:
            torch.save(state, "model.pt")
    """
    state, entries = {}, dict[str, Any](model.state_dict())
    kept = not rank0_only or torch.distributed.get_rank() == min(ranks_of(entries), default=0)
    for key, entry in entries.items():
        whole: Any = entry
        if is_dtensor(entry):  # fully_shard with an offload policy keeps it on the CPU, where NCCL gathers nothing
            whole = entry.to(entry.device_mesh.device_type).full_tensor()
        if not kept:
            continue
        if isinstance(whole, Tensor):  # a copy: full_tensor() of a replicated tensor has its memory
            whole = whole.detach().to("cpu" if cpu_offload else whole.device, copy=True)
        state[key] = whole
    return state


def ranks_of(state: dict[str, Any], whole: bool = False) -> set[int]:
    """Ranks of the meshes of a state's DTensors; with whole=True, of those that these meshes were sliced from."""
    meshes = [entry.device_mesh for entry in state.values() if is_dtensor(entry)]
    return {rank for mesh in meshes for rank in (root_mesh(mesh) if whole else mesh).mesh.flatten().tolist()}


def load_full_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Load rank 0's full state into all ranks, whatever their mesh and partition.

    It is set_model_state_dict with broadcast_from_rank0=True, which writes to parameters as if ranks held equal ranges
    of them; those of tensor-parallel block-sparse layers may be others.

    Args:
        model: called on all ranks; one tensor at a time is broadcast.
        state: of full_state_dict, or of a model that is not parallelized; on ranks other than 0 it is not read.

    Raises:
        ValueError: the model is on ranks of a mesh that rank 0 is not in; on these alone, so rank 0 must not call.
        RuntimeError: names or shapes differ from the state's or between ranks, or a pattern; on all ranks.

    Example::

        state = torch.load("model.pt", mmap=True) if torch.distributed.get_rank() == 0 else {}
        load_full_state_dict(model, state)
    """
    own, first = dict[str, Any](model.state_dict()), torch.distributed.get_rank() == 0
    ranks = ranks_of(own, whole=True)
    if ranks and 0 not in ranks:
        raise ValueError(
            f"load_full_state_dict: rank 0, whose state is loaded, does not have this model, which is on ranks "
            f"{sorted(ranks)}; call model.load_state_dict(state) with the full state on each of them"
        )
    shapes = {key: tuple(entry.shape) if isinstance(entry, Tensor) else () for key, entry in own.items()}
    error = None
    if from_rank_0(shapes) != shapes:
        error = RuntimeError("its model has other names or shapes than rank 0's")
    if text := reasons(error, None):
        raise RuntimeError(
            f"load_full_state_dict: {text}; for models of some ranks, as pipeline stages, call "
            "model.load_state_dict(state) with the full state on each rank"
        )
    if misfit := from_rank_0(misfits(own, state) if first else None):
        raise RuntimeError(f"load_full_state_dict: {misfit}")
    model.load_state_dict({key: placed_as(mine, state[key] if first else None) for key, mine in own.items()})


def from_rank_0(value: Any) -> Any:
    box = [value]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def placed_as(mine: Any, value: Any) -> Any:
    """Rank 0's value as this rank's part of a DTensor that is placed as `mine`; whole if `mine` is no DTensor."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(mine, Tensor):
        return from_rank_0(value)
    placed: Any = mine if is_dtensor(mine) else None
    device = mine.device if placed is None else placed.device_mesh.device_type
    whole = torch.empty(mine.shape, dtype=mine.dtype, device=device)
    if value is not None:
        whole.copy_(value)
    flat = whole.view(-1)  # a view of bytes needs a dimension; gloo has no FP8
    torch.distributed.broadcast(flat.view(torch.uint8) if flat.element_size() == 1 else flat, 0)
    if placed is None:
        return whole
    return distribute_tensor(whole, placed.device_mesh, placed.placements, src_data_rank=None).to(mine.device)


def misfits(own: dict[str, Any], state: dict[str, Any]) -> str:
    """The reason why a full state does not fit a model's, or ""."""
    if not isinstance(state, Mapping):
        return f"rank 0 must pass a state dict, got {type(state).__name__}"
    if own.keys() != state.keys():
        missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        return f"keys missing in the state: {missing}; keys that the model does not have: {extra}"
    for key, mine in own.items():
        value = state[key]
        if not isinstance(mine, Tensor):
            continue
        if not isinstance(value, Tensor) or is_dtensor(value):
            return f"{key} must be a torch.Tensor that is not sharded, got {type(value).__name__}; call full_state_dict"
        if mine.shape != value.shape:
            return f"{key} has shape {tuple(value.shape)}, the model's {tuple(mine.shape)}"
    return ""


def load_patterns(
    model: nn.Module, checkpoint_id: str | os.PathLike[str], *, prefix: str = "", storage_reader: Any = None
) -> None:
    """Give the block-sparse layers of a model the patterns of a checkpoint, which may have other numbers of blocks.

    dcp.load (torch.distributed.checkpoint) reads into tensors of the checkpoint's sizes alone, and pruning changes
    those of `values` and `col_indices`. Call load_patterns on each rank when the model is made, before
    parallelize_module, fully_shard, DistributedDataParallel and the optimizer; then load the checkpoint. It needs no
    process group.

    Args:
        model: its BsrLinear, GatedBsrLinear and BsrGroupedLinear layers, also inside of others, are changed in place:
            `values` become zeros (nnz, bm, bk) of the checkpoint's nnz, in the same Parameter.
        checkpoint_id: folder of a checkpoint of dcp.save, from any number of ranks.
        prefix: "model." if the checkpoint was saved as {"model": model.state_dict(), ...}.
        storage_reader: that of dcp.load; None reads the folder `checkpoint_id`.

    Raises:
        TypeError: a layer is tensor or expert parallel, or sharded, or its values are parametrized.
        ValueError: the checkpoint has no pattern for a layer, or one that does not fit its shape.

    Example::

        load_patterns(model, folder, prefix="model.")
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    """
    import torch.distributed.checkpoint as dcp

    reader = storage_reader or dcp.FileSystemReader(checkpoint_id)
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    names = {unwrapped(key): key for key in saved}
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, BsrModule)}
    indices: dict[str, Tensor] = {}
    keys: dict[str, tuple[str, str]] = {}
    for path, layer in layers.items():
        if is_dtensor(layer.values) or isinstance(layer, PlacedState):
            raise TypeError(
                f"load_patterns: {path or type(layer).__name__} is split over ranks; call it before "
                "parallelize_module or fully_shard"
            )
        if name_of_values(layer) != "values":
            raise TypeError(
                f"load_patterns: the values of {path or type(layer).__name__} are parametrized; call it before "
                "register_parametrization"
            )
        own = [unwrapped(f"{path}.{name}".lstrip(".")) for name in ("crow_indices", "col_indices")]
        if not all(prefix + name in names for name in own):
            known = next((name for name in names if f".{name}".endswith(f".{own[0]}")), None)
            advice = f"it has {known!r}: pass prefix={known[: -len(own[0])]!r}" if known else "pass the model's own"
            raise ValueError(f"load_patterns: the checkpoint has no {prefix + own[0]!r}; {advice}")
        keys[path] = names[prefix + own[0]], names[prefix + own[1]]
        indices |= {
            key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype, device="cpu") for key in keys[path]
        }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said of no_dist=True
        dcp.load(indices, storage_reader=reader, no_dist=True)
    for path, layer in layers.items():
        pattern = indices[keys[path][0]], indices[keys[path][1]]
        crow, col = (t.to(layer.crow_indices.device) for t in pattern)
        shape = *layer.values.shape[:-3], len(col), *layer.blocksize
        zeros = torch.zeros((), dtype=layer.values.dtype, device=layer.values.device).expand(shape)
        state = {"crow_indices": crow, "col_indices": col, "values": zeros}
        try:
            layer.load_state_dict(state, strict=False)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ValueError(f"load_patterns: {path or type(layer).__name__}: {reason}") from None
        if crow.is_meta:  # for reset_parameters
            layer._kept_pattern = pattern


def unwrapped(name: str) -> str:
    """A name of a state without what torch.compile and checkpoint_wrapper add to it, as get_state_dict returns it."""
    return re.sub(r"\b(_orig_mod|_checkpoint_wrapped_module)\.", "", name)


def register_optimizer_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make optimizer.state_dict() independent of the number of ranks, as model.state_dict() is.

    Without these hooks the state of tensor- and expert-parallel layers has the shape and order of their parameters on
    this mesh, and is right for the same mesh and partition alone. With them it is one process's state, which
    torch.distributed.checkpoint, get_optimizer_state_dict and set_optimizer_state_dict read and write. All ranks call
    state_dict and load_state_dict together.

    Args:
        model: with layers of BsrColwiseParallel, BsrRowwiseParallel or BsrExpertParallel; others need no hooks.
        optimizer: of its parameters, after parallelize_module and fully_shard.

    Raises:
        ValueError: the optimizer has the hooks already.

    state_dict and load_state_dict of the optimizer raise:
        TypeError: a state tensor of such a parameter has neither its shape nor one element.
        ValueError: a loaded one has another shape than the whole layer.

    Example::

        optimizer = torch.optim.AdamW(model.parameters())
        register_optimizer_hooks(model, optimizer)
        state = get_optimizer_state_dict(model, optimizer)  # torch.distributed.checkpoint.state_dict
        dcp.save({"optimizer": state}, checkpoint_id=folder)
    """
    if optimizer in HOOKED:
        raise ValueError(
            "register_optimizer_hooks: this optimizer has the hooks already; call it once for an optimizer"
        )
    HOOKED.add(optimizer)
    # Hooks get the optimizer as an argument: one that held it would keep its memory until garbage collection.
    optimizer.register_state_dict_post_hook(lambda own, state: converted(model, own, state, loading=False))
    optimizer.register_load_state_dict_pre_hook(lambda own, state: converted(model, own, state, loading=True))


def converted(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], loading: bool) -> dict:
    """An optimizer's state dict with tensors of tensor- and expert-parallel parameters converted."""
    layers = [module for module in model.modules() if isinstance(module, PlacedState)]
    placed = {id(p): (layer, name) for layer in layers for name, p in layer.named_parameters(recurse=False)}
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    keys = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
    entries = dict(state["state"])
    for key, parameter in zip(keys, parameters, strict=False):  # torch reports numbers that differ
        if key in entries and id(parameter) in placed:
            layer, name = placed[id(parameter)]
            entries[key] = {
                which: converted_entry(layer, name, t, loading) if isinstance(t, Tensor) and t.numel() > 1 else t
                for which, t in entries[key].items()
            }
    return {**state, "state": entries}


def converted_entry(layer: PlacedState, name: str, t: Tensor, loading: bool) -> Any:
    """A tensor of an optimizer's state in one process's order, or when loading in this rank's."""
    if loading:
        return layer.own_entry(name, t)
    shape = getattr(layer, name).shape
    if not is_dtensor(t) or t.shape != shape:
        raise TypeError(
            f"register_optimizer_hooks: the optimizer has state of shape {tuple(t.shape)} for {name} of shape "
            f"{tuple(shape)}; use one with elementwise state, as AdamW, or save without these hooks, for the same mesh "
            "and partition"
        )
    return layer.in_order(name, t)
