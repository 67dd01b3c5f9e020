"""attention: what a torch user calls. Validate, plan, launch; as cute_kernels.ops does for products.

An eager call with metadata seen before costs a key, a look-up and the launch. Under torch.compile the calls go through
the registered ops of torch_op.py.
"""

import torch

from cute_kernels import checks as common
from cute_kernels.explain import explains
from cute_kernels.runtime.plan import forced_path
from sparse_collective import BsrMatrix

from . import checks
from . import plan as planning
from .block_mask import BlockMask
from .mask_mods import window_bounds
from .plan import FlashPlan, launch, near, remember, without_kernel
from .sparse_plan import launch_blocks, plan_blocks

_PLANS: dict[tuple, FlashPlan] = {}


def attention(
    q, k, v, *, causal=False, window=None, softcap=None, scale=None, return_lse=False, out=None,
    cu_seqlens_q=None, cu_seqlens_k=None,
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

        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device, for sequences packed one after another: then q is
            (total_q, H, D), k and v (total_k, Hkv, D or Dv), and sequence b's rows of q are those from cu_seqlens_q[b]
            to before cu_seqlens_q[b + 1], and so of k and v. Masks are aligned in each sequence. The entries must begin
            at 0 and never decrease. On a GPU this is not checked, since the host does not wait for the GPU: others
            give wrong results, but no access out of the tensors. A CUDA graph may change them between replays.

    Returns:
        (B, H, Sq, Dv) of q's dtype, `out` if it was given. A row that sees no column gets 0, and an lse of -inf.
        Packed: (total_q, H, Dv), and an lse (H, total_q), as FlashAttention's. Rows from cu_seqlens_q[B] on, which are
        of no sequence, see no column.

    The same bits on every run. q, k or v whose address or strides are not multiples of 16 bytes, or which are expanded,
    are copied first, which `cute_kernels.explain(attention, ...)` says. CPU tensors run a torch reference in fp32.

    Raises:
        TypeError, ValueError: an argument's type, dtype, device, shape or strides, before any launch.
        RuntimeError: an argument requires a gradient, or the GPU is older than sm_80.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if torch.compiler.is_compiling():
        from .torch_op import traced_attention

        if packed:
            raise NotImplementedError("attention: torch.compile does not take cu_seqlens yet; call it outside")
        return traced_attention(q, k, v, causal, window, softcap, scale, return_lse, out)
    if type(window) is list:
        window = tuple(window)
    if packed:
        from .packed import attention_packed

        terms = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        return attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **terms, return_lse=return_lse, out=out)
    try:
        pq, pk, pv, po = q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if out is None else out.data_ptr()
        key = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device,
            (pq & 15, pk & 15, pv & 15, po & 15) if (pq | pk | pv | po) & 15 else 0,
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            causal, window, softcap, scale, return_lse, forced_path(),
        )  # fmt: skip
        plan = _PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = plan = None  # whatever it is, the plan's checks will name it
    if plan is None:
        terms = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "return_lse": return_lse}
        plan = plan_attention(q, k, v, **terms, out=out)
        remember(_PLANS, key, plan)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        common.check_no_grad("attention", q, k, v)
    if out is not None:
        spans = plan.spans
        if out.requires_grad or near(po, pq, spans, 0) or near(po, pk, spans, 1) or near(po, pv, spans, 2):
            common.check_out("attention", out, q, k, v)
    if plan.function is not None:
        out, lse = launch(plan, q, k, v, out)
    else:
        terms = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        out, lse = without_kernel(plan, lambda: _reference(q, k, v, **terms), out)
    return (out, lse) if return_lse else out


def block_sparse_attention(q, k, v, block_mask, *, causal=False, softcap=None, scale=None, return_lse=False, out=None):
    """attention() over the blocks of scores that `block_mask` names: nothing else is loaded or multiplied.

    Args:
        q, k, v, softcap, scale, return_lse, out: see attention.
        block_mask: a BlockMask; FlexAttention's BlockMask; a BsrMatrix or torch.sparse_bsr tensor (Sq, Sk), of which
            the pattern counts and the values do not; or a bool tensor (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk) of
            128 x 128 blocks (for others: BlockMask.from_blocks). One that has 1 batch item or 1 head serves all. Under
            torch.compile only a BlockMask, made outside, whose mask_mod is of mask_mods.py or captures no tensor.
        causal: a row also sees no column after its own, as in attention.

    Returns and raises as attention does, and raises ValueError or TypeError for a mask_mod that a kernel cannot be
    compiled with: see attention.element_mask. CPU tensors run the reference. What is made of a mask, once and without
    waiting for the GPU, is kept as long as the BlockMask: to pass the same one again costs nothing more.
    """
    if torch.compiler.is_compiling():
        from .torch_op import traced_block_sparse

        return traced_block_sparse(q, k, v, block_mask, causal, softcap, scale, return_lse, out)
    mask = as_block_mask(q, k, block_mask)
    if planning.has_kernel(q):
        out, lse = launch_blocks(q, k, v, mask, causal, softcap, scale, return_lse, out)
        return (out, lse) if return_lse else out
    terms = {"causal": causal, "softcap": softcap, "scale": scale}
    plan = plan_block_sparse(q, k, v, mask, **terms, return_lse=return_lse, out=out)
    common.check_no_grad("block_sparse_attention", q, k, v)
    out, lse = without_kernel(plan, lambda: _reference(q, k, v, **terms, block_mask=mask), out)
    return (out, lse) if return_lse else out


