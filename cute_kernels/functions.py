"""Elementwise functions that mean the same in a kernel's epilogue and on a torch tensor.

An epilogue function is written once with these and with Python's operators. In a kernel it sees a fragment of fp32
accumulators (a CuTe `TensorSSA`); in the CPU reference it sees an fp32 `torch.Tensor`:

    from cute_kernels import functions as F

    def squared_relu(x):
        return F.maximum(x, 0.0) * F.maximum(x, 0.0)

    gemm(a, b, epilogue=squared_relu)
"""

import torch


def _unary(name: str):
    def function(x):
        if isinstance(x, torch.Tensor):
            return getattr(torch, name)(x)
        import cutlass.cute as cute

        return getattr(cute.math, name)(x)

    function.__name__ = name
    function.__doc__ = f"Elementwise {name} of a torch tensor or of an accumulator fragment."
    return function


exp = _unary("exp")
exp2 = _unary("exp2")
log = _unary("log")
sqrt = _unary("sqrt")
rsqrt = _unary("rsqrt")
tanh = _unary("tanh")
erf = _unary("erf")
sin = _unary("sin")
cos = _unary("cos")


def where(condition, x, y):
    """x where the condition holds, else y; x and y may be Python numbers."""
    if isinstance(condition, torch.Tensor):
        like = next((v for v in (x, y) if isinstance(v, torch.Tensor)), None)
        dtype = like.dtype if like is not None else torch.float32
        x, y = (torch.as_tensor(v, dtype=dtype, device=condition.device) for v in (x, y))
        return torch.where(condition, x, y)
    import cutlass
    import cutlass.cute as cute

    x, y = (cutlass.Float32(v) if isinstance(v, (int, float)) else v for v in (x, y))
    return cute.where(condition, x, y)


def maximum(x, y):
    """The larger of a fragment x and a number or fragment y; NaN in x stays NaN."""
    return where(x < y, y, x)


def minimum(x, y):
    """The smaller of a fragment x and a number or fragment y; NaN in x stays NaN."""
    return where(x > y, y, x)


def relu(x):
    """max(x, 0)."""
    return maximum(x, 0.0)


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-x))


def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + exp(-x))


def gelu(x):
    """Exact GELU: x * Phi(x) with the error function."""
    return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))


def gelu_tanh(x):
    """GELU by its tanh approximation, as torch's gelu(approximate="tanh")."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
