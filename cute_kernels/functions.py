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


# -log2(e) times the polynomial of z = x * x whose product with x is log(Phi(x) / Phi(-x)): fitted by least squares, the
# weights raised where gelu's error was largest. gelu errs by 6e-7 at most, half of what torch's own fp32 formula does.
# The last coefficient decides beyond |x| = 6, where it must be negative.
_LOGIT = (-2.3022072035950445, -0.10483858123418538, 9.559291552588941e-05, 1.5938940810355266e-04)
_LOGIT += (-1.1452430881703205e-05, 3.850450616938493e-07, -5.209910337208762e-09)


def gelu(x):
    """Exact GELU: x * Phi(x) with the error function; in a kernel Phi(x) is the sigmoid of a polynomial.

    libdevice's erf, as exact as fp32 can be, made the epilogue of a tile longer than its products.
    """
    if isinstance(x, torch.Tensor):
        return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))
    z = x * x
    logit = z * _LOGIT[-1] + _LOGIT[-2]
    for coefficient in _LOGIT[-3::-1]:
        logit = logit * z + coefficient
    return x * reciprocal(1.0 + _exp2(x * logit))


def gelu_tanh(x):
    """GELU by its tanh approximation, as torch's gelu(approximate="tanh"): 1 + tanh(u) = 2 sigmoid(2 u)."""
    return x * sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x))


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
