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
NAN = {2: 0x7FFF, 4: 0x7FFFFFFF}  # bits that are NaN in bf16, fp16 and fp32, by bytes of an element
PATTERN = {2: 0x5A3C, 4: 0x5A3C5A3C}  # finite in all of them
GARBAGE = 0x5A3C5A3C  # around index tensors: no row, block or page has this number
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Wrong(AssertionError):
    """What a case found; `kind` is what the fuzz counts it as."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class Placement:
    """How a tensor lies in a buffer. All zeros: contiguous, 128 bytes after the buffer's beginning.

    `order`: the dimensions from the slowest to the fastest in memory; empty: as they come. `pads`: by how many elements
    each dimension's extent is wider in the buffer, one number a dimension; empty: by none. `before`: elements between
    the margin and the tensor.
    """

    order: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    before: int = 0

    def strides(self, shape) -> tuple[int, ...]:
        """In elements."""
        strides, span = [1] * len(shape), 1
        for dim in reversed(self.order or range(len(shape))):
            strides[dim] = span
            span *= max(shape[dim], 1) + (self.pads[dim] if self.pads else 0)
        return tuple(strides)

    def span(self, shape) -> int:
        """Elements of the buffer that the padded tensor takes."""
        return math.prod(max(n, 1) + (self.pads[i] if self.pads else 0) for i, n in enumerate(shape))


class Zones:
    """The buffers of one call."""

    def __init__(self, device: str = "cpu"):
        self.device = device
        self.inputs = []  # (name, buffer, copy)
        self.outputs = []  # (name, buffer, copy, tensor)

    def _buffer(self, shape, dtype: torch.dtype, placement: Placement, fill: int) -> tuple[Tensor, Tensor]:
        size = dtype.itemsize
        count = 2 * MARGIN + placement.before + placement.span(shape)
        bits = torch.full((count,), fill, dtype=BITS[size], device=self.device)
        offset = MARGIN + placement.before
        return bits, bits.view(dtype).as_strided(shape, placement.strides(shape), offset)

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
        copy = bits.clone()
        tensor.fill_(math.nan)
        self.outputs.append((name, bits, copy, tensor))
        return tensor

    def counts(self) -> list[Tensor]:
        """How many elements changed that may not have, of each input and each output; nothing is waited for."""
        found = [(bits != copy).count_nonzero() for _, bits, copy in self.inputs]
        outside = ((self._outside(*rest), rest[1]) for _, *rest in self.outputs)
        return found + [(bits != copy).count_nonzero() for bits, copy in outside]

    @staticmethod
    def _outside(bits: Tensor, copy: Tensor, tensor: Tensor) -> Tensor:
        """The buffer, with what stood in the output's own elements before."""
        view = tensor.shape, tensor.stride(), tensor.storage_offset()
        outside = bits.clone()
        outside.as_strided(*view).copy_(copy.as_strided(*view))
        return outside

    def complain(self, counts: list[int]) -> None:
        """Raise for `counts` that are not all 0."""
        for (name, bits, copy), count in zip(self.inputs, counts, strict=False):
            if count:
                at = (bits != copy).nonzero().flatten()[:8].tolist()
                raise Wrong("input changed", f"{count} elements of {name}'s buffer, at {at}")
        for (name, bits, copy, tensor), count in zip(self.outputs, counts[len(self.inputs) :], strict=True):
            if count:
                at = (self._outside(bits, copy, tensor) != copy).nonzero().flatten()
                near = [a - tensor.storage_offset() for a in at[:8].tolist()]
                raise Wrong(
                    "memory outside of out",
                    f"{count} elements around {name} {tuple(tensor.shape)}, strides {tensor.stride()}, were written, "
                    f"{near} elements after its first one",
                )

    def check(self) -> None:
        """Raise Wrong if an input changed, or anything around an output."""
        self.complain([int(c) for c in self.counts()])
