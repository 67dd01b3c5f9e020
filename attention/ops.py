"""attention and block_sparse_attention: what a torch user calls.

Under torch.compile a call becomes a registered op (torch_op.py); all other calls go to dispatch.py at once.
"""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from cute_kernels.checks import watched
from cute_kernels.explain import explains
from cute_kernels.fp8.quantized import Quantized, unpacked_arguments
from cute_kernels.runtime.autocast import any_autocast
from cute_kernels.runtime.front import NeedsDispatcher, dispatched, hidden
from cute_kernels.runtime.torch_compat import uncompiled
from sparse_collective import BsrMatrix

from . import checks, dispatch
from . import families as _families  # noqa: F401 (importing it registers them)
from .annotations import AttentionOptions, BlockSparseOptions, Window
from .arguments import OPTIONAL, AttentionArgs
from .masks.block_mask import BlockMask
from .masks.score_mod import bound
from .operands import autocast
from .plan import FlashPlan

Operand = Tensor | Quantized
AnyMask = BlockMask | FlexBlockMask | BsrMatrix | Tensor


@overload
def attention(
    q: Operand, k: Operand, v: Operand, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Tensor: ...
@overload
def attention(
    q: Operand, k: Operand, v: Operand, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Operand, k: Operand, v: Operand, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    causal: bool = False,
    window_size: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    score_mod: Callable | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    use_fast_accum: bool = False,
    q_offset: int | None = None,
    k_offset: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Flash attention: softmax(scale * q @ k.T) @ v with masks, in one kernel that does not store the scores.

    | operands | supported |
    | --- | --- |
    | bfloat16, float16 | sm_80 and newer; gradients except at head dimension 512 |
    | float32, float64 | CPU; gradients |
    | FP8 q, k, v | sm_90, see q_descale; no gradients |
    | FP8 KV cache with 16-bit q | sm_80 and newer, with seqused_k; no gradients |

    Args:
        q: (B, H, Sq, D) bfloat16 or float16, with any strides and D contiguous.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); H is a multiple of Hkv, and head h of q uses head h // (H / Hkv).
            On a GPU D and Dv are 64, 96, 128, 192 or 256, or both are 512.
        causal: True lets row i attend to columns up to i + Sk - Sq: the last row attends to the last column.
        window_size: (left, right): row i attends to columns i + Sk - Sq - left to i + Sk - Sq + right, both included.
            None, or -1 as in FlashAttention, is unbounded.
        softcap: c, for scores c * tanh(scale * score / c).
        scale: positive; 1 / sqrt(D) by default.
        return_lse: True returns (out, lse), lse (B, H, Sq) float32: the log of a row's sum of exponentials.
        out: the output tensor, with D contiguous and strides that are multiples of 16 bytes. Its dtype is q's, or
            float32 to add shards by attention.merge without rounding.
        seqused_k: (B,) int32, the number of valid rows of k and v in each sequence of a KV cache; it replaces Sk in
            causal and window_size. Later rows may hold anything, even NaN. Or (B, 2) for left padding: sequence b has
            rows seqused_k[b, 0] to before seqused_k[b, 1], and earlier rows must be finite.
        page_table: (B, pages per sequence) int32 with contiguous rows, for a paged KV cache: k and v are (pages, Hkv,
            page_size, D) and (pages, Hkv, page_size, Dv), page_size a power of two, at least 16. Row j of sequence b is
            row j % page_size of page page_table[b, j // page_size]. Requires seqused_k. Later entries are not read. A
            page that does not exist counts as zeros, and a length out of range as the nearest valid one.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device, for packed sequences: q is (total_q, H, D), k and v
            are (total_k, Hkv, D or Dv), and sequence b has rows cu_seqlens_q[b] to before cu_seqlens_q[b + 1] of q,
            likewise for k and v. Masks are aligned in each sequence. Entries begin at 0 and never decrease, which is
            not checked on a GPU: other entries give wrong results, but no access outside the tensors. They may change
                between replays of
            a CUDA graph.
        sinks: (H,) float32, bfloat16 or float16: a logit per head that is added to the softmax's sum, and so to lse,
            without a value, as in gpt-oss. The lse of a fully masked row is its sink.
        deterministic: True for a gradient of q that is bitwise identical on every run; all other results always are,
            but for what score_mod captures.
            None follows torch.use_deterministic_algorithms.
        score_mod: (score, b, h, q, kv) -> score, as in FlexAttention, on scaled scores in FP32 before masks. Positions
            are int32 and count from 0 in q and k, or in a packed sequence, whose number is b. Torch traces the
            function, see score_mod. Captured tensors get gradients, on a GPU by FP32 atomics. Not supported with
            softcap, which it can compute as c * torch.tanh(score / c). In packed sequences on a GPU, tensors indexed by
            q or kv past their end are read at their last element. Under torch.compile it must be a function, a method
            of a module, a functools.partial or a dataclass; see function_text for what it may capture.
        q_descale, k_descale, v_descale: dequantization scales of FP8 q, k and v: float32, positive (not checked); None
            is 1. Shape (1,), (H,) or (Hkv,), or (B, H) or (B, Hkv), as in FlashAttention 3; B is the number of packed
            sequences. q, k or v may also be the result of quantize, with its scale. Two combinations are supported, not
            at head dimension 512:
            - FP8 attention on sm_90: q and k float8_e4m3fn, v that or 16-bit; dense, packed or block-sparse, without
              seqused_k. Unless packed, also scales per 128 tokens, (B, H, blocks); see quantize(per="tokens").
            - FP8 KV cache: k and v float8_e4m3fn or float8_e5m2, q 16-bit; without seqused_k, small Sq only.
        use_fast_accum: for FP8 q, k and v: P is E4M3, and P V accumulates in the tensor cores' accumulators, about 14
            bits of mantissa, with errors of some percent (docs/howto/attention.md). Not on the CPU.
        q_offset, k_offset: positions of the first row of q, and of k and v, as shards of a longer sequence. Query i
            attends to key j if j + k_offset <= i + q_offset (causal); windows and score_mod use these positions, too.
            If one is passed, the other is 0; without both, the last query is at the last key. They are arguments of one
            kernel, so new values compile nothing. Fully masked KV tiles are skipped; fully masked rows get 0 and an lse
            of -inf. Combine the outputs of shards of k and v with attention.merge. Not with cu_seqlens, seqused_k or
            page_table.

    Returns:
        (B, H, Sq, Dv) with q's dtype, or `out` if it was passed. For FP8 q bfloat16, or out's dtype: bfloat16, float16
        or float32. A fully masked row gets 0 and an lse of -inf; a NaN score makes its row and lse NaN. With
        cu_seqlens: (total_q, H, Dv), and lse (H, total_q), as in FlashAttention. Rows from cu_seqlens_q[B] on belong to
        no sequence and are fully masked.

    Differentiable once in q, k, v, sinks and tensors captured by score_mod, through out and lse. Autograd saves these,
    out and lse, nothing quadratic. The gradient of q uses atomics and is nondeterministic on a GPU, unless
    `deterministic`. Rows that belong to no packed sequence give sinks no gradient.

    Under torch.autocast q, k and v are cast as in torch's SDPA, but not with out=; float64 and FP8 are not cast.

    Results are bitwise identical on every run; on the sm_80 path they differ with and without return_lse. q, k or v
    are copied first if their address or strides are not multiples of 16 bytes, or if they are expanded;
    `cute_kernels.explain(attention, ...)` reports it. CPU tensors run a torch reference in FP32.

    Raises:
        TypeError, ValueError: an argument has an unsupported type, dtype, device, shape or strides. Raised before any
            launch.
        RuntimeError: q, k, v or sinks requires a gradient, and out, seqused_k or page_table is passed, k and v are FP8,
            or on a GPU the head dimension is 512; a scale requires a gradient; or the GPU is older than sm_80.

    Example:
        q = torch.randn(2, 16, 1024, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(2, 4, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))  # GQA
        out = attention(q, k, v, causal=True, window_size=(255, 0))
    """
    args = AttentionArgs(
        q, k, v,  # type: ignore[arg-type]  # `call` unpacks a Quantized
        out, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, sinks, q_descale, k_descale, v_descale, None,
        score_mod, causal, window_size, softcap, scale, return_lse, deterministic, use_fast_accum, q_offset, k_offset,
    )  # fmt: skip
    return call(args)


@overload
def block_sparse_attention(
    q: Operand, k: Operand, v: Operand, block_mask: AnyMask, *, return_lse: Literal[False] = False,
    **options: Unpack[BlockSparseOptions],
) -> Tensor: ...  # fmt: skip
@overload
def block_sparse_attention(
    q: Operand,
    k: Operand,
    v: Operand,
    block_mask: AnyMask,
    *,
    return_lse: Literal[True],
    **options: Unpack[BlockSparseOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def block_sparse_attention(
    q: Operand, k: Operand, v: Operand, block_mask: AnyMask, *, return_lse: bool, **options: Unpack[BlockSparseOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def block_sparse_attention(
    q: Operand,
    k: Operand,
    v: Operand,
    block_mask: AnyMask,
    *,
    causal: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    score_mod: Callable | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    use_fast_accum: bool = False,
    q_offset: int | None = None,
    k_offset: int | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the blocks of scores that `block_mask` lists; other blocks are neither loaded nor multiplied.

    Args:
        q, k, v, softcap, scale, return_lse, out, sinks, deterministic, score_mod: see attention; and q_descale,
            k_descale, v_descale and use_fast_accum, for float8_e4m3fn q and k.
        block_mask: one of these, with 1 or B batch indices and 1 or H heads:

            - a BlockMask, or FlexAttention's BlockMask;
            - a BsrMatrix or torch.sparse_bsr tensor (Sq, Sk), whose pattern is used and whose values are not. Under
              torch.compile pass BsrMatrix.from_torch(t), made outside;
            - a bool tensor (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk) of 128 x 128 blocks (others: BlockMask.from_blocks).

            It has the lengths of the scores, or as many more rows as columns, and is cropped then. Tensors captured by
            its mask_mod are read when a compiled graph runs, so the graph must not write to them.
        causal: True also masks columns after a row's position, as in attention.
        q_offset, k_offset: positions of the first row of q, and of k and v, for mask_mod and score_mod, see attention.
            The lists of block_mask are those of this shard, see BlockMask.shard. Not with causal=True.
        others: attention's cu_seqlens_q, cu_seqlens_k, seqused_k, page_table and window_size raise TypeError, which
            names the alternative: masks combine with &, see docs/howto/masks.md.

    Returns the results of attention. Raises its errors, TypeError for a mask_mod that a kernel cannot compute (see
    masks.element_mask), and IndexError if b, h, q or kv exceeds a tensor that it indexes. CPU tensors run a reference.

    Tables computed from a mask, without synchronization, are cached in the object that was passed, also under
    torch.compile: passing the same object again costs only a look-up. They are computed again for

    - FlexAttention's BlockMask, if one of its lists was written to or replaced, or its mask_mod, lengths or block size;
    - a bool tensor, if it was written to, and for each (Sq, Sk), of which the latest 8 are cached;
    - a BsrMatrix or torch.sparse_bsr tensor, if its indices were written to;
    - a BlockMask never: its lists must not be written to.

    Writes are detected by torch's version counters: in-place operations on the tensor, its views or its detach(), and
    assignments to its .data; but not writes through .data, NumPy, kernels, or the index tensors passed to
    torch.sparse_bsr_tensor. Tensors made in inference mode have no version counter; these masks are converted in each
    call. During CUDA graph capture all masks except a BlockMask and a BsrMatrix are converted in the graph, since
    replays must see writes between them: pass one of these two if the mask does not change.

    Backward uses the mask of the forward call. Autograd saves the tensors that it reads, and raises "modified by an
    inplace operation" if one was written to since.

    Example:
        mask = create_block_mask(lambda b, h, q, kv: q // 256 == kv // 256, None, None, 1024, 1024, q.device)
        out = block_sparse_attention(q, k, v, mask)
    """
    if others:
        checks.refuse_options("block_sparse_attention", others)
    if block_mask is None:
        checks.refuse_mask(block_mask)
    args = AttentionArgs(
        q, k, v,  # type: ignore[arg-type]  # `call` unpacks a Quantized
        out, None, None, None, None, sinks, q_descale, k_descale, v_descale, block_mask,
        score_mod, causal, None, softcap, scale, return_lse, deterministic, use_fast_accum, q_offset, k_offset,
    )  # fmt: skip
    return call(args)


def call(args: AttentionArgs) -> Tensor | tuple[Tensor, Tensor]:
    """Both ops, with the arguments as the user passed them."""
    if type(args.q) is Quantized or type(args.k) is Quantized or type(args.v) is Quantized:
        args = AttentionArgs(**unpacked_arguments(args.op, args._asdict()))
    if any_autocast() and args.out is None:
        q, k, v = autocast(*args[:3])
        args = args._replace(q=q, k=k, v=v)
    if type(args.window_size) is list:  # plans need a key that can be hashed
        args = args._replace(window_size=tuple(args.window_size))
    if args.deterministic is not None:
        checks.check_deterministic(args.op, args.deterministic)
    if not is_compiling():
        try:
            return _eager(args)
        except NeedsDispatcher:
            pass
    from .torch_op import traced  # imports torch's compiler, which takes seconds

    return traced(args)


@uncompiled
def _eager(args: AttentionArgs) -> Tensor | tuple[Tensor, Tensor]:
    """A call outside of a trace; raises NeedsDispatcher if the registered op must serve it."""
    q, k, v, out = args[:4]
    score, mask = args.score_mod, args.block_mask
    differentiable = out is None and watched(q, k, v, args.sinks)
    # Checked before a function is traced, and before another form of mask is converted
    converts = score is not None or (mask is not None and not isinstance(mask, BlockMask))
    try:  # looking up a plan reads strides, which aborts the process for strided nested tensors
        nested = q.is_nested or k.is_nested or v.is_nested
    except AttributeError:  # not a tensor: the op's checks raise
        nested = False
    if converts or nested or hidden():
        optional: Any = args[OPTIONAL]
        check_front(args.op, q, k, v, *optional)
    if score is not None:
        checks.check_tensor(f"{args.op}: q", q)
        score = bound(score, q.device)
        check_front(args.op, q, *score.tensors)
        args = args._replace(score_mod=score)
        differentiable = out is None and watched(q, k, v, args.sinks, *score.tensors)
    if not differentiable or not isinstance(args.return_lse, bool):
        return dispatch.attention(args)
    checks.check_differentiable(args)
    from .gradients import differentiable_attention

    found = differentiable_attention(args)
    return found if args.return_lse else found[0]


def check_front(op: str, *tensors) -> None:
    """Raise NeedsDispatcher if a call with these tensors must go through the registered op."""
    if dispatched(op, *tensors):
        raise NeedsDispatcher(f"{op} must be called as its registered op")


def _plan(q, k, v, block_mask=None, *, out=None, **options) -> FlashPlan:
    """The plan of the same call of attention, or with a block_mask of block_sparse_attention."""
    q, k, v = autocast(q, k, v) if out is None else (q, k, v)
    return dispatch.plan_attention(AttentionArgs(q, k, v, out, block_mask=block_mask, **options))


explains(attention, _plan)
explains(block_sparse_attention, _plan)
