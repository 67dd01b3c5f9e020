"""FLOPs of the attention ops for FlopCounterMode, as torch counts scaled_dot_product_attention: two per multiply-add.
Causal and window masks count all scores; a block mask counts its nonzero blocks."""

import math

from torch import Tensor

from cute_kernels.runtime.front import readable


def forward(q: Tensor, k: Tensor, v: Tensor, scores: int) -> int:
    """S = Q K', O = P V."""
    return 2 * scores * (q.shape[-1] + v.shape[-1])


def backward(q: Tensor, k: Tensor, v: Tensor, scores: int) -> int:
    """S again; dP = dO V', dV = P' dO; dQ = dS K, dK = dS' Q."""
    return 2 * scores * (3 * q.shape[-1] + 2 * v.shape[-1])


def dense_scores(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None) -> int:
    """Number of scores. For packed sequences whose cu_seqlens cannot be read, an upper bound."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return math.prod(q.shape[:-1]) * k.shape[-2]
    if not readable(cu_seqlens_q):
        return q.shape[1] * q.shape[0] * k.shape[0]
    lengths = (cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
    return q.shape[1] * sum(m * n for m, n in zip(*lengths, strict=True))


def block_scores(q: Tensor, k: Tensor, lists: list[Tensor], blocksize: list[int], form: str) -> int:
    """Number of scores in the nonzero blocks; all scores if the lists cannot be read. For selected blocks that of whole
    lists."""
    if form == "selected":
        (indices, *_), (block_size, *_) = lists, blocksize
        rows = q.shape[1] // max(indices.shape[2], 1)  # of each list
        return min(indices.numel() * block_size * rows, dense_scores(q, k))
    if form in ("full rows", "partial rows"):
        (index,), rows = lists, math.prod(q.shape[:2]) // max(math.prod(lists[0].shape[:2]), 1)
        return min(index.numel() * rows * math.prod(blocksize), dense_scores(q, k))
    if form not in ("lists", "flex", "blocks") or not all(readable(t) for t in lists):
        return dense_scores(q, k)
    counts, (bm, bn) = (lists, (128, 128)) if form == "blocks" else (lists[::2], blocksize)
    total = sum(int(t.sum()) for t in counts)
    shared = math.prod(q.shape[:2]) // max(math.prod(counts[0].shape[: -2 if form == "blocks" else -1]), 1)
    return min(total * shared * bm * bn, dense_scores(q, k))
