"""Checks of attention's arguments, before any kernel launch."""

from typing import NoReturn

import torch

from cute_kernels import checks
from cute_kernels.dtypes import FLOAT8, NAMES, OPERANDS, accumulator, default_out_dtype
from cute_kernels.runtime.device import plans_kernel

from .arguments import AttentionArgs
from .forward.heuristics import HEAD_DIMS, WIDE, head_dims_text
from .masks.block_lists import MOST

check_tensor = checks.check_tensor
TORCHS = "torch.nn.functional.scaled_dot_product_attention"
NO_CACHE = (
    "attention: gradients are not supported with seqused_k, page_table or FP8 k and v, and q, k, v or sinks requires "
    "one; call it under torch.no_grad(), or pass BF16 or FP16 packed sequences (cu_seqlens_q, cu_seqlens_k), which "
    "have gradients"
)


def check_qkv(op: str, q, k, v, alike: str = "kv", also: tuple = ()) -> None:
    """Check q (B, H, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv): same dtype and device, D and Dv contiguous. The
    dtype is BF16 or FP16; on the CPU, which runs no kernel, also float32 or float64.

    alike: "k", "v" or "kv", the tensors that must have q's dtype; others may have any dtype.
    also: further dtypes that q, k and v may have.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.check_tensor(f"{op}: {name}", tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}; it must be (batch, heads, length, head_dim)"
            )
    of_one = {name: tensor for name, tensor in (("q", q), ("k", k), ("v", v)) if name in f"q{alike}"}
    instead = TORCHS if torch.float64 in (t.dtype for t in of_one.values()) else f"torch.autocast or {TORCHS}"
    checks.check_operands(op, kernel=plans_kernel(q.device), also=also, instead=instead, **of_one)
    checks.check_device(op, q.device, k=k, v=v)
    (B, H, _, D), (Bk, heads, _, Dk) = q.shape, k.shape
    if Bk != B or v.shape[0] != B:
        raise ValueError(f"{op}: q, k and v must have the same batch size, got {B}, {Bk} and {v.shape[0]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"{op}: k {tuple(k.shape)} and v {tuple(v.shape)} differ in heads or length")
    if Dk != D:
        raise ValueError(f"{op}: q has head_dim {D} and k {Dk}")
    if H and (heads == 0 or H % heads):
        raise ValueError(f"{op}: {H} heads of q share {heads} of k and v: the first must be a multiple of the second")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[2] > MOST:
            raise ValueError(f"{op}: {name} has {tensor.shape[2]} rows; at most {MOST} are possible")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{op}: {name}'s last dimension, strides {tensor.stride()}, is not contiguous; call .contiguous()"
            )


def narrow(k, v) -> bool:
    """True if k or v is FP8; False for objects that are not tensors, which the checks report."""
    return getattr(k, "dtype", None) in FLOAT8 or getattr(v, "dtype", None) in FLOAT8


def check_differentiable(args: AttentionArgs) -> None:
    """Check a call that requires gradients: no KV cache, no FP8, no dequantization scales, which nothing reads, and
    head dimensions with a backward kernel."""
    q, k, v = args[:3]
    if args.seqused_k is not None or args.page_table is not None or narrow(k, v):
        raise RuntimeError(NO_CACHE)
    if args.q_descale is not None or args.k_descale is not None or args.v_descale is not None:
        raise TypeError(
            f"{args.op}: q_descale, k_descale and v_descale require FP8 operands, and k is "
            f"{getattr(k, 'dtype', type(k))}; multiply by them first, as (k * k_descale).to(k.dtype)"
        )
    if isinstance(q, torch.Tensor) and isinstance(v, torch.Tensor) and q.dim() and v.dim():
        check_gradient_dims(args.op, q, v, plans_kernel(q.device))


def check_wide(args: AttentionArgs, form: str) -> None:
    """Check calls whose `form` has no FP8 kernel."""
    if narrow(args.k, args.v) or args.k_descale is not None or args.v_descale is not None:
        raise TypeError(
            f"{args.op}: with {form} k and v are of q's dtype, without k_descale and v_descale; give q and k in "
            "torch.float8_e4m3fn, too (sm_90), or dequantize k and v, as (k.float() * scale).to(q.dtype) with a scale "
            "that broadcasts over k; FP8 caches (seqused_k) go with a 16-bit q"
        )


def check_scale(op: str, scale, softcap) -> None:
    """Check that scale and softcap are positive: the kernels compute a row's maximum before scaling."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None:
            continue
        checks.check_scalar(op, name, value)
        if not 0 < value < float("inf"):
            raise ValueError(f"{op}: {name} is {value}; it must be above 0 and finite")


