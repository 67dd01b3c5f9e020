"""FP8 quantization: by kernels (quantization), or with torch functions on any device."""

import torch
from torch import Tensor

from ..annotations import Activation, ScaleKind
from ..checks import check_tensor
from ..dtypes import FLOAT8
from ..functions import ACTIVATIONS
from ..reference import BLOCK, GATE, gate_of_rounded
from .config import NO_TOKENS
from .dispatch import quantized, quantized_gated
from .quantized import Quantized

AXES = {"tensor": None, "row": -1, "column": -2, "head": (-2, -1)}  # dimensions that amax reduces
BLOCKS = {"1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK)}  # rows and columns of x that share a scale


def quantize(x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, per: ScaleKind = "tensor") -> Quantized:
    """Quantize to FP8: (values, scale) with x approximately values * scale and amax at the end of dtype's range.

    gemm, the block-sparse GEMMs and attention accept the pair in place of an operand; see Quantized.

    Args:
        x: (..., rows, columns) with a floating-point dtype, on any device.
        dtype: float8_e4m3fn (magnitudes up to 448) or float8_e5m2 (57344, with two bits of mantissa instead of three).
        per: the elements that share a scale:

            per         scale                            shape of scale (extents rounded up)    used as
            "tensor"    one                              (1,)                                   scale_a, scale_b
            "row"       one per row                      (..., rows, 1)                         scale_a
            "column"    one per column                   (..., 1, columns)                      scale_b
            "head"      one per matrix                   (...)                                  q/k/v_descale
            "tokens"    one per 128 rows of a matrix     (..., rows / 128)                      q/k/v_descale
            "1x128"     one per row and 128 columns      (..., rows, columns / 128)             scale_a
            "128x128"   one per 128 rows and columns     (..., rows / 128, columns / 128)       scale_b

            Attention operands are (B, heads, length, head_dim). An (N, K) weight with "128x128" is passed to gemm as
            values.mT with scale.mT.

    Returns:
        values: x / scale, rounded to nearest, with x's shape; contiguous along the same mode as x. With block scales
            the strides of other modes may be those of whole blocks.
        scale: float32. 1 if all elements are 0; with "tokens" 2 ** -24, so that a block of zeros never has the largest
            scale of its head.

    NaN makes all values that share its scale NaN. An infinity makes its scale infinite: its own value is NaN, finite
    elements become 0. values are detached: no gradient passes.

    Raises:
        TypeError: x is not a floating-point tensor, or dtype is not FP8.
        ValueError: per is unknown, or x has fewer than two dimensions and per is not "tensor".

    Example:
        x, w = quantize(tokens, per="row"), quantize(weight, per="row")  # (T, K) and (N, K)
        y = gemm(x, w.mT)  # BF16
    """
    check_tensor("quantize: x", x)
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise TypeError(f"quantize: x is {x.dtype}; it must be torch.bfloat16, float16, float32 or float64")
    if dtype not in FLOAT8:
        raise TypeError(f"quantize: dtype is {dtype}; known are {', '.join(map(str, FLOAT8))}")
    if per not in (known := (*AXES, "tokens", *BLOCKS)):
        raise ValueError(f"quantize: per is {per!r}; known are {', '.join(map(repr, known))}")
    if per != "tensor" and x.dim() < 2:
        raise ValueError(f"quantize: x must have at least 2 dimensions with per={per!r}, got {x.dim()}")
    with torch.no_grad():
        if x.numel() == 0:
            ones = torch.ones(shape_of_scale(x.shape, per), dtype=torch.float32, device=x.device)
            return Quantized(torch.empty_like(x, dtype=dtype), ones)
        if (result := quantized(x.detach(), dtype, per)) is not None:
            return Quantized(*result)
        wide = x.to(torch.float32)
        if per in BLOCKS:
            return Quantized(*rounded_by_blocks(wide, *BLOCKS[per], dtype, 1.0))
        if per == "tokens":
            values, scale = rounded_by_blocks(wide, BLOCK, x.shape[-1], dtype, NO_TOKENS)
            return Quantized(values, scale[..., 0])
        axis = AXES[per]
        largest = wide.abs().amax().reshape(1) if axis is None else wide.abs().amax(axis, keepdim=True)
        values, scale = rounded(wide, largest, dtype, 1.0)
        return Quantized(values, scale.reshape(shape_of_scale(x.shape, per)))


def quantize_gated(
    z: Tensor, *, activation: Activation | None = "silu", dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantized:
    """Compute quantize(h, per="row") for h = activation(gate) * up in one kernel, between the two GEMMs of a gated
    feed-forward layer.

    Args:
        z: (..., 2 H) with a floating-point dtype and H a multiple of 64. Its columns alternate, 64 of gate and 64 of
            up, as with a weight made by sparse_collective.interleaved.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        values: (..., H) in dtype. scale: float32, (..., 1). h is computed in FP32 (float64 for float64) and rounded to
            z's dtype first.

    Contiguous bfloat16 and float16 on sm_89 and sm_90 run a kernel; other tensors use torch functions. No gradient
    passes.

    Raises:
        TypeError: z is not a floating-point tensor, or dtype is not FP8.
        ValueError: activation is unknown, or the last extent is not a multiple of 128.

    Example:
        h = quantize_gated(bsr_linear(x, gate_up))  # gate_up: made with sparse_collective.interleaved
        y = bsr_linear(h, down)
    """
    check_tensor("quantize_gated: z", z)
    if not z.is_floating_point() or z.dtype.itemsize == 1:
        raise TypeError(f"quantize_gated: z is {z.dtype}; it must be torch.bfloat16, float16, float32 or float64")
    if dtype not in FLOAT8:
        raise TypeError(f"quantize_gated: dtype is {dtype}; known are {', '.join(map(str, FLOAT8))}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"quantize_gated: activation {activation!r}; use None or one of {', '.join(ACTIVATIONS)}")
    if z.dim() < 1 or z.shape[-1] % (2 * GATE):
        raise ValueError(
            f"quantize_gated: z has shape {tuple(z.shape)}; its last extent must be a multiple of {2 * GATE}: "
            f"{GATE} columns of gate and {GATE} of up alternate"
        )
    with torch.no_grad():
        if z.numel() and (result := quantized_gated(z.detach(), activation, dtype)) is not None:
            return Quantized(*result)
        h = gate_of_rounded(z, activation)
        if h.dim() > 1:
            return quantize(h, dtype=dtype, per="row")
        return Quantized(*(t[0] for t in quantize(h[None], dtype=dtype, per="row")))


def shape_of_scale(shape, per: str) -> tuple:
    """Shape of the scale of a tensor with this shape."""
    if per == "tensor":
        return (1,)
    *batch, rows, columns = shape
    if per == "head":
        return tuple(batch)
    if per == "tokens":
        return *batch, -(-rows // BLOCK)
    if per in AXES:
        return (*batch, rows, 1) if per == "row" else (*batch, 1, columns)
    return *batch, -(-rows // BLOCKS[per][0]), -(-columns // BLOCKS[per][1])


def rounded(x: Tensor, largest: Tensor, dtype: torch.dtype, none: float) -> tuple[Tensor, Tensor]:
    """(x / scale in dtype, scale), where scale maps `largest` to the end of dtype's range.

    none: the scale to use if that would not be a normal number. It has no default, which torch.compile(dynamic=True)
    would treat as an input and trace every graph twice.
    """
    top = torch.finfo(dtype).max
    # A scale that is not a normal number is treated like that of zeros.
    scale = largest / torch.full_like(largest, top)  # dividing by a number, a GPU would multiply by its reciprocal
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.full_like(scale, none), scale)
    values = (x / scale).clamp(-top, top)  # a quotient may round to above the range, which is NaN in e4m3fn
    return values.to(dtype), scale


def rounded_by_blocks(x: Tensor, rows: int, columns: int, dtype: torch.dtype, none: float) -> tuple[Tensor, Tensor]:
    """`rounded` for x (..., R, C) with one scale per block, (..., R / rows, C / columns), rounded up."""
    R, C = x.shape[-2:]
    padding = (0, -C % columns, 0, -R % rows)
    if any(padding):
        if x.stride(-1) != 1 and x.stride(-2) == 1:  # padding would make it row-major
            values, scale = rounded_by_blocks(x.mT, columns, rows, dtype, none)
            return values.mT, scale.mT
        x = torch.nn.functional.pad(x, padding)
    blocks = x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # (..., R / rows, rows, C / columns, columns)
    values, scale = rounded(blocks, blocks.abs().amax((-3, -1), keepdim=True), dtype, none)
    # Round to dtype before removing the padding: in the other order torch 2.13 compiles wrong code for the CPU.
    return values.flatten(-2).flatten(-3, -2)[..., :R, :C], scale[..., 0, :, 0]
