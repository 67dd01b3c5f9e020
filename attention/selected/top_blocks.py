"""The lists of select_blocks: an indexer's scores of KV blocks, and the exact top k of them.

Torch ops without synchronization, in parts of the rows that bound the memory.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor

CHUNK = 2**28  # bytes of scores and keys that are held together
LEAST = -(2**63)
LARGEST = (2**31 - 1) << 32


def lists_of(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups) -> Tensor:
    """select_blocks without checks: (B, Sq, groups, top)."""
    with torch.autocast(q_index.device.type, enabled=False):
        return _lists_of(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups)


def _lists_of(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups) -> Tensor:
    (batch, heads, rows), columns = q_index.shape[:3], k_index.shape[2]
    blocks = -(-columns // block_size)
    found = torch.full((batch, rows, groups, top), -1, dtype=torch.int32, device=q_index.device)
    if 0 not in (*found.shape, columns):
        q = q_index.unflatten(1, (groups, heads // groups))  # (B, G, heads of a group, Sq, D)
        k = k_index.float()
        if pool == "mean":
            k = _averaged(k, block_size)
        part = max(1, CHUNK // (batch * (4 * heads * k.shape[2] + 32 * groups * blocks)))
        for begin in range(0, rows, part):
            end = min(begin + part, rows)
            position = torch.arange(begin, end, device=q.device)[:, None] + (columns - rows if causal else columns)
            score = _scores(q[:, :, :, begin:end].float(), k, activation)  # (B, G, rows of this part, keys or blocks)
            if pool == "max":
                score = _largest(score, position, block_size, causal)
            key = _keys(score, position, columns, block_size, causal, local, initial, pool == "mean")
            found[:, begin:end, :, : min(top, blocks)] = _best(key, top)
    return found


def lists_of_scores(score: Tensor, position: Tensor, columns: int, top, block_size, local, initial) -> Tensor:
    """Causal lists (B, rows, groups, top) from FP32 scores of blocks (B, groups, rows, blocks).

    Args:
        position: (rows, 1) int64 positions of the rows among `columns` keys.
        local, initial: see select_blocks.
    """
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


def _averaged(k: Tensor, block_size: int) -> Tensor:
    """Mean over each block, (B, heads, blocks, D); the last block may be shorter."""
    columns, past = k.shape[2], -k.shape[2] % block_size
    total = nnf.pad(k, (0, 0, 0, past)).unflatten(2, (-1, block_size)).sum(3)
    ends = (torch.arange(total.shape[2], device=k.device) + 1) * block_size
    return total / (block_size - (ends - columns).clamp(min=0))[:, None]


def _largest(score: Tensor, position: Tensor, block_size: int, causal: bool) -> Tensor:
    """Largest score of the keys of each block, up to the position if causal."""
    columns = score.shape[-1]
    if causal:
        score = score.masked_fill(torch.arange(columns, device=score.device) > position, float("-inf"))
    return nnf.pad(score, (0, -columns % block_size), value=float("-inf")).unflatten(-1, (-1, block_size)).amax(-1)


def _keys(score: Tensor, position, columns, block_size, causal, local, initial, whole: bool) -> Tensor:
    """Distinct int64 in the order of preference: scores, and of equal ones the first block; LEAST for blocks that may
    not be selected, the largest for those that are always selected. whole: a block that is not complete at a position
    is no candidate."""
    block = torch.arange(score.shape[-1], device=score.device)
    bits = (score + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    later = 2**31 - 1 - block
    key = (ordered << 32) + later
    newest = (position // block_size).clamp(max=score.shape[-1] - 1) if causal else block[-1:]
    ends = ((block + 1) * block_size).clamp(max=columns)
    candidate = ends <= position + 1 if causal and whole else block <= newest
    forced = ((block < initial) | (block > newest - local)) & (block <= newest)
    key = key.masked_fill(~(candidate | forced), LEAST)
    return torch.where(forced, later + LARGEST, key)
