"""bsr_matmul, bsr_linear and bsr_grouped_linear: what a torch user calls with a block-sparse weight.

Under torch.compile the calls go through the registered ops `sparse_collective::bsr` and `sparse_collective::bsr_out`,
those of a Bsr24 through `sparse_collective::bsr24` and its `_out`; under the transforms of torch.func through a
differentiable form of the first.
"""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from cute_kernels.annotations import Activation, Precision
from cute_kernels.checks import check_no_grad, narrow, scaled, watched
from cute_kernels.dtypes import FLOAT8
from cute_kernels.explain import explains
from cute_kernels.fp8.quantized import Quantized, unpacked
from cute_kernels.gate.dispatch import gate
from cute_kernels.matmul.epilogue.terms import check_activation, epilogue_program, new_amax
from cute_kernels.matmul.precision import check_precision
from cute_kernels.reference import GATE
from cute_kernels.runtime.autocast import any_autocast
from cute_kernels.runtime.front import NeedsDispatcher, dispatched, hidden, undisturbed

from . import dispatch, explain, padded_rows
from .annotations import LinearOptions, MatmulOptions
from .arguments import GATED, BsrArgs
from .bsr import BsrMatrix
from .bsr24.matrix import Bsr24
from .gradients import differentiable
from .plan import check_gated, check_structured
from .sddmm_kernel import dispatch as sddmm_dispatch

Epilogue = Callable[[Tensor], Tensor]


@overload
def bsr_matmul(
    W: BsrMatrix | Bsr24 | Tensor,
    b: Tensor | Quantized,
    *,
    return_amax: Literal[False] = False,
    **options: Unpack[MatmulOptions],
) -> Tensor: ...


@overload
def bsr_matmul(
    W: BsrMatrix | Bsr24 | Tensor,
    b: Tensor | Quantized,
    *,
    return_amax: Literal[True],
    **options: Unpack[MatmulOptions],
) -> tuple[Tensor, Tensor]: ...


