"""A Program on torch tensors: what CPU tensors compute, and block masks look at on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from .program import TORCH_DTYPES, Load, Node, Program

OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs,
    "max": torch.maximum, "min": torch.minimum, "pow": torch.pow, "atan2": torch.atan2,
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": torch.remainder, "fmod": torch.fmod,
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2,
    "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "rcp": torch.reciprocal,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh, "sinh": torch.sinh, "cosh": torch.cosh,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "erf": torch.erf, "erfc": torch.erfc,
    "sigmoid": torch.sigmoid, "silu": nnf.silu, "gelu": nnf.gelu,
    "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "gelu_slope": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x),
    "gelu_tanh_slope": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh"),
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc,
    "isnan": torch.isnan,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "where": torch.where,
}  # fmt: skip


def evaluate(program: Program, inputs: Sequence[Tensor], tensors: Sequence = ()) -> Tensor:
    """The result, of the shape that the inputs broadcast to or of one that does.

    tensors: those that the program reads, and then its arguments, Python numbers.

    Inputs of the program's dtypes; or, in place of float32, of float64, and then all is computed in float64.

    Raises:
        IndexError: an index lies outside of a tensor; on a GPU torch asserts that on the device instead.
    """
    wide = any(t.dtype is torch.float64 for t in inputs)
    dtypes = TORCH_DTYPES | {"float32": torch.float64} if wide else TORCH_DTYPES
    values = list(inputs)
    for node in program.nodes:
        dtype = dtypes[node.dtype]
        if node.op == "const":
            # torch.where and indexing would copy a CPU tensor to the GPU, which a CUDA graph cannot capture.
            value = torch.full((), node.args[0], dtype=dtype, device=inputs[0].device)
        elif node.op == "argument":
            value = torch.full((), tensors[len(program.tensors) + node.args[0]], dtype=dtype, device=inputs[0].device)
        elif node.op == "load":
            load = Load(*node.args)
            value = tensors[load.slot][tuple(values[i].long() for i in load.indices)].to(dtype)
        elif node.op == "cast":
            value = values[node.args[0]].to(dtype)
        else:
            value = OPERATIONS[node.op](*(values[i] for i in node.args))
        values.append(value)
    return values[program.output]


def fold(op: str, dtype: str, constants: Sequence[Node]) -> int | float | bool:
    """The result of an operation on constants."""
    values = [torch.tensor(node.args[0], dtype=TORCH_DTYPES[node.dtype], device="cpu") for node in constants]
    result = values[0].to(TORCH_DTYPES[dtype]) if op == "cast" else OPERATIONS[op](*values)
    return result.item()
