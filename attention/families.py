"""The families of attention's kernels. Importing registers them."""

from .backward.family import FLASH_BACKWARD
from .decode.family import DECODE
from .forward.family import FLASH_FORWARD, TRANSPOSED_VALUES

__all__ = ["DECODE", "FLASH_BACKWARD", "FLASH_FORWARD", "TRANSPOSED_VALUES"]
