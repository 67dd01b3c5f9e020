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


def absolute(x):
    """|x|; a NaN stays one."""
    if isinstance(x, torch.Tensor):
        return torch.abs(x)
    import cutlass.cute as cute

    return cute.math.absf(x)


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


def _approximate(name: str, x):
    """cute.math's `name` by its one approximate instruction, element by element: the intrinsics take no vectors."""
    import cutlass
    import cutlass.cute as cute

    values = cute.make_rmem_tensor(x.shape, cutlass.Float32)
    values.store(x)
    for v in range(cute.size(values)):
        values[v] = getattr(cute.math, name)(values[v], approx=True, ftz=True)
    return values.load()


def reciprocal(x):
    """1 / x; in a kernel within one unit in the last place, by one instruction instead of a division's ten."""
    return torch.reciprocal(x) if isinstance(x, torch.Tensor) else _approximate("rcp", x)


def _exp2(x):
    """2 ** x; in a kernel by one instruction, and 0 below 2 ** -126."""
    return torch.exp2(x) if isinstance(x, torch.Tensor) else _approximate("exp2", x)


def sigmoid(x):
    """1 / (1 + exp(-x)); in a kernel within some 1e-7 * (1 + |x|) of that."""
    if isinstance(x, torch.Tensor):
        return torch.sigmoid(x)
    return reciprocal(1.0 + _exp2(-1.4426950408889634 * x))


def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


# log2(Phi(-u)) as a polynomial of u >= 0: fitted by least squares, the weights raised where gelu's error, with that of
# fp32's rounding, was largest. gelu errs by 7e-7 at most, where torch's own fp32 formula errs by 1e-6. The last
# coefficient decides beyond u = 6, where it must be negative.
_LOG2_TAIL = (-1.0000454187393188, -1.150726556777954, -0.4601375162601471)
_LOG2_TAIL += (-0.05168679729104042, 0.007026067469269037, -0.00046467085485346615)


def gelu(x):
    """Exact GELU: x * Phi(x) with the error function; in a kernel x / 2 + u / 2 - u * Phi(-u) with u = |x|.

    libdevice's erf, as exact as fp32 can be, made the epilogue of a tile longer than its products. This takes nine
    instructions, of which one is an exponential.
    """
    if isinstance(x, torch.Tensor):
        return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))
    u = absolute(x)
    exponent = u * _LOG2_TAIL[-1] + _LOG2_TAIL[-2]
    for coefficient in _LOG2_TAIL[-3::-1]:
        exponent = exponent * u + coefficient
    return u * (0.5 - _exp2(exponent)) + 0.5 * x


def gelu_tanh(x):
    """GELU by its tanh approximation, as torch's gelu(approximate="tanh"): 1 + tanh(v) = 2 sigmoid(2 v)."""
    # -2 v log2(e), with v = sqrt(2 / pi) (x + 0.044715 x^3)
    exponent = x * (x * x * -0.1029432395800235 - 2.302208198144325)
    return x * reciprocal(1.0 + _exp2(exponent))


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