def as_block_mask(q, k, block_mask) -> BlockMask:
    """What block_sparse_attention was given, as a BlockMask for q and k."""
    checks.check_tensor("block_sparse_attention: q", q)
    checks.check_tensor("block_sparse_attention: k", k)
    if isinstance(block_mask, BlockMask):
        return block_mask
    if isinstance(block_mask, BsrMatrix) or (
        isinstance(block_mask, torch.Tensor) and block_mask.layout is torch.sparse_bsr
    ):
        return BlockMask.from_bsr(block_mask)
    if isinstance(block_mask, torch.Tensor):
        return BlockMask.from_blocks(block_mask, lengths=(q.shape[-2], k.shape[-2]))
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    if isinstance(block_mask, FlexBlockMask):
        return BlockMask.from_flex(block_mask)
    raise TypeError(
        "block_sparse_attention: block_mask must be a BlockMask, FlexAttention's BlockMask, a BsrMatrix, a "
        f"torch.sparse_bsr or a bool tensor, got {type(block_mask).__name__}"
    )


def plan_attention(
    q, k, v, *, causal=False, window=None, softcap=None, scale=None, return_lse=False, out=None,
    cu_seqlens_q=None, cu_seqlens_k=None,
) -> FlashPlan:  # fmt: skip
    """Check a call's arguments and choose its kernel, without launching it."""
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        from .packed import plan_packed

        terms = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        return plan_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **terms, return_lse=return_lse, out=out)
    plan = _checked_plan("attention", q, k, v, softcap, scale, return_lse, out)
    bounds = window_bounds(window, causal)
    if not plan.empty and planning.has_kernel(q):
        terms = {"bounds": bounds, "softcap": softcap, "scale": scale, "lse": return_lse}
        extents = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
        planning.plan_kernel(plan, q, k, v, out, extents=extents, **terms)
    return plan


def plan_block_sparse(
    q, k, v, block_mask, *, causal=False, softcap=None, scale=None, return_lse=False, out=None
) -> FlashPlan:
    """The same of block_sparse_attention."""
    op = "block_sparse_attention"
    mask = as_block_mask(q, k, block_mask)
    plan = _checked_plan(op, q, k, v, softcap, scale, return_lse, out)
    checks.check_block_mask(op, mask, q, k)
    window_bounds(None, causal)
    if not plan.empty and planning.has_kernel(q):
        plan_blocks(plan, q, k, v, mask, causal, softcap, scale, return_lse, out)
    return plan


def _checked_plan(op: str, q, k, v, softcap, scale, return_lse, out) -> FlashPlan:
    """The plan of a call whose q, k, v, scalars and out are right, without a kernel."""
    checks.check_qkv(op, q, k, v)
    checks.check_scale(op, scale, softcap)
    if not isinstance(return_lse, bool):
        raise TypeError(f"{op}: return_lse must be True or False, got {return_lse!r}")
    if planning.has_kernel(q):
        checks.check_head_dims(op, q, v)
    plan = FlashPlan(op, (*q.shape[:3], v.shape[-1]), tuple(q.shape[:3]), q.dtype, q.device)
    if out is not None:
        checks.check_out(op, out, plan.out_shape, q.dtype, q.device, (q, k, v))
        plan.spans = tuple(common.dense_bytes(t) for t in (q, k, v, out))
    plan.empty = 0 in q.shape[:3] or k.shape[2] == 0
    return plan


def _reference(q, k, v, **terms):
    from . import reference

    return reference.attention(q, k, v, **terms, return_lse=True)


explains(attention, plan_attention)
explains(block_sparse_attention, plan_block_sparse)
