"""Layers for inference whose block-sparse weights are 8-bit floats, and the way from trained ones to them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cute_kernels.checks import check_no_grad
from cute_kernels.dtypes import FLOAT8
from cute_kernels.quantization.eager import quantized, quantized_gated
from cute_kernels.quantize import quantize, quantize_gated
from cute_kernels.reference import gate_of_rounded
from cute_kernels.runtime.torch_compat import has_global_module_hook

from .. import eager
from ..bsr import BsrMatrix
from ..chains import MOST_COLUMNS
from ..ops import bsr_linear
from .feed_forward import SwiGLU
from .gated import GatedBsrLinear
from .inference import InferenceLinear, StoredBlocks
from .linear import BsrLinear
from .module import autocast_dtype
from .prune24 import Masked24BsrLinear, Masked24GatedBsrLinear

__all__ = ["Float8BsrLinear", "Float8SwiGLU", "quantize_"]

LEAST_GATED = 320  # tokens: 256 took as long either way, 384 gained 3 %
CARRIED_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
CARRIED = (  # with what says how they are called
    *CARRIED_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


class Float8BsrLinear(StoredBlocks, InferenceLinear):
    """y = activation(x @ W.T + bias) for inference, with an FP8 W that has a scale for each stored block.

    Args:
        layer: a BsrLinear, whose weight is quantized, and whose bias, activation and gate (of a GatedBsrLinear) are
            taken over.
        dtype: float8_e4m3fn or float8_e5m2.

    Forward takes x (..., K) of bfloat16, float16 or float32 and returns (..., M) in its dtype, or autocast's. x is
    quantized with a scale for each token and multiplied by one kernel (see bsr_linear), which on sm_90 loads W while
    x of at most 64 tokens is still being quantized. Runs on sm_89, sm_90 and the CPU, and with at most 16 tokens on
    every GPU. There is no parameter and no gradient.

    Buffers: crow_indices and col_indices int32, values (nnz, bm, bk) of the FP8 dtype, scales (nnz,) float32, and bias
    (M,), which state_dict() has. .to(dtype) converts the bias alone. load_state_dict() takes another number of blocks,
    and states saved before the weight was made of buffers.

    Raises:
        TypeError: `layer` is no BsrLinear, or dtype is no FP8 dtype.
        RuntimeError: in forward, x requires a gradient.
    """

    TENSORS = ("crow_indices", "col_indices", "values", "scales")
    trained = "a BsrLinear"

    def __init__(self, layer: BsrLinear, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        if not isinstance(layer, BsrLinear):
            raise TypeError(f"Float8BsrLinear needs a BsrLinear, got {type(layer).__name__}; see BsrLinear.from_linear")
        super().__init__(quantised(layer, dtype), layer.bias, layer.activation, layer.training, layer.gated)

    def _matrix(self) -> BsrMatrix:
        tensors, shape = (self.crow_indices, self.col_indices, self.values), (self.out_features, self.in_features)
        return BsrMatrix(*tensors, shape, check=not self._checked, scales=self.scales)

    def _apply(self, fn: Callable, recurse: bool = True) -> Float8BsrLinear:
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
        y = multiplied(*(found or quantize(tokens, W.dtype, "row")), self, x.dtype, found is not None)
        return y if x.dim() > 1 else y[0]

    def _gated(self, x: Tensor) -> Tensor:
        h = self._hidden(x) if x.dim() > 1 else None
        return gate_of_rounded(self._product(x), self.activation) if h is None else h

    def _hidden(self, x: Tensor) -> Tensor | None:
        """The gated output for x (..., K), of one kernel; None where no kernel gates what it stores."""
        found = quantized(x.detach(), self.weight.dtype, "row") if gates_its_store(self, x) else None
        if found is None:
            return None
        terms = self.weight, found[0], None, self.activation, None, None, None
        return eager.call(eager.GATED, *terms, scale_b=found[1], out_dtype=x.dtype, fused=True)


class Float8SwiGLU(nn.Module):
    """SwiGLU for inference with FP8 weights: down(gate_up(x)) of two Float8BsrLinear, in four kernels.

    Args:
        layer: a SwiGLU whose gate_up is a GatedBsrLinear and whose down is a BsrLinear.
        dtype: float8_e4m3fn or float8_e5m2.

    Forward takes x (..., dim) of bfloat16, float16 or float32 and returns (..., dim) in its dtype, or autocast's. The
    four kernels quantize x, multiply, quantize the hidden features with a scale for each token, and multiply. With many
    tokens on Hopper, without a bias, the first GEMM's epilogue computes the gate, if blocks have a multiple of 128 rows
    (see bsr_gated_linear); otherwise the second quantization does (see cute_kernels.quantize_gated). Both round alike.

    With hooks on gate_up or down, global hooks, or another module in the place of one, the layers are called one by
    one, to the same result up to the order of sums.

    Raises:
        TypeError: `layer` is no such SwiGLU, or dtype is no FP8 dtype.
        RuntimeError: in forward, x requires a gradient.
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
            y = multiplied(*(found or quantize_gated(z, *terms)), self.down, x.dtype, found is not None)
        return y if x.dim() > 1 else y[0]


