"""Dense GEMM with fused epilogues, and the base of the block-sparse and attention packages.

gemm(a, b, ...)       matmul with a fused epilogue
explain(op, ...)      the kernel that a call selects, and why; with arch="sm_90" it needs no GPU
inspect(op, ...)      the resources of that kernel: registers, spills, shared memory, instructions
path("sm_80")         context manager that forces a kernel path
quantize(x, ...)      FP8 values and their scale (Quantized), an operand of gemm; quantize_gated(z, ...) is gated
prune_2_4(w)          keep the 2 largest of every 4 neighbors; Sparse24.from_dense(prune_2_4(w)) is an a of gemm
KTileSource(at, count) selects the K-tiles that each row tile multiplies: gemm(a, b, source=...)
functions             elementwise functions for user-defined epilogues
warm_up(model, call)  compile the kernels that a call of a model needs, in parallel
load_bundle(folder)   use kernels compiled ahead of time by `python -m cute_kernels compile`
"""

from . import functions
from .explain import explain, explains, inspect
from .first_call import warm_up
from .fp8.quantize import quantize, quantize_gated
from .fp8.quantized import Quantized
from .ops import gemm
from .runtime.device import path
from .source import KTileSource
from .sparse24 import torch_functions as _torch_functions  # noqa: F401 (importing it makes W @ b of a Sparse24 a GEMM)
from .sparse24.dispatch import plan_gemm
from .sparse24.format import Sparse24, prune_2_4

__all__ = [
    "KTileSource",
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
    "warm_up",
]
__version__ = "0.1.0"

explains(gemm, plan_gemm)


def load_bundle(folder) -> None:
    """Use the kernels of an ahead-of-time bundle, before those of the disk cache.

    Args:
        folder: a folder written by `python -m cute_kernels compile --out FOLDER`.

    Raises:
        BundleError: the bundle was made with other sources, versions or for another CPU.

    Example:
        load_bundle("kernels-h100")
    """
    from .runtime.cache import default_cache

    default_cache().add_bundle(folder)
