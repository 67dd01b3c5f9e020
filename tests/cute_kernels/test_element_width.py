"""Operand tiles in shared memory with elements of 1, 2 and 4 bytes: copied once, and read as they were copied."""

import cutlass
import cutlass.cute as cute
import pytest

from cute_kernels.runtime.compile import compile_for
from cute_kernels.tile.ampere import OperandTile
from cute_kernels.tile.element import BYTES, Element
from cute_kernels.tile.hopper import smem_layout

FP8, TF32 = "float8_e4m3fn", "float32"  # the second as tensor cores would read it
DTYPES = {FP8: cutlass.Float8E4M3FN, "bfloat16": cutlass.BFloat16, TF32: cutlass.Float32}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_dtype
def test_shared_memory_is_laid_out_by_bytes(dtype):
    """A ring of tiles has the same places, of each 16 bytes, whatever elements they are made of."""
    found = {}

    @cute.jit
    def trace():
        for name in (dtype, "bfloat16"):
            width = BYTES[name]
            for span in (32, 64, 128, 256):
                layout = smem_layout(DTYPES[name], 64, span // width, 3, True)
                places = [
                    cute.crd2idx((row, byte // width, stage), layout.outer) * width
                    for row in range(0, 64, 3)
                    for byte in range(0, span, 16)
                    for stage in range(3)
                ]
                found[name, span] = str(layout.inner), places, cute.cosize(layout) * width

    compile_for("sm_90a", trace)
    for span in (32, 64, 128, 256):
        swizzle, places, size = found[dtype, span]
        assert (swizzle, places, size) == found["bfloat16", span] and size == 3 * 64 * span
        assert len(set(places)) == len(places) and all(place % 16 == 0 for place in places)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("vector_bytes", [4, 8, 16])
@pytest.mark.parametrize("k_bytes", [64, 128])
@pytest.mark.parametrize("is_b", [False, True])
def test_operand_tiles_are_copied_once_and_read_as_they_were_copied(width, vector_bytes, k_bytes, is_b):
    element = Element(width)
    op = OperandTile(64, k_bytes // width, True, vector_bytes // width, 128, 2, is_b, element)
    assert op.bytes == 64 * k_bytes and op.vector_bytes == vector_bytes
    place_of = {}  # (row, first k) -> where the vector lies
    for index in range(op.copies * op.active):
        line, k = op.position(index)
        place_of[line, k] = op.offset(line, k * width)
    assert len(place_of) == op.bytes // vector_bytes == len(set(place_of.values()))
    assert {place // 16 * 16 for place in place_of.values()} == set(range(0, op.bytes, 16))
    for warp in range(2):
        for step in range(k_bytes // 32):
            for i in range(op.span // 16):
                x, add = op.step(i, step)
                read = {(op.lane_offset(lane, warp) ^ x) + add for lane in range(32)}
                rows, first = range(warp * op.span + 16 * i, warp * op.span + 16 * i + 16), step * element.mma_k
                halves = (first, first + element.vector)
                assert read == {place_of[row, k] for row in rows for k in halves}


def test_operands_that_ldmatrix_cannot_turn_are_refused():
    for width in (1, 4):
        with pytest.raises(AssertionError, match="does not transpose"):
            OperandTile(64, 64, False, 16 // width, 128, 2, False, Element(width))
