"""What a product adds to a @ b: an op's epilogue arguments, their checks, and the facts that they become."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..checks import check_scalar, check_tensor
from ..dtypes import NAMES
from ..functions import ACTIVATIONS
from ..traced.memo import traced
from ..traced.program import FLOAT, Program
from .config import EpilogueSpec


@dataclass(frozen=True, slots=True)
class Terms:
    """The epilogue arguments of a call, as gemm documents them."""

    bias: torch.Tensor | None = None
    activation: str | None = None
    residual: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    epilogue: Callable | None = None
    with_z: bool = False  # whether what enters the activation is a second result
    gated: bool = False  # see EpilogueSpec

    def spec(self, op: str, kind: str | None) -> EpilogueSpec:
        """The static half of the epilogue, with a bias of this kind (see bias_kind); checks what has no shape."""
        for name in ("alpha", "beta"):
            check_scalar(op, name, getattr(self, name))
        check_activation(op, self.activation)
        return EpilogueSpec(
            scale=self.alpha != 1.0,
            bias=kind,
            bias_dtype=NAMES.get(self.bias.dtype) if kind else None,
            residual=None if self.residual is None else "any",
            activation=self.activation,
            function=None if self.epilogue is None else epilogue_program(op, self.epilogue),
            stores_z=self.with_z,
            gated=self.gated,
        )


def check_activation(op: str, activation) -> None:
    """ValueError for one that is not known."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{op}: unknown activation {activation!r}; known are {known} and None")


def bias_kind(op: str, bias, rows: int, cols: int, dtype: torch.dtype) -> str | None:
    """ "col" for a bias (cols,) or (1, cols), one value per column of the result; "row" for (rows, 1).

    dtype: of the operands; the bias may be of it, too.
    """
    if bias is None:
        return None
    check_tensor(f"{op}: bias", bias)
    if bias.dtype not in NAMES and bias.dtype != dtype:  # float64 beside float64 operands
        raise TypeError(f"{op}: bias is {bias.dtype}; torch.bfloat16, torch.float16 and torch.float32 are supported")
    shape = tuple(bias.shape)
    if shape in ((cols,), (1, cols)):
        return "col"
    if shape == (rows, 1):
        return "row"
    raise ValueError(
        f"{op}: bias has shape {shape}; the result's last two extents are ({rows}, {cols}), so it must be "
        f"({cols},) for one value a column or ({rows}, 1) for one value a row"
    )


def epilogue_program(op: str, function) -> Program:
    """What a user's epilogue function computes, traced by torch once for each state that the function can be in.

    Raises:
        TypeError: it is no function of one tensor, does what a kernel cannot, or returns something other than a
            floating-point tensor of its argument's shape; the message names the line.
    """
    if isinstance(function, Program):
        return function
    what = f"{op}: the epilogue function"
    if not callable(function):
        raise TypeError(f"{what} must be a function of one tensor, got {type(function).__name__}")
    program = traced(function, what, ("float32",), (2, 3), torch.device("cpu")).program
    if program.dtype not in FLOAT:
        raise TypeError(
            f"{what} returns a tensor of torch.{program.dtype}; it must be of a floating-point dtype (use .float(), or "
            "torch.where(condition, x, y) with a number for y)"
        )
    return program