def check_score(args: AttentionArgs, items: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Check a score_mod.BoundScore against items (batch size, heads) and the lengths of the scores."""
    if args.softcap is not None:
        raise ValueError(
            f"{args.op}: softcap and score_mod are not both possible; write c * torch.tanh(score / c) in the score_mod"
        )
    args.score_mod.check(*items, lengths)


def check_deterministic(op: str, deterministic) -> None:
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"{op}: deterministic must be True, False or None, got {deterministic!r}")


def check_fast(args: AttentionArgs) -> None:
    """Check use_fast_accum: True requires FP8 q, k and v, since other kernels have one kind of accumulation."""
    if not isinstance(args.use_fast_accum, bool):
        raise TypeError(f"{args.op}: use_fast_accum must be True or False, got {args.use_fast_accum!r}")
    if args.use_fast_accum and any(getattr(t, "dtype", None) not in FLOAT8 for t in args[:3]):
        dtypes = ", ".join(str(getattr(t, "dtype", type(t))) for t in args[:3])
        raise TypeError(
            f"{args.op}: use_fast_accum requires q, k and v in torch.float8_e4m3fn, got {dtypes}; leave it out, "
            "or quantize them"
        )


def out_dtype(op: str, q, out) -> torch.dtype:
    """The output dtype: q's, or float32 if `out` is. For FP8 q out's (bfloat16, float16 or float32), or bfloat16 by
    default."""
    if q.dtype in OPERANDS and getattr(out, "dtype", None) == torch.float32:
        return out.dtype
    if q.dtype not in FLOAT8 or not isinstance(out, torch.Tensor):  # an `out` that is no tensor: check_out raises
        return default_out_dtype(q.dtype)
    if out.dtype not in NAMES:
        raise TypeError(f"{op}: out is {out.dtype}; for an FP8 q it must be {', '.join(map(str, NAMES))}")
    return out.dtype


def check_head_dims(op: str, q, v) -> None:
    """Check that the kernels support the head dimensions."""
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[-1] not in HEAD_DIMS and not q.shape[-1] == v.shape[-1] == WIDE:
            raise ValueError(
                f"{op}: {name} has head_dim {tensor.shape[-1]}; kernels exist for {head_dims_text()}: "
                f"pad q and k with zeros (torch.nn.functional.pad) and pass scale={q.shape[-1]}**-0.5, or your own; "
                "pad v, and drop the padded columns of the result"
            )


def check_gradient_dims(op: str, q, v, kernel: bool) -> None:
    """Check before the forward pass that the head dimensions have a backward kernel, if `kernel` is True."""
    if kernel and WIDE in (q.shape[-1], v.shape[-1]):
        raise RuntimeError(
            f"{op}: gradients are not supported at head_dim {WIDE}, and q, k, v or sinks requires one; call it under "
            f"torch.no_grad(), or use torch's flex_attention or scaled_dot_product_attention. Gradients are supported "
            f"for head_dims {', '.join(map(str, HEAD_DIMS))}"
        )


def check_block_mask(op: str, mask, q, k) -> None:
    """Check a BlockMask against the lengths and device of q and k; its batch size and heads must be theirs or 1."""
    lengths = q.shape[2], k.shape[2]
    if mask.lengths != lengths:
        advice = "build it for these lengths"
        if lengths[0] <= mask.lengths[0] and lengths[1] <= mask.lengths[1]:
            advice = (
                f"pass BlockMask.crop({lengths}) for its first rows and columns (BlockMask.from_flex(mask) of "
                "FlexAttention's), or BlockMask[:, :, i] for rows of blocks"
            )
        raise ValueError(f"{op}: block_mask is of lengths {mask.lengths}, q and k of {lengths}; {advice}")
    if mask.device != q.device:
        raise ValueError(f"{op}: block_mask is on {mask.device}, q on {q.device}; move it with .to()")
    check_mask_heads(op, "block_mask", mask, q)


def check_mask_heads(op: str, name: str, mask, q) -> None:
    """Check a BlockMask's batch size and heads against those of q: its own, or 1."""
    batch, heads = q.shape[:2]
    if mask.batch not in (1, batch) or mask.heads not in (1, heads):
        raise ValueError(
            f"{op}: {name} has {mask.batch} batch items and {mask.heads} heads; it must have {batch} or 1 and "
            f"{heads} or 1"
        )


def check_causal_blocks(op: str, causal: bool, offsets) -> None:
    """Raise if causal=True is combined with a block mask and offsets: the mask's lists assume one alignment."""
    if causal and offsets is not None:
        raise TypeError(
            f"{op}: causal=True with a block mask is not supported with q_offset or k_offset; put kv <= q into its "
            "mask_mod, which sees positions with the offsets added"
        )


def check_results(op: str, dout, dlse, q, v, out, lse, grad_dtype, dq_dtype) -> None:
    """Check the dtypes and shapes of out, lse and their gradients; also for fake tensors."""
    packed, wide = q.dim() == 3, accumulator(q.dtype)
    rows, shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3], (*q.shape[:-1], v.shape[-1])
    of_output, of_lse = (q.dtype, shape), (wide, rows)
    named = ("dout", dout, *of_output), ("out", out, *of_output), ("lse", lse, *of_lse), ("dlse", dlse, *of_lse)
    for name, t, dtype, expected in named:
        if t is None and name == "dlse":
            continue
        if t.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, got {t.dtype}; call {name}.to({dtype})")
        if tuple(t.shape) != tuple(expected):
            raise ValueError(f"{op}: {name} must have shape {tuple(expected)}, got {tuple(t.shape)}")
    for name, dtype in (("grad_dtype", grad_dtype), ("dq_dtype", dq_dtype)):
        if dtype not in (None, q.dtype, wide):
            raise TypeError(f"{op}: {name} must be None, {q.dtype} or {wide}, got {dtype!r}")


