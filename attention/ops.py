"""attention: what a torch user calls. Validate, plan, launch; as cute_kernels.ops does for products."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cute_kernels import checks as common
from cute_kernels.arch import ArchSpec
from cute_kernels.dtypes import NAMES
from cute_kernels.explain import explains
from cute_kernels.runtime.plan import device_arch, forced_path
from sparse_collective import BsrMatrix

from . import checks
from .block_mask import BlockMask
from .config import BandKind, FlashFacts

LOG2E = 1.4426950408889634
_PLANS: dict[tuple, "FlashPlan"] = {}
_MOST_PLANS = 8192
OP = "attention"
ON_GPU = False  # whether CUDA tensors are taken: once the kernels have been run


@dataclass
class FlashPlan:
    """What a call runs; made once per metadata. `function` is None for CPU tensors and results that need no kernel."""

    out_shape: tuple
    scalars: tuple = ()  # scale_log2, softcap, left, right, max_ctas
    function: Callable | None = None
    facts: FlashFacts | None = None
    notes: list[str] = field(default_factory=list)
    views: tuple = ()  # of q, k, v and out: None, or what makes the kernel's tensor of it
    empty: bool = False  # no row, or nothing to attend to

    def __str__(self) -> str:
        lines = [f"{OP} -> {self.out_shape}"]
        if self.facts is None:
            lines.append("kernel: none, " + ("nothing to compute" if self.empty else "CPU tensors run the reference"))
        else:
            f = self.facts
            lines.append(f"path: {f.path}, compiled for {f.arch}")
            lines.append(f"configuration: {f.config}, head_dim {f.head_dim}, of v {f.head_dim_v}, {f.band}")
        return "\n  ".join(lines + self.notes)


def attention(q, k, v, *, causal=False, window=None, softcap=None, scale=None, return_lse=False, out=None):
    """softmax(scale * q @ k.T) @ v, with masks, in one kernel that keeps no scores (flash attention).

    Args:
        q: (B, H, Sq, D) bfloat16 or float16, of any strides with D contiguous.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); H is a multiple of Hkv, and head h of q takes head h // (H / Hkv).
            On a GPU D and Dv are 64, 96, 128, 192 or 256.
        causal: row i sees columns up to i + Sk - Sq: the last row sees the last column, whatever the lengths.
        window: (left, right): row i sees columns i + Sk - Sq - left to i + Sk - Sq + right, None for no bound.
        softcap: c, for scores c * tanh(scale * score / c).
        scale: above 0; 1 / sqrt(D) by default.
        return_lse: whether to return (out, lse) too, lse (B, H, Sq) float32: log of a row's sum of exponentials.
        out: where to write the result, D contiguous, of strides that are multiples of 16 bytes.

    Returns:
        (B, H, Sq, Dv) of q's dtype, `out` if it was given. A row that sees no column gets 0, and an lse of -inf.

    The same bits on every run. q, k or v whose address or strides are not multiples of 16 bytes are copied first, which
    `cute_kernels.explain(attention, ...)` says. CPU tensors run a torch reference in fp32.

    Raises:
        TypeError, ValueError: an argument's type, dtype, device, shape or strides, before any launch.
        RuntimeError: an argument requires a gradient, or the GPU is older than sm_80.
    """
    try:
        key = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
            None if out is None else out.stride(),
            causal, window, softcap, scale, return_lse, forced_path(),
        )  # fmt: skip
        plan = _PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = plan = None  # whatever it is, the plan's checks will name it
    terms = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "return_lse": return_lse}
    if plan is None:
        plan = plan_attention(q, k, v, **terms, out=out)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        if key is not None:
            _PLANS[key] = plan
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        common.check_no_grad(OP, q, k, v)
    if out is not None:
        checks.check_out(OP, out, plan.out_shape, q.dtype, q.device, (q, k, v))
    if plan.function is None:
        return _without_kernel(plan, q, k, v, terms, out)
    if out is None:
        out = torch.empty(plan.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(plan.out_shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    d = out
    if plan.views:
        q, k, v, d = (t if view is None else view(t) for t, view in zip((q, k, v, out), plan.views, strict=True))
    plan.function(q, k, v, d, lse, *plan.scalars)
    return (out, lse) if return_lse else out


def block_sparse_attention(q, k, v, block_mask, *, causal=False, softcap=None, scale=None, return_lse=False, out=None):
    """attention() over the blocks of scores that `block_mask` names: nothing else is loaded or multiplied.

    Args:
        q, k, v, softcap, scale, return_lse, out: see attention.
        block_mask: a BlockMask; FlexAttention's BlockMask; a BsrMatrix or torch.sparse_bsr tensor (Sq, Sk), of which
            the pattern counts and the values do not; or a bool tensor (Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk) of
            128 x 128 blocks (for others: BlockMask.from_blocks). One that has 1 batch item or 1 head serves all.
        causal: a row also sees no column after its own, as in attention.

    Returns and raises as attention does. CPU tensors run the reference; a GPU has no kernel of it yet, and raises.
    """
    mask = as_block_mask(q, k, block_mask)
    plan = plan_attention(q, k, v, causal=causal, softcap=softcap, scale=scale, return_lse=return_lse, out=out)
    common.check_no_grad("block_sparse_attention", q, k, v)
    if q.device.type == "cuda":
        raise RuntimeError("block_sparse_attention: there is no kernel yet; this op takes CPU tensors only for now")
    terms = {"causal": causal, "softcap": softcap, "scale": scale, "return_lse": return_lse, "block_mask": mask}
    return _without_kernel(plan, q, k, v, terms, out)


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
    q, k, v, *, causal=False, window=None, softcap=None, scale=None, return_lse=False, out=None
) -> FlashPlan:
    """Check a call's arguments and choose its kernel, without launching it."""
    checks.check_qkv(OP, q, k, v)
    checks.check_scale(OP, scale, softcap)
    left, right = checks.window_bounds(OP, causal, window)
    if not isinstance(return_lse, bool):
        raise TypeError(f"{OP}: return_lse must be True or False, got {return_lse!r}")
    plan = FlashPlan((*q.shape[:3], v.shape[-1]))
    checks.check_out(OP, out, plan.out_shape, q.dtype, q.device, (q, k, v))
    if math.prod(plan.out_shape) == 0 or k.shape[2] == 0:
        plan.empty = True
    elif q.device.type == "cuda":
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        _plan_kernel(plan, q, k, v, out, left, right, softcap, scale, return_lse)
    return plan


