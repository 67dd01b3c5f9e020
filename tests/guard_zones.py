"""Tensors inside larger buffers: NaN around what an op reads, a fixed pattern of bits around what it writes.

    zones = Zones("cuda")
    x = zones.input(values, Placement(order=(1, 0), pads=(0, 7), before=8))
    out = zones.output((65, 192), torch.bfloat16, Placement(pads=(0, 8)))
    bsr_linear(x, W, out=out)
    zones.check()

A buffer is compared bit for bit. Of an input nothing may change, of an output nothing but its own elements, which are
NaN before the call. The comparison is made by the CPU or the GPU that wrote, so it sees what any copy engine wrote.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MARGIN = 64  # elements before and after each tensor; their bytes are a multiple of 16
NAN = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF}  # bits that are NaN in each floating type, by bytes of an element
PATTERN = {1: 0x5A, 2: 0x5A3C, 4: 0x5A3C5A3C}  # finite in all of them
GARBAGE = 0x5A3C5A3C  # around index tensors: no row, block or page has this number
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Wrong(AssertionError):
    """A wrong result of a case; `kind` is what the fuzz counts it as."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class Placement:
    """Layout of a tensor in a buffer. All zeros: contiguous, 128 bytes after the buffer's beginning.

    `order`: the dimensions from the slowest to the fastest in memory; empty: as they come. `pads`: by how many elements
    each dimension's extent is wider in the buffer, one number a dimension; empty: by none. `before`: elements between
    the margin and the tensor.
    """

    order: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    before: int = 0

    def place(self, shape) -> tuple[tuple[int, ...], int]:
        """(strides, elements of the buffer that the padded tensor takes)"""
        strides, span = [1] * len(shape), 1
        for dim in reversed(self.order or range(len(shape))):
            strides[dim] = span
            span *= max(shape[dim], 1) + (self.pads[dim] if self.pads else 0)
        return tuple(strides), span


class Zones:
    """The buffers of one call."""

    def __init__(self, device: str = "cpu"):
        self.device = device
        self.inputs = []  # (name, bits, what they were)
        self.outputs = []  # (name, bits, what they were, tensor)

    def _buffer(self, shape, dtype: torch.dtype, placement: Placement, fill: int) -> tuple[Tensor, Tensor]:
        (strides, span), offset = placement.place(shape), MARGIN + placement.before
        bits = torch.full((offset + span + MARGIN,), fill, dtype=BITS[dtype.itemsize], device=self.device)
        return bits, bits.view(dtype).as_strided(shape, strides, offset)

    def input(self, values: Tensor, placement: Placement = Placement(), name: str = "input") -> Tensor:
        """`values` in a buffer that is NaN elsewhere; of integers, a number that no index may be."""
        fill = GARBAGE if not values.is_floating_point() else NAN[values.element_size()]
        bits, tensor = self._buffer(values.shape, values.dtype, placement, fill)
        tensor.copy_(values)
        self.inputs.append((name, bits, bits.clone()))
        return tensor

    def output(self, shape, dtype: torch.dtype, placement: Placement = Placement(), name: str = "out") -> Tensor:
        """All NaN, in a buffer of PATTERN."""
        bits, tensor = self._buffer(shape, dtype, placement, PATTERN[dtype.itemsize])
        self.outputs.append((name, bits, bits.clone(), tensor))
        return tensor.fill_(math.nan)

    def _changed(self) -> list[Tensor]:
        """Masks of elements that changed and must not, of each input's buffer and of each output's."""
        changed = [bits != before for _, bits, before, *_ in (*self.inputs, *self.outputs)]
        for mask, (*_, out) in zip(changed[len(self.inputs) :], self.outputs, strict=True):
            mask.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
        return changed

    def counts(self) -> list[Tensor]:
        """Their number; nothing is waited for."""
        return [changed.count_nonzero() for changed in self._changed()]

    def complain(self, counts: list[int]) -> None:
        """Raise for `counts` that are not all 0."""
        number = next((n for n, count in enumerate(counts) if count), None)
        if number is None:
            return
        at, count = self._changed()[number].nonzero().flatten()[:8], counts[number]
        name, _, _, *out = (*self.inputs, *self.outputs)[number]
        if not out:
            raise Wrong("input changed", f"{count} elements of {name}'s buffer, at {at.tolist()}")
        near, what = (at - out[0].storage_offset()).tolist(), f"{tuple(out[0].shape)}, strides {out[0].stride()}"
        text = f"{count} elements around {name} {what}, were written, {near} elements after its first one"
        raise Wrong("memory outside of out", text)

    def check(self) -> None:
        """Raise Wrong if an input changed, or anything around an output."""
        self.complain([int(count) for count in self.counts()])
