"""The lists of select_blocks: an indexer's scores of KV blocks, and the exact top k of them.

Without synchronization, in parts of the rows that bound the memory: torch ops, or on a GPU the kernels of selection/.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor

from cute_kernels.runtime.device import plans_kernel

from .pooling import averaged, largest
from .selection.config import VECTOR
from .selection.dispatch import facts_of, top_blocks
from .selection.score_config import TILE
from .selection.scores import scores_of

CHUNK = 2**28  # bytes of scores and keys that are held together
PART = 2**29  # bytes of scores that kernels write and read at a time
LEAST = -(2**63)
LARGEST = (2**31 - 1) << 32


def lists_of(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups) -> Tensor:
    """select_blocks without checks: (B, Sq, groups, top)."""
    with torch.autocast(q_index.device.type, enabled=False):
        blocks = -(-k_index.shape[2] // block_size)
        if plans_kernel(q_index.device) and (facts := facts_of(q_index.get_device(), blocks, top)) is not None:
            terms = top, block_size, causal, local, initial, pool, activation, groups
            return _lists_on_gpu(facts, q_index, k_index, *terms)
        return _lists_of(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups)


def _lists_of(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups) -> Tensor:
    (batch, heads, rows), columns = q_index.shape[:3], k_index.shape[2]
    blocks = -(-columns // block_size)
    found = torch.full((batch, rows, groups, top), -1, dtype=torch.int32, device=q_index.device)
    if 0 not in (*found.shape, columns):
        q = q_index.unflatten(1, (groups, heads // groups))  # (B, G, heads of a group, Sq, D)
        k = (averaged(k_index, block_size) if pool == "mean" else k_index).float()
        part = max(1, CHUNK // (batch * (4 * heads * k.shape[2] + 32 * groups * blocks)))
        for begin in range(0, rows, part):
            end = min(begin + part, rows)
            position = torch.arange(begin, end, device=q.device)[:, None] + (columns - rows if causal else columns)
            score = _scores(q[:, :, :, begin:end].float(), k, activation)  # (B, G, rows of this part, keys or blocks)
            if pool == "max":
                score = largest(score, position, block_size, causal)
            key = _keys(score, position, columns, block_size, causal, local, initial, pool == "mean")
            found[:, begin:end, :, : min(top, blocks)] = _best(key, top)
    return found


def _lists_on_gpu(facts, q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups) -> Tensor:
    (batch, _, rows), columns = q_index.shape[:3], k_index.shape[2]
    found = torch.empty((batch, rows, groups, top), dtype=torch.int32, device=q_index.device)
    if found.numel() == 0 or columns == 0:
        return found.fill_(-1)
    scores = scores_of(q_index, k_index, block_size, causal, pool, activation, groups)
    part = max(1, PART // scores.bytes_per_row)
    part = part // TILE * TILE or part
    for begin in range(0, rows, part):
        end = min(begin + part, rows)
        terms = scores.first + begin, columns, block_size, local, initial, causal, pool == "mean"
        top_blocks(facts, scores.compute(begin, end), found[:, begin:end], *terms)
    return found


def lists_of_scores(
    score: Tensor, position: Tensor, columns: int, top, block_size, local, initial, first: int | None = None
) -> Tensor:
    """Causal lists (B, rows, groups, top) from FP32 scores of blocks (B, groups, rows, blocks).

    Args:
        position: (rows, 1) int64 positions of the rows among `columns` keys.
        local, initial: see select_blocks.
        first: position of the first row, if those of the others follow. Then a kernel selects on a GPU.
    """
    if first is not None and plans_kernel(score.device) and score.numel() > 0:
        if (facts := facts_of(score.get_device(), score.shape[3], top)) is not None:
            found = torch.empty(
                score.shape[0], score.shape[2], score.shape[1], top, dtype=torch.int32, device=score.device
            )
            score = nnf.pad(score.float(), (0, -score.shape[3] % VECTOR)).contiguous()
            top_blocks(facts, score, found, first, columns, block_size, local, initial, True, False)
            return found
    index = _best(_keys(score, position, columns, block_size, True, local, initial, whole=False), top)
    return nnf.pad(index, (0, top - index.shape[-1]), value=-1)


def _best(key: Tensor, top: int) -> Tensor:
    """Blocks of the largest keys, ascending and then -1, (B, rows, groups, at most top) int32."""
    blocks = key.shape[-1]
    best = key.topk(min(top, blocks), sorted=False)
    index = best.indices.masked_fill(best.values == LEAST, blocks).sort().values
    return index.masked_fill(index == blocks, -1).transpose(1, 2).int()


def _scores(q: Tensor, k: Tensor, activation: str | None) -> Tensor:
    """Sums over heads of q @ k.T, (B, G, rows, keys), from q (B, G, heads, rows, D) and k (B, 1 or G, keys, D)."""
    if activation is None:
        return q.sum(2) @ k.mT
    return torch.relu(q @ k[:, :, None].mT).sum(2)


def _keys(score: Tensor, position, columns, block_size, causal, local, initial, whole: bool) -> Tensor:
    """Distinct int64 in the order of preference: scores, and of equal ones the first block; LEAST for blocks that may
    not be selected, the largest for those that are always selected. whole: a block that is not complete at a position
    is no candidate."""
    block = torch.arange(score.shape[-1], device=score.device)
    # -0.0 becomes 0.0, and NaN of any sign one NaN above all numbers, below what is always selected
    bits = (score + 0.0).masked_fill(score.isnan(), float("nan")).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    later = 2**31 - 1 - block
    key = (ordered << 32) + later
    newest = (position // block_size).clamp(max=score.shape[-1] - 1) if causal else block[-1:]
    ends = ((block + 1) * block_size).clamp(max=columns)
    candidate = ends <= position + 1 if causal and whole else block <= newest
    forced = ((block < initial) | (block > newest - local)) & (block <= newest)
    key = key.masked_fill(~(candidate | forced), LEAST)
    return torch.where(forced, later + LARGEST, key)
