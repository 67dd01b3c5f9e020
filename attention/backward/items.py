"""Work items of backward's kernels: a KV tile, with all query heads that share its head of K and V, or some of them.

KV tiles of a causal mask have different lengths. Tiles that run at the same time begin near each other, but after some
heads they are rows apart, more with every head, and what they read leaves L2 before others need it. A work item of few
heads ends before that. An H200 draws its 700 W in these kernels, so its clock is higher for what memory does not draw:
causal, 64k tokens, 64/8 heads, 0.37 TB from and to memory and 1510 MHz become 0.02 TB and 1640 MHz. Small problems also
have more items to balance.

On the other hand each item has a prologue and an epilogue. It stores its part of dK and dV in FP32, and sum_parts.py
adds the parts in order, so that both are bitwise identical in every run.
"""

import torch
from torch import Tensor

NEAR_BYTES = 2**23  # of Q, dO and dq_accum of rows that are near each other: a quarter of what stays in L2
LEAST_STEPS = 64  # blocks of 128x128 scores of an item with some of the heads, on average
LEAST_WORK = 48  # blocks for each multiprocessor of a call whose items have some of the heads
MOST_PARTS = 4  # of dK and dV
MOST_MEMORY = 2  # of all parts, relative to dq_accum's


def heads_of_an_item(share: int, steps: float, tiles: int, sms: int, fewest: int = 1) -> int:
    """Number of query heads of a work item, of `share` that have one head of K and V.

    steps: blocks of 128x128 scores of a KV tile and query head, on average; 0 if all tiles have as many or few.
    tiles: KV tiles of all heads of K and V.
    fewest: heads that an item has at least, for the parts' memory.
    """
    if steps * tiles * share < LEAST_WORK * sms:
        return share
    fewest = min(max(-(-share // MOST_PARTS), fewest), share)
    choices = [heads for heads in range(fewest, share + 1) if share % heads == 0]
    heads = next((heads for heads in choices if heads * steps >= LEAST_STEPS), share)
    balanced = [fewer for fewer in choices if fewer <= heads and tiles * (share // fewer) >= 2 * sms]
    return balanced[-1] if balanced else choices[0]


def empty_parts(t: Tensor, items: int) -> Tensor:
    """FP32 parts of the gradient of K or V, batched (B, items, Sk, D) or packed (total_k, items, D), of as many items
    as split its query heads."""
    if t.dim() == 3:
        return t.new_empty((items, len(t), t.shape[-1]), dtype=torch.float32).transpose(0, 1)
    return t.new_empty((len(t), items, *t.shape[2:]), dtype=torch.float32)


def order_of_items(lengths: Tensor, begins: Tensor, near: int, sms: int) -> Tensor:
    """The order in which work items begin, int32 (items,), for a GPU with `sms` multiprocessors.

    Heads follow each other, and in a head items that begin within `near` rows of blocks, the longest first: items that
    run at the same time then read the same rows at the same time, also where each has rows of its own. But the last
    heads, which have two items or more for each multiprocessor, come longest first, so that all multiprocessors end at
    the same time; and before all others come items that last longer than these heads.

    lengths, begins: (heads, tiles), numbers of blocks and first rows of blocks.
    """
    heads, tiles = lengths.shape
    last = min(-(-2 * sms // tiles), heads)
    lengths = lengths.long()
    shorter = lengths.amax() - lengths
    section = begins // near
    section += torch.arange(heads, device=lengths.device)[:, None] * (section.amax() + 1)
    section[heads - last :] = section.amax()
    long = lengths * sms * heads > lengths.sum() * last
    keys = torch.where(long, -lengths, section * (lengths.amax() + 1) + shorter)
    return keys.flatten().sort(stable=True).indices.to(torch.int32)
