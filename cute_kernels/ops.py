"""gemm, the user-facing function.

Under torch.compile it dispatches to the registered ops `cute_kernels::gemm` and `cute_kernels::gemm_out`, for a
Sparse24 to `cute_kernels::sparse24_gemm` and its `_out`.
"""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from . import dispatch
from .annotations import Activation, GemmOptions, Precision
from .arguments import GemmArgs
from .checks import narrow, scaled, watched
from .fp8.quantized import Quantized, unpacked
from .gradients import differentiable
from .matmul.epilogue.terms import epilogue_program, new_amax
from .runtime.autocast import any_autocast, cast_product
from .runtime.front import NeedsDispatcher, dispatched, hidden
from .source import KTileSource
from .sparse24 import dispatch as sparse24
from .sparse24.format import Sparse24

SPECIAL = frozenset({Sparse24, Quantized})  # operand types that are not tensors


@overload
def gemm(
    a: Tensor | Sparse24 | Quantized,
    b: Tensor | Quantized,
    *,
    return_amax: Literal[False] = False,
    **options: Unpack[GemmOptions],
) -> Tensor: ...


@overload
def gemm(
    a: Tensor | Sparse24 | Quantized,
    b: Tensor | Quantized,
    *,
    return_amax: Literal[True],
    **options: Unpack[GemmOptions],
) -> tuple[Tensor, Tensor]: ...


