"""The gradient of z, of y = f(activation(z)), as it runs: by the kernel, or where that does not serve by torch."""

import functools

import torch
from torch import Tensor

from ..dtypes import NAMES, accumulator
from ..runtime.device import collected, device_arch
from ..runtime.families import function_for, unsupported
from ..traced.derivative import derivative, followed_by
from ..traced.evaluate import evaluate
from ..traced.program import Program
from . import family  # noqa: F401 (importing it registers the family)
from .config import VECTOR, EpilogueGradientFacts, parts_of

derivative_of = functools.lru_cache(1024)(lambda activation, program: derivative(followed_by(activation, program)))


def epilogue_gradient(
    dy: Tensor, saved: Tensor, activation: str | None, program: Program | None, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """(dz, sums of dz's columns in fp32 or None): dz = dy f'(saved), in fp32 and rounded once.

    The kernel takes contiguous bfloat16 and float16 of one dtype, of a multiple of 8 columns; torch takes the rest.

    Args:
        dy: (..., cols), the gradient of y; of other strides than contiguous it is copied.
        saved: z, or y of a ReLU without a function; contiguous, of dy's shape.
        sums: True also returns the sums of columns.
    """
    cols = dy.shape[-1] if dy.dim() else 1
    function = None
    collects = collected() is not None
    if (
        (dy.is_cuda or collects)
        and dy.dtype is saved.dtype
        and cols % VECTOR == 0
        and dy.numel()
        and not saved.data_ptr() & 15
    ):
        find = _kernel.__wrapped__ if collects else _kernel
        function, sms = find(activation, program, dy.dtype, sums, dy.get_device())
    if function is None:
        return _by_torch(dy, saved, derivative_of(activation, program), sums)
    dy = dy.contiguous()
    if dy.data_ptr() & 15:
        dy = dy.clone()
    dz = torch.empty_like(dy)
    rows = dy.numel() // cols
    parts = parts_of(rows, cols, sms)
    partial = dy.new_empty(parts, cols, dtype=torch.float32) if sums else None
    matrices = (dy, saved, dz) if dy.dim() == 2 else (t.view(rows, cols) for t in (dy, saved, dz))
    function(*matrices, partial, parts)
    return dz, None if partial is None else partial.sum(0)


@functools.lru_cache(1024)
def _kernel(activation: str | None, program: Program | None, dtype: torch.dtype, sums: bool, index: int) -> tuple:
    """(the kernel's function, or None where there is no kernel, multiprocessors) of a CUDA device; cached."""
    arch, sms = device_arch(index)
    facts = EpilogueGradientFacts(arch.target, NAMES.get(dtype, str(dtype)), derivative_of(activation, program), sums)
    return None if unsupported(facts) else function_for(facts), sms


def _by_torch(dy: Tensor, saved: Tensor, slope: Program, sums: bool) -> tuple[Tensor, Tensor | None]:
    wide = accumulator(dy.dtype)
    dz = dy.to(wide) * evaluate(slope, [saved.to(wide)])
    return dz.to(dy.dtype).contiguous(), dz.unsqueeze(0).flatten(0, -2).sum(0) if sums else None