def is_plain(layer: nn.Module) -> bool:
    """True if nothing but its product happens when a layer is called. A hook may launch kernels of its own."""
    return type(layer) is Float8BsrLinear and not hooks_of(layer) and "forward" not in layer.__dict__


def gates_its_store(layer: Float8BsrLinear, tokens: Tensor) -> bool:
    """True if the epilogue of a gated layer's GEMM may compute the gate. With fewer tokens it is as fast without; few
    tokens take other kernels, which begin while the tokens are being quantized."""
    return layer.bias is None and math.prod(tokens.shape[:-1]) >= LEAST_GATED


def are_few(x: Tensor) -> bool:
    """Whether x has tokens, and so few that a product of them may follow what quantises them."""
    return 0 < x.numel() <= MOST_COLUMNS * x.shape[-1]


def multiplied(values: Tensor, scale: Tensor, layer: Float8BsrLinear, dtype: torch.dtype, chained: bool) -> Tensor:
    """A layer of quantised tokens (..., K) with scales (..., 1). chained: whether a kernel that leads has made them
    (cute_kernels/tile/chain.py): then W is loaded while it still runs."""
    W, bias, activation = layer.weight, layer.bias, None if layer.gated else layer.activation
    if chained:
        terms = W, values, bias, activation, None, None, None
        return eager.call("bsr_linear", *terms, scale_b=scale, out_dtype=dtype, chained=True)
    return bsr_linear(values, W, bias, activation, scale_x=scale, out_dtype=dtype)


def quantize_(model: nn.Module, dtype: torch.dtype = torch.float8_e4m3fn) -> nn.Module:
    """Put a Float8SwiGLU in the place of each SwiGLU of a model, and a Float8BsrLinear in that of each other BsrLinear.

    Other layers stay: BsrGroupedLinear, Bsr24Linear, subclasses and parametrized layers; of a SwiGLU with such a layer
    inside the other one is replaced alone. Layers that appear twice stay one layer.

    A new layer has the forward hooks and forward pre-hooks of the one that it replaces, and their handles remove them.

    Args:
        model: changed in place.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        The model; where it is itself such a layer, the new one.

    Raises:
        TypeError: dtype is no float8, and there is a layer to replace.
        ValueError: a layer to replace has hooks of its gradients or its state, or a pre-hook of torch.nn.utils that
            makes its weight, or a layer inside of a SwiGLU has any. The model is as it was.
    """
    made = {}
    for name, module in model.named_modules():
        if narrow_kind(module) is not None:
            check_hooks(name or type(module).__name__, module)

    def swapped(module: nn.Module) -> nn.Module:
        if (kind := narrow_kind(module)) is not None:
            if module not in made:
                made[module] = with_hooks_of(module, kind(module, dtype))
            return made[module]
        for name, child in module._modules.items():  # a layer twice, too
            if child is not None and (new := swapped(child)) is not child:
                setattr(module, name, new)
        return module

    return swapped(model)


NARROW = {
    SwiGLU: Float8SwiGLU,
    **{kind: Float8BsrLinear for kind in (BsrLinear, GatedBsrLinear, Masked24BsrLinear, Masked24GatedBsrLinear)},
}


def narrow_kind(module: nn.Module) -> type | None:
    """What quantize_ puts in a layer's place; None of others."""
    kind = NARROW.get(type(module))
    return kind if all(isinstance(layer, BsrLinear) for layer in module.children()) else None


def check_hooks(name: str, module: nn.Module) -> None:
    """ValueError if a layer has hooks that its replacement would not call, or not with what they were made for."""
    for layer in (module, *module.children()):
        for hook in layer._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils"):
                raise ValueError(
                    f"quantize_: {name} has a hook that makes its weight in each call ({type(hook).__name__}); make it "
                    "permanent first, as by torch.nn.utils.prune.remove or remove_spectral_norm"
                )
    for inside, layer in module.named_children():
        if hooks_of(layer):
            raise ValueError(
                f"quantize_: {name}.{inside} has hooks, and a Float8SwiGLU does not call its layers one by one; remove "
                f"them, or put hooks on {name}, which the new layer takes over"
            )
    if "forward" in vars(module):
        raise ValueError(
            f"quantize_: {name}.forward was replaced by another function, which its replacement would not call; put "
            "that on the new layer, or set it back"
        )
    for kind in hooks_of(module):
        if kind not in CARRIED_HOOKS:
            why = "has no gradients" if "backward" in kind else "has another state"
            raise ValueError(
                f"quantize_: {name} has hooks ({kind[1:]}), and its replacement {why}; remove them by their handles, "
                "and register on the new layer what it is to have. Forward hooks and pre-hooks are taken over"
            )


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that it has, by the names of torch's attributes."""
    return [name for name, value in module.__dict__.items() if name.endswith("_hooks") and value]


def with_hooks_of(module: nn.Module, new: nn.Module) -> nn.Module:
    """`new` with the same dicts of forward hooks, which handles know."""
    for name in CARRIED:
        setattr(new, name, getattr(module, name))
    return new


def outside_autocast(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """product(x); inside torch.autocast of x in its dtype, as `multiply` does."""
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
