"""User-defined epilogue: a function of the accumulators, compiled into a GEMM kernel.

Algorithm. A layer computes d = f(a @ b + bias). Three kernels write the GEMM's result to memory and read it twice. A
fused epilogue applies f to the FP32 accumulators in registers; d is written once and rounded once. Here f is

    f(x) = x * clamp(x + 3, 0, 6) / 6                                  (hard swish)

`gemm` and `bsr_linear` accept the torch function: torch traces it, the trace is lowered into the epilogue of the
kernel, and CPU tensors run it in torch. It may capture numbers; a new value compiles a new kernel.

    python examples/epilogue.py
"""

import torch

from cute_kernels import gemm
from sparse_collective import BsrMatrix, bsr_linear

try:
    from .show import DEVICE, compare, inspect_call, measure, normal, refused
except ImportError:  # run as a file: python examples/epilogue.py
    from show import DEVICE, compare, inspect_call, measure, normal, refused

# Code


def hard_swish(x):
    return x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0


def operands(size: int, device: str = DEVICE):
    """x, a dense weight, the half of its 64 x 64 blocks of largest norm, and a bias, in the nonlinear range of f."""
    x, weight = normal(size, size, seed=1, device=device), normal(size, size, seed=2, device=device) * size**-0.5
    return x, weight, BsrMatrix.from_dense(weight, (64, 64), density=0.5), normal(size, seed=3, device=device)


# Test


def check(size: int = 256) -> None:
    """Compare with FP64. torch's three kernels round twice in between."""
    x, weight, W, bias = operands(size)
    for result, dense in (
        (gemm(x, weight.t(), bias=bias, epilogue=hard_swish), weight),
        (bsr_linear(x, W, bias=bias, epilogue=hard_swish), W.to_dense()),
    ):
        exact = hard_swish(torch.nn.functional.linear(x.double(), dense.double(), bias.double()))
        compare(result, exact, hard_swish(torch.nn.functional.linear(x, dense, bias)))


def inspect(size: int = 256) -> None:
    """Inspect the kernels with and without f."""
    x, weight, W, bias = operands(size, "cpu")
    inspect_call(gemm, x, weight.t(), bias=bias)
    inspect_call(gemm, x, weight.t(), bias=bias, epilogue=hard_swish)
    inspect_call(bsr_linear, x, W, bias=bias, epilogue=hard_swish)


def errors() -> None:
    """A wrong shape, a wrong dtype, and a function that torch cannot trace."""
    x, weight, W, bias = operands(256)
    refused(lambda: bsr_linear(x, W, bias=bias[:-1], epilogue=hard_swish))
    refused(lambda: gemm(x.float(), weight.t(), epilogue=hard_swish))
    refused(lambda: gemm(x, weight.t(), epilogue=lambda acc: acc if acc.sum() > 0 else -acc))


# Measurement


def times(size: int = 4096) -> None:
    """Time the fused kernels and torch's three kernels."""
    if DEVICE == "cpu":
        size = 64
    x, weight, W, bias = operands(size)
    measure(
        fused=lambda: gemm(x, weight.t(), bias=bias, epilogue=hard_swish),
        fused_half_of_the_blocks=lambda: bsr_linear(x, W, bias=bias, epilogue=hard_swish),
        torch=lambda: hard_swish(torch.nn.functional.linear(x, weight, bias)),
    )


if __name__ == "__main__":
    check()
    inspect()
    errors()
    times()
