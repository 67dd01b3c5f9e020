"""attention: what a torch user calls. Validate, plan, launch; as cute_kernels.ops does for products.

An eager call with metadata seen before costs a look-up, a test of its tensors and the launch. Under torch.compile the
calls go through the registered ops of torch_op.py.
"""

from functools import partial

import torch
from torch.compiler import is_compiling

from cute_kernels import checks as common
from cute_kernels.explain import explains
from cute_kernels.runtime.plan import forced_path
from sparse_collective import BsrMatrix

from . import checks
from . import plan as planning
from .block_sparse import launch_blocks, plan_blocks
from .decode import checks as cache_checks
from .decode import choose as decode
from .masks import kept
from .masks.block_mask import BlockMask
from .masks.mask_mods import window_bounds
from .packed import attention_packed, plan_packed
from .plan import FlashPlan, Plans, launch, spans_of, without_kernel

_PLANS = Plans()


def attention(
    q, k, v, *, causal=False, window=None, softcap=None, scale=None, return_lse=False, out=None,
    cu_seqlens_q=None, cu_seqlens_k=None, seqlens_k=None, block_table=None,
):  # fmt: skip
    """softmax(scale * q @ k.T) @ v, with masks, in one kernel that keeps no scores (flash attention).

    Args:
        q: (B, H, Sq, D) bfloat16 or float16, of any strides with D contiguous.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); H is a multiple of Hkv, and head h of q takes head h // (H / Hkv).
            On a GPU D and Dv are 64, 96, 128, 192 or 256.
        causal: row i sees columns up to i + Sk - Sq: the last row sees the last column, whatever the lengths.
        window: (left, right): row i sees columns i + Sk - Sq - left to i + Sk - Sq + right, both included; None, or -1
            as in FlashAttention, for no bound.
        softcap: c, for scores c * tanh(scale * score / c).
        scale: above 0; 1 / sqrt(D) by default.
        return_lse: whether to return (out, lse), lse (B, H, Sq) float32: log of a row's sum of exponentials.
        out: where to write the result, D contiguous, of strides that are multiples of 16 bytes.
        seqlens_k: (B,) int32, for a cache that is not full: how many rows of k and v each item has, instead of all Sk,
            also in what causal and window say. Rows after those may hold anything, NaN too.
        block_table: (B, pages of an item) int32, contiguous rows. k and v are pages then, (pages, Hkv, page_size, D)
            and (pages, Hkv, page_size, Dv), page_size a power of two from 16 on, and item b's row j of K and V is row
            j % page_size of page block_table[b, j // page_size]. Needs seqlens_k. Entries past an item's rows are not
            used.

    The numbers in seqlens_k and block_table are not checked, since that would wait for the GPU, but nothing outside of
    the tensors is read: a length is taken as the nearest one that can be, a page that is not there as zeros.

        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device, for sequences packed one after another: then q is
            (total_q, H, D), k and v (total_k, Hkv, D or Dv), and sequence b's rows of q are those from cu_seqlens_q[b]
            to before cu_seqlens_q[b + 1], and so of k and v. Masks are aligned in each sequence. The entries must begin
            at 0 and never decrease. On a GPU this is not checked, since the host does not wait for the GPU: others
            give wrong results, but no access out of the tensors. A CUDA graph may change them between replays.

    Returns:
        (B, H, Sq, Dv) of q's dtype, `out` if it was given. A row that sees no column gets 0, and an lse of -inf; one
        that sees a score of NaN gets NaN, and an lse of NaN.
        Packed: (total_q, H, Dv), and an lse (H, total_q), as FlashAttention's. Rows from cu_seqlens_q[B] on, which are
        of no sequence, see no column.

    The same bits on every run; on the sm_80 path not the same with return_lse as without. q, k or v whose address or
    strides are not multiples of 16 bytes, or which are expanded, are copied first, which
    `cute_kernels.explain(attention, ...)` says. CPU tensors run a torch reference in fp32.

    Raises:
        TypeError, ValueError: an argument's type, dtype, device, shape or strides, before any launch.
        RuntimeError: an argument requires a gradient, or the GPU is older than sm_80.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if is_compiling():
        from .torch_op import traced_attention

        tensors = cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table
        return traced_attention(q, k, v, causal, window, softcap, scale, return_lse, out, *tensors)
    if type(window) is list:
        window = tuple(window)
    if packed:
        _check_one_form(seqlens_k, block_table)
        terms = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        return attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **terms, return_lse=return_lse, out=out)
    terms = (
        causal, window, softcap, scale, return_lse, forced_path(), decode.forced_splits(),
        out is None, seqlens_k is None, block_table is None,
    )  # fmt: skip
    tensors = (q, k, v) if out is None else (q, k, v, out)
    if seqlens_k is not None or block_table is not None:
        tensors += (seqlens_k,) if block_table is None else (seqlens_k, block_table)
    plan = _PLANS.known(terms, tensors, out)
    if plan is None:
        make = partial(
            plan_attention, q, k, v, causal=causal, window=window, softcap=softcap, scale=scale, return_lse=return_lse,
            out=out, seqlens_k=seqlens_k, block_table=block_table,
        )  # fmt: skip
        plan = _PLANS.checked("attention", terms, tensors, out, make)
    if plan.function is None:
        terms = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        if seqlens_k is not None:
            terms |= {"seqlens_k": seqlens_k, "block_table": block_table}
        out, lse = without_kernel(plan, partial(_reference, q, k, v, **terms), out)
    elif seqlens_k is not None:
        out, lse = launch(plan, q, k, v, out, seqlens_k, block_table)
    else:
        out, lse = launch(plan, q, k, v, out)
    return (out, lse) if return_lse else out


def block_sparse_attention(q, k, v, block_mask, *, causal=False, softcap=None, scale=None, return_lse=False, out=None):
    """attention() over the blocks of scores that `block_mask` names: nothing else is loaded or multiplied.

    Args:
        q, k, v, softcap, scale, return_lse, out: see attention.
        block_mask: a BlockMask; FlexAttention's BlockMask; a BsrMatrix or torch.sparse_bsr tensor (Sq, Sk), of which
            the pattern counts and the values do not; or a bool tensor (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk) of
            128 x 128 blocks (for others: BlockMask.from_blocks). One that has 1 batch item or 1 head serves all. Under
            torch.compile no torch.sparse_bsr tensor, which it does not take: make BsrMatrix.from_torch(t) outside.
            Tensors that a mask's function captures are read when the graph runs, so they must not be written to inside
            of it.
        causal: a row also sees no column after its own, as in attention.

    Returns and raises as attention does, and raises TypeError for a mask_mod that a kernel cannot compute, see
    attention.element_mask, and IndexError where b, h, q or kv goes past the end of a tensor that it indexes. CPU
    tensors run the reference.

    What is made of a mask, without waiting for the GPU, is kept as long as the object that was passed, under
    torch.compile too: to pass the same object again costs nothing more than a look-up. It is made again

    - of FlexAttention's BlockMask, when one of its lists was written to or replaced, or its mask_mod, lengths or block
      size;
    - of a bool tensor, when it was written to, and for each (Sq, Sk), of which the latest 8 are kept;
    - of a BsrMatrix or torch.sparse_bsr tensor, when its indices were written to;
    - of a BlockMask never: its lists must not be written to.

    Writes are seen where torch counts them, which are operations in place on the tensor, its views or its detach(), and
    assignments to its .data; not through .data, NumPy, kernels, or the index tensors that torch.sparse_bsr_tensor was
    given. Of tensors that were made in inference mode torch counts none: these masks are converted at each call. While
    a CUDA graph is captured, so are all but a BlockMask and a BsrMatrix, since replays must see what was written
    between them: pass one of these two where the mask does not change.
    """
    if is_compiling():
        from .torch_op import traced_block_sparse

        return traced_block_sparse(q, k, v, block_mask, causal, softcap, scale, return_lse, out)
    mask = as_block_mask(q, k, block_mask)
    if planning.has_kernel(q):
        out, lse = launch_blocks(q, k, v, mask, causal, softcap, scale, return_lse, out)
        return (out, lse) if return_lse else out
    terms = {"causal": causal, "softcap": softcap, "scale": scale}
    plan = plan_block_sparse(q, k, v, mask, **terms, return_lse=return_lse, out=out)
    common.check_no_grad("block_sparse_attention", q, k, v)
    out, lse = without_kernel(plan, partial(_reference, q, k, v, **terms, block_mask=mask), out)
    return (out, lse) if return_lse else out


def as_block_mask(q, k, block_mask) -> BlockMask:
    """What block_sparse_attention was given, as a BlockMask for q and k."""
    checks.check_tensor("block_sparse_attention: q", q)
    checks.check_tensor("block_sparse_attention: k", k)
    if isinstance(block_mask, BlockMask):
        return block_mask
    if isinstance(block_mask, kept.FlexBlockMask):
        return kept.of_flex(block_mask)
    if isinstance(block_mask, BsrMatrix):
        return kept.of_bsr(block_mask)
    if isinstance(block_mask, torch.Tensor):
        if block_mask.layout is torch.sparse_bsr:
            return kept.of_torch_bsr(block_mask)
        return kept.of_blocks(block_mask, (q.shape[-2], k.shape[-2]))
    raise TypeError(
        "block_sparse_attention: block_mask must be a BlockMask, FlexAttention's BlockMask, a BsrMatrix, a "
        f"torch.sparse_bsr or a bool tensor, got {type(block_mask).__name__}"
    )


def plan_attention(
    q, k, v, *, causal=False, window=None, softcap=None, scale=None, return_lse=False, out=None,
    cu_seqlens_q=None, cu_seqlens_k=None, seqlens_k=None, block_table=None,
) -> FlashPlan:  # fmt: skip
    """Check a call's arguments and choose its kernel, without launching it."""
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        _check_one_form(seqlens_k, block_table)
        terms = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        return plan_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **terms, return_lse=return_lse, out=out)
    cache_checks.check_cache("attention", q, k, v, seqlens_k, block_table)
    plan = _checked_plan("attention", q, k, v, softcap, scale, return_lse, out, cache_checks.capacity(k, block_table))
    bounds = window_bounds(window, causal)
    if not plan.empty and planning.has_kernel(q):

        def choose(plan, facts, sms) -> bool:
            if seqlens_k is None and not decode.serves(q, k, sms):
                return False
            decode.use(plan, facts, q, k, seqlens_k, block_table, bounds, sms)
            return True

        terms = {"bounds": bounds, "softcap": softcap, "scale": scale, "lse": return_lse, "choose": choose}
        extents = q.shape[0] * q.shape[1], q.shape[2], cache_checks.capacity(k, block_table)
        planning.plan_kernel(plan, q, k, v, out, extents=extents, **terms)
    return plan


