"""Epilogue arguments of an op, their checks, and the facts that a kernel is compiled from."""

import torch
from torch.autograd.forward_ad import unpack_dual

from ...checks import check_scalar, check_tensor
from ...dtypes import FLOAT8, NAMES
from ...functions import ACTIVATIONS
from ...reference import BLOCK
from ...traced.memo import traced
from ...traced.program import FLOAT, Program
from ...traced.record import Traced
from ..config import EpilogueSpec

FLOAT8_TEXT = " and ".join(map(str, FLOAT8))


def acc_dtype(args) -> str:
    """Name of the accumulator's dtype of a call."""
    return "float32" if args.accumulation_dtype is None else NAMES[args.accumulation_dtype]


def spec_of(op: str, args, kind: str | None, scales: tuple, with_z: bool) -> EpilogueSpec:
    """The static half of a call's epilogue, with a bias and scales of these kinds (see bias_kind, scale_kind). Checks
    the terms that have no shape. As in torch.addmm, the residual is not read if beta is 0."""
    for name in ("alpha", "beta"):
        check_scalar(op, name, getattr(args, name))
    check_activation(op, args.activation)
    return EpilogueSpec(
        scale=args.alpha != 1.0,
        bias=kind,
        bias_dtype=NAMES.get(args.bias.dtype) if kind else None,
        residual=None if args.residual is None or args.beta == 0 else "any",
        activation=args.activation,
        function=None if args.epilogue is None else epilogue_program(op, args.epilogue),
        stores_z=with_z,
        gated=args.gated,
        scale_m=scales[0],
        scale_n=scales[1],
        scale_out=args.scale_out is not None,
        amax=args.amax is not None,
    )


def check_activation(op: str, activation) -> None:
    """Raise ValueError for an unknown activation."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{op}: unknown activation {activation!r}; known are {known} and None")


def bias_kind(op: str, bias, rows: int, cols: int, dtype: torch.dtype) -> str | None:
    """Return "col" for a bias (cols,) or (1, cols), one value per column of the result, and "row" for (rows, 1).

    dtype: dtype of the operands, which the bias may have, too.
    """
    if bias is None:
        return None
    check_tensor(f"{op}: bias", bias)
    if bias.dtype not in NAMES and bias.dtype != dtype:  # float64 with float64 operands
        raise TypeError(f"{op}: bias is {bias.dtype}; torch.bfloat16, torch.float16 and torch.float32 are supported")
    shape = tuple(bias.shape)
    if shape in ((cols,), (1, cols)):
        return "col"
    if shape == (rows, 1):
        return "row"
    raise ValueError(
        f"{op}: bias has shape {shape}; the result's last two extents are ({rows}, {cols}), so it must be "
        f"({cols},) for one value per column or ({rows}, 1) for one value per row"
    )


def scale_kind(op: str, name: str, scale, operand: torch.Tensor) -> str | None:
    """Return the kind of a dequantization scale, from its shape; None without one.

    | kind | scale of | shape |
    | --- | --- | --- |
    | "tensor" | any operand | one element |
    | "row" | a or x (..., M, K) | (..., M, 1); without batch dimensions also (M,) |
    | "column" | b (..., K, N) | (..., 1, N); without batch dimensions also (N,) |
    | "1x128" | gemm's a | (..., M, K / 128), rounded up |
    | "128x128" | gemm's b | (..., K / 128, N / 128), rounded up |

    Two kinds have the same shape only if K is at most 128; they mean the same then.
    """
    if scale is None:
        return None
    check_tensor(f"{op}: {name}", scale)
    if operand.dtype not in FLOAT8:
        raise TypeError(
            f"{op}: {name} of {operand.dtype} operands; {FLOAT8_TEXT} have scales (others: alpha, epilogue)"
        )
    if scale.dtype != torch.float32:
        raise TypeError(f"{op}: {name} is {scale.dtype}; scales are torch.float32 (cast with .float())")
    if scale.numel() == 1:
        return "tensor"
    of_rows = name != "scale_b"
    kind, extent = ("row", operand.shape[-2]) if of_rows else ("column", operand.shape[-1])
    whole = (*operand.shape[:-1], 1) if of_rows else (*operand.shape[:-2], 1, extent)
    if tuple(scale.shape) == whole or operand.dim() == 2 and tuple(scale.shape) == (extent,):
        return kind
    shape, of_k = tuple(scale.shape), -(-operand.shape[-1 if of_rows else -2] // BLOCK)
    short = f"({extent},) or " if operand.dim() == 2 else ""
    expected = f"one element, or be {short}{whole}, one for each {kind} of {name[-1]} {tuple(operand.shape)}"
    if op != "gemm":
        raise ValueError(f"{op}: {name} has shape {shape}; it must have {expected}")
    blocks = (*operand.shape[:-1], of_k) if of_rows else (*operand.shape[:-2], of_k, -(-extent // BLOCK))
    name_of_blocks = "1x128" if of_rows else "128x128"
    if shape == blocks:
        return name_of_blocks
    other = (*operand.shape[:-2], -(-extent // BLOCK), of_k) if of_rows else (*operand.shape[:-2], of_k, extent)
    hint = ""
    if shape == other:
        hint = (
            f". One for each {'128x128' if of_rows else '128x1'} of {name[-1]} is not supported: a has scales of "
            "1x128, and b of 128x128; where it is the other way round, multiply the transposes, "
            "gemm(b.mT, a.mT, scale_a=scale_b.mT, scale_b=scale_a.mT).mT"
        )
    raise ValueError(
        f"{op}: {name} has shape {shape}; it must have {expected}, or {blocks}, one for each {name_of_blocks} of "
        f"it{hint}"
    )


def check_fast_accum(op: str, value, dtype: torch.dtype, scales: tuple = ()) -> None:
    """Raise TypeError unless value is a bool, and ValueError if operands or scales of these kinds do not support it."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: use_fast_accum must be a bool, got {type(value).__name__}")
    if value and dtype not in FLOAT8:
        raise ValueError(
            f"{op}: use_fast_accum=True requires {FLOAT8_TEXT} operands, got {dtype}; others accumulate in FP32"
        )
    if value and ("1x128" in scales or "128x128" in scales):
        raise ValueError(
            f"{op}: use_fast_accum=True is not supported with block scales, which apply to promoted partial sums of "
            "128 elements of K; leave use_fast_accum out"
        )


