"""Error bounds of GEMM: the exact result, and how far tensor cores may be from it in each arithmetic.

| operands and accumulators | bound |
| --- | --- |
| BF16, FP16; FP8 converted to FP16; CPU tensors | twice torch's error in FP32, `assert_as_good_as_torch` |
| FP8 on tensor cores | `fp8_bound`: what an MMA step drops |
| FP32 with `precision=` | `tf32_bound`: two roundings to TF32, and the additions |
| FP16 with `accumulation_dtype=torch.float16` | `fp16_bound`: one rounding per MMA step |

An FP8 output is saturated and rounded after `scale_out`.
"""

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT8

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
KEPT = 2.0**-13  # of the largest product of an FP8 MMA step: the least that tensor cores keep
TERMS = 33  # added at once: 32 products, and the accumulator
ROUNDING = {"tf32": 2 * 2.0**-11 + 2.0**-22, "3xtf32": 2 * 2.0**-23 + 2.0**-22}  # of |a| |b|, both operands
SUM = 2.0**-23  # an addition of tensor cores, which truncate
STEP = 8  # products that FP16 accumulation adds before it rounds; WGMMA adds 16
SUBNORMAL = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}  # the least one
ACTIVATION_SLOPE = 1.2  # largest derivative of an activation


def numbers(*shape: int, dtype=torch.float8_e4m3fn, device="cpu") -> Tensor:
    """Normal random numbers, some of them large or subnormal in FP8."""
    x = torch.randn(*shape, device=device)
    return (x * 2.0 ** torch.randint(-6, 3, shape, device=device)).to(dtype)


def factors(*shape: int, device="cpu") -> Tensor:
    """Dequantization scales from 1/4 to 5/4."""
    return torch.rand(shape, device=device) + 0.25


def same_bits(x: Tensor, y: Tensor) -> bool:
    """torch.equal, also for FP8."""
    if x.itemsize == 1:
        x, y = (t.contiguous().view(torch.uint8) for t in (x, y))
    return torch.equal(x, y)


def dequantized(x: Tensor, scale: Tensor | None, dtype: torch.dtype, of_b: bool = False) -> Tensor:
    """x times its scales, in `dtype`.

    scale: one element, or (M,) or (..., M, 1) or (..., M, K / 128) of a, or (N,), (..., 1, N) or
        (..., K / 128, N / 128) of b.
    """
    x = x.to(dtype)
    if scale is None:
        return x
    if scale.numel() != 1 and scale.dim() == 1:
        scale = scale if of_b else scale[:, None]
    elif scale.numel() != 1 and of_b and not (scale.shape[-2] == 1 and scale.shape[-1] == x.shape[-1]):
        scale = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : x.shape[-2], : x.shape[-1]]
    elif scale.numel() != 1 and not of_b and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(128, -1)[..., : x.shape[-1]]
    return x * scale.to(dtype)


def fp8_bound(a: Tensor, b: Tensor, fast: bool) -> Tensor:
    """Error of FP8 tensor cores, for a (..., M, K) and b (..., K, N), dequantized.

    In each step of 32 of K they may drop KEPT times the largest product from each term. Without promotion the
    accumulator of all steps so far is one of the terms.
    """
    a, b = a.float().abs(), b.float().abs()
    K = a.shape[-1]
    rows = [(a[..., m, :, None] * b).amax(-2) for m in range(a.shape[-2] if K else 0)]
    largest = torch.stack(rows, -2) if rows else 0.0
    steps = K / 32 + 1
    return KEPT * (steps * TERMS * largest + (steps if fast else 5) * torch.matmul(a, b))


def tf32_bound(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """Error of TF32: both operands rounded, and an addition for each 4 products."""
    additions = (3 if precision == "3xtf32" else 1) * (a.shape[-1] // 4 + 4)
    return (ROUNDING[precision] + additions * SUM) * (a.to(FP64).abs() @ b.to(FP64).abs())


def fp16_bound(a: Tensor, b: Tensor, parts: int = 1) -> Tensor:
    """Error of FP16 accumulation: each step rounds the partial sum to 11 bits, so by 2^-11 of it.

    parts: CTAs among which K is split; each has its own partial sums. 2 % for the errors of earlier partial sums. A
    GPU may round towards zero: twice as much.
    """
    slack = 2.0 if a.is_cuda else 1.0
    a, b = a.to(FP64), b.to(FP64)
    steps = -(-a.shape[-1] // STEP // parts) * parts
    pad = steps * STEP - a.shape[-1]
    a = torch.nn.functional.pad(a, (0, pad)).unflatten(-1, (parts, steps // parts, STEP))
    b = torch.nn.functional.pad(b, (0, 0, 0, pad)).unflatten(-2, (parts, steps // parts, STEP))
    total = 0.0
    for part in range(parts):
        sums = torch.zeros((), device=a.device)
        for step in range(steps // parts):
            sums = sums + a[..., part, step, :] @ b[..., part, step, :, :]
            total = total + sums.abs()
    return slack * (1.02 * 2.0**-11 * total + 2.0**-24 * steps)


def error_bound(a: Tensor, b: Tensor, fp8: bool, terms: dict, facts=None) -> Tensor | None:
    """Error of a GEMM of a and b before its epilogue, element by element; None: as little as torch's in FP32.

    fp8: True for FP8 operands. terms: of the call. facts: of its kernel, if known.
    """
    if terms.get("precision"):
        return tf32_bound(a, b, terms["precision"])
    if terms.get("accumulation_dtype") == FP16 and (facts is None or facts.acc_dtype == "float16"):
        return fp16_bound(a, b, facts.config.split if facts is not None else 1)
    if fp8 and a.is_cuda and not (facts is not None and facts.converts):
        return fp8_bound(a, b, bool(terms.get("use_fast_accum")))
    return None


def assert_within(out: Tensor, exact: Tensor, bound: Tensor, scale: float = 1.0) -> None:
    """`out` is exact * scale within scale * bound and one rounding; FP8 outputs saturate."""
    assert out.shape == exact.shape, f"shape {tuple(out.shape)}, expected {tuple(exact.shape)}"
    half, wanted = torch.finfo(out.dtype).eps / 2, exact * scale
    bound = abs(scale) * (bound + 2.0**-20 * (exact.abs() + 2.0))  # of an epilogue in FP32
    if out.dtype in FLOAT8:
        wanted = wanted.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max)
        bound = 1.1 * bound + SUBNORMAL[out.dtype] / 2
    wrong = ~((out.to(FP64) - wanted).abs() <= bound + half * (wanted.abs() + bound))  # NaN is never <=
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements, {wrong.nonzero()[:4].tolist()}"
