"""Elementwise functions for epilogues, on tensors and Python numbers, in addition to torch's own.

An epilogue function may use these, torch functions and methods, and Python operators. torch traces it with a tensor,
and it is compiled into the kernel, where it is applied to the FP32 accumulators:

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
    """x where the condition is true, else y. Either may be a Python number; with two numbers the result is float32."""
    if not isinstance(x, torch.Tensor) and not isinstance(y, torch.Tensor):
        x = torch.tensor(x, dtype=torch.float32, device=condition.device)
    return torch.where(condition, x, y)


def maximum(x, y):
    """The larger of two tensors or of a tensor and a number; propagates NaN."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.maximum(x, y)
    return torch.clamp(x, min=y) if isinstance(x, torch.Tensor) else torch.clamp(y, min=x)


def minimum(x, y):
    """The smaller of two tensors or of a tensor and a number; propagates NaN."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.minimum(x, y)
    return torch.clamp(x, max=y) if isinstance(x, torch.Tensor) else torch.clamp(y, max=x)


def gelu_tanh(x):
    """GELU with the tanh approximation."""
    return nnf.gelu(x, approximate="tanh")


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
