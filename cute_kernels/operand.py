"""Memory layout of a torch matrix, reduced to the facts that select a kernel."""

import math
from typing import NamedTuple

import torch

from .tile.element import VECTOR_BYTES


class Layout(NamedTuple):
    """One matrix, or one batch of matrices.

    contiguous: the mode of stride 1: "row" (the elements of a row are adjacent), "col", or "any" for neither.
    align: the base address and all other strides are multiples of this many elements, 1 to 8.
    vector: like align, and the contiguous extent is a multiple as well.

    TMA loads require align == 8, and TMA stores vector == 8; cp.async copies `vector` elements at a time. (The limit is
    16 bytes: 4 elements of 4 bytes, 16 of one byte.)
    """

    contiguous: str
    align: int
    vector: int


def layout_of(shape, stride, address: int, itemsize: int) -> Layout:
    """The Layout of a (rows, cols) or (L, rows, cols) tensor; strides in elements, the address in bytes.

    A mode of extent 1 may have any stride, which is never used.
    """
    strides = [0 if n <= 1 else s for n, s in zip(shape, stride, strict=True)]
    limit = VECTOR_BYTES // itemsize
    base = math.gcd(address // itemsize, limit) if address % itemsize == 0 else 1
    best = Layout("any", 1, 1)
    for name, mode in (("row", len(shape) - 1), ("col", len(shape) - 2)):
        if strides[mode] != 1 and shape[mode] > 1:
            continue
        align = math.gcd(base, *(s for i, s in enumerate(strides) if i != mode))
        layout = Layout(name, align, math.gcd(align, shape[mode]))
        # Prefer the mode that allows wider copies, then the longer one, so that a column vector is not one row.
        if best.contiguous == "any" or (layout.align, layout.vector) > (best.align, best.vector):
            best = layout
    return best


def layout_of_tensor(tensor) -> Layout:
    """The Layout of a torch tensor. A meta tensor represents a new allocation, which is aligned."""
    address = 0 if tensor.is_meta else tensor.data_ptr()
    return layout_of(tensor.shape, tensor.stride(), address, tensor.element_size())


def major(layout: Layout, modes: tuple[str, str]) -> str:
    """The kernel's name for the contiguous mode of a (rows, cols) tensor with modes of these names."""
    return {"row": modes[1], "col": modes[0], "any": "any"}[layout.contiguous]


def flatten_batch(tensor, rank: int):
    """(tensor as (rows, cols) or (L, rows, cols), True if torch had to copy it).

    With rank 2 the batch is folded into the rows, which requires a single row stride.
    """
    if tensor.dim() == rank:
        return tensor, False
    kept = tensor.shape[1 - rank :]
    shape = (math.prod(tensor.shape[: 1 - rank]), *kept)
    try:
        return tensor.view(shape), False
    except RuntimeError:
        return tensor.reshape(shape), True


def broadcast_shapes(*shapes) -> torch.Size:
    """torch.broadcast_shapes, whose first call imports sympy: half a second or more."""
    return torch.broadcast_tensors(*[torch.empty(shape, device="meta") for shape in shapes])[0].shape


def folds_into_rows(tensor) -> bool:
    """True if (..., rows, cols) is one matrix (prod(...) * rows, cols) with a single row stride."""
    shape, stride = tensor.shape, tensor.stride()
    expected = None
    for n, s in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if n == 1:
            continue
        if expected is not None and s != expected:
            return False
        expected = s * n
    return True
