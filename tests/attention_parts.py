"""What tests of attention share: q, k and v, and what exact attention makes of them."""

import torch

from .reference import attention_plainly, band_mask, normal


def qkv(Sq=200, Sk=200, D=64, Dv=None, B=2, H=4, heads=2, dtype=torch.bfloat16, device="cpu") -> tuple:
    """q (B, H, Sq, D), k (B, heads, Sk, D) and v (B, heads, Sk, Dv), Dv being D where it is None."""
    shapes = (B, H, Sq, D), (B, heads, Sk, D), (B, heads, Sk, D if Dv is None else Dv)
    return tuple(normal(*shape, dtype=dtype, device=device) for shape in shapes)


def plainly(q, k, v, dtype, *, causal=False, window=None, softcap=None, scale=None):
    """(out, lse) from the whole matrix of scores, every step of it rounded to `dtype`."""
    left, right = (None if bound == -1 else bound for bound in window or (None, None))
    seen = band_mask(q.shape[2], k.shape[2], left, 0 if causal else right, q.device)
    return attention_plainly(*(t.to(dtype) for t in (q, k, v)), seen, softcap=softcap, scale=scale)
