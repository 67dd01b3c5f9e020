"""torch functions with a Sparse24 among their arguments: torch.matmul, torch.mm and torch.nn.functional.linear."""

import operator
from typing import Any

import torch
from torch import Tensor

from ..dtypes import default_out_dtype
from ..ops import gemm
from ..runtime.autocast import any_autocast, cast_product
from ..runtime.torch_compat import order_of_matmul, run_in_trace
from .like_tensor import FUNCTIONS, WORKS, LikeTensor, Transposed24


def matmul(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """W @ b, b (K, N) or (K,); or x @ W.t(), x (..., K).

    Raises:
        TypeError: the operands are others, such as W.t() @ b.
    """
    if isinstance(input, LikeTensor) and isinstance(other, LikeTensor):
        raise TypeError(f"a Sparse24 times a Sparse24 has no kernel; {WORKS}")
    if isinstance(other, Transposed24):
        if out is not None:
            gemm(other.base, input.t(), out=out.t())
            return out
        return linear(input, other.base)
    if isinstance(input, Transposed24) or isinstance(other, LikeTensor):
        raise TypeError(
            "a Sparse24 W is sparse along its rows: W.t() @ b and x @ W have no kernel. Compress the transpose, "
            "V = Sparse24.from_dense(prune_2_4(w.t())), for V @ b and x @ V.t(); or take W.to_dense()"
        )
    if isinstance(other, Tensor) and other.dim() == 1:
        return gemm(input, other[:, None], out=None if out is None else out[:, None])[:, 0]
    return gemm(input, other, out=out)


def linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """x @ W.t() + bias: x (..., K) and bias (M,) give (..., M), contiguous."""
    if not isinstance(input, Tensor) or isinstance(bias, LikeTensor) or isinstance(weight, (Tensor, Transposed24)):
        raise TypeError(f"linear takes a Sparse24 as its weight alone; {WORKS}")
    M, K = weight.shape
    if input.dim() == 0 or input.shape[-1] != K:
        raise ValueError(f"linear: the weight is {M}x{K}, so x must be (..., {K}), got {tuple(input.shape)}")
    if bias is not None and tuple(bias.shape) != (M,):
        raise ValueError(f"linear: bias has shape {tuple(bias.shape)}; it must be ({M},), one for each row of W")
    b = input.reshape(-1, K).t()
    if any_autocast():  # gemm does not cast beside out=
        weight, b, _ = cast_product(weight, b, None, None)
    out = b.new_empty((b.shape[1], M), dtype=default_out_dtype(weight.dtype))
    gemm(weight, b, bias=None if bias is None else bias[:, None], out=out.t())
    return out.view(*input.shape[:-1], M)


def tensor_matmul(left: LikeTensor | Tensor, right: LikeTensor | Tensor) -> Tensor:
    """left @ right."""
    if torch.compiler.is_compiling():
        run_in_trace(order_of_matmul)
    return matmul(left, right)


FUNCTIONS.update({f: matmul for f in (torch.matmul, torch.mm, operator.matmul)})
FUNCTIONS.update({f: tensor_matmul for f in (Tensor.matmul, Tensor.mm, Tensor.__matmul__)})
FUNCTIONS[torch.nn.functional.linear] = linear
