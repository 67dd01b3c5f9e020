"""A Triton kernel for selected-block attention, written for this benchmark as what a user would write: forward only.

A program computes the heads of one token that share a KV head, padded to 16 rows of a tensor-core instruction. It walks
the token's own list and gathers its keys. Neighboring tokens share loads in L2 only.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def kernel(
    q, k, v, indices, counts, out, first, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LISTS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = first + tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    rows, columns, d = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, D)
    at = ((token * KV_HEADS + head) * GROUP + rows[:, None]) * D + d[None, :]
    of_token = token * LISTS + head % LISTS  # one list for all heads, or one for each KV head
    count = tl.load(counts + of_token)
    queries = tl.load(q + at, mask=rows[:, None] < GROUP, other=0.0)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, count * BLOCK, TILE):
        entry = (start + columns) // BLOCK
        block = tl.load(indices + of_token * TOP + entry, mask=entry < count, other=0)
        key = block * BLOCK + (start + columns) % BLOCK
        place = (key * KV_HEADS + head) * D
        scores = tl.dot(queries, tl.load(k + place[None, :] + d[:, None])) * scale  # base 2
        scores = tl.where(((entry < count) & (key <= token))[None, :], scores, -1e30)
        largest = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - largest[:, None])
        factor = tl.exp2(top - largest)
        total = total * factor + tl.sum(weight, 1)
        acc = acc * factor[:, None] + tl.dot(weight.to(v.dtype.element_ty), tl.load(v + place[:, None] + d[None, :]))
        top = largest
    tl.store(out + at, acc / total[:, None], mask=rows[:, None] < GROUP)


def launch(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor, out: Tensor, block_size: int, first: int,
    tile: int, warps: int, stages: int,
) -> None:  # fmt: skip
    """Write `out` for the tokens from `first` on.

    Args:
        q, out: (1, S, H, D), contiguous, D a power of two.
        k, v: (1, S, Hkv, D), contiguous, H at most 16 * Hkv. S must be a multiple of block_size.
        indices: (S, G, top) int32, G 1 or Hkv; the first entry of each list must be visible.
        counts: (S, G) int32: the entries of each list, which come first.
        tile: gathered keys of a step.
    """
    (_, tokens, heads, D), kv_heads = q.shape, k.shape[2]
    shape = {"KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "LISTS": indices.shape[1], "TOP": indices.shape[2]}
    shape |= {"BLOCK": block_size, "D": D, "ROWS": 16, "TILE": tile}
    scale = D**-0.5 * 1.4426950408889634
    grid = ((tokens - first) * kv_heads,)
    kernel[grid](q, k, v, indices, counts, out, first, scale, **shape, num_warps=warps, num_stages=stages)
