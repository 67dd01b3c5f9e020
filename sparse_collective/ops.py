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
from cute_kernels.matmul.epilogue.terms import check_activation, epilogue_program, new_amax
from cute_kernels.matmul.precision import check_precision
from cute_kernels.reference import GATE, gate
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
    """epilogue(activation(W @ b + bias + residual)) for a block-sparse W, accumulated and applied in fp32.

    Args:
        W: (M, K) BsrMatrix or torch.sparse_bsr tensor of bfloat16 or float16, on the CPU also float32 or float64, with
            blocks whose sides are multiples of 16; any pattern, empty block rows included. Or a batch (L, M, K) of
            them. On sm_89 and sm_90 also a BsrMatrix of float8, whose bk is a multiple of 32, with scales or without.
            Or a Bsr24, whose blocks are 2:4 sparse, of bfloat16, float16 or, on sm_89 and sm_90, float8: without
            gradients, accumulation_dtype and float8 outputs, and of float8 without torch.compile.
            With a precision also float32, no view W.t().
            Values that do not begin at a multiple of 16 bytes are copied for a kernel; see BsrMatrix.
        b: (..., K, N) of W's dtype, of any strides. With a batch (L, K, N), or (K, N) for all items. Or a Quantized.
        bias: (N,), one value a column, or (M, 1), one value a row; with a batch also (L, M, 1).
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu".
        residual: of the result's shape and dtype.
        out: where to write the result; its dtype (see out_dtype) is the result's.
        epilogue: a function of the fp32 accumulators, traced by torch (see cute_kernels.gemm).
        scale_b: float32, of float8 operands alone: what b's values are multiplied by. One element, or (..., 1, N), of
            a matrix also (N,), one for each column.
        use_fast_accum: of float8 operands alone, see cute_kernels.gemm. Not for a W with a scale for each block:
            those multiply the sums when they are promoted to fp32.
        accumulation_dtype: of float16 operands alone, see cute_kernels.gemm. Kernels for special shapes (few columns,
            small blocks, pairs of rows) add up in fp32 all the same; `explain` says which.
        out_dtype: bfloat16, float16 or float32; by default W's dtype, of float8 bfloat16. Also float8, without a
            residual, see cute_kernels.gemm. No gradient is computed with it.
        scale_out, return_amax: of float8 outputs alone, see cute_kernels.gemm.
        precision: "tf32" or "3xtf32", of float32 operands alone, see cute_kernels.gemm; without
            gradients.

    Returns:
        (..., M, N), of a batch (L, M, N); `out` if it was given. With return_amax (out, amax).

    W's indices are checked once, on its device, before the first launch (BsrMatrix(check=False) leaves that out).
    Every element is summed in one order and written by one thread block: the bits are the same on every
    run. CPU tensors are multiplied by torch, the stored blocks alone, in fp32, of float64 in float64. A BsrMatrix also
    takes W @ b and torch.matmul(W, b).

    Under torch.autocast W's values, b and the residual are cast to its dtype, as in cute_kernels.gemm. W's are cast in
    each call, and again in backward, which keeps no copy of them.

    Of float8 operands sums of at most 128 products are added up in fp32, and the result is bfloat16 unless out says
    else. A b that is not contiguous along K, or whose rows or address are no multiples of 16 bytes, is copied first.
    There is no gradient, and no kernel for W.t(). Such a b of float32 is copied, too; with "3xtf32" W's values and b
    are, to where the parts of their numbers lie side by side along K.

    Raises as cute_kernels.gemm does, RuntimeError also where an argument requires a gradient beside out_dtype, a
    precision or a Bsr24.
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
    """epilogue(activation(x @ W.T + bias)): a linear layer with a block-sparse weight.

    Args:
        x: (..., K) of W's dtype, of any strides; with a batch (L, N, K), or (N, K) for all items. Or a Quantized.
        W: (M, K) BsrMatrix, Bsr24 or torch.sparse_bsr tensor, or a batch (L, M, K); see bsr_matmul.
        bias: (M,), with a batch also (L, M).
        activation, out, epilogue, use_fast_accum, accumulation_dtype, out_dtype, scale_out, return_amax, precision: see
            bsr_matmul.
        scale_x: float32, of float8 operands alone: one element, or (..., 1), one for each token, of an x (N, K) also
            (N,); see cute_kernels.quantize(x, per="row").

    Returns:
        (..., M), of a batch (L, N, M); `out` if it was given. With return_amax (out, amax).

    A BsrMatrix also takes x @ W.T and torch.nn.functional.linear(x, W, bias). Raises as bsr_matmul does.
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
    """activation(x @ G.T) * (x @ U.T): the first half of a gated feed-forward layer, in one kernel.

    Args:
        x: (..., K) of W's dtype, of any strides, or a Quantized.
        W: (2 H, K) BsrMatrix, Bsr24 or torch.sparse_bsr tensor: of its rows 64 are G's, 64 U's, and so on (see
            interleaved).
        activation: of the gate: None, "relu", "gelu", "gelu_tanh" or "silu".
        out: (..., H); its dtype is the result's.
        scale_x: of float8 operands, as of bsr_linear.
        out_dtype: of a result that is made here: bfloat16, float16 or float32; as of bsr_linear, but no float8. With it
            what requires a gradient raises RuntimeError.

    Returns:
        (..., H), `out` if it was given.

    One kernel serves a BsrMatrix with blocks of 128 rows and more on Hopper, where no gradient is wanted: what the two
    halves are never reaches memory. Elsewhere torch computes the gate of bsr_linear's result, which is rounded to W's
    dtype before; `explain` says so. So a result with gradients may differ in its last bits from one without, also in a
    reentrant checkpoint. nn.GatedBsrLinear and SwiGLU in training mode give the results with gradients in both.

    Of float8 operands both halves are rounded to the result's dtype before the gate, which is in fp32, whoever computes
    it, as quantize_gated does with bsr_linear's result. One kernel serves blocks whose rows are a multiple of 128 on
    Hopper. There is no gradient.

    Raises as bsr_linear does, TypeError or ValueError also where out or out_dtype is of float8.
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
    """Rows of both in turn, 64 of each, as bsr_gated_linear wants them: of (H, ...) and (H, ...) (2 H, ...).

    Raises:
        ValueError: the shapes differ, or H is no multiple of 64.
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
    """A linear layer with one weight for each expert, for tokens that are sorted by expert (mixture of experts).

    Pass the routing in one of two forms:

    - ``offs``: where each expert's tokens end, as in torch._grouped_mm: offs[e] is the number of tokens of experts 0 to
      e, without a leading zero. Any offsets are right.
      y[i] = epilogue(activation(x[i] @ W[e].T + bias[e])) with e the number of offsets that are at most i.
    - ``expert_ids``: the expert of each run of group_rows tokens, for tokens that are padded to whole runs already.
      Nothing is copied. y[i] is the same with e = expert_ids[i // group_rows].

    Args:
        x: (T, K) of W's dtype, of any strides, or a Quantized; with expert_ids T is len(expert_ids) times a multiple of
            64.
        W: (E, M, K) BsrMatrix, Bsr24 or torch.sparse_bsr tensor: a batch of either form, of dtypes as in bsr_matmul.
        offs: (E,) int32 or int64 on x's device, ascending; experts may have no tokens.
        expert_ids: (T / group_rows,) int32 on x's device, contiguous.
        group_rows: rows of a run, a multiple of 64. With offs it is a tuning parameter, 128 by default: a GEMM tile
            belongs to one run, so 256 allows the tiles of bsr_linear, and 64 pads less. With expert_ids it is T /
            len(expert_ids), and need not be passed.
        bias: (E, M), or (M,) for all experts.
        activation, out, epilogue, use_fast_accum, accumulation_dtype: see bsr_matmul.
        scale_x: float32, of float8 operands alone: one element, or (T,) or (T, 1), one for each token; with expert_ids
            it must be finite for padding, too.

    Returns:
        (T, M), `out` if it was given.

    The routing is not read on the host, so it may change with every call and between the replays of a CUDA graph.
    Tokens without an expert (past the last offset, or in a run whose number is not in [0, E)) are not multiplied:
    they get epilogue(activation(bias)) with the bias of the nearest expert. An offset beyond T counts as T, and one
    that is smaller than the one before it as that one. W's indices are checked as in bsr_matmul.

    Cost of offs: x is copied to a padded layout of at most T + min(T, E + 1) * group_rows rows, and the result back
    from it; about 16 small kernels compute the layout. For several layers with one routing, pad once and pass
    expert_ids::

        T = group_rows * runs  # every expert's rows padded to a multiple of group_rows, ends: where they end
        firsts = torch.arange(0, T, group_rows, device=x.device)
        expert_ids = torch.searchsorted(ends, firsts, right=True, out_int32=True)

    as sparse_collective.nn.BsrMixtureOfExperts does.

    Of float8 operands W has no scales, one for all items, or one for each stored block (BsrMatrix.stack makes these of
    matrices with one each). Sums, copies of x and gradients are as in bsr_linear.

    Raises as bsr_matmul does.
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
        a: (M, K) bfloat16 or float16, of any strides; on the CPU also float32 or float64.
        b: (K, N) of a's dtype, of any strides.
        pattern: (M, N) BsrMatrix with (bm, bk) blocks, or with expert_ids a batch (L, M, N); its values are not read.
        out: (nnz, bm, bk), contiguous, at any address: where to write the result; its dtype (bfloat16, float16,
            float32 or a's) is the result's.
        accumulate: add to what `out` holds, in fp32, rounding once.
        out_dtype: of a result that is made here; a's unless told.
        expert_ids: (K / run,) int32 on a's device, contiguous, for a batch: the item to which each run of K belongs.
            Each item sums over its own runs; runs with a number out of range are skipped. run is a multiple of 64.

    Returns:
        (nnz, bm, bk), of a batch as its values: values for `pattern.with_values`; `out` if it was given.

    Of y = bsr_linear(x, W) with x (tokens, K), the gradient of W's values is sddmm(dy.t(), x, W). Sums are in fp32 and
    in one order: the bits are the same on every run. CPU tensors run a torch reference of the stored blocks. Not
    differentiable itself.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or layout is not supported; the message says
            what is.
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
