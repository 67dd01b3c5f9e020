"""Forward and backward passes of context_parallel_attention, in one stage or in stages of some heads each.

In one stage K and V move, then a kernel runs. In stages they move for some heads while it runs for others:

    forward     transfers   gather 0 | gather 1    | gather 2    | gather 3    |
                kernels              | attention 0 | attention 1 | attention 2 | attention 3

    backward    transfers   gather 0 | gather 1    | gather 2, reduce 0 | gather 3, reduce 1 | reduce 2   | reduce 3
                kernels              | backward 0  | backward 1         | backward 2         | backward 3 |

A kernel has one transfer next to it, since a second one would get no multiprocessors before that kernel ends. For the
same reason the transfer must begin before the kernel does.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.runtime.torch_compat import in_graph_trace, without_modes
from cute_kernels.runtime.transforms import differentiable_once

from ..block_sparse import contents_of
from ..masks.block_mask import BlockMask
from ..masks.element_mask import H_INPUT, trace_mask
from ..masks.score_mod import inputs_of
from ..ops import block_sparse_attention
from ..shards import attention_backward
from .exchange import Gather, Reduce, Transfer, begin_together, gathered, reduced, wait, waited_for
from .plan import ContextParallelPlan

STAGE_BYTES = 2**24  # see count_of


@dataclass(frozen=True)
class Stage:
    """Some heads of q, and those of k and v that they share.

    mask: of the former; None: the plan's, which is that of all heads. (The plan's mask has a cache with its stages, so
        that a reference to it would be a cycle.)
    """

    heads: slice
    kv_heads: slice
    mask: BlockMask | None

    def of_q(self, x: Tensor) -> Tensor:
        return x[:, self.heads]

    def of_kv(self, x: Tensor) -> Tensor:
        return x[:, self.kv_heads]

    def mask_of(self, plan: ContextParallelPlan) -> BlockMask:
        return plan.mask if self.mask is None else self.mask


_TRACED: set[str] = set()  # names of groups with calls that this process has traced
_STAGED: WeakKeyDictionary[ContextParallelPlan, bool] = WeakKeyDictionary()  # whether eager calls may have stages


@torch.compiler.assume_constant_result  # runs when torch.compile traces a call, not in the compiled call
def note_trace(group_name: str) -> bool:
    """Give eager calls of this group's plans one stage, but plans that have been in use.

    A compiled call has one, in which it exchanges other messages than an eager call in stages. So ranks would wait for
    each other if torch.compile gave up on one of them, as it does where a function is compiled too often. A plan that
    was in use keeps its stages, since a checkpointed call is computed again.
    """
    if not torch.compiler.is_exporting():  # one rank may export alone; asked here, since Dynamo takes it for True
        _TRACED.add(group_name)
    return True


def stages_of(plan: ContextParallelPlan, q: Tensor, k: Tensor, v: Tensor, scored: bool) -> list[Stage]:
    """The stages of a call, or none if it has one. All processes find the same number.

    scored: whether there is a score_mod, which gets numbers of heads.
    """
    if is_compiling() or scored or plan.stages == 1 or in_graph_trace():
        return []
    if not _STAGED.setdefault(plan, plan.group.group_name not in _TRACED):
        return []
    row = sum(t.element_size() * t.shape[0] * t.shape[1] * t.shape[3] for t in (k, v))
    count = count_of(plan.stages, row * plan.tile * plan.most_moved, k.shape[1])
    if count == 1:
        return []
    mask = plan.mask
    key = "stages", q.shape[1], k.shape[1], count
    make = partial(_stages, mask, *key[1:])
    return mask.derived.get(key, mask.kv_num_blocks, make, _lists_of, contents_of(mask))


def count_of(most: int, moved: int, kv_heads: int) -> int:
    """Number of stages of a call: the largest divisor of the number of KV heads up to `most` with which the process
    that receives most, `moved` bytes of K and V, gets at least STAGE_BYTES in each."""
    most = min(most, moved // STAGE_BYTES)
    return max((n for n in range(2, most + 1) if kv_heads % n == 0), default=1)


@without_modes()  # selective checkpointing must not see what the first call alone does
def _stages(mask: BlockMask, q_heads: int, kv_heads: int, count: int) -> list[Stage]:
    if _reads_heads(mask):
        return []
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


def _reads_heads(mask: BlockMask) -> bool:
    """True if mask_mod may depend on the head."""
    if mask.mask_mod is None:
        return False
    try:
        program = trace_mask(mask.mask_mod, mask.device).program
    except Exception:  # the reference on a CPU calls functions that kernels refuse
        return True
    return H_INPUT in inputs_of(program, program.output)


class ContextParallelPasses(torch.autograd.Function):
    """(out, lse) of a process's queries, differentiable once in q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, plan, options, keep: bool, reduce_dtype):
        stages = stages_of(plan, q, k, v, options["score_mod"] is not None)
        if stages:
            out, lse, buffers = _attention_in_stages(stages, q, k, v, plan, options)
        else:
            k_buffer, v_buffer = buffers = gathered((k, v), plan)
            out, lse = block_sparse_attention(q, k_buffer, v_buffer, plan.mask, return_lse=True, **options)
        ctx.save_for_backward(q, out, lse, *(buffers if keep else (k, v)))
        ctx.stages, ctx.plan, ctx.options, ctx.keep = stages, plan, options, keep
        ctx.dtypes, ctx.sizes = (k.dtype, v.dtype), (k.shape, v.shape)
        ctx.grad_dtype = torch.promote_types(q.dtype, reduce_dtype)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        # In a trace AOTAutograd itself refuses second derivatives.
        return (_gradients if is_compiling() else _gradients_once)(ctx, dout, dlse)


