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
    """softmax(scale * q @ k.T) @ v, with masks, in one kernel that stores no scores (flash attention).

    Args:
        q: (B, H, Sq, D) bfloat16 or float16, of any strides with D contiguous.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); H is a multiple of Hkv, and head h of q uses head h // (H / Hkv).
            On a GPU D and Dv are 64, 96, 128, 192 or 256, or both are 512.
        causal: row i sees columns up to i + Sk - Sq, so the last row sees the last column, whatever the lengths.
        window_size: (left, right): row i sees columns i + Sk - Sq - left to i + Sk - Sq + right, both included; None,
            or -1 as in FlashAttention, for no bound.
        softcap: c, for scores c * tanh(scale * score / c).
        scale: above 0; 1 / sqrt(D) by default.
        return_lse: whether to return (out, lse), lse (B, H, Sq) float32: log of a row's sum of exponentials.
        out: where to write the result, D contiguous, of strides that are multiples of 16 bytes. Its dtype is q's or
            float32, in which the results of shards are not rounded before attention.merge adds them up.
        seqused_k: (B,) int32, for a cache that is not full: the rows of k and v that each item has, instead of all Sk,
            also for causal and window_size. Rows after those may hold anything, even NaN. Or (B, 2), for padding on the
            left: item b has rows seqused_k[b, 0] to before seqused_k[b, 1], and those before must be finite.
        page_table: (B, pages of an item) int32, contiguous rows. k and v are pages then, (pages, Hkv, page_size, D)
            and (pages, Hkv, page_size, Dv), page_size a power of two from 16 on, and item b's row j of K and V is row
            j % page_size of page page_table[b, j // page_size]. Needs seqused_k. Later entries are not read. A
            page that does not exist counts as zeros, a length out of range as the nearest one in range.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device, for sequences packed one after another: then q is
            (total_q, H, D), k and v (total_k, Hkv, D or Dv), and sequence b's rows of q are those from cu_seqlens_q[b]
            to before cu_seqlens_q[b + 1], and so of k and v. Masks are aligned in each sequence. The entries begin at 0
            and never decrease, which is not checked on a GPU: others give wrong results, but no access outside of the
            tensors. They may change between a graph's replays.
        sinks: (H,) float32, bfloat16 or float16, a logit per head in the softmax's sum, and so in lse, without a value,
            as in gpt-oss. A row that sees no column has its sink for an lse.
        deterministic: True for a gradient of q that is bitwise identical on every run, as all other results always are.
            None: as torch.use_deterministic_algorithms says.
        score_mod: (score, b, h, q, kv) -> score, FlexAttention's: what becomes of each score, scaled, in float32,
            before masks. Positions are int32, and count from 0 in q and k, or in a packed sequence, whose number is b.
            Torch traces the function, see score_mod. Captured tensors get gradients, on a GPU by float32 atomics. Not
            with softcap, which it can write as c * torch.tanh(score / c). In packed sequences on a GPU, tensors indexed
            by q or kv past their end are read at their last element. Under torch.compile it is a function, a method of
            a module, a functools.partial or a dataclass; see function_text for what it may capture.
        q_descale, k_descale, v_descale: float32 above 0 (not checked), dequantization scales of FP8 q, k and v, None
            for 1. (1,), (H,) or (Hkv,), or (B, H) or (B, Hkv), as in FlashAttention 3; B is the number of packed
            sequences. q, k or v may be what quantize returns, with its own scale. Two combinations are supported,
            neither at head dimension 512:
            - FP8 attention on sm_90: q and k float8_e4m3fn, v that or 16-bit; dense, packed or block-sparse, without
              seqused_k. Unless packed, also scales per 128 tokens, (B, H, blocks); see quantize(per="tokens").
            - FP8 KV cache: k and v float8_e4m3fn or float8_e5m2, q 16-bit; without seqused_k, few queries only.
        use_fast_accum: for FP8 q, k and v: P is E4M3, and P V stays in the tensor cores' accumulators of some 14 bits,
            with errors of some percent (docs/howto/attention.md). Not on the CPU.
        q_offset, k_offset: positions of the first row of q, and of k and v, in a longer sequence of which these are
            shards. Query i then attends to key j if j + k_offset <= i + q_offset (causal), windows shift alike, and
            score_mod is given positions. If one is given, the other counts as 0; without both the last query is at the
            last key. Both are arguments of one kernel, so other values compile nothing. Key tiles that no query sees
            are skipped, and rows that see no key get 0 and an lse of -inf. Combine the outputs of several shards of k
            and v with attention.merge. Not with cu_seqlens, seqused_k or page_table.

    Returns:
        (B, H, Sq, Dv) with q's dtype, or `out` if given. For FP8 q it is bfloat16, or out's dtype: bfloat16, float16 or
        float32. A row that sees no column gets 0 and an lse of -inf; a NaN score makes its row and lse NaN.
        With cu_seqlens: (total_q, H, Dv), and an lse (H, total_q), as in FlashAttention. Rows from cu_seqlens_q[B] on,
        which belong to no sequence, see no column.

    Differentiable once in q, k, v, sinks and what score_mod captures, by out and by lse. These, out and lse are saved,
    nothing quadratic. Rows that belong to no packed sequence give sinks no gradient. The gradient of q uses atomics and
    is nondeterministic on a GPU, unless `deterministic`. Head dimension 512 has no gradients.

    Under torch.autocast q, k and v are cast as in torch's SDPA, but not with out=; float64 and FP8 are not cast.

    Results are bitwise identical from run to run; on the sm_80 path they differ with and without return_lse. q, k or v
    are copied first if their address or strides are not multiples of 16 bytes, or if they are expanded;
    `cute_kernels.explain(attention, ...)` reports it. CPU tensors run a torch reference in FP32.

    Raises:
        TypeError, ValueError: an argument's type, dtype, device, shape or strides, before any launch.
        RuntimeError: q, k, v or sinks requires a gradient and out, seqused_k or page_table is given, k and v are of 8
            bits, or on a GPU the head dimension is 512; or a scale requires one; or the GPU is older than sm_80.
    """
    args = AttentionArgs(
        q, k, v,  # type: ignore[arg-type]  # `_call` unpacks a Quantized
        out, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, sinks, q_descale, k_descale, v_descale, None,
        score_mod, causal, window_size, softcap, scale, return_lse, deterministic, use_fast_accum, q_offset, k_offset,
    )  # fmt: skip
    return _call(args)


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
    """attention() over the blocks of scores that `block_mask` lists; no other blocks are loaded or multiplied.

    Args:
        q, k, v, softcap, scale, return_lse, out, sinks, deterministic, score_mod: see attention; and q_descale,
            k_descale, v_descale and use_fast_accum, for q and k of float8_e4m3fn.
        block_mask: a BlockMask; FlexAttention's BlockMask; a BsrMatrix or torch.sparse_bsr tensor (Sq, Sk), of which
            the pattern counts and the values do not; or a bool tensor (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk) of
            128 x 128 blocks (for others: BlockMask.from_blocks). A mask with 1 batch item or 1 head serves all.
            torch.compile does not take a torch.sparse_bsr tensor: make BsrMatrix.from_torch(t) outside. Tensors that a
            mask's function captures are read when the graph runs, so they must not be written to inside of it.
            Mask and scores have the same lengths; or the mask is as many rows as columns longer, and is cropped.
        causal: a row also sees no column after its own, as in attention.
        q_offset, k_offset: positions of the first row of q, and of k and v, as mask_mod and score_mod see them, see
            attention. The lists of block_mask are those of this shard, see BlockMask.shard. Not with causal=True.
        others: there are none. attention's cu_seqlens_q, cu_seqlens_k, seqused_k, page_table and window_size raise
            TypeError, with what serves instead: masks combine with &, see docs/howto/masks.md.

    Returns and raises as attention does, and raises TypeError for a mask_mod that a kernel cannot compute, see
    masks.element_mask, and IndexError where b, h, q or kv goes past the end of a tensor that it indexes. CPU
    tensors run the reference.

    What is computed from a mask, without waiting for the GPU, is kept as long as the object that was passed, also under
    torch.compile: passing the same object again costs only a look-up. It is computed again

    - of FlexAttention's BlockMask, when one of its lists was written to or replaced, or its mask_mod, lengths or block
      size;
    - of a bool tensor, when it was written to, and for each (Sq, Sk), of which the latest 8 are kept;
    - of a BsrMatrix or torch.sparse_bsr tensor, when its indices were written to;
    - of a BlockMask never: its lists must not be written to.

    Writes are seen where torch counts them: in-place operations on the tensor, its views or its detach(), and
    assignments to its .data; but not writes through .data, NumPy, kernels, or the index tensors that
    torch.sparse_bsr_tensor was given. Torch counts no writes to tensors that were made in inference mode: these masks
    are converted at each call. While a CUDA graph is captured, so are all but a BlockMask and a BsrMatrix, since
    replays must see what was written between them: pass one of these two if the mask does not change.

    Backward uses the mask of the forward call. Autograd saves the tensors that it reads, and raises "modified by an
    inplace operation" if one was written to since.
    """
    if others:
        checks.refuse_options("block_sparse_attention", others)
    if block_mask is None:
        checks.refuse_mask(block_mask)
    args = AttentionArgs(
        q, k, v,  # type: ignore[arg-type]  # `_call` unpacks a Quantized
        out, None, None, None, None, sinks, q_descale, k_descale, v_descale, block_mask,
        score_mod, causal, None, softcap, scale, return_lse, deterministic, use_fast_accum, q_offset, k_offset,
    )  # fmt: skip
    return _call(args)


def _call(args: AttentionArgs) -> Tensor | tuple[Tensor, Tensor]:
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
