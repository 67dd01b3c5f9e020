"""gemm: what a torch user calls.

Under torch.compile the call goes through the registered ops `cute_kernels::gemm` and `cute_kernels::gemm_out`, of a
Sparse24 through `cute_kernels::sparse24_gemm` and its `_out`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import eager
from .checks import narrow, scaled, watched
from .gradients import differentiable
from .matmul.terms import epilogue_program, new_amax
from .quantized import Quantized, unpacked
from .runtime.autocast import any_autocast, cast_product
from .runtime.front import NeedsDispatcher, dispatched, hidden
from .sparse24 import eager as sparse24
from .sparse24.format import Sparse24

SPECIAL = frozenset({Sparse24, Quantized})  # operands that are no tensors


def gemm(
    a: Tensor | Sparse24 | Quantized,
    b: Tensor | Quantized,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    epilogue: Callable[[Tensor], Tensor] | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    use_fast_accum: bool = False,
    accumulation_dtype: torch.dtype | None = None,
    scale_out: Tensor | None = None,
    return_amax: bool = False,
    precision: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """epilogue(activation(alpha * S(a @ b) + bias + beta * residual)), accumulated and applied in fp32.

    S multiplies by the scales of float8 operands; of others it is nothing.

    Args:
        a: (..., M, K) bfloat16 or float16, of any strides; on sm_89 and sm_90 also float8_e4m3fn or float8_e5m2; on the
            CPU all of them, and float32 or float64. Or a Sparse24 (M, K), a matrix with 2:4 structured sparsity: in
            bfloat16, float16 or, on sm_89 and sm_90, float8, with b (K, N), without scales of blocks and gradients.
            With a precision also float32.
        b: (..., K, N) of a's dtype; batch dimensions broadcast as in torch.matmul.
        bias: (N,), one value a column, or (M, 1), one value a row; bfloat16, float16, float32 or a's dtype,
            but no float8.
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu".
        residual: of the result's shape and dtype.
        alpha, beta: Python floats. With beta=0 the residual is not read, as in torch.addmm: NaN in it has no effect,
            and its gradient is 0. alpha=0 multiplies as any other number does: NaN in a @ b stays NaN.
        out: where to write the result, of any strides. It may be `residual`, in the same shape and strides, and shares
            no memory with any other input.
        out_dtype: bfloat16, float16 or float32; by default a's dtype, of float8 bfloat16. On sm_89, sm_90 and the CPU
            also float8_e4m3fn and float8_e5m2, of operands of any dtype but not of a Sparse24, without a residual.
        epilogue: a function of the fp32 accumulators, written with torch's functions, compiled into the kernel: torch
            traces it, so that it means what it means in torch (see cute_kernels.functions). It returns a floating-point
            tensor of the same shape, and captures numbers. It gives captured tensors no gradients: one that requires
            a gradient raises RuntimeError. Apply it to the result instead, as in gemm(a, b) * scale.
        scale_a, scale_b: float32, of any strides, of float8 operands alone: what their values are multiplied by, as
            torch._scaled_mm has it. One element for all of the operand; or (..., M, 1), of a matrix also (M,), one for
            each row of a, and (..., 1, N) or (N,), one for each column of b; or
            (..., M, K / 128), one for each row and 128 columns of a, and (..., K / 128, N / 128), one for each 128x128
            of b, extents rounded up. a and b may have scales of different kinds. See cute_kernels.quantize, whose
            result may be a or b itself, with its own scale.
        use_fast_accum: of float8 operands alone: sums stay in the tensor cores, which keep some 14 bits of their
            mantissas. By default sums of at most 128 products are added up in fp32. Not with scales of blocks.
        accumulation_dtype: of float16 operands alone, and not of a Sparse24: torch.float16 keeps the sums of products
            in fp16, which GeForce cards (sm_86, sm_89) add up at twice the rate. Each addition rounds to 11 bits, and a
            sum beyond 65504 is infinite. All that the sum then goes through is in fp32. None or torch.float32: fp32
            sums.
        scale_out: float32 of one element, of float8 outputs alone: what the result is multiplied by before it is
            rounded, as torch._scaled_mm does with scale_result on a GPU (on a CPU torch 2.13 divides by it). Whoever
            reads the output multiplies by its reciprocal. Numbers beyond dtype's range, and infinities, become its
            largest; NaN stays NaN.
        return_amax: True to return (out, amax), for float8 outputs alone: amax is float32 (1,), the largest magnitude
            of the result before scale_out and rounding; NaN if the result has one, 0 if it has no elements.
        precision: of float32 operands alone, which kernels do not multiply without it. "tf32": both are rounded to
            TF32, 10 bits of mantissa. "3xtf32": each is the sum of two such numbers, and of their products the three
            larger are added up, which is nearly as exact as fp32 and three times the work; infinite operands give NaN.
            torch's own setting, torch.set_float32_matmul_precision, changes nothing.

    Returns:
        (..., M, N), `out` if it was given; with return_amax (out, amax).

    CUDA tensors run a kernel on the current stream: on Hopper the sm_90 one if a, b and their strides are multiples
    of 16 bytes, else, and on Ampere and Ada, the sm_80 one; `cute_kernels.explain(gemm, ...)` says which. CPU tensors
    run a plain torch reference in fp32, of float64 in float64; sums in fp16 are fp32 ones there, rounded once. Results
    are the same bits on every run. Gradients are products with fp32 sums, and forward's precision.

    A float8 operand that is not contiguous along K, or whose rows or address are no multiples of 16 bytes, is copied
    first, and so are both where K is no multiple of 16. So is a float32 one, and a K that is no multiple of 4. With
    "3xtf32" both are copied to where their parts lie side by side along K. `explain` names each copy.

    Under torch.autocast a, b and the residual are cast to its dtype (the residual to out_dtype, if that is passed), as
    those of torch.addmm. Calls with out= or a precision, and float64 and FP8 operands, are not cast.

    Raises:
        TypeError, ValueError: an argument's type, dtype, device, shape or strides, before any launch.
        RuntimeError: an argument requires a gradient, and `out` is given, operands or the output are float8, or a is a
            Sparse24; torch.compile traces the call, and a is a Sparse24 of float8; or the GPU is older than sm_80.
    """
    compiling, casts = torch.compiler.is_compiling(), any_autocast()
    special = type(a) in SPECIAL or type(b) in SPECIAL
    if special:
        (a, scale_a), (b, scale_b) = unpacked("gemm", "a", a, scale_a), unpacked("gemm", "b", b, scale_b)
    amax = None if return_amax is False else new_amax("gemm", return_amax, a)
    watches = out is None and watched(a, b, bias, residual)
    plain = epilogue is None and not special
    if watches and (scaled(a, scale_a, scale_b, use_fast_accum) or narrow(out, out_dtype, scale_out, amax)):
        watches = False  # and the call raises
    if plain and not (compiling or casts or hidden()):
        try:
            if watches:
                sums = accumulation_dtype, precision
                return differentiable(a, b, bias, activation, residual, alpha, beta, out_dtype, None, *sums)
            y = eager.gemm(
                a, b, bias, activation, residual, alpha, beta, out, out_dtype, None, False, scale_a, scale_b,
                use_fast_accum, accumulation_dtype, scale_out, amax, precision,
            )  # fmt: skip
            return y if amax is None else (y, amax)
        except NeedsDispatcher:
            pass
    terms = bias, activation, residual, alpha, beta, out, out_dtype, epilogue
    more = {"use_fast_accum": use_fast_accum, "accumulation_dtype": accumulation_dtype, "scale_out": scale_out}
    more |= {"scale_a": scale_a, "scale_b": scale_b, "amax": amax, "precision": precision}
    y = _unusual(a, b, terms, more, watches)
    return y if amax is None else (y, amax)


def _unusual(a, b, terms: tuple, more: dict, watches: bool) -> Tensor:
    """gemm of a call that torch.compile traces or the dispatcher must see, under autocast, with a user's function, or
    of a Sparse24. watches: autograd differentiates it."""
    bias, activation, residual, alpha, beta, out, out_dtype, epilogue = terms
    scale_a, scale_b, precision = more["scale_a"], more["scale_b"], more["precision"]
    if any_autocast() and out is None and precision is None:
        a, b, residual = cast_product(a, b, residual, out_dtype)
        terms = bias, activation, residual, alpha, beta, out, out_dtype, epilogue
    compiling, scale_out, amax = torch.compiler.is_compiling(), more["scale_out"], more["amax"]
    if isinstance(a, Sparse24) or isinstance(b, Sparse24):
        sparse24.check_wide(scale_out, amax, precision)
        if compiling or dispatched("gemm", *sparse24.parts(a, b), bias, residual, out, scale_a, scale_b):
            from .sparse24.torch_op import traced_gemm as run
        else:
            run = sparse24.gemm
        return run(a, b, *terms, scale_a, scale_b, more["use_fast_accum"], more["accumulation_dtype"])
    if not compiling and not dispatched("gemm", a, b, bias, residual, out, scale_a, scale_b, scale_out, amax):
        try:
            if not watches:
                return eager.gemm(a, b, *terms, **more)
            if epilogue is not None:  # here, where captured tensors can be seen to require gradients
                epilogue = epilogue_program("gemm", epilogue)
            sums = more["accumulation_dtype"], precision
            return differentiable(a, b, bias, activation, residual, alpha, beta, out_dtype, epilogue, *sums)
        except NeedsDispatcher:
            pass
    from .torch_op import traced_gemm  # imports torch's compiler, which takes seconds

    return traced_gemm(a, b, *terms, **more)
