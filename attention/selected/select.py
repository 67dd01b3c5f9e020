"""select_blocks: an indexer's scores of KV blocks and the exact top k of them, as lists for selected_attention.

Torch ops without synchronization, in parts of the rows that bound the memory.
"""

from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from cute_kernels import checks as common

from .checks import check_block_size

OP = "select_blocks"
CHUNK = 2**28  # bytes of scores and keys that are held together
LEAST = -(2**63)
LARGEST = (2**31 - 1) << 32


@torch.no_grad()
def select_blocks(
    q_index: Tensor,
    k_index: Tensor,
    top: int,
    block_size: int,
    *,
    causal: bool = False,
    local: int = 0,
    initial: int = 0,
    pool: Literal["mean", "max"] = "mean",
    activation: Literal["relu"] | None = None,
    groups: int | None = None,
) -> Tensor:
    """Select the `top` KV blocks with the largest scores for each query token.

    The score of a token and a block, in FP32, is the sum over the indexer's heads of activation(q_index @ k_index.T),
    with k_index averaged over the block (pool="mean"), or its maximum over the keys of the block (pool="max").

    | model | heads of q_index, k_index | arguments |
    | --- | --- | --- |
    | QSA | 4, 1 | block_size=4, pool="mean", activation="relu", local=1 |
    | MSA | Hkv, 1 or Hkv | block_size=128, pool="max", groups=Hkv, local=1 |

    Args:
        q_index: (B, heads, Sq, D), floating point.
        k_index: (B, 1 or groups, Sk, D), of q_index's dtype.
        top: length of the lists.
        block_size: tokens of a KV block: 1, 4, 16, 64 or 128.
        causal: True if row i, at position p = i + Sk - Sq, selects among blocks with a key up to p. With pool="max"
            later keys do not count. With pool="mean" blocks that end after p, whose average contains later keys, are
            selected by `local` only.
        local, initial: number of newest visible blocks, and of first blocks, that are always selected. They count in
            `top`.
        activation: "relu", or None for the scores as they are.
        groups: number of lists per token; heads of q_index are split into so many groups of consecutive heads, each
            with its own scores. None: one list, for all heads.

    Returns:
        (B, Sq, top) int32, or (B, Sq, groups, top): ascending blocks, padded with -1 where a token has fewer. Of equal
        scores the first block is selected, so results are identical on every run.

    Does not synchronize, and can be captured in a CUDA graph. The result has no gradient.

    Raises:
        TypeError, ValueError: an argument has an unsupported type, dtype, shape or value.

    Example:
        q_index = torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16)
        k_index = torch.randn(1, 1, 1024, 128, device="cuda", dtype=torch.bfloat16)
        indices = select_blocks(q_index, k_index, 64, 4, causal=True, local=1, activation="relu")  # (1, 1024, 64)
    """
    _check(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups)
    (batch, heads, rows), columns = q_index.shape[:3], k_index.shape[2]
    lists, blocks = groups or 1, -(-columns // block_size)
    found = torch.full((batch, rows, lists, top), -1, dtype=torch.int32, device=q_index.device)
    if 0 not in (*found.shape, columns):
        q = q_index.unflatten(1, (lists, heads // lists))  # (B, G, heads of a group, Sq, D)
        k = k_index.float()
        if pool == "mean":
            k = _averaged(k, block_size)
        part = max(1, CHUNK // (batch * (4 * heads * k.shape[2] + 32 * lists * blocks)))
        for begin in range(0, rows, part):
            end = min(begin + part, rows)
            position = torch.arange(begin, end, device=q.device)[:, None] + (columns - rows if causal else columns)
            score = _scores(q[:, :, :, begin:end].float(), k, activation)  # (B, G, rows of this part, keys or blocks)
            if pool == "max":
                score = _largest(score, position, block_size, causal)
            key = _keys(score, position, columns, block_size, causal, local, initial, pool)
            best = key.topk(min(top, blocks), sorted=False)
            index = best.indices.masked_fill(best.values == LEAST, blocks).sort().values
            index = index.masked_fill(index == blocks, -1).transpose(1, 2)
            found[:, begin:end, :, : index.shape[-1]] = index
    return found if groups is not None else found.squeeze(2)


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


def _keys(score: Tensor, position, columns, block_size, causal, local, initial, pool) -> Tensor:
    """Distinct int64 in the order of preference: scores, and of equal ones the first block; LEAST for blocks that may
    not be selected, the largest for those that are always selected."""
    block = torch.arange(score.shape[-1], device=score.device)
    bits = (score + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    later = 2**31 - 1 - block
    key = (ordered << 32) + later
    newest = (position // block_size).clamp(max=score.shape[-1] - 1) if causal else block[-1:]
    ends = ((block + 1) * block_size).clamp(max=columns)
    candidate = ends <= position + 1 if causal and pool == "mean" else block <= newest
    forced = ((block < initial) | (block > newest - local)) & (block <= newest)
    key = key.masked_fill(~(candidate | forced), LEAST)
    return torch.where(forced, later + LARGEST, key)


def _check(q_index, k_index, top, block_size, causal, local, initial, pool, activation, groups) -> None:
    for name, tensor in (("q_index", q_index), ("k_index", k_index)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{OP}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"{OP}: {name} must be a floating-point (batch, heads, length, head_dim), got {tuple(tensor.shape)} "
                f"{tensor.dtype}"
            )
    common.check_device(OP, q_index.device, k_index=k_index)
    if k_index.dtype != q_index.dtype:
        raise TypeError(f"{OP}: k_index is {k_index.dtype} but q_index is {q_index.dtype}; cast one of them")
    for name, value, least in (("top", top, 1), ("local", local, 0), ("initial", initial, 0), ("groups", groups, 1)):
        if value is None and name == "groups":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{OP}: {name} must be an int of at least {least}, got {value!r}")
    if local + initial > top:
        raise ValueError(f"{OP}: local + initial must be at most top, got {local} + {initial} and {top}")
    check_block_size(block_size, OP)
    if not isinstance(causal, bool):
        raise TypeError(f"{OP}: causal must be True or False, got {causal!r}")
    if pool not in ("mean", "max"):
        raise ValueError(f'{OP}: pool must be "mean" or "max", got {pool!r}')
    if activation not in (None, "relu"):
        raise ValueError(f'{OP}: activation must be "relu" or None, got {activation!r}')
    (batch, heads, _, width), lists = q_index.shape, groups or 1
    if heads % lists or k_index.shape[1] not in (1, lists):
        raise ValueError(
            f"{OP}: the heads of q_index must be a multiple of groups ({lists}), and those of k_index 1 or groups; got "
            f"{heads} and {k_index.shape[1]}"
        )
    if k_index.shape[0] != batch or k_index.shape[3] != width:
        raise ValueError(
            f"{OP}: q_index {tuple(q_index.shape)} and k_index {tuple(k_index.shape)} must have the same batch "
            "size and head_dim"
        )
