"""Kernel families of attention. Importing this module registers them."""

from .backward.family import FLASH_BACKWARD
from .backward.gather.family import GATHER_BACKWARD
from .decode.family import DECODE
from .forward.family import FLASH_FORWARD, VALUES
from .masks.sharded.family import SHARDED_MASKS
from .masks.transposed.family import TRANSPOSED_LISTS
from .selected.decode.family import SELECTED_DECODE
from .selected.selection.family import SCORES, SUMS, TOP
from .selected.tables.family import SELECTED_TABLES
from .selected.unions.family import UNIONS

__all__ = ["DECODE", "FLASH_BACKWARD", "FLASH_FORWARD", "GATHER_BACKWARD", "SCORES", "SELECTED_DECODE"]
__all__ += ["SELECTED_TABLES", "SHARDED_MASKS", "SUMS", "TOP", "TRANSPOSED_LISTS", "UNIONS", "VALUES"]
