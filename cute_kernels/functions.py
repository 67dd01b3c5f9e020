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


def _each(function, x):
    """`function` of each element of a fragment: the intrinsics that are one instruction take no vectors."""
    import cutlass
    import cutlass.cute as cute

    values = cute.make_rmem_tensor(x.shape, cutlass.Float32)
    values.store(x)
    for v in range(cute.size(values)):
        values[v] = function(values[v])
    return values.load()


def _approximate(name: str, x):
    """cute.math's `name` of a fragment by its one approximate instruction."""
    import cutlass.cute as cute

    return _each(lambda value: getattr(cute.math, name)(value, approx=True, ftz=True), x)


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


def gelu(x):
    """Exact GELU: x * Phi(x) with the error function.

    In a kernel Phi's tail is t (a1 + ... + a5 t^4) exp(-x^2 / 2) / 2 with t = 1 / (1 + p |x| / sqrt 2): formula 7.1.26
    of Abramowitz and Stegun's Handbook of Mathematical Functions, within 7.5e-8 of Phi. libdevice's erf, as exact as
    fp32 can be, made the epilogue of a tile longer than its products.
    """
    if isinstance(x, torch.Tensor):
        return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))
    import cutlass.cute as cute

    size = cute.math.absf(x)
    # Beyond 16 the tail is 0 in fp32; infinity times 0 would not be.
    z = _each(lambda value: cute.arch.fmin(value, 16.0), size)
    t = reciprocal(0.23164189 * z + 1.0)
    tail = t * (0.12741479 + t * (-0.14224836 + t * (0.71070687 + t * (-0.72657601 + t * 0.53070271))))
    return 0.5 * (x + size) - z * (tail * _exp2(z * (-0.72134752 * z)))


def gelu_tanh(x):
    """GELU by its tanh approximation, as torch's gelu(approximate="tanh"): 1 + tanh(u) = 2 sigmoid(2 u)."""
    return x * sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x))


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
