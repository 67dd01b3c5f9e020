"""Quantized: FP8 values with their dequantization scale, which ops take in the place of an operand."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# The argument for the scale of each operand that may be quantized.
SCALE_OF = {"a": "scale_a", "b": "scale_b", "x": "scale_x", "q": "q_descale", "k": "k_descale", "v": "v_descale"}


class Quantized(NamedTuple):
    """FP8 values and their float32 scale, as quantize returns them: values * scale is about the original tensor.

    An op takes the pair in the place of the operand: gemm(quantize(x, per="row"), quantize(w, per="row").mT) is
    gemm(x.values, w.values.mT, scale_a=x.scale, scale_b=w.scale.mT) of these two.
    """

    values: Tensor
    scale: Tensor

    @property
    def mT(self) -> Quantized:
        """The transposed matrix; a scale for each row becomes one for each column."""
        return Quantized(self.values.mT, self.scale.mT if self.scale.dim() > 1 else self.scale)


def unpacked(op: str, name: str, operand, scale) -> tuple:
    """(values, scale) of an operand, which is a Quantized or has `scale`.

    Raises:
        ValueError: it is a Quantized, and a scale is given, too.
    """
    if type(operand) is not Quantized:
        return operand, scale
    if scale is not None:
        scale_name = SCALE_OF[name]
        raise ValueError(
            f"{op}: {scale_name} is given for a quantized {name}, which has its own scale; leave {scale_name} out"
        )
    return operand.values, operand.scale


def unpacked_arguments(op: str, arguments: dict) -> dict:
    """The arguments of a call by name, with all Quantized unpacked."""
    found = dict(arguments)
    for name, operand in arguments.items():
        if type(operand) is Quantized and name in SCALE_OF:
            scale = SCALE_OF[name]
            found[name], found[scale] = unpacked(op, name, operand, arguments.get(scale))
    return found
