"""The families of attention's kernels. Importing registers them."""

from .decode.family import DECODE
from .forward.family import FLASH_FORWARD

__all__ = ["DECODE", "FLASH_FORWARD"]
