"""Elementwise functions for epilogues, beside torch's own, on tensors and Python numbers alike.

An epilogue function is written once, with these, with torch's functions and methods, and with Python's operators. It is
called with a tensor, traced by torch, and compiled into the kernel, where it computes on the fp32 accumulators:

    from cute_kernels import functions as F

    def squared_relu(x):
        return F.maximum(x, 0.0) * F.maximum(x, 0.0)

    gemm(a, b, epilogue=squared_relu)
"""

import torch
import torch.nn.functional as nnf

exp, exp2, log, sqrt, rsqrt = torch.exp, torch.exp2, torch.log, torch.sqrt, torch.rsqrt
tanh, erf, sin, cos = torch.tanh, torch.erf, torch.sin, torch.cos
absolute, reciprocal = torch.abs, torch.reciprocal
relu, sigmoid, silu, gelu = torch.relu, torch.sigmoid, nnf.silu, nnf.gelu


def where(condition, x, y):
    """x where the condition holds, else y; either may be a Python number, and two numbers make an fp32 tensor."""
    if not isinstance(x, torch.Tensor) and not isinstance(y, torch.Tensor):
        x = torch.tensor(x, dtype=torch.float32, device=condition.device)
    return torch.where(condition, x, y)


def maximum(x, y):
    """The larger of two tensors or of a tensor and a number; NaN if one of them is."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.maximum(x, y)
    return torch.clamp(x, min=y) if isinstance(x, torch.Tensor) else torch.clamp(y, min=x)


def minimum(x, y):
    """The smaller of two tensors or of a tensor and a number; NaN if one of them is."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.minimum(x, y)
    return torch.clamp(x, max=y) if isinstance(x, torch.Tensor) else torch.clamp(y, max=x)


def gelu_tanh(x):
    """GELU by its tanh approximation."""
    return nnf.gelu(x, approximate="tanh")


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
