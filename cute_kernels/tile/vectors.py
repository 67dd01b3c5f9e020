"""Vectors of 16 bytes between global memory and registers, for elementwise kernels on BF16 and FP16 tensors."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.typing import AddressSpace

from .element import BITS_16

VECTOR = BITS_16.vector


def vector(t: cute.Tensor, place: Int64) -> cute.Tensor:
    """VECTOR elements of a contiguous tensor, 16 bytes, from element number `place` on."""
    dtype = t.element_type
    pointer = make_ptr(dtype, t.iterator.toint() + place * (dtype.width // 8), AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, VECTOR)


def load(t: cute.Tensor, place: Int64) -> cute.Tensor:
    values = cute.make_rmem_tensor(VECTOR, t.element_type)
    cute.copy(_atom(t), vector(t, place), values)
    return values


def store(values: cute.Tensor, t: cute.Tensor, place: Int64) -> None:
    cute.copy(_atom(t), values, vector(t, place))


def widened(values: cute.Tensor) -> list:
    """VECTOR elements in FP32. A bfloat16 is the upper half of one, so that each takes one instruction on a pair."""
    if values.element_type is not cutlass.BFloat16:
        return [values[v].to(Float32) for v in range(VECTOR)]
    pairs = cute.recast_tensor(values, Int32)
    bits = cute.make_rmem_tensor(VECTOR, Int32)
    for v in range(0, VECTOR, 2):
        bits[v] = pairs[v // 2] << 16
        bits[v + 1] = pairs[v // 2] & -65536
    floats = cute.recast_tensor(bits, Float32)
    return [floats[v] for v in range(VECTOR)]


def _atom(t: cute.Tensor) -> cute.CopyAtom:
    return cute.make_copy_atom(CopyUniversalOp(), t.element_type, num_bits_per_copy=128)
