"""Fake tensors to compile with: dtypes, ranks, contiguous modes and alignments, but no extents."""

from ..dtypes import cutlass_dtype


def fake_stream():
    """torch's current stream at the call."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


def fake_tensor(dtype: str, rank: int, contiguous: int | None, align: int, shape: tuple | None = None):
    """A tensor with unknown extents and strides.

    contiguous: the mode of stride 1, or None. align: all other strides and the base pointer are multiples of this many
    elements. The compiled function checks both when it is called.
    """
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    element = cutlass_dtype(dtype)
    stride = tuple(1 if i == contiguous else cute.sym_int64(divisibility=align) for i in range(rank))
    shape = shape or tuple(cute.sym_int32() for _ in range(rank))
    return make_fake_tensor(element, shape, stride=stride, assumed_align=align * element.width // 8)
