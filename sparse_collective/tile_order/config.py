"""What the kernel that orders work tiles is compiled from."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class OrderFacts:
    """What an order kernel is compiled from."""

    family: ClassVar[str] = "tile order"
    arch: str
    index_dtype: str
    dealt: bool  # to workers; else the order alone counts
