"""torch functions with a BsrMatrix among their arguments: torch.matmul (and `@`) and torch.nn.functional.linear."""

import operator

import torch
from torch import Tensor

from cute_kernels.runtime.torch_compat import order_of_matmul, run_in_trace

from . import ops
from .bsr import BsrMatrix
from .bsr24 import matrix as bsr24
from .bsr24.matrix import Bsr24
from .like_tensor import FUNCTIONS, WORKS


def matmul(input: BsrMatrix | Tensor, other: BsrMatrix | Tensor, *, out: Tensor | None = None) -> Tensor:
    """W @ b, or x @ V."""
    if isinstance(other, Bsr24):
        raise TypeError(
            f"torch.matmul takes a Bsr24 as its left operand alone, since it has no transpose; {bsr24.WORKS}"
        )
    if isinstance(input, BsrMatrix) and isinstance(other, BsrMatrix):
        raise TypeError(
            "a BsrMatrix times a BsrMatrix has no kernel; make one of them dense, as in W @ W2.to_dense(), or multiply "
            "one after the other, as in W @ (W2 @ b)"
        )
    if not isinstance(input, BsrMatrix | Bsr24):
        return ops.bsr_linear(input, other.t(), out=out)
    if isinstance(other, Tensor) and other.dim() == 1:
        return ops.bsr_linear(other, input, out=out)
    return ops.bsr_matmul(input, other, out=out)  # type: ignore[arg-type]  # the op names what `other` must be


def linear(input: Tensor, weight: BsrMatrix, bias: Tensor | None = None) -> Tensor:
    """bsr_linear"""
    sparse = BsrMatrix | Bsr24
    if isinstance(input, sparse) or isinstance(bias, sparse) or not isinstance(weight, sparse):
        raise TypeError(f"linear takes a BsrMatrix as its weight alone; {WORKS}")
    return ops.bsr_linear(input, weight, bias=bias)


def tensor_matmul(left: BsrMatrix | Tensor, right: BsrMatrix | Tensor) -> Tensor:
    """left @ right."""
    if torch.compiler.is_compiling():
        run_in_trace(order_of_matmul)
    return matmul(left, right)


FUNCTIONS.update({f: matmul for f in (torch.matmul, operator.matmul)})  # the second under torch.export
FUNCTIONS.update({f: tensor_matmul for f in (Tensor.matmul, Tensor.__matmul__)})
FUNCTIONS[torch.nn.functional.linear] = linear
