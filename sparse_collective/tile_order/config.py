"""What the kernel that orders work tiles is compiled from."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class OrderFacts:
    """What the kernel is compiled from."""

    family: ClassVar[str] = "tile order"
    arch: str
    index_dtype: str
    to_workers: bool  # tiles are assigned to workers; else the order alone counts