def _attention_in_stages(stages: list[Stage], q, k, v, plan: ContextParallelPlan, options: dict[str, Any]) -> tuple:
    """out, lse, and the buffers of K and V, two for each stage."""
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
            (k_buffer, v_buffer), mask = buffers[-2:], stage.mask_of(plan)
            part, lse = block_sparse_attention(stage.of_q(q), k_buffer, v_buffer, mask, return_lse=True, **options)
            stage.of_q(out).copy_(part)
            lses.append(lse)
    return out, torch.cat(lses, 1), buffers


def _gradients(ctx, dout, dlse) -> tuple:
    q, out, lse, *kv = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dtypes = {"grad_dtype": None if ctx.grad_dtype is q.dtype else ctx.grad_dtype, "dq_dtype": q.dtype}
    if ctx.stages:
        dq, dk, dv = _gradients_in_stages(ctx, dout, q, kv, out, lse, dlse, ctx.options | dtypes)
    else:
        k, v = kv if ctx.keep else gathered(kv, ctx.plan)
        dq, dk, dv = attention_backward(dout, q, k, v, out, lse, ctx.plan.mask, dlse=dlse, **ctx.options, **dtypes)
        dk, dv = reduced((dk, dv), ctx.plan, ctx.dtypes)
    return dq, dk, dv, None, None, None, None


def _gradients_in_stages(ctx, dout, q, kv, out, lse, dlse, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    stages, plan = ctx.stages, ctx.plan
    dq = torch.empty_like(q)
    dk, dv = (q.new_empty(size, dtype=dtype) for size, dtype in zip(ctx.sizes, ctx.dtypes, strict=True))
    gathers: deque[Gather] = deque()
    reduces: deque[tuple[Stage, Reduce]] = deque()
    to_gather = deque([] if ctx.keep else stages)

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
            if ctx.keep:
                k, v = kv[2 * i : 2 * i + 2]
            else:
                gather = gathers.popleft()
                gather.copy_own()
                k, v = gather.buffers()
            dout_part, q_part, out_part, lse_part = (stage.of_q(t) for t in (dout, q, out, lse))
            dlse_part = None if dlse is None else stage.of_q(dlse)
            dq_part, dk_part, dv_part = attention_backward(
                dout_part, q_part, k, v, out_part, lse_part, stage.mask_of(plan), dlse=dlse_part, **options
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


_gradients_once = differentiable_once(_gradients)
