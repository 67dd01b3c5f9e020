"""Ready-made score_mods: ALiBi, relative position biases, and a bias for each score.

A score_mod is called with (score, b, h, q, kv): a scaled score in float32, and integer tensors of no dimension. Torch
traces it, see score_mod.py. These are frozen dataclasses, as the masks of mask_mods.py are. Their tensors get gradients
where they require one.

Where lengths differ, rows are aligned to the end if `offset` is Sk - Sq: row q is then at position q + offset. Where
each item or sequence has its own, it is an int32 tensor (B,): of a cache seqused_k - Sq.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.runtime.front import check_no_tangent

from .score_mod import BoundScore, ScoreMod, bound_by_trace

__all__ = ["Alibi", "Bias", "RelativeBias", "alibi_slopes", "t5_bias"]


@dataclass(frozen=True, eq=False)
class Alibi:
    """score - slopes[h] * distance (Press et al. 2022), as FlashAttention's alibi_slopes: slopes (H,)."""

    slopes: Tensor
    offset: int | Tensor = 0

    def __call__(self, score, b, h, q, kv):
        return score - self.slopes[h] * (q + _of_item(self.offset, b) - kv).abs()


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """score + table[h, reach + distance], where distance is kv - (q + offset), clamped to -reach ... reach.

    table: (H, 2 * reach + 1) floating-point.
    """

    table: Tensor
    offset: int | Tensor = 0

    def __call__(self, score, b, h, q, kv):
        reach = self.table.shape[1] // 2
        return score + self.table[h, (kv - q - _of_item(self.offset, b)).clamp(-reach, reach) + reach]


@dataclass(frozen=True, eq=False)
class Bias:
    """score + bias[b, h, q, kv] for a tensor (B, H, Sq, Sk); extents of 1 are broadcast.

    Example:
        out = attention(q, k, v, score_mod=Bias(bias))  # bias gets a gradient
    """

    bias: Tensor

    def __call__(self, score, b, h, q, kv):
        batch, heads, rows, columns = self.bias.shape
        # Constants alone would make an element of the whole tensor, which has no gradient in a score_mod.
        first = 0 if self.bias.numel() != 1 else b * 0
        index = b if batch != 1 else first, h if heads != 1 else 0, q if rows != 1 else 0, kv if columns != 1 else 0
        return score + self.bias[index]

    def bound_score(self, device: torch.device) -> BoundScore:
        """score_mod.bound of this object. Its trace is looked up, which takes an eighth of the time of tracing it.

        On the CPU the bias may be float64: the reference computes in float64 what was traced in float32.
        """
        bias = self.bias
        if bias.dim() != 4:
            raise ValueError(
                f"Bias: bias has shape {tuple(bias.shape)}; it must be (B, H, Sq, Sk), with 1 to broadcast"
            )
        if bias.device != device:
            return bound_by_trace(self, device)  # which raises
        key = bias.dtype, device.type, bias.stride(-1) == 1, *(n != 1 for n in bias.shape)
        mod = _BIASES.get(key)
        if mod is None:
            check_no_tangent("attention", (bias,))
            traced = bias.detach()
            if bias.numel() == 0:  # torch indexes no element of it
                traced = torch.empty([n or 2 for n in bias.shape], dtype=bias.dtype, device=device)
            if bias.dtype == torch.float64 and device.type == "cpu":
                traced = traced.float()
            mod = _BIASES[key] = bound_by_trace(Bias(traced), device).mod
        return BoundScore(mod, (bias,))


_BIASES: dict[tuple, ScoreMod] = {}


def _of_item(offset: int | Tensor, b):
    return offset[b] if isinstance(offset, Tensor) else offset


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return the slopes of the ALiBi paper, float32 (heads,): 2^(-8 i / heads) for i = 1, 2, ...

    If heads is not a power of two: the slopes of the largest smaller power of two, then every other one of the next
    larger power.

    Example:
        out = attention(q, k, v, causal=True, score_mod=Alibi(alibi_slopes(q.shape[1], device=q.device)))
    """
    if heads < 1:
        raise ValueError(f"heads is {heads}; it must be at least 1")
    below = 2 ** int(math.log2(heads))
    found = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    found += [2.0 ** (-4 * i / below) for i in range(1, 2 * (heads - below), 2)]
    return torch.tensor(found, device=device)


def t5_bias(table: Tensor, *, bidirectional: bool, max_distance: int = 128, offset: int | Tensor = 0) -> RelativeBias:
    """T5's relative position bias from its table (heads, buckets), which gets the gradient.

    Half of the buckets (of each direction if bidirectional) hold one distance each. The others are logarithmically
    wider, up to max_distance; all larger distances have the last bucket.
    """
    if table.dim() != 2 or table.shape[1] < (4 if bidirectional else 2):
        raise ValueError(f"table has shape {tuple(table.shape)}; it must be (heads, buckets)")
    relative = torch.arange(-max_distance, max_distance + 1, device=table.device)
    return RelativeBias(table[:, t5_buckets(relative, table.shape[1], bidirectional, max_distance)], offset)


def t5_buckets(relative: Tensor, buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """Return the bucket of each distance kv - q."""
    first = torch.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        first = (relative > 0) * buckets
    distance = relative.abs() if bidirectional else (-relative).clamp(min=0)
    exact = buckets // 2
    wide = (distance.clamp(min=1) / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    wide = (exact + wide.to(torch.int64)).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, wide)
