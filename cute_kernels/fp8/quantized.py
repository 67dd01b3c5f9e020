"""Quantized: FP8 values with their dequantization scale, accepted by ops in place of an operand."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# The argument for the scale of each operand that may be quantized.
SCALE_OF = {"a": "scale_a", "b": "scale_b", "x": "scale_x", "q": "q_descale", "k": "k_descale", "v": "v_descale"}


class Quantized(NamedTuple):
    """FP8 values and their float32 scale, as returned by quantize; values * scale approximates the original tensor.

    Ops accept the pair in place of an operand. With x = quantize(..., per="row") and w = quantize(..., per="row"),
    gemm(x, w.mT) is gemm(x.values, w.values.mT, scale_a=x.scale, scale_b=w.scale.mT).
    """

    values: Tensor
    scale: Tensor

    @property
    def mT(self) -> Quantized:
        """The transposed matrix; per-row scales become per-column scales."""
        return Quantized(self.values.mT, self.scale.mT if self.scale.dim() > 1 else self.scale)


def unpacked(op: str, name: str, operand, scale) -> tuple:
    """(values, scale) of an operand: those of a Quantized, otherwise the operand and `scale`.

    Raises:
        ValueError: the operand is a Quantized and `scale` is not None.
    """
    if type(operand) is not Quantized:
        return operand, scale
    if scale is not None:
        scale_name = SCALE_OF[name]
        raise ValueError(
            f"{op}: {scale_name} must be None for a Quantized {name}, which has its own scale; leave {scale_name} out"
        )
    return operand.values, operand.scale


def unpacked_arguments(op: str, arguments: dict) -> dict:
    """Arguments of a call by name, with each Quantized unpacked."""
    result = dict(arguments)
    for name, operand in arguments.items():
        if type(operand) is Quantized and name in SCALE_OF:
            scale = SCALE_OF[name]
            result[name], result[scale] = unpacked(op, name, operand, arguments.get(scale))
    return result