def check_accumulation_dtype(op: str, value, dtype: torch.dtype) -> None:
    """Raise TypeError unless value is a dtype or None, and ValueError if operands do not support it."""
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{op}: accumulation_dtype must be a torch.dtype or None, got {type(value).__name__}")
    if dtype != torch.float16:
        also = f"; {FLOAT8_TEXT} support use_fast_accum=True" if dtype in FLOAT8 else ""
        raise ValueError(
            f"{op}: accumulation_dtype={value} requires torch.float16 operands, got {dtype}; others accumulate in FP32 "
            f"or wider (leave it out){also}"
        )
    if value not in (torch.float16, torch.float32):
        raise ValueError(f"{op}: accumulation_dtype must be torch.float32, the default, or torch.float16, got {value}")


def check_narrow(op: str, args, out_dtype: torch.dtype, default: torch.dtype) -> None:
    """Check scale_out and return_amax, which require an FP8 output, and that an FP8 output has no residual.

    Raises:
        TypeError: scale_out is not a tensor of torch.float32.
        ValueError: it does not have one element, or the output is not FP8; or the output is FP8 and there is a
            residual.
    """
    if args.scale_out is not None:
        check_one_number(op, "scale_out", args.scale_out)
    for name, value in (("scale_out", args.scale_out), ("return_amax", args.amax)):
        if value is not None and out_dtype not in FLOAT8:
            raise ValueError(f"{op}: {name} requires an output of {FLOAT8_TEXT}, got {out_dtype}; pass out_dtype=")
    if out_dtype in FLOAT8 and args.residual is not None:
        raise ValueError(
            f"{op}: residual is not supported with an output of {out_dtype}; add it to an output in {default}"
        )


def new_amax(op: str, return_amax, operand) -> torch.Tensor | None:
    """Memory for the largest magnitude of a call's result, float32 (1,); None if it is not to be returned."""
    if not isinstance(return_amax, bool):
        raise TypeError(f"{op}: return_amax must be True or False, got {return_amax!r}")
    device = getattr(operand, "device", None)  # None if it is not a tensor, which the call will report
    return torch.empty(1, dtype=torch.float32, device=device) if return_amax else None


def check_one_number(op: str, name: str, value) -> None:
    """Raise TypeError unless value is a tensor of torch.float32, ValueError unless it has one element."""
    check_tensor(f"{op}: {name}", value)
    if value.dtype != torch.float32:
        raise TypeError(f"{op}: {name} is {value.dtype}; it must be torch.float32")
    if value.numel() != 1:
        raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}; it must have one element")


def epilogue_program(op: str, function) -> Program:
    """The program of a user's epilogue function, traced by torch once per state of the function.

    Raises:
        TypeError: it is not a function of one tensor, does something that a kernel cannot, or returns something other
            than a floating-point tensor of its argument's shape; the message names the line.
        RuntimeError: it reads a captured tensor that requires a gradient, while gradients are enabled.
    """
    return function if isinstance(function, Program) else traced_epilogue(op, function).program


def traced_epilogue(op: str, function) -> Traced:
    """Trace a function that is not a Program; the result also has the tensors that it reads."""
    what = f"{op}: the epilogue function"
    if not callable(function):
        raise TypeError(f"{what} must be a function of one tensor, got {type(function).__name__}")
    found = traced(function, what, ("float32",), (2, 3), torch.device("cpu"))
    if found.program.dtype not in FLOAT:
        raise TypeError(
            f"{what} returns a tensor of torch.{found.program.dtype}; it must be of a floating-point dtype (use "
            ".float(), or torch.where(condition, x, y) with a number for y)"
        )
    if torch.is_grad_enabled():
        for t in found.used:
            if t.requires_grad or unpack_dual(t).tangent is not None:
                write = "capture a Python number" if op == "torch.compile" else "write scale.detach().item() in it"
                raise RuntimeError(
                    f"{what} reads a captured tensor that requires a gradient, which the kernel does not compute. "
                    f"Apply it to the result instead, as in gemm(a, b) * scale; or, to treat it as a constant, {write}"
                )
    return found
