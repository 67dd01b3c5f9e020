"""Check that a call passes a compiled function what it was compiled for, as far as that shows without a GPU."""

import functools
from typing import NamedTuple

import torch

from cute_kernels.dtypes import NAMES_OF_INDEX, NAMES_OF_OPERANDS, cutlass_dtype
from cute_kernels.runtime.families import family_of

DTYPES = {cutlass_dtype(name): dtype for dtype, name in (NAMES_OF_OPERANDS | NAMES_OF_INDEX).items()}
DTYPES[cutlass_dtype("bool")] = torch.uint8


class TensorKind(NamedTuple):
    """Requirements of a tensor: `strides` are one for each mode, an int, or (n,) for a multiple of n elements. Its
    address is a multiple of `align` bytes."""

    rank: int
    dtype: torch.dtype
    strides: tuple
    align: int


@functools.cache
def compiled_from(facts) -> tuple:
    """Requirements of the arguments except the stream: None, a TensorKind, a tuple of these, or "scalar"."""
    return tuple(kind_of_fake(fake) for fake in family_of(facts).arguments(facts)[:-1])


def kind_of_fake(fake):
    if fake is None or isinstance(fake, tuple):
        return None if fake is None else tuple(map(kind_of_fake, fake))
    if hasattr(fake, "element_type"):
        strides = tuple(s if isinstance(s, int) else (s.divisibility,) for s in fake.stride)
        return TensorKind(len(fake.shape), DTYPES[fake.element_type], strides, fake._assumed_align)
    return "scalar"


def insist_on_arguments(facts, arguments: tuple) -> None:
    """AssertionError where arguments differ from what the function of these facts was compiled from."""
    wanted = compiled_from(facts)
    assert len(arguments) == len(wanted), f"{len(arguments)} arguments, compiled from {len(wanted)}: {facts}"
    for number, (given, fake) in enumerate(zip(arguments, wanted, strict=True)):
        insist(number, given, fake)


def insist(place, given, fake) -> None:
    if isinstance(fake, tuple) and not isinstance(fake, TensorKind):
        assert isinstance(given, tuple) and len(given) == len(fake), f"argument {place} is {given}, not like {fake}"
        for i, pair in enumerate(zip(given, fake, strict=True)):
            insist((place, i), *pair)
    elif fake is None:
        assert given is None, f"argument {place} was compiled as None"
    elif fake == "scalar":
        assert isinstance(given, (int, float)), f"argument {place} is {type(given).__name__}, not a number"
    else:
        found = (given.dim(), given.dtype) if isinstance(given, torch.Tensor) else type(given).__name__
        assert found == fake[:2], f"argument {place} is {found}, compiled from {fake}"
        assert given.data_ptr() % fake.align == 0, (
            f"argument {place} is at an address that is no multiple of {fake.align}"
        )
        for extent, stride, wanted in zip(given.shape, given.stride(), fake.strides, strict=True):
            if extent > 1:  # the stride of an extent of 1 is not looked at
                right = stride % wanted[0] == 0 if isinstance(wanted, tuple) else stride == wanted
                assert right, f"argument {place} has strides {given.stride()}, compiled from {fake.strides}"
