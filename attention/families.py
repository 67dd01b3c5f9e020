"""Kernel families of attention. Importing this module registers them."""

from .backward.family import FLASH_BACKWARD
from .decode.family import DECODE
from .forward.family import FLASH_FORWARD, VALUES
from .selected.decode.family import SELECTED_DECODE
from .selected.unions.family import UNIONS

__all__ = ["DECODE", "FLASH_BACKWARD", "FLASH_FORWARD", "SELECTED_DECODE", "UNIONS", "VALUES"]
