"""From wide numbers to 8-bit floats and their scales: by kernels (quantization), or in torch's own functions, on any
device."""

import torch
from torch import Tensor

from .checks import check_tensor
from .dtypes import FLOAT8
from .functions import ACTIVATIONS
from .quantization.config import NO_TOKENS
from .quantization.eager import quantized, quantized_gated
from .quantized import Quantized
from .reference import BLOCK, GATE, gate_of_rounded

AXES = {"tensor": None, "row": -1, "column": -2, "head": (-2, -1)}  # what the largest magnitude is taken over
BLOCKS = {"1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK)}  # rows and columns of x that share a scale


def quantize(x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, per: str = "tensor") -> Quantized:
    """(values, scale) such that x is about values * scale, with the largest magnitude at the end of dtype's range.

    gemm, the block-sparse GEMMs and attention take the pair itself in the place of an operand, see Quantized.

    Args:
        x: (..., rows, columns) of a floating-point dtype, on any device.
        dtype: float8_e4m3fn (magnitudes up to 448) or float8_e5m2 (57344, with two bits of mantissa instead of three).
        per: "tensor", one scale; "row", one for each row, as gemm's scale_a; "column", one for each column, as scale_b;
            "head", one for each matrix of rows and columns, as attention's q_descale, k_descale and v_descale of
            (B, heads, length, head_dim); "tokens", one for each 128 rows of such a matrix, as the same; "1x128", one
            for each row and 128 columns, as scale_a; "128x128", one for each so many rows and columns, as scale_b: of
            an (N, K) weight that is multiplied as values.mT with scale.mT.

    Returns:
        values: of x's shape, in dtype, each rounded to nearest from x / scale; contiguous along the mode that x is.
            With scales of blocks the other modes' strides may be those of whole blocks.
        scale: float32, (1,), (..., rows, 1) or (..., 1, columns); per head (...); per tokens (..., rows / 128); of
            blocks (..., rows, columns / 128) or (..., rows / 128, columns / 128), extents rounded up. 1 where all
            numbers are 0; of tokens 2 ** -24, so that no block of zeros has the largest scale of its head.

    NaN makes all values that share its scale NaN. An infinity makes that scale infinite: its own value is NaN, those of
    finite numbers are 0. No gradient passes: values are detached.

    Raises:
        TypeError: x is no floating-point tensor, or dtype is no such type.
        ValueError: per is none of these, or x has fewer than two dimensions and per is not "tensor".
    """
    check_tensor("quantize: x", x)
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise TypeError(f"quantize: x is {x.dtype}; it must be torch.bfloat16, float16, float32 or float64")
    if dtype not in FLOAT8:
        raise TypeError(f"quantize: dtype is {dtype}; known are {', '.join(map(str, FLOAT8))}")
    if per not in (known := (*AXES, "tokens", *BLOCKS)):
        raise ValueError(f"quantize: per is {per!r}; known are {', '.join(map(repr, known))}")
    if per != "tensor" and x.dim() < 2:
        raise ValueError(f"quantize: x has {x.dim()} dimensions; a scale per {per} needs 2")
    with torch.no_grad():
        if x.numel() == 0:
            ones = torch.ones(shape_of_scale(x.shape, per), dtype=torch.float32, device=x.device)
            return Quantized(torch.empty_like(x, dtype=dtype), ones)
        if (found := quantized(x.detach(), dtype, per)) is not None:
            return Quantized(*found)
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
    z: Tensor, *, activation: str | None = "silu", dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantized:
    """quantize(h, per="row") of h = activation(gate) * up, in one kernel: the middle of a gated feed-forward layer.

    Args:
        z: (..., 2 H) of a floating-point dtype: of its columns 64 are of the gate, 64 of what it multiplies, and so on,
            as a weight made by sparse_collective.interleaved gives them; H a multiple of 64.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        values: (..., H) in dtype. scale: float32, (..., 1). h is computed in fp32, of float64 in float64, and rounded
            to z's dtype first.

    The kernels serve contiguous bfloat16 and float16 on sm_89 and sm_90; torch's functions serve other tensors. No
    gradient passes.

    Raises:
        TypeError: z is no floating-point tensor, or dtype is no such type.
        ValueError: an activation that is not known, or a last extent that is no multiple of 128.
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
            f"quantize_gated: z has shape {tuple(z.shape)}; its last extent must be a multiple of {2 * GATE}, of which "
            f"{GATE} columns of the gate and {GATE} that it multiplies come in turn"
        )
    with torch.no_grad():
        if z.numel() and (found := quantized_gated(z.detach(), activation, dtype)) is not None:
            return Quantized(*found)
        h = gate_of_rounded(z, activation)
        if h.dim() > 1:
            return quantize(h, dtype=dtype, per="row")
        return Quantized(*(t[0] for t in quantize(h[None], dtype=dtype, per="row")))


def shape_of_scale(shape, per: str) -> tuple:
    """Of a tensor of such a shape."""
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
    """(x / scale in dtype, scale), with the scales that make the end of its range of these magnitudes.

    none: the scale where that is no normal number. It has no default: torch.compile(dynamic=True) would take that for
    an input, and trace every graph twice.
    """
    top = torch.finfo(dtype).max
    # Division by the largest finite number; one that leaves no normal scale is as good as zeros.
    scale = largest / torch.full_like(largest, top)  # by a number a GPU would multiply by its reciprocal
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.full_like(scale, none), scale)
    values = (x / scale).clamp(-top, top)  # a quotient may round to above the range, of which e4m3fn makes NaN
    return values.to(dtype), scale


def rounded_by_blocks(x: Tensor, rows: int, columns: int, dtype: torch.dtype, none: float) -> tuple[Tensor, Tensor]:
    """`rounded` of x (..., R, C), with a scale for each block, (..., R / rows, C / columns), rounded up."""
    R, C = x.shape[-2:]
    padding = (0, -C % columns, 0, -R % rows)
    if any(padding):
        if x.stride(-1) != 1 and x.stride(-2) == 1:  # padding would turn it
            values, scale = rounded_by_blocks(x.mT, columns, rows, dtype, none)
            return values.mT, scale.mT
        x = torch.nn.functional.pad(x, padding)
    blocks = x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # (..., R / rows, rows, C / columns, columns)
    values, scale = rounded(blocks, blocks.abs().amax((-3, -1), keepdim=True), dtype, none)
    # Rounded to dtype while whole: with the padding cut off before, torch 2.13 compiled wrong numbers for the CPU.
    return values.flatten(-2).flatten(-3, -2)[..., :R, :C], scale[..., 0, :, 0]
