"""Kernel families of attention. Importing this module registers them."""

from .backward.family import FLASH_BACKWARD
from .decode.family import DECODE
from .forward.family import FLASH_FORWARD, VALUES

__all__ = ["DECODE", "FLASH_BACKWARD", "FLASH_FORWARD", "VALUES"]