def gemm(
    a: Tensor | Sparse24 | Quantized,
    b: Tensor | Quantized,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
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
    precision: Precision | None = None,
    source: KTileSource | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute epilogue(activation(alpha * S(a @ b) + bias + beta * residual)) with FP32 accumulation.

    S applies the dequantization scales of FP8 operands; for other dtypes it is the identity.

    Args:
        a: (..., M, K) with any strides, or a Sparse24 (M, K), a 2:4 sparse matrix. Dtypes: bfloat16, float16; on sm_89
            and sm_90 also float8_e4m3fn and float8_e5m2; with a precision also float32; on the CPU all of them and
            float64. A Sparse24 requires b (K, N) and supports neither float32 on a GPU nor block scales nor gradients.
        b: (..., K, N) with a's dtype; batch dimensions broadcast as in torch.matmul.
        bias: (N,), one value per column, or (M, 1), one value per row; bfloat16, float16, float32 or a's dtype, but not
            FP8.
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu".
        residual: a tensor with the result's shape and dtype.
        alpha, beta: Python floats. With beta=0 the residual is not read, as in torch.addmm: NaN in it has no effect,
            and its gradient is 0. With alpha=0, NaN in a @ b stays NaN.
        out: the output tensor, with any strides. It may be `residual`, with the same shape and strides, and must not
            share memory with any other input.
        out_dtype: bfloat16, float16 or float32; by default a's dtype, for FP8 operands bfloat16. On sm_89, sm_90 and
            the CPU also float8_e4m3fn and float8_e5m2, for operands of any dtype, without a Sparse24 or a residual.
        epilogue: a function of the FP32 accumulators, written with torch functions. torch traces it, so it has torch's
            semantics, and it is compiled into the kernel (see cute_kernels.functions). It returns a floating-point
            tensor of the same shape, and may capture numbers. Captured tensors get no gradients: one that requires a
            gradient raises RuntimeError. Apply such a tensor to the result instead, as in gemm(a, b) * scale.
        scale_a, scale_b: dequantization scales of FP8 operands, as in torch._scaled_mm; float32 with any strides. One
            of these, independently for a and b:

                per tensor    one element
                per row       scale_a (..., M, 1), for a matrix also (M,)
                per column    scale_b (..., 1, N) or (N,)
                1x128         scale_a (..., M, K / 128), rounded up
                128x128       scale_b (..., K / 128, N / 128), rounded up

            cute_kernels.quantize returns values and scale, and may itself be passed as a or b.
        use_fast_accum: FP8 operands only. True keeps partial sums in the tensor cores' accumulators, which have some 14
            bits of mantissa. By default they are promoted to FP32 at least every 128 elements of K. Not supported with
            block scales.
        accumulation_dtype: None or torch.float32; for float16 operands without a Sparse24 also torch.float16, the
            accumulator dtype. FP16 accumulation runs at twice the rate on GeForce cards (sm_86, sm_89). Each addition
            rounds to 11 bits, and overflows beyond 65504. The epilogue is computed in FP32.
        scale_out: FP8 outputs only; float32 with one element. The result is multiplied by it before rounding, like
            torch._scaled_mm's scale_result on a GPU (on a CPU torch 2.13 divides by it). Multiply the output by
            1 / scale_out to dequantize it. Values beyond the dtype's range, and infinities, saturate; NaN stays NaN.
        return_amax: FP8 outputs only. True returns (out, amax): amax is float32 (1,), the largest magnitude of the
            result before scale_out and rounding; NaN if the result contains NaN, 0 if it is empty.
        precision: required for float32 operands on a GPU. "tf32" rounds both to TF32, 10 bits of mantissa. "3xtf32"
            splits each into two TF32 numbers and adds up the three larger of their products: nearly FP32 accuracy at
            three times the cost; infinite operands give NaN. torch.set_float32_matmul_precision has no effect.
        source: a KTileSource, which selects the K-tiles that each row tile of a multiplies. By default all of them.

    Returns:
        (..., M, N), `out` if it was passed; with return_amax (out, amax).

    CUDA tensors run a kernel on the current stream. On Hopper this is the sm_90 kernel if the addresses and strides of
    a and b are multiples of 16 bytes. Otherwise, and on Ampere and Ada, it is the sm_80 kernel.
    `cute_kernels.explain(gemm, ...)` reports the selection. CPU tensors run a torch reference in FP32 (float64 in
    float64; FP16 accumulation rounds once). Results are deterministic. Gradients are GEMMs with FP32 accumulation and
    the same precision.

    FP8 and float32 operands are copied first unless they are contiguous along K, with rows and an address of multiples
    of 16 bytes. With "3xtf32" both are copied, with their parts side by side along K. `explain` names each copy.

    Under torch.autocast a, b and the residual are cast to its dtype (the residual to out_dtype if that is passed), as
    in torch.addmm. Calls with out= or a precision, and float64 and FP8 operands, are not cast.

    Raises:
        TypeError, ValueError: an argument has an unsupported type, dtype, device, shape or strides. Raised before any
            launch.
        RuntimeError: an argument requires a gradient, and `out` or a source is passed, operands or output are FP8, or a
            is a Sparse24; torch.compile traces a call with an FP8 Sparse24 or a source; or the GPU precedes sm_80.

    Example:
        d = gemm(a, b, bias=bias, activation="gelu")
        d = gemm(a, b, epilogue=lambda x: torch.where(x > 0, x, 0.1 * x))
        d = gemm(quantize(a, per="row"), quantize(b.mT, per="row").mT)  # FP8
    """
    compiling, casts = torch.compiler.is_compiling(), any_autocast()
    special = not (type(a) is type(b) is Tensor) and (type(a) in SPECIAL or type(b) in SPECIAL)
    if special:
        (a, scale_a), (b, scale_b) = unpacked("gemm", "a", a, scale_a), unpacked("gemm", "b", b, scale_b)
    amax = None if return_amax is False else new_amax("gemm", return_amax, a)
    watches = out is None and watched(a, b, bias, residual)
    plain = epilogue is None and not special
    fp8 = watches and (scaled(a, scale_a, scale_b, use_fast_accum) or narrow(out, out_dtype, scale_out, amax))
    if fp8 or source is not None:
        watches = False  # the call raises
    values: tuple = (
        a, b, out, bias, residual, scale_a, scale_b, scale_out, amax, activation, alpha, beta, out_dtype, epilogue,
        accumulation_dtype, precision, use_fast_accum, source,
    )  # fmt: skip
    if plain and not (compiling or casts or hidden()):
        try:
            if watches:
                return differentiable(values)
            y = dispatch.gemm(values)
            return y if amax is None else (y, amax)
        except NeedsDispatcher:
            pass
    y = _unusual(GemmArgs(*values), watches)
    return y if amax is None else (y, amax)


def _unusual(args: GemmArgs, watches: bool) -> Tensor:
    """The slow path of gemm: calls traced by torch.compile or seen by the dispatcher, under autocast, with a user's
    function, or with a Sparse24. watches: autograd records the call."""
    if any_autocast() and args.out is None and args.precision is None:
        a, b, residual = cast_product(args.a, args.b, args.residual, args.out_dtype)
        args = args._replace(a=a, b=b, residual=residual)
    compiling, structured = torch.compiler.is_compiling(), isinstance(args.a, Sparse24) or isinstance(args.b, Sparse24)
    if structured:
        sparse24.check_kind(args)
        tensors = *sparse24.parts(args.a), args.b, *args.tensors[2:]
    else:
        tensors = args.tensors
    if not compiling and not dispatched("gemm", *tensors):
        try:
            if args.epilogue is not None:  # traced here, where captured tensors still show requires_grad
                program: Any = epilogue_program("gemm", args.epilogue)
                args = args._replace(epilogue=program)
            run = sparse24.gemm if structured else differentiable if watches else dispatch.gemm
            return run(args)
        except NeedsDispatcher:
            if structured:
                raise
    if structured:
        from .sparse24.torch_op import traced_gemm
    else:
        from .torch_op import traced_gemm  # imports torch's compiler, which takes seconds

    return traced_gemm(args)
