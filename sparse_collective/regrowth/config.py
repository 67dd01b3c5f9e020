"""What the kernels are compiled from."""

from dataclasses import dataclass
from typing import ClassVar


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
    in_place: bool  # else into another tensor
