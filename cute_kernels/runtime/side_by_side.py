"""Memory of several GPUs under consecutive addresses, by CUDA's virtual memory management."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .torch_compat import tensor_at

__all__ = ["SideBySide"]


class SideBySide:
    """Allocations of one size, of several GPUs, mapped once more, one behind the other.

    A kernel thus reads and writes the memory of any of them by a stride, and TMA needs a single descriptor.

        addresses      a0: [rank 0]      a1: [rank 1]      a2: [rank 2]        where they are mapped already
        tensor         [rank 0 | rank 1 | rank 2]

    tensor: uint8 (ranks, bytes), of `device`. It is unmapped with this object.
    """

    def __init__(self, addresses: Sequence[int], device: torch.device) -> None:
        """
        Args:
            addresses: the beginning of each allocation. All are made by cuMemCreate, as those of torch's symmetric
                memory, and `device` can access them.
        """
        import cuda.bindings.driver as cuda

        with torch.cuda.device(device):
            size = int(_checked(cuda.cuMemGetAddressRange(addresses[0]))[1])  # an allocation is mapped as a whole
            everything = size * len(addresses)
            base = int(_checked(cuda.cuMemAddressReserve(everything, 0, 0, 0))[0])
            weakref.finalize(self, _unmap, base, size, len(addresses), device).atexit = False
            for rank, address in enumerate(addresses):
                (handle,) = _checked(cuda.cuMemRetainAllocationHandle(address))
                try:
                    _checked(cuda.cuMemMap(base + rank * size, size, 0, handle, 0))
                finally:
                    _checked(cuda.cuMemRelease(handle))
            access = cuda.CUmemAccessDesc()
            access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device.index
            access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _checked(cuda.cuMemSetAccess(base, everything, [access], 1))
        self.tensor: Tensor = tensor_at(base, everything, device).view(len(addresses), size)


def _unmap(base: int, size: int, count: int, device: torch.device) -> None:
    import cuda.bindings.driver as cuda

    torch.cuda.synchronize(device)  # no kernel may use it any more
    for rank in range(count):  # after an error some are not mapped; the results are not looked at
        cuda.cuMemUnmap(base + rank * size, size)
    cuda.cuMemAddressFree(base, size * count)


def _checked(result: tuple) -> tuple:
    """The values of a driver call; its error as RuntimeError."""
    import cuda.bindings.driver as cuda

    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"memory of peers cannot be mapped side by side: {result[0].name}; torch's symmetric memory must have its "
            "backend CUDA"
        )
    return result[1:]
