"""Scores of KV blocks for parts of the rows: by the kernel of block scores, or by torch's GEMM."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

from cute_kernels.dtypes import NAMES
from cute_kernels.runtime.device import device_arch, forced_path
from cute_kernels.runtime.families import function_for

from ..pooling import averaged, largest
from .config import VECTOR
from .score_config import HEAD_DIMS, POOLS, ScoreFacts, facts_for
from .sums import aligned, split_sums

SHORT = (torch.bfloat16, torch.float16)


class TorchScores:
    """Scores of an indexer by torch's GEMM, accumulated and added in FP32.

    q (B, G, heads, rows, D) and k (B, 1 or G, keys or blocks, D), in the dtype that is multiplied, are of `operands`.
    """

    def __init__(self, q: Tensor, k: Tensor, shape: tuple[int, int], block_size: int, causal: bool, relu: bool, pools):
        self.rows, self.columns = shape
        self.q, self.k, self.block_size, self.causal, self.relu, self.pools = q, k, block_size, causal, relu, pools
        self.first = self.columns - self.rows  # position of row 0 if causal
        self.most = -(-self.columns // block_size)  # blocks

    @property
    def bytes_per_row(self) -> int:
        """Bytes of memory that a row of scores needs."""
        each = self.k.shape[2] * (1 + (self.q.shape[2] > 1)) + self.most * self.pools
        return 4 * self.q.shape[0] * self.q.shape[1] * each

    def visible(self, end: int) -> tuple[int, int]:
        """(blocks, rows of k) that rows before `end` see, the latter rounded up to a multiple of VECTOR blocks."""
        count = self.most
        if self.causal:
            count = min(count, max(1, -(-(self.first + end) // self.block_size)))
        return count, min(self.columns, count * self.block_size) if self.pools else -(-count // VECTOR) * VECTOR

    def compute(self, begin: int, end: int) -> Tensor:
        """Scores (B, G, end - begin, blocks) of rows, contiguous; blocks are rounded up to a multiple of VECTOR."""
        _, keys = self.visible(end)
        k = self.k[:, :, :keys].expand(-1, self.q.shape[1], -1, -1).flatten(0, 1).mT
        q, total = self.q[:, :, :, begin:end].flatten(0, 1), None
        for head in range(q.shape[1]):
            score = product(q[:, head], k)
            score = score.relu_() if self.relu else score
            total = score if total is None else total.add_(score)
        assert total is not None
        score = total.unflatten(0, self.q.shape[:2])
        if self.pools:
            position = torch.arange(begin, end, device=q.device)[:, None] + self.first
            score = largest(score, position, self.block_size, self.causal)
            score = nnf.pad(score, (0, -score.shape[-1] % VECTOR))
        return score


class KernelScores(TorchScores):
    """Scores of an indexer by the kernel of `facts`."""

    def __init__(self, facts: ScoreFacts, q: Tensor, k: Tensor, *terms):
        super().__init__(q, k, *terms)
        self.heads_first, self.k = aligned(q.flatten(1, 2), facts.head_dim), aligned(k, facts.head_dim)
        self.function, self.max_ctas = function_for(facts), device_arch(q.get_device())[1]

    @property
    def bytes_per_row(self) -> int:
        return 4 * self.q.shape[0] * self.q.shape[1] * self.most

    def compute(self, begin: int, end: int) -> Tensor:
        blocks, keys = self.visible(end)
        shape = *self.q.shape[:2], end - begin, -(-blocks // VECTOR) * VECTOR
        scores = torch.empty(shape, dtype=torch.float32, device=self.q.device)
        q, k = self.heads_first[:, :, begin:end], self.k[:, :, :keys]
        first = self.first + begin
        per = 0 if not self.causal or first < 0 else 1 if self.pools else self.block_size
        self.function(q, k, scores.flatten(0, 1), first, per, self.max_ctas)
        return scores


def scores_of(q_index, k_index, block_size: int, causal: bool, pool: str, activation: str | None, groups: int):
    """Scores of an indexer on a GPU, by a kernel where there is one."""
    q, k = operands(q_index, k_index, block_size, pool, activation, groups)
    pools = pool == "max" and block_size > 1
    terms = q, k, (q_index.shape[2], k_index.shape[2]), block_size, causal, activation is not None, pools
    head_dim = next((n for n in HEAD_DIMS if n >= q.shape[4]), None)
    if q.dtype in SHORT and head_dim and forced_path() != "sm_80":
        arch = device_arch(q.get_device())[0].target
        keys = block_size if pools else POOLS[0]
        facts = facts_for(arch, NAMES[q.dtype], head_dim, q.shape[2], activation is not None, keys, causal)
        if facts is not None:
            return KernelScores(facts, *terms)
    return TorchScores(*terms)


def operands(
    q_index, k_index, block_size: int, pool: str, activation: str | None, groups: int
) -> tuple[Tensor, Tensor]:
    """q (B, G, heads, rows, D) and k (B, 1 or G, keys or blocks, D) whose products have the scores as their sums.

    Averages are padded with zeros to a multiple of VECTOR blocks. Without an activation, 16-bit heads are summed in
    FP32 first, and the sum is split into two 16-bit numbers, which replace the heads (sums.py).
    """
    q = q_index.unflatten(1, (groups, q_index.shape[1] // groups))
    k = k_index if q.dtype in SHORT else k_index.float()
    if pool == "mean" or block_size == 1:
        if block_size > 1:
            k = averaged(k_index, block_size).to(k.dtype)
        if past := -k.shape[2] % VECTOR:
            k = nnf.pad(k, (0, 0, 0, past))
    if q.dtype not in SHORT:
        q = q.float()
        return (q if activation else q.sum(2, keepdim=True)), k
    if activation is None and q.shape[2] > 1:
        q = split_sums(q_index, groups)
    return q, k


def product(q: Tensor, k: Tensor) -> Tensor:
    """q @ k, (batch, rows, keys) in FP32."""
    if q.dtype is torch.float32 or not q.is_cuda:
        return q.float() @ k.float()
    return torch.bmm(q, k, out_dtype=torch.float32)
