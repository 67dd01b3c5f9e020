"""Layers for inference with FP8 block-sparse weights; to_fp8.py makes them of the layers of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from cute_kernels.checks import check_no_grad
from cute_kernels.dtypes import FLOAT8
from cute_kernels.fp8.dispatch import quantized, quantized_gated
from cute_kernels.fp8.quantize import quantize, quantize_gated
from cute_kernels.reference import gate_of_rounded
from cute_kernels.runtime.autocast import autocast_dtype
from cute_kernels.runtime.torch_compat import has_global_module_hook

from .. import dispatch
from ..arguments import GATED, BsrArgs
from ..bsr import BsrMatrix
from ..bsr_gemm.dependent_launch import MOST_COLUMNS
from ..ops import bsr_linear
from .feed_forward import SwiGLU
from .inference import StoredBlocks
from .linear import BsrLinear
from .swap import hooks_of

__all__ = ["Float8BsrLinear", "Float8SwiGLU"]

LEAST_GATED = 320  # tokens: 256 took as long either way, 384 gained 3 %


class Float8BsrLinear(StoredBlocks):
    """FP8 block-sparse linear layer for inference: y = activation(x @ W.T + bias), with one scale per block of W.

    Args:
        layer: a BsrLinear or GatedBsrLinear. Its weight is quantized; bias, activation and gate are kept.
        dtype: float8_e4m3fn or float8_e5m2.

    Forward maps x (..., K) in bfloat16, float16 or float32 to (..., M) in the same dtype, or autocast's. It quantizes x
    with one scale per token and runs one GEMM (see bsr_linear). With at most 64 tokens on sm_90, the GEMM loads W while
    x is still being quantized. Supported on sm_89, sm_90 and the CPU, and with at most 16 tokens on every GPU. The
    layer has no parameters and no gradients.

    Buffers: crow_indices and col_indices int32, values (nnz, bm, bk) FP8, scales (nnz,) float32, and bias (M,), all in
    state_dict(). .to(dtype) converts the bias only. load_state_dict() accepts another number of blocks, and states of
    earlier versions.

    Raises:
        TypeError: `layer` is not a BsrLinear, or dtype is not an FP8 dtype.
        RuntimeError: in forward, x requires a gradient.

    Example:
        layer = Float8BsrLinear(BsrLinear(1024, 4096, density=0.25, dtype=torch.bfloat16))
    """

    TENSORS = ("crow_indices", "col_indices", "values", "scales")
    trained = "a BsrLinear"
    scales: Tensor

    def __init__(self, layer: BsrLinear, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        if not isinstance(layer, BsrLinear):
            raise TypeError(f"Float8BsrLinear needs a BsrLinear, got {type(layer).__name__}; see BsrLinear.from_linear")
        super().__init__(quantised(layer, dtype), layer.bias, layer.activation, layer.training, layer.gated)

    def _matrix(self) -> BsrMatrix:
        tensors, shape = (self.crow_indices, self.col_indices, self.values), (self.out_features, self.in_features)
        return BsrMatrix(*tensors, shape, check=not self._checked, scales=self.scales)

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        """Values and scales keep their dtype: a function like t.half() sees their bits as integers."""

        def apply(t: Tensor) -> Tensor:
            if t is not self.values and t is not self.scales:
                return fn(t)
            bits = t.view(torch.uint8 if t.dtype in FLOAT8 else torch.int32)
            new = fn(bits)
            if new is bits:
                return t
            return new.view(t.dtype) if new.dtype is bits.dtype else t.to(new.device)

        return super()._apply(apply, recurse)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        old = state_dict.pop(f"{prefix}weight._extra_state", None)  # a dict, until the weight was made of buffers
        if old is not None:
            if tuple(old["shape"]) != (self.out_features, self.in_features):
                shapes = f"{tuple(old['shape'])}, and this one is {(self.out_features, self.in_features)}"
                args[-1].append(f"{prefix[:-1] or type(self).__name__}: the state is of a weight {shapes}")
                return
            state_dict.update({prefix + name: old[name] for name in self.TENSORS})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _misfit(self, found: dict[str, Tensor]) -> str:
        values, scales = found["values"], found["scales"]
        if values.dtype not in FLOAT8:
            return (
                f"values is {values.dtype}, the layer's {self.values.dtype}; load it into a BsrLinear and quantize that"
            )
        if tuple(scales.shape) != (len(values),) or scales.dtype is not torch.float32:
            return f"scales is {tuple(scales.shape)} of {scales.dtype}; it must be ({len(values)},) of torch.float32"
        if values.dtype is not self.values.dtype:  # the other FP8 dtype; a copy would round
            self.values = self.values.new_empty(values.shape, dtype=values.dtype)
        return ""

    def forward(self, x: Tensor) -> Tensor:
        check_no_grad("Float8BsrLinear", x)
        return outside_autocast(self._gated if self.gated else self._product, x)

    def _product(self, x: Tensor) -> Tensor:
        """The layer of x (..., K); of a gated one what its gate is computed of, (..., 2 H)."""
        W = self.weight
        tokens = x if x.dim() > 1 else x[None]
        found = quantized(tokens.detach(), W.dtype, "row", leads=True) if are_few(x) else None
        y = multiplied(*(found or quantize(tokens, dtype=W.dtype, per="row")), self, x.dtype, found is not None)
        return y if x.dim() > 1 else y[0]

    def _gated(self, x: Tensor) -> Tensor:
        h = self._hidden(x) if x.dim() > 1 else None
        return gate_of_rounded(self._product(x), self.activation) if h is None else h

    def _hidden(self, x: Tensor) -> Tensor | None:
        """The gated output for x (..., K), of one kernel; None where no kernel gates what it stores."""
        found = quantized(x.detach(), self.weight.dtype, "row") if gates_its_store(self, x) else None
        if found is None:
            return None
        args = BsrArgs(GATED, self.weight, found[0], scale_b=found[1], activation=self.activation, out_dtype=x.dtype)
        return dispatch.call(args, fused=True)


class Float8SwiGLU(nn.Module):
    """SwiGLU for inference with FP8 weights: down(gate_up(x)) with two Float8BsrLinear, in four kernels.

    Args:
        layer: a SwiGLU whose gate_up is a GatedBsrLinear and whose down is a BsrLinear.
        dtype: float8_e4m3fn or float8_e5m2.

    Forward maps x (..., dim) in bfloat16, float16 or float32 to (..., dim) in the same dtype, or autocast's. The four
    kernels quantize x, multiply, quantize the hidden features with one scale per token, and multiply. The gate is
    computed in the epilogue of the first GEMM with many tokens on Hopper, without a bias and with blocks of a multiple
    of 128 rows (see bsr_gated_linear); otherwise by the second quantization (see cute_kernels.quantize_gated). Both
    round alike.

    With hooks on gate_up or down, global hooks, or another module in place of one, the layers are called one by one.
    Results then differ only by the order of additions.

    Raises:
        TypeError: `layer` is not such a SwiGLU, or dtype is not an FP8 dtype.
        RuntimeError: in forward, x requires a gradient.

    Example:
        layer = Float8SwiGLU(SwiGLU(1024, 4096, blocksize=(128, 128), density=0.25, dtype=torch.bfloat16))
    """

    def __init__(self, layer: SwiGLU, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        super().__init__()
        if not isinstance(layer, SwiGLU):
            raise TypeError(f"Float8SwiGLU needs a SwiGLU, got {type(layer).__name__}; see SwiGLU.from_linears")
        if not getattr(layer.gate_up, "gated", False):
            raise TypeError(
                f"Float8SwiGLU needs a SwiGLU whose gate_up is a GatedBsrLinear, got {type(layer.gate_up).__name__}"
            )
        self.gate_up = Float8BsrLinear(layer.gate_up, dtype)
        self.down = Float8BsrLinear(layer.down, dtype)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        check_no_grad("Float8SwiGLU", x)
        if has_global_module_hook() or not all(is_plain(layer) for layer in (self.gate_up, self.down)):
            return self.down(self.gate_up(x))
        return outside_autocast(self._product, x)

    def _product(self, x: Tensor) -> Tensor:
        """As forward, with what is between the layers never stored unquantized, or not at all."""
        tokens = x if x.dim() > 1 else x[None]
        h = self.gate_up._hidden(tokens)
        if h is not None:
            y = self.down._product(h)
        else:
            z, terms = self.gate_up._product(tokens), (self.gate_up.activation, self.down.weight.dtype)
            found = quantized_gated(z.detach(), *terms, chained=True) if are_few(z) else None
            y = multiplied(
                *(found or quantize_gated(z, activation=terms[0], dtype=terms[1])),
                self.down,
                x.dtype,
                found is not None,
            )
        return y if x.dim() > 1 else y[0]


def is_plain(layer: nn.Module) -> bool:
    """True if nothing but its product happens when a layer is called. A hook may launch kernels of its own."""
    return type(layer) is Float8BsrLinear and not hooks_of(layer) and "forward" not in layer.__dict__


def gates_its_store(layer: Float8BsrLinear, tokens: Tensor) -> bool:
    """True if the epilogue of a gated layer's GEMM may compute the gate. With fewer tokens it is as fast without; few
    tokens take other kernels, which begin while the tokens are being quantized."""
    if torch.compiler.is_compiling():  # no such kernel is traced, and a comparison would make a graph for each answer
        return False
    return layer.bias is None and math.prod(tokens.shape[:-1]) >= LEAST_GATED


def are_few(x: Tensor) -> bool:
    """True if x has few enough tokens (at least one) for its GEMM to be a secondary kernel of the quantization."""
    return not torch.compiler.is_compiling() and 0 < x.numel() <= MOST_COLUMNS * x.shape[-1]


def multiplied(values: Tensor, scale: Tensor, layer: Float8BsrLinear, dtype: torch.dtype, chained: bool) -> Tensor:
    """A layer of quantised tokens (..., K) with scales (..., 1). chained: whether a kernel that leads has made them
    (cute_kernels/tile/dependent_launch.py): then W is loaded while it still runs."""
    W, bias, activation = layer.weight, layer.bias, None if layer.gated else layer.activation
    if chained:
        args = BsrArgs("bsr_linear", W, values, bias=bias, scale_b=scale, activation=activation, out_dtype=dtype)
        return dispatch.call(args, chained=True)
    return bsr_linear(values, W, bias=bias, activation=activation, scale_x=scale, out_dtype=dtype)


def outside_autocast(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """product(x); inside torch.autocast of x in its dtype. The product itself is outside."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return product(x)
    with torch.autocast(x.device.type, enabled=False):
        return product(x.to(dtype))


def quantised(layer: BsrLinear, dtype: torch.dtype) -> BsrMatrix:
    """The layer's weight, copied, with a scale for each stored block."""
    W = layer.weight
    values = BsrMatrix(W.crow_indices.clone(), W.col_indices.clone(), W.values.detach(), W.shape)
    return values.quantize(dtype, "block")
