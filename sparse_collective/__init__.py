"""Block-sparse (BSR) matrices and GEMMs whose cost is that of the stored blocks.

BsrMatrix                 the format; shares its tensors with torch.sparse_bsr
bsr_matmul(W, b, ...)     (M, K) BSR @ (..., K, N)
bsr_linear(x, W, ...)     x (..., K) @ W.T
bsr_gated_linear(x, W)    silu(x @ G.T) * (x @ U.T), for a W that holds both
bsr_grouped_linear(...)   bsr_linear with one W per expert: a mixture of experts
Bsr24                     stored blocks with 2:4 sparsity, `W.prune_2_4()`; these GEMMs accept it, too
sddmm(a, b, pattern)      the stored blocks of a dense a @ b: a weight's gradient
"""

from . import torch_functions  # noqa: F401 (importing it makes W @ b a product)
from .bsr import BsrMatrix
from .bsr24.matrix import Bsr24
from .ops import bsr_gated_linear, bsr_grouped_linear, bsr_linear, bsr_matmul, interleaved, sddmm
from .random_matrix import random_bsr

__all__ = [
    "Bsr24",
    "BsrMatrix",
    "bsr_gated_linear",
    "bsr_grouped_linear",
    "bsr_linear",
    "bsr_matmul",
    "interleaved",
    "random_bsr",
    "sddmm",
]
