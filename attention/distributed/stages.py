"""Forward and backward passes in stages of some heads: K and V move for these while a kernel runs for others.

    forward     transfers   gather 0 | gather 1    | gather 2    | gather 3    |
                kernels              | attention 0 | attention 1 | attention 2 | attention 3

    backward    transfers   gather 0 | gather 1    | gather 2, reduce 0 | gather 3, reduce 1 | reduce 2   | reduce 3
                kernels              | backward 0  | backward 1         | backward 2         | backward 3 |

A kernel has one transfer next to it, since a second one would get no multiprocessors before that kernel ends. For the
same reason the transfer must begin before the kernel does.

A call that torch.compile traces runs them inside of registered ops (stages_op.py).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.runtime.torch_compat import without_modes

from ..block_sparse import contents_of
from ..masks.block_mask import BlockMask
from ..ops import block_sparse_attention
from ..shards import attention_backward
from .exchange import Gather, Reduce, Route, Transfer, begin_together, wait, waited_for
from .plan import ContextParallelPlan

STAGE_BYTES = 2**24  # see count_of


@dataclass(frozen=True)
class Stage:
    """Some heads of q, and those of k and v that they share.

    mask: of the former; None: that of all heads, which they share.
    """

    heads: slice
    kv_heads: slice
    mask: BlockMask | None

    def of_q(self, x: Tensor) -> Tensor:
        return x[:, self.heads]

    def of_kv(self, x: Tensor) -> Tensor:
        return x[:, self.kv_heads]

    def mask_of(self, whole: BlockMask) -> BlockMask:
        """This stage's part of a mask, which may have another mask_mod than the one that the stages were made of."""
        if self.mask is None:
            return whole
        return self.mask if self.mask.mask_mod is whole.mask_mod else self.mask.with_mask_mod(whole.mask_mod)


def count_of(most: int, moved: int, kv_heads: int) -> int:
    """Number of stages of a call: the largest divisor of the number of KV heads up to `most` with which the process
    that receives most, `moved` bytes of K and V, gets at least STAGE_BYTES in each."""
    count = 1
    for n in range(2, most + 1):
        if kv_heads % n == 0 and moved >= n * STAGE_BYTES:
            count = n
    return count


def stages_of(mask: BlockMask, q_heads: int, kv_heads: int, count: int) -> list[Stage]:
    """The stages of a call whose mask has q_heads heads, or one for all of them. They are cached with the mask."""
    make = partial(_stages, mask, q_heads, kv_heads, count)
    key = "stages", q_heads, kv_heads, count
    return mask.derived.get(key, mask.kv_num_blocks, make, _lists_of, contents_of(mask))


@without_modes()  # selective checkpointing must not see what the first call alone does
def _stages(mask: BlockMask, q_heads: int, kv_heads: int, count: int) -> list[Stage]:
    stages = []
    for i in range(count):
        heads, of_kv = (slice(n // count * i, n // count * (i + 1)) for n in (q_heads, kv_heads))
        part = None
        if mask.heads > 1:
            lists = (t[:, heads].contiguous() for t in mask.lists())
            part = BlockMask(
                *lists, lengths=mask.lengths, blocksize=mask.blocksize, mask_mod=mask.mask_mod, check=False
            )
        stages.append(Stage(heads, of_kv, part))
    return stages


def _lists_of(stages: list[Stage]) -> list[Tensor]:
    return [t for stage in stages if stage.mask is not None for t in stage.mask.lists()]


def attention_in_stages(
    count: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    plan: ContextParallelPlan | Route,
    options: dict[str, Any],
    keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse and, to keep, the buffers of K and V, two for each stage."""
    stages = stages_of(mask, q.shape[1], k.shape[1], count)
    gathers: list[Gather] = []
    works: deque[list[Any]] = deque()
    out, lses, buffers = q.new_empty((*q.shape[:3], v.shape[3])), [], []
    with waited_for(works):
        for stage in stages:
            gathers.append(Gather((stage.of_kv(k), stage.of_kv(v)), plan))
            works.append(begin_together(gathers[-1].transfers, plan.group))
        for i, stage in enumerate(stages):
            wait(works.popleft())
            if i == 0:
                for gather in gathers:  # while the second transfer begins
                    gather.copy_own()
            buffers += gathers[i].buffers()
            # Without out=, of which selective checkpointing would save no result.
            (k_buffer, v_buffer), part_of_mask = buffers[-2:], stage.mask_of(mask)
            part, lse = block_sparse_attention(
                stage.of_q(q), k_buffer, v_buffer, part_of_mask, return_lse=True, **options
            )
            stage.of_q(out).copy_(part)
            lses.append(lse)
    return out, torch.cat(lses, 1), buffers if keep else []


def gradients_in_stages(
    count: int,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    kv: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    mask: BlockMask,
    plan: ContextParallelPlan | Route,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv.

    kv: k and v, or the buffers of attention_in_stages.
    """
    dq, dk, dv = new_gradients(q, kv, count)
    stages, kept = stages_of(mask, q.shape[1], dk.shape[1], count), len(kv) > 2
    gathers: deque[Gather] = deque()
    reduces: deque[tuple[Stage, Reduce]] = deque()
    to_gather = deque([] if kept else stages)

    def next_gather() -> list[Transfer]:
        if not to_gather:
            return []
        stage = to_gather.popleft()
        gathers.append(Gather([stage.of_kv(t) for t in kv], plan))
        return gathers[-1].transfers

    def store_next_sums() -> None:
        stage, reduce = reduces.popleft()
        for gradient, total in zip((dk, dv), reduce.sums(), strict=True):
            stage.of_kv(gradient).copy_(total)

    works: deque[list[Any]] = deque()
    with waited_for(works):
        # Before stage i, works[0] are the transfers of its keys and values and of the gradients of stage i - 2.
        for _ in range(2):
            works.append(begin_together(next_gather(), plan.group))
        for i, stage in enumerate(stages):
            wait(works.popleft())
            if i >= 2:
                store_next_sums()
            if kept:
                k, v = kv[2 * i : 2 * i + 2]
            else:
                gather = gathers.popleft()
                gather.copy_own()
                k, v = gather.buffers()
            dout_part, q_part, out_part, lse_part = (stage.of_q(t) for t in (dout, q, out, lse))
            dlse_part = None if dlse is None else stage.of_q(dlse)
            dq_part, dk_part, dv_part = attention_backward(
                dout_part, q_part, k, v, out_part, lse_part, stage.mask_of(mask), dlse=dlse_part, **options
            )
            reduce = Reduce((dk_part, dv_part), plan)
            reduces.append((stage, reduce))
            works.append(begin_together(reduce.transfers + next_gather(), plan.group))
            reduce.add_own()  # while the transfer begins
            stage.of_q(dq).copy_(dq_part)
        while works:
            wait(works.popleft())
            store_next_sums()
    return dq, dk, dv


def new_gradients(q: Tensor, kv: Sequence[Tensor], count: int) -> list[Tensor]:
    """Memory for dq, dk and dv; kv: see gradients_in_stages."""
    heads = kv[0].shape[1] * (count if len(kv) > 2 else 1)
    return [torch.empty_like(q), *(t.new_empty((len(q), heads, q.shape[2], t.shape[3])) for t in kv[:2])]
