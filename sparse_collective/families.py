"""The families of block-sparse products, and of rows for experts. Importing registers them."""

from .bsr24.family import BSR24
from .bsr_gemm.family import BSR
from .expert_rows.family import EXPERT_ROWS
from .gemv.family import SKINNY
from .sddmm_kernel.family import SAMPLED
from .small_blocks.family import SMALL_BLOCKS

__all__ = [
    "BSR",
    "BSR24",
    "EXPERT_ROWS",
    "SAMPLED",
    "SKINNY",
    "SMALL_BLOCKS",
]
