"""Activations of fp32 accumulators in a kernel, by formulas that take few instructions.

Each takes one accumulator, or a fragment of them (a CuTe `TensorSSA`), whose operations then come one after the other,
each for all accumulators. With GELU beside a residual that order leaves registers where the other one spills (SASS).
"""

import cutlass.cute as cute
from cutlass import Float32

LOG2E = 1.4426950408889634


def _each(function, x):
    """An instruction that takes no vectors, on an accumulator or on each of a fragment."""
    if not isinstance(x, cute.TensorSSA):
        return function(x)
    values = cute.make_rmem_tensor(x.shape, Float32)
    values.store(x)
    for v in range(cute.size(values)):
        values[v] = function(values[v])
    return values.load()


def _exp2(x):
    """2 ** x by one instruction; 0 below 2 ** -126."""
    return _each(lambda v: cute.math.exp2(v, approx=True, ftz=True), x)


def reciprocal(x):
    """1 / x by one instruction instead of a division's ten, within one unit in the last place."""
    return _each(lambda v: cute.math.rcp(v, approx=True, ftz=True), x)


def relu(x):
    """max(x, 0); a NaN stays one."""
    return _each(lambda v: cute.arch.fmax(v, 0.0, nan=True), x)


def sigmoid(x):
    """1 / (1 + exp(-x)), within some 1e-7 * (1 + |x|)."""
    return reciprocal(1.0 + _exp2(-LOG2E * x))


def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


# log2(Phi(-u)) as a polynomial of u >= 0: fitted by least squares, the weights raised where gelu's error, with that of
# fp32's rounding, was largest. gelu errs by 7.4e-7 at most, torch's own fp32 gelu on a CPU by 3.7e-7 to 1.07e-6, by the
# machine. The last coefficient decides beyond u = 6, where it must be negative.
_LOG2_TAIL = (-1.0000454187393188, -1.150726556777954, -0.4601375162601471)
_LOG2_TAIL += (-0.05168679729104042, 0.007026067469269037, -0.00046467085485346615)


def _tail(u):
    """Phi(-u) of u >= 0."""
    exponent = u * _LOG2_TAIL[-1] + _LOG2_TAIL[-2]
    for coefficient in _LOG2_TAIL[-3::-1]:
        exponent = exponent * u + coefficient
    return _exp2(exponent)


def gelu(x):
    """Exact GELU, x * Phi(x), as x / 2 + u / 2 - u * Phi(-u) with u = |x|.

    libdevice's erf, as exact as fp32 can be, made the epilogue of a tile longer than its products. This takes nine
    instructions, of which one is an exponential.
    """
    u = cute.math.absf(x)
    return u * (0.5 - _tail(u)) + 0.5 * x


def gelu_tanh(x):
    """GELU by its tanh approximation: 1 + tanh(v) = 2 sigmoid(2 v)."""
    # -2 v log2(e), with v = sqrt(2 / pi) (x + 0.044715 x^3)
    exponent = x * (x * x * -0.1029432395800235 - 2.302208198144325)
    return x * reciprocal(1.0 + _exp2(exponent))


# exp(u^2 / 2) (Phi(-u) - u phi(u)) as a polynomial of u >= 0, by the powers of u: fitted by weighted least squares.
_SLOPE = (0.5, -0.797788414, 0.248991703, -0.129120119, 0.0549616695, -0.0179462812, 0.00404723027, -0.000543383363)
_SLOPE += (3.20701814e-05,)
_SLOPE_END = 14.0  # where the exponential is 0; the polynomial must not overflow


def gelu_slope(x):
    """The derivative of gelu, Phi(x) + x phi(x), of one accumulator; for 16-bit results.

    That of -u is exp(-u^2 / 2) times a function which a polynomial approximates, and that of u is 1 less it: 15
    instructions with one exponential. Errs by 3e-6, below 0 relatively by 5e-5 to x = -3 and 4e-4 to x = -4.
    """
    u = cute.arch.fmin(cute.math.absf(x), _SLOPE_END, nan=True)
    factor = u * _SLOPE[-1] + _SLOPE[-2]
    for coefficient in _SLOPE[-3::-1]:
        factor = factor * u + coefficient
    above = 0.5 - _exp2(u * u * (-0.5 * LOG2E)) * factor
    return 0.5 + cute.math.copysign(above, x)


def gelu_tanh_slope(x):
    """The derivative of gelu_tanh: s + x s (1 - s) 2 v', s = sigmoid(2 v)."""
    square = x * x
    s = reciprocal(1.0 + _exp2(x * (square * -0.1029432395800235 - 2.302208198144325)))
    return s + x * s * (1.0 - s) * (square * 0.2140644430230464 + 1.5957691216057308)


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