MASK_ADVICE = {  # arguments of attention that are not supported with a block mask -> what serves instead
    "cu_seqlens_q": (
        "a mask keeps packed sequences apart: pass q.transpose(0, 1)[None], k and v alike, and block_mask & "
        "patterns.packed_documents(cu_seqlens_q, cu_seqlens_k, lengths=(total_q, total_k))"
    ),
    "seqused_k": (
        "gather the pages with k.transpose(0, 1)[:, page_table].transpose(0, 1).flatten(2, 3), v alike, which copies "
        "them, and let mask_mod see kv < seqused_k[b]; or call attention, which reads pages in place"
    ),
    "window_size": "pass block_mask & patterns.sliding_window(lengths, window_size)",
}
MASK_ADVICE["cu_seqlens_k"], MASK_ADVICE["page_table"] = MASK_ADVICE["cu_seqlens_q"], MASK_ADVICE["seqused_k"]


def refuse_with_mask(op: str, args: AttentionArgs) -> None:
    """Raise for arguments that are not supported together with a block mask."""
    for name, advice in MASK_ADVICE.items():
        if getattr(args, name) is not None:
            raise TypeError(f"{op}: block_mask is not supported with {name}; {advice}")


def refuse_options(op: str, options: dict) -> None:
    """Raise TypeError for unsupported keywords of block_sparse_attention, with alternatives for those of attention."""
    name = next(iter(options))
    advice = f"; {MASK_ADVICE[name]}" if name in MASK_ADVICE else ""
    raise TypeError(f"{op}() has no argument {name!r}{advice}")


def refuse_mask(block_mask) -> NoReturn:
    """Raise TypeError for a block_mask of an unsupported type."""
    raise TypeError(
        "block_sparse_attention: block_mask must be a BlockMask, FlexAttention's BlockMask, a BsrMatrix, a "
        f"torch.sparse_bsr or a bool tensor, got {type(block_mask).__name__}"
    )


def check_out(op: str, out, shape, dtype, device) -> None:
    """Check that out has the result's shape and dtype, a contiguous head dim, and a TMA-aligned address and strides."""
    checks.check_result(op, "out", out, shape, dtype)
    checks.check_device(op, device, out=out)
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ValueError(f"{op}: out's last dimension, strides {out.stride()}, is not contiguous")
    if not tma_ready(out):
        raise ValueError(f"{op}: out's address and strides {out.stride()} must be multiples of 16 bytes")


def tma_ready(tensor: torch.Tensor) -> bool:
    """True if the last dimension is contiguous, and the address and all other strides of dimensions above 1 are
    multiples of 16 bytes, and none is 0."""
    if tensor.data_ptr() % 16 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        return False
    strides = (s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1)
    return all(s > 0 and s * tensor.element_size() % 16 == 0 for s in strides)