def _plan_kernel(plan: FlashPlan, q, k, v, out, left, right, softcap, scale, return_lse) -> None:
    from .heuristics import pick
    from .runtime import function_for

    if not ON_GPU:
        raise RuntimeError(
            f"{OP}: the GPU kernels compile, but have not been run and measured yet, so this op takes CPU tensors only "
            "for now; torch.nn.functional.scaled_dot_product_attention takes CUDA tensors"
        )
    spec, _, _ = device_arch(q.get_device())
    facts = FlashFacts(
        arch=spec.target,
        path=path_of(spec),
        config=None,
        dtype=NAMES[q.dtype],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        band=BandKind(left is not None, right is not None),
        softcap=softcap is not None,
        lse=return_lse,
    )
    plan.facts = pick(facts)
    tensors = {"q": q, "k": k, "v": v, "out": out}
    views = tuple(None if t is None else view_of(name, t, plan) for name, t in tensors.items())
    plan.views = views if any(views) else ()
    # With a cap, scores are tanh(..) times it; what multiplies them before the cap is folded into the tanh's argument.
    scale_log2, cap = (scale * LOG2E, 0.0) if softcap is None else (softcap * LOG2E, 2 * LOG2E * scale / softcap)
    plan.scalars = (scale_log2, cap, left or 0, right or 0, 2**30)
    plan.function = function_for(plan.facts)


def path_of(spec: ArchSpec) -> str:
    """The family of kernels: the one forced, or the architecture's own."""
    path = forced_path() or spec.path
    if path == "sm_90" and spec.path != "sm_90":
        raise ValueError(f"{OP}: {spec.name} has neither TMA nor WGMMA; its kernels are those of the sm_80 path")
    return path


def view_of(name: str, tensor: torch.Tensor, plan: FlashPlan) -> Callable | None:
    """What makes the kernel's tensor of one whose strides it does not take; None where it takes them."""
    if not checks.tma_ready(tensor):
        plan.notes.append(f"{name} is copied: its address and strides {tensor.stride()} are not multiples of 16 bytes")
        return torch.Tensor.contiguous if not tensor.is_contiguous() else torch.clone
    shape, stride = tensor.shape, tensor.stride()
    if all(s % 8 == 0 for s in stride[:-1]):
        return None
    fixed = (*(s if n > 1 else 8 for n, s in zip(shape[:-1], stride[:-1], strict=True)), 1)
    return lambda t: t.as_strided(shape, fixed)  # dimensions of extent 1 may have any stride


def _without_kernel(plan: FlashPlan, q, k, v, terms, out):
    """CPU tensors run the reference; rows with nothing to attend to are zeros."""
    if plan.empty:
        result = torch.zeros(plan.out_shape, dtype=q.dtype, device=q.device)
        lse = torch.full(plan.out_shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    else:
        from . import reference

        result, lse = reference.attention(q, k, v, **(terms | {"return_lse": True}))
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if terms["return_lse"] else result


explains(attention, plan_attention)
