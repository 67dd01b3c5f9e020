"""torch.distributed: FSDP2's parameters, collectives, and symmetric memory."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def process_group_of(name: str) -> Any:
    """The process group whose `group_name` this is."""
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
    return resolve(name)


def root_mesh(mesh: Any) -> Any:
    """The DeviceMesh that a mesh was sliced from, or the mesh itself."""
    return mesh._get_root_mesh()


def _managed(parameter: Tensor) -> tuple[Any, Any] | None:
    """FSDP2's group of parameters and FSDPParam that manage a sharded parameter; None if it does not."""
    states = sys.modules.get("torch.distributed._composable_state")
    for reference in list(getattr(states, "_module_state_mapping", {}).values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for managed in getattr(group, "fsdp_params", ()):
                if managed.sharded_param is parameter:
                    return group, managed
    return None


def has_unreduced_gradient(parameter: Tensor) -> bool:
    """True if FSDP2 holds a gradient of a sharded parameter that is not reduced, or not to all replicas, as after
    set_requires_gradient_sync(False) or set_requires_all_reduce(False)."""
    if (managers := _managed(parameter)) is None:
        return False
    group, managed = managers
    kept = getattr(getattr(managed, "_unsharded_param", None), "grad", None), managed.unsharded_accumulated_grad
    return any(t is not None for t in (*kept, getattr(group, "_partial_reduce_output", None)))


def resize_fully_sharded(parameter: Tensor, room: Tensor) -> None:
    """Let FSDP2 know that a sharded parameter has another size in dimension 0; nothing if FSDP2 does not manage it.

    Args:
        parameter: a DTensor whose local tensor is the beginning of `room`.
        room: as many entries as the largest shard has.
    """
    if managers := _managed(parameter):
        _resize_managed(managers[1], parameter, room)


def _resize_managed(managed: Any, parameter: Any, room: Tensor) -> None:
    """Set all that an FSDPParam derives from the size of its parameter, which is sharded at present."""
    local = parameter._local_tensor
    managed._orig_size, managed.sharded_size = parameter.size(), local.size()
    managed._contiguous_orig_stride, managed.contiguous_sharded_stride = parameter.stride(), local.stride()
    managed.padded_sharded_param_size, managed._sharded_param_data = room.size(), room.view(-1)
    managed._sharding_spec = parameter._spec
    if managed.post_forward_mesh_info is not None:
        managed._init_sharded_post_forward_param_metadata(torch.empty(parameter.shape, device="meta"))
    managed.all_gather_outputs = []
    if hasattr(managed, "_unsharded_param"):
        del managed._unsharded_param


def all_gather_single(out: Tensor, x: Tensor, group: Any) -> None:
    """torch.distributed.all_gather_single, which is all_gather_into_tensor in torch before 2.13."""
    import torch.distributed as dist

    found: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found(out, x, group=group)


def reduce_scatter_single(out: Tensor, x: Tensor, group: Any, async_op: bool = False) -> Any:
    """torch.distributed.reduce_scatter_single, which is reduce_scatter_tensor in torch before 2.13."""
    import torch.distributed as dist

    found: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return found(out, x, group=group, async_op=async_op)


def timeout_ms(group: Any, device: torch.device) -> int:
    """Timeout of a process group, which torch's signals and barriers of symmetric memory take."""
    return int(group._get_backend(device).options._timeout.total_seconds() * 1000)


def symmetric_buffer(size: int, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """uint8 (size,) that the other ranks of a group can read, and the handle of all ranks' buffers; collective."""
    from torch.distributed import _symmetric_memory as symmetric

    with torch.inference_mode(False):  # or only calls in inference mode could write to it
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
    return buffer, symmetric.rendezvous(buffer, group)


def may_share_a_device() -> bool:
    """True if symmetric memory allows several ranks on one GPU, by torch's environment variable."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def has_mapped_memory(device: torch.device) -> bool:
    """True if symmetric memory is that of CUDA's virtual memory management, torch's default, and not of NVSHMEM."""
    from torch.distributed import _symmetric_memory as symmetric

    return getattr(symmetric, "get_backend", lambda device: "CUDA")(device) in ("CUDA", None)


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """uint8 (size,) at an address of CUDA memory that a device can access; who calls keeps the memory."""
    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(address, device, size)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
