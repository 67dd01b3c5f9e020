"""What the kernels are compiled from."""

from dataclasses import dataclass
from typing import ClassVar

MOST_TENSORS = 4  # of a launch that moves blocks: values, their gradient, and two moments


@dataclass(frozen=True)
class RegrowthFacts:
    """Of the kernel that chooses blocks."""

    family: ClassVar[str] = "regrowth"
    arch: str
    even: bool  # each block row by itself; else all of them together


@dataclass(frozen=True)
class BlockMoveFacts:
    """Of the kernel that moves blocks."""

    family: ClassVar[str] = "block moves"
    arch: str
    dtype: str  # of the tensors: bfloat16, float16, float32, or int32 for the words of others
    tensors: int  # of one shape, 1 to MOST_TENSORS
    in_place: bool  # else into another tensor
