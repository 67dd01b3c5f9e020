"""Work items of backward's kernels: a KV tile, with all query heads that share its head of K and V, or some of them.

KV tiles of a causal mask have different lengths. Tiles that run at the same time begin near each other, but after some
heads they are rows apart, more with every head, and what one reads leaves L2 before the others need it. A work item of
few heads ends before that. These kernels run at an H200's limit of 700 W, so less DRAM traffic means a higher SM clock:
causal, 64k tokens, 64/8 heads, 0.37 TB at 1510 MHz become 0.02 TB at 1640 MHz. Small problems also have more items to
balance.

On the other hand each item has a prologue and an epilogue. It stores its part of dK and dV in FP32, and combine.py adds
the parts in order, so that both are bitwise identical in every run.
"""

import torch
from torch import Tensor

from cute_kernels.runtime.call_plan import layout_of

LEAST_STEPS = 64  # blocks of 128x128 scores of an item with some of the heads, on average
LEAST_WORK = 48  # blocks for each multiprocessor of a call whose items have some of the heads
MOST_PARTS = 4  # of dK and dV; twice as many if their number has no divisor that is large enough, as 5 and 7
MOST_MEMORY = 2  # of all parts, relative to dq_accum's


def heads_of_an_item(per_head: int, steps: float | None, tiles: int, sms: int, fewest: int = 1) -> int:
    """Number of query heads of a work item, of the `per_head` query heads of a head of K and V.

    steps: blocks of 128x128 scores of a KV tile and query head, on average. None: do not split.
    tiles: KV tiles of all heads of K and V.
    fewest: query heads that an item has at least, for the parts' memory.
    """
    if steps is None or steps * tiles * per_head < LEAST_WORK * sms:
        return per_head
    divisors = [heads for heads in range(1, per_head + 1) if per_head % heads == 0]
    choices = [heads for heads in divisors if per_head // heads <= MOST_PARTS]
    if choices == [per_head]:
        choices = [heads for heads in divisors if per_head // heads <= 2 * MOST_PARTS]
    choices = [heads for heads in choices if heads >= fewest] or [per_head]
    heads = next((heads for heads in choices if heads * steps >= LEAST_STEPS), per_head)
    balanced = [other for other in choices if other <= heads and tiles * (per_head // other) >= 2 * sms]
    return balanced[-1] if balanced else choices[0]


def parts_layout(t: Tensor, items: int) -> tuple:
    """(shape, strides, dtype) of the FP32 parts of the gradient of K or V: batched (B, items, Sk, D) or packed
    (total_k, items, D), a part's rows side by side in memory.

    items: work items of all heads for each KV tile.
    """
    if t.dim() == 3:
        rows, _, width = t.shape
        return (rows, items, width), (width, rows * width, 1), torch.float32
    return layout_of((len(t), items, *t.shape[2:]), torch.float32)