def _check_one_form(seqlens_k, block_table) -> None:
    """Packed sequences have no cache."""
    if seqlens_k is not None or block_table is not None:
        raise ValueError("attention: cu_seqlens and seqlens_k are two forms; give one of them")


def plan_block_sparse(
    q, k, v, block_mask, *, causal=False, softcap=None, scale=None, return_lse=False, out=None
) -> FlashPlan:
    """The same of block_sparse_attention."""
    op = "block_sparse_attention"
    mask = as_block_mask(q, k, block_mask)
    checks.check_qkv(op, q, k, v)
    plan = _checked_plan(op, q, k, v, softcap, scale, return_lse, out, k.shape[2])
    checks.check_block_mask(op, mask, q, k)
    window_bounds(None, causal)
    if not plan.empty and planning.has_kernel(q):
        plan_blocks(plan, q, k, v, mask, causal, softcap, scale, return_lse, out)
    return plan


def _checked_plan(op: str, q, k, v, softcap, scale, return_lse, out, columns: int) -> FlashPlan:
    """The plan of a call whose scalars and out are right too, without a kernel."""
    checks.check_scale(op, scale, softcap)
    if not isinstance(return_lse, bool):
        raise TypeError(f"{op}: return_lse must be True or False, got {return_lse!r}")
    if planning.has_kernel(q):
        checks.check_head_dims(op, q, v)
    plan = FlashPlan(op, (*q.shape[:3], v.shape[-1]), tuple(q.shape[:3]), q.dtype, q.device)
    if out is not None:
        checks.check_out(op, out, plan.out_shape, q.dtype, q.device, (q, k, v))
        plan.spans = spans_of(q, k, v, out)
    plan.empty = 0 in plan.out_shape or columns == 0
    return plan


def _reference(q, k, v, **terms):
    from . import reference

    run = reference.attention_cached if "seqlens_k" in terms else reference.attention
    return run(q, k, v, **terms, return_lse=True)


explains(attention, plan_attention)
explains(block_sparse_attention, plan_block_sparse)
