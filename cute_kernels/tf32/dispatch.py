"""Copies of fp32 operands along K by the kernels, of tensors that these serve; torch's functions serve the others."""

import torch
from torch import Tensor

from ..matmul import precision
from ..matmul.precision import PARTS, SMALL_OF_A, SMALL_OF_B
from ..operand import flatten_batch
from ..runtime.device import assumed, collected, device_arch
from ..runtime.families import function_for
from ..tile.element import VECTOR_BYTES, element_of
from . import family  # noqa: F401 (importing it registers the family)
from .config import TILE_N, PartsFacts

VECTOR = element_of("float32").vector
MOST_ELEMENTS = VECTOR << 30
MOST_TILES = 65535  # of a grid's second and third extents, which turned operands' tiles of N and items are


def side_by_side(x: Tensor, of_b: bool, group: int | None = None) -> Tensor:
    """precision.side_by_side: of (..., rows, K) the parts of each `group` columns, of all by default."""
    K, small = x.shape[-1], SMALL_OF_B if of_b else SMALL_OF_A
    group = group or K
    if not _on_gpu(x) or group % VECTOR or not x.numel():
        return precision.side_by_side(x, of_b, group)
    if _is_turned(x):
        return _turned(x, PARTS, small, group)
    x = x.contiguous()
    if x.data_ptr() % VECTOR_BYTES:
        x = x.clone()
    out = torch.empty(*x.shape[:-1], PARTS * K, dtype=x.dtype, device=x.device)
    facts = PartsFacts(device_arch(x.get_device())[0].target, PARTS, small)
    function_for(facts)(x.view(-1, group), out.view(-1, PARTS * group))
    return out


def along_k(x: Tensor) -> Tensor | None:
    """A contiguous copy of an fp32 (..., rows, K) that is contiguous along its rows; None where no kernel serves it."""
    K = x.shape[-1]
    if not _on_gpu(x) or K % VECTOR or not x.numel() or not _is_turned(x):
        return None
    return _turned(x, 1, 0, K)


def _on_gpu(x: Tensor) -> bool:
    """True if a kernel can run: a plan for a GPU that is assumed copies nothing by it on the one that is there. The
    kernels number vectors of 16 bytes in 32 bits."""
    if collected() is not None:
        return x.numel() <= MOST_ELEMENTS
    return x.is_cuda and x.numel() <= MOST_ELEMENTS and (assumed() is None or x.device.type != "cuda")


def _is_turned(x: Tensor) -> bool:
    """True if x (..., rows, K) is one tensor of three dimensions that is contiguous along its rows."""
    if x.stride(-2) != 1 or x.stride(-1) == 1 or x.shape[-2] > MOST_TILES * TILE_N:
        return False
    return x.dim() == 2 or (x.shape[:-2].numel() <= MOST_TILES and not flatten_batch(x.to("meta"), 3)[1])


def _turned(x: Tensor, parts: int, small: int, group: int) -> Tensor:
    K = x.shape[-1]
    items = (x[None] if x.dim() == 2 else flatten_batch(x, 3)[0]).mT  # (L, K, rows)
    out = torch.empty(*x.shape[:-1], parts * K, dtype=x.dtype, device=x.device)
    facts = PartsFacts(device_arch(x.get_device())[0].target, parts, small, True)
    function_for(facts)(items, out.view(items.shape[0], -1, K // group, parts * group))
    return out
