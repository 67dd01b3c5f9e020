"""The families of block-sparse products, and of the kernels that make their tables. Importing registers them."""

from .bsr24.family import BSR24
from .family import BSR
from .regrowth.family import BLOCK_MOVES, REGROWTH
from .row_pairs.family import ROW_PAIRS
from .row_pairs.tables_family import ROW_PAIR_TABLES
from .sampled.family import SAMPLED
from .sampled.tables_family import BOX_GROUPS
from .skinny.family import SKINNY
from .small_blocks.family import SMALL_BLOCKS
from .small_blocks.tables_family import SMALL_BLOCK_TABLES
from .tile_order.family import TILE_ORDER
from .transposed.family import TRANSPOSED

__all__ = [
    "BLOCK_MOVES",
    "BOX_GROUPS",
    "BSR",
    "BSR24",
    "REGROWTH",
    "ROW_PAIRS",
    "ROW_PAIR_TABLES",
    "SAMPLED",
    "SKINNY",
    "SMALL_BLOCKS",
    "SMALL_BLOCK_TABLES",
    "TILE_ORDER",
    "TRANSPOSED",
]