def bsr_matmul(
    W: BsrMatrix | Bsr24 | Tensor,
    b: Tensor | Quantized,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    epilogue: Epilogue | None = None,
    scale_b: Tensor | None = None,
    use_fast_accum: bool = False,
    accumulation_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    scale_out: Tensor | None = None,
    return_amax: bool = False,
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Block-sparse GEMM: epilogue(activation(W @ b + bias + residual)), with FP32 accumulation and epilogue.

    | dtype of W and b | supported |
    | --- | --- |
    | bfloat16, float16 | sm_80 and newer, CPU; gradients |
    | float8_e4m3fn, float8_e5m2 | sm_89, sm_90, CPU; blocks with bk a multiple of 32; no gradients, no W.t() |
    | float32 with precision | sm_80 and newer; no gradients, no W.t() |
    | float32, float64 | CPU; gradients |

    Args:
        W: (M, K) BsrMatrix or torch.sparse_bsr tensor, or a batch (L, M, K). Any pattern, empty block rows included;
            the blocks' sides are multiples of 16. Or a Bsr24, whose blocks are 2:4 sparse: bfloat16, float16 or, on
            sm_89 and sm_90, FP8; without gradients, accumulation_dtype and FP8 outputs, and for FP8 without
            torch.compile. Kernels copy values that do not begin at a multiple of 16 bytes; see BsrMatrix.
        b: (..., K, N) with W's dtype and any strides; for a batch (L, K, N), or (K, N) for all matrices. Or a
            Quantized.
        bias: (N,), one value per column, or (M, 1), one value per row; for a batch also (L, M, 1).
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu".
        residual: a tensor with the result's shape and dtype.
        out: the output tensor; its dtype (see out_dtype) is the result's.
        epilogue: a function of the FP32 accumulators, traced by torch (see cute_kernels.gemm).
        scale_b: FP8 only; float32 dequantization scale of b: one element, or one per column, (..., 1, N), for a matrix
            also (N,).
        use_fast_accum: FP8 only, see cute_kernels.gemm. Not supported if W has one scale per block: these scales apply
            to promoted partial sums.
        accumulation_dtype: float16 only, see cute_kernels.gemm. Kernels for special shapes (small M, small blocks)
            always accumulate in FP32; `explain` reports it.
        out_dtype: bfloat16, float16 or float32; by default W's dtype, for FP8 bfloat16. Also FP8, without a residual,
            see cute_kernels.gemm. No gradients are computed with it.
        scale_out, return_amax: FP8 outputs only, see cute_kernels.gemm.
        precision: "tf32" or "3xtf32", float32 only, see cute_kernels.gemm; without gradients.

    Returns:
        (..., M, N), for a batch (L, M, N); `out` if it was passed. With return_amax (out, amax).

    W's indices are validated once, on its device, before the first launch (not with BsrMatrix(check=False)). Results
    are bitwise identical on every run. CPU tensors run a torch reference over the stored blocks, in FP32 (float64 in
    float64). A BsrMatrix also supports W @ b and torch.matmul(W, b).

    Under torch.autocast W's values, b and the residual are cast to its dtype, as in cute_kernels.gemm. Values are cast
    in each call, and again in backward, which keeps no copy of them.

    With FP8 operands, partial sums of at most 128 elements of K are promoted to FP32. A b that is not contiguous along
    K, or whose rows or address are not multiples of 16 bytes, is copied first. The same holds for float32; with
    "3xtf32" W's values and b are copied, with their parts side by side along K.

    Raises:
        TypeError, ValueError: as in cute_kernels.gemm.
        RuntimeError: as in cute_kernels.gemm; also if an argument requires a gradient and out_dtype, a precision or a
            Bsr24 is passed.

    Example:
        W = random_bsr((8192, 8192), (128, 128), density=0.125, device="cuda")
        y = bsr_matmul(W, torch.randn(8192, 1024, dtype=torch.bfloat16, device="cuda"))
    """
    if type(b) is Quantized:
        b, scale_b = unpacked("bsr_matmul", "b", b, scale_b)
    amax = None if return_amax is False else new_amax("bsr_matmul", return_amax, b)
    y = called((
        "bsr_matmul", W, b, out, None, bias, residual, scale_b, scale_out, amax, activation, out_dtype, epilogue,
        accumulation_dtype, precision, use_fast_accum,
    ))  # fmt: skip
    return y if amax is None else (y, amax)


@overload
def bsr_linear(
    x: Tensor | Quantized,
    W: BsrMatrix | Bsr24 | Tensor,
    *,
    return_amax: Literal[False] = False,
    **options: Unpack[LinearOptions],
) -> Tensor: ...


@overload
def bsr_linear(
    x: Tensor | Quantized,
    W: BsrMatrix | Bsr24 | Tensor,
    *,
    return_amax: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]: ...


def bsr_linear(
    x: Tensor | Quantized,
    W: BsrMatrix | Bsr24 | Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
    epilogue: Epilogue | None = None,
    scale_x: Tensor | None = None,
    use_fast_accum: bool = False,
    accumulation_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    scale_out: Tensor | None = None,
    return_amax: bool = False,
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear layer with a block-sparse weight: epilogue(activation(x @ W.T + bias)).

    Args:
        x: (..., K) with W's dtype and any strides; for a batch (L, N, K), or (N, K) for all matrices. Or a Quantized.
        W: (M, K) BsrMatrix, Bsr24 or torch.sparse_bsr tensor, or a batch (L, M, K); see bsr_matmul.
        bias: (M,), for a batch also (L, M).
        activation, out, epilogue, use_fast_accum, accumulation_dtype, out_dtype, scale_out, return_amax, precision: see
            bsr_matmul.
        scale_x: FP8 only; float32 dequantization scale of x: one element, or one per token, (..., 1), for x (N, K) also
            (N,); see cute_kernels.quantize(x, per="row").

    Returns:
        (..., M), for a batch (L, N, M); `out` if it was passed. With return_amax (out, amax).

    A BsrMatrix also supports x @ W.T and torch.nn.functional.linear(x, W, bias). Raises the errors of bsr_matmul.

    Example:
        W = BsrMatrix.from_dense(weight, (128, 128), density=0.25)
        y = bsr_linear(x, W, bias=bias, activation="gelu")
    """
    if type(x) is Quantized:
        x, scale_x = unpacked("bsr_linear", "x", x, scale_x)
    amax = None if return_amax is False else new_amax("bsr_linear", return_amax, x)
    y = called((
        "bsr_linear", W, x, out, None, bias, None, scale_x, scale_out, amax, activation, out_dtype, epilogue,
        accumulation_dtype, precision, use_fast_accum,
    ))  # fmt: skip
    return y if amax is None else (y, amax)


def bsr_gated_linear(
    x: Tensor | Quantized,
    W: BsrMatrix | Bsr24 | Tensor,
    *,
    activation: Activation | None = "silu",
    out: Tensor | None = None,
    scale_x: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """First half of a gated feed-forward layer: activation(x @ G.T) * (x @ U.T), in one kernel if possible.

    Args:
        x: (..., K) with W's dtype and any strides, or a Quantized.
        W: (2 H, K) BsrMatrix, Bsr24 or torch.sparse_bsr tensor; its rows alternate, 64 of G and 64 of U (see
            interleaved).
        activation: of the gate: None, "relu", "gelu", "gelu_tanh" or "silu".
        out: (..., H); its dtype is the result's.
        scale_x: FP8 only, as in bsr_linear.
        out_dtype: bfloat16, float16 or float32, as in bsr_linear, but not FP8. With it, an argument that requires a
            gradient raises RuntimeError.

    Returns:
        (..., H), `out` if it was passed.

    On Hopper, a BsrMatrix with blocks of 128 rows and more runs one kernel if no gradient is required; the halves are
    never stored. Otherwise the gate is computed from bsr_linear's result, rounded to W's dtype; `explain` reports it.
    So results with and without gradients may differ in their last bits, also in a reentrant checkpoint.
    nn.GatedBsrLinear and SwiGLU in training mode compute both as with gradients.

    With FP8 operands both halves are rounded to the result's dtype before the gate, which is computed in FP32, as
    quantize_gated does. One kernel supports blocks with a multiple of 128 rows on Hopper. There are no gradients.

    Raises the errors of bsr_linear, and TypeError or ValueError if out or out_dtype is FP8.

    Example:
        W = BsrMatrix.from_dense(interleaved(gate, up), (128, 128), density=0.25)
        h = bsr_gated_linear(x, W, activation="silu")
    """
    if type(x) is Quantized:
        x, scale_x = unpacked(GATED, "x", x, scale_x)
    if out is None and out_dtype is None and scale_x is None and watched(W, x):
        check_activation(GATED, activation)
        check_gated(dispatch.as_bsr(GATED, W))
        return gate(bsr_linear(x, W), activation)
    # In the order of BsrArgs, whose construction would cost two Python calls.
    return called(
        (GATED, W, x, out, None, None, None, scale_x, None, None, activation, out_dtype, None, None, None, False)
    )


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave rows of gate and up, 64 of each in turn, for bsr_gated_linear: two tensors (H, ...) become (2 H, ...).

    Raises:
        ValueError: the shapes differ, or H is not a multiple of 64.

    Example:
        W = BsrMatrix.from_dense(interleaved(gate.weight, up.weight), (128, 128), density=0.25)
    """
    if gate.shape != up.shape or gate.dim() == 0 or gate.shape[0] % GATE:
        raise ValueError(
            f"interleaved: shapes {tuple(gate.shape)} and {tuple(up.shape)}; they must be one, (H, ...) with H a "
            f"multiple of {GATE}"
        )
    return torch.stack([t.unflatten(0, (-1, GATE)) for t in (gate, up)], 1).flatten(0, 2)


def bsr_grouped_linear(
    x: Tensor | Quantized,
    W: BsrMatrix | Bsr24 | Tensor,
    *,
    offs: Tensor | None = None,
    expert_ids: Tensor | None = None,
    group_rows: int | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
    epilogue: Epilogue | None = None,
    scale_x: Tensor | None = None,
    use_fast_accum: bool = False,
    accumulation_dtype: torch.dtype | None = None,
) -> Tensor:
    """Grouped linear layer for a mixture of experts: tokens are sorted by expert, and each expert has its own weight.

    Pass the routing in one of two forms:

    - ``offs``: the end of each expert's tokens, as in torch._grouped_mm: offs[e] is the number of tokens of experts 0
      to e, without a leading zero. Offsets need not be multiples of anything.
      y[i] = epilogue(activation(x[i] @ W[e].T + bias[e])), where e is the number of offsets that are at most i.
    - ``expert_ids``: the expert of each run of group_rows tokens, for tokens that are already padded to whole runs.
      Nothing is copied. y[i] is the same with e = expert_ids[i // group_rows].

    Args:
        x: (T, K) with W's dtype and any strides, or a Quantized; with expert_ids, T is len(expert_ids) times a multiple
            of 64.
        W: (E, M, K) BsrMatrix, Bsr24 or torch.sparse_bsr tensor: a batch with one pattern or one per expert, with the
            dtypes of bsr_matmul.
        offs: (E,) int32 or int64 on x's device, ascending; experts may have no tokens.
        expert_ids: (T / group_rows,) int32 on x's device, contiguous.
        group_rows: rows per run, a multiple of 64. With offs it is a tuning parameter, 128 by default: a GEMM tile
            belongs to one run, so 256 allows the tiles of bsr_linear, and 64 pads less. With expert_ids it is T /
            len(expert_ids), and optional.
        bias: (E, M), or (M,) for all experts.
        activation, out, epilogue, use_fast_accum, accumulation_dtype: see bsr_matmul.
        scale_x: FP8 only; float32: one element, or one per token, (T,) or (T, 1); with expert_ids it must be finite for
            padding, too.

    Returns:
        (T, M), `out` if it was passed.

    The host does not read the routing, so it may change in every call and between replays of a CUDA graph. Tokens
    without an expert (past the last offset, or in a run whose expert is not in [0, E)) are not multiplied: they get
    epilogue(activation(bias)) with the bias of the nearest expert. An offset beyond T counts as T, and one smaller than
    its predecessor counts as that. W's indices are validated as in bsr_matmul.

    Cost of offs: x is copied to a padded layout of at most T + min(T, E + 1) * group_rows rows, and the result back
    from it; about 16 small kernels compute the layout. For several layers with one routing, pad once and pass
    expert_ids, as sparse_collective.nn.BsrMixtureOfExperts does:

        T = group_rows * runs  # every expert's rows padded to a multiple of group_rows; ends: where they end
        firsts = torch.arange(0, T, group_rows, device=x.device)
        expert_ids = torch.searchsorted(ends, firsts, right=True, out_int32=True)

    With FP8 operands W has no scales, one for all experts, or one per stored block (BsrMatrix.stack combines matrices).
    Accumulation, copies of x and gradients are as in bsr_linear, and so are errors.

    Example:
        W = BsrMatrix.stack([BsrMatrix.from_dense(w, (128, 128), density=0.25) for w in weights])
        y = bsr_grouped_linear(x, W, offs=torch.cumsum(tokens_per_expert, 0))
    """
    op = "bsr_grouped_linear"
    if type(x) is Quantized:
        x, scale_x = unpacked(op, "x", x, scale_x)
    tokens: Any = x
    args = BsrArgs(
        op, W, tokens, out, expert_ids, bias, scale_b=scale_x, activation=activation, epilogue=epilogue,
        accumulation_dtype=accumulation_dtype, use_fast_accum=use_fast_accum,
    )  # fmt: skip
    padding = dispatch.routing(op, x, W, expert_ids, offs, group_rows)
    if padding is None:
        return called(args)
    if tokens.dtype in FLOAT8:
        check_no_grad(f"{op} of float8", tokens)
    to = None if out is None else dispatch.padded_out(op, out, W, padding, x, bias, scale_x, offs)
    rows, scale = padded_rows.spread(tokens, padding), padded_rows.spread_scale(op, scale_x, tokens, padding)
    y = called(args._replace(b=rows, out=to, expert_ids=padding.groups, scale_b=scale))
    y = padded_rows.taken(y, padding)
    return y if out is None else out.copy_(y)


def sddmm(
    a: Tensor,
    b: Tensor,
    pattern: BsrMatrix,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    expert_ids: Tensor | None = None,
) -> Tensor:
    """SDDMM: compute the stored blocks of a pattern of the dense a @ b, such as the gradient of a sparse weight.

    Args:
        a: (M, K) bfloat16 or float16 with any strides; on the CPU also float32 or float64.
        b: (K, N) with a's dtype and any strides.
        pattern: (M, N) BsrMatrix with (bm, bk) blocks, or with expert_ids a batch (L, M, N); its values are not read.
        out: (nnz, bm, bk), contiguous, at any address: the output; its dtype is bfloat16, float16, float32 or a's.
        accumulate: True adds to the contents of `out`, in FP32, and rounds once.
        out_dtype: dtype of the result without `out`; a's by default.
        expert_ids: (K / run,) int32 on a's device, contiguous, for a batch: the matrix that each run of K belongs to.
            Each matrix accumulates its own runs; runs with an id out of range are skipped. run is a multiple of 64.

    Returns:
        (nnz, bm, bk), for a batch as its values: values for `pattern.with_values`; `out` if it was passed.

    For y = bsr_linear(x, W) with x (tokens, K), the gradient of W's values is sddmm(dy.t(), x, W). Accumulation is in
    FP32, and results are bitwise identical on every run. CPU tensors run a torch reference over the stored blocks. Not
    differentiable.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or layout is not supported; the message says
            what is.

    Example:
        gradient = W.with_values(sddmm(dy.t(), x, W))
    """
    terms = a, b, pattern, out, accumulate, out_dtype, expert_ids
    if torch.compiler.is_compiling() or dispatched("sddmm", a, b, getattr(pattern, "stored", None), out, expert_ids):
        from .torch_op import traced_sddmm

        return traced_sddmm(*terms)
    return sddmm_dispatch.sddmm(*terms)


def called(values: tuple) -> Tensor:
    """An op of all fields of BsrArgs: as torch.compile, torch.func or autograd want it."""
    _, W, b, out, _, bias, residual, scale_b, scale_out, amax, _, out_dtype, epilogue, _, precision, fast = values
    compiling, casts = torch.compiler.is_compiling(), any_autocast()
    watches: bool | None = out is None and watched(W, b, bias, residual)
    # A call with any of these raises where something is watched, or has a W that check_indices must look at first.
    if watches and (
        precision is not None or out_dtype is not None or scaled(b, None, scale_b, fast)
        or narrow(out, out_dtype, scale_out, amax)
    ):  # fmt: skip
        watches = None
    plain = type(W) is BsrMatrix and (W.pattern.checked or not W.check) and epilogue is None
    if plain and watches is not None and not (compiling or casts or hidden()):
        try:
            return differentiable(values) if watches else dispatch.call(values)
        except NeedsDispatcher:
            pass
    return _unusual(BsrArgs(*values), bool(watches))


def _unusual(args: BsrArgs, watches: bool) -> Tensor:
    """An op of a call that torch.compile traces or the dispatcher must see, under autocast, with a user's function,
    with another W than a checked BsrMatrix, or with a gradient that raises. watches: autograd differentiates it."""
    op, source, compiling = args.op, None, torch.compiler.is_compiling()
    if any_autocast() and args.out is None and args.precision is None:
        source = getattr(args.W, "stored", None)
        W, b, residual = dispatch.under_autocast(op, args.W, args.b, args.residual, args.out_dtype)
        args = args._replace(W=W, b=b, residual=residual)
    through_dispatcher = compiling or dispatched(op, getattr(args.W, "stored", args.W), *args.tensors)
    if through_dispatcher and not compiling:
        with undisturbed():
            args = args._replace(W=dispatch.as_bsr(op, args.W))
    narrows = narrow(args.out, args.out_dtype, args.scale_out, args.amax)
    if isinstance(args.W, Bsr24):
        check_structured(op, args.accumulation_dtype, narrows, args.precision)
        what = f"{op} of a Bsr24"
    elif narrows or args.out_dtype is not None or args.precision is not None or scaled(
        args.b, None, args.scale_b, args.use_fast_accum
    ):  # fmt: skip
        if args.precision is not None:
            check_precision(op, args.precision, args.W.dtype)
        what = f"{op} of float8, or with out_dtype or precision,"
    else:
        what = ""
    if not through_dispatcher:
        if what:
            refuse_gradient(what, args)
        try:
            if args.epilogue is not None:  # as it is now, and where captured tensors can be seen to require gradients
                program: Any = epilogue_program(op, args.epilogue)
                args = args._replace(epilogue=program)
            if watches and not what:
                return differentiable(args._replace(W=dispatch.as_bsr(op, args.W)), source)
            return dispatch.call(args)
        except NeedsDispatcher:
            if isinstance(args.W, Bsr24):
                raise
    if isinstance(args.W, Bsr24):
        from .bsr24.torch_op import traced_bsr24 as traced
    else:
        from .torch_op import traced_bsr as traced  # imports torch's compiler, which takes seconds
    return traced(args, what)


def refuse_gradient(what: str, args: BsrArgs) -> None:
    """RuntimeError if autograd watches an argument; dispatch.call says so, too, but not which kind of call it is."""
    if watched(args.W, *args.inputs):
        check_no_grad(what, *(t for t in (args.W, *args.inputs) if hasattr(t, "requires_grad")))


explains(bsr_matmul, explain.plan_bsr_matmul)
explains(bsr_linear, explain.plan_bsr_linear)
explains(bsr_gated_linear, explain.plan_bsr_gated_linear)
explains(bsr_grouped_linear, explain.plan_bsr_grouped_linear)
explains(sddmm, sddmm_dispatch.plan_sddmm)
