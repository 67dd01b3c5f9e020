"""Activations of one fp32 accumulator in a kernel, by formulas that take few instructions."""

import cutlass.cute as cute
from cutlass import Float32

LOG2E = 1.4426950408889634


def _exp2(x: Float32) -> Float32:
    """2 ** x by one instruction; 0 below 2 ** -126."""
    return cute.math.exp2(x, approx=True, ftz=True)


def reciprocal(x: Float32) -> Float32:
    """1 / x by one instruction instead of a division's ten, within one unit in the last place."""
    return cute.math.rcp(x, approx=True, ftz=True)


def relu(x: Float32) -> Float32:
    """max(x, 0); a NaN stays one."""
    return cute.arch.fmax(x, 0.0, nan=True)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)), within some 1e-7 * (1 + |x|)."""
    return reciprocal(1.0 + _exp2(-LOG2E * x))


def silu(x: Float32) -> Float32:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


# log2(Phi(-u)) as a polynomial of u >= 0: fitted by least squares, the weights raised where gelu's error, with that of
# fp32's rounding, was largest. gelu errs by 7e-7 at most, where torch's own fp32 formula errs by 1e-6. The last
# coefficient decides beyond u = 6, where it must be negative.
_LOG2_TAIL = (-1.0000454187393188, -1.150726556777954, -0.4601375162601471)
_LOG2_TAIL += (-0.05168679729104042, 0.007026067469269037, -0.00046467085485346615)


def gelu(x: Float32) -> Float32:
    """Exact GELU, x * Phi(x), as x / 2 + u / 2 - u * Phi(-u) with u = |x|.

    libdevice's erf, as exact as fp32 can be, made the epilogue of a tile longer than its products. This takes nine
    instructions, of which one is an exponential.
    """
    u = cute.math.absf(x)
    exponent = u * _LOG2_TAIL[-1] + _LOG2_TAIL[-2]
    for coefficient in _LOG2_TAIL[-3::-1]:
        exponent = exponent * u + coefficient
    return u * (0.5 - _exp2(exponent)) + 0.5 * x


def gelu_tanh(x: Float32) -> Float32:
    """GELU by its tanh approximation: 1 + tanh(v) = 2 sigmoid(2 v)."""
    # -2 v log2(e), with v = sqrt(2 / pi) (x + 0.044715 x^3)
    exponent = x * (x * x * -0.1029432395800235 - 2.302208198144325)
    return x * reciprocal(1.0 + _exp2(exponent))


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
