"""The families of block-sparse products. Importing registers them."""

from .bsr24.family import BSR24
from .family import BSR
from .sampled.family import SAMPLED
from .skinny.family import SKINNY
from .small_blocks.family import SMALL_BLOCKS

__all__ = [
    "BSR",
    "BSR24",
    "SAMPLED",
    "SKINNY",
    "SMALL_BLOCKS",
]
