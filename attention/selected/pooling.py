"""Averages of an indexer's keys, and maxima of its scores, over KV blocks."""

import torch
import torch.nn.functional as nnf
from torch import Tensor


def averaged(k: Tensor, block_size: int) -> Tensor:
    """Mean over each block in FP32, rounded to k's dtype, (B, heads, blocks, D); the last block may be shorter."""
    whole = k.shape[2] // block_size * block_size
    mean = k[:, :, :whole].unflatten(2, (-1, block_size)).mean(3, dtype=torch.float32)
    if rest := k.shape[2] - whole:
        mean = torch.cat([mean, k[:, :, whole:].sum(2, keepdim=True, dtype=torch.float32) / rest], 2)
    return mean.to(k.dtype)


def largest(score: Tensor, position: Tensor, block_size: int, causal: bool) -> Tensor:
    """Largest score of the keys of each block, up to the position if causal."""
    columns = score.shape[-1]
    if causal:
        score = score.masked_fill(torch.arange(columns, device=score.device) > position, float("-inf"))
    return nnf.pad(score, (0, -columns % block_size), value=float("-inf")).unflatten(-1, (-1, block_size)).amax(-1)
