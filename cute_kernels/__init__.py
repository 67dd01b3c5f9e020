"""Dense GEMM with fused epilogues, and the ground that block-sparse products and attention stand on.

gemm(a, b, ...)       the product a torch user calls
explain(op, ...)      which kernel a call takes, and why; with arch="sm_90" on a machine without a GPU
inspect(op, ...)      what that kernel costs: registers, spills, shared memory, instructions
path("sm_80")         a context that forces a family of kernels
quantize(x, ...)      Quantized: FP8 values and their scale, an operand for gemm; quantize_gated(z, ...) is gated
prune_2_4(w)          the 2 largest of every 4 neighbours; Sparse24.from_dense of that is a left operand for gemm
functions             elementwise functions for epilogues of one's own
load_bundle(folder)   use kernels compiled ahead of time by `python -m cute_kernels compile`
"""

from . import functions
from .explain import explain, explains, inspect
from .ops import gemm
from .quantize import quantize, quantize_gated
from .quantized import Quantized
from .runtime.device import path
from .sparse24 import torch_functions as _torch_functions  # noqa: F401 (importing it makes W @ b of a Sparse24 a GEMM)
from .sparse24.eager import plan_gemm
from .sparse24.format import Sparse24, prune_2_4

__all__ = [
    "Quantized",
    "Sparse24",
    "explain",
    "functions",
    "gemm",
    "inspect",
    "load_bundle",
    "path",
    "prune_2_4",
    "quantize",
    "quantize_gated",
]
__version__ = "0.1.0"

explains(gemm, plan_gemm)


def load_bundle(folder) -> None:
    """Look for kernels in this ahead-of-time bundle before the disk cache; raises BundleError if it does not fit."""
    from .runtime.cache import default_cache

    default_cache().add_bundle(folder)
