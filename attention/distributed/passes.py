"""Forward and backward passes of context_parallel_attention: in one stage, in which K and V move and then a kernel
runs, or in stages of some heads each (stages.py)."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.runtime.torch_compat import in_graph_trace
from cute_kernels.runtime.transforms import differentiable_once

from ..ops import block_sparse_attention
from ..shards import attention_backward
from . import stages
from .exchange import gathered, reduced
from .plan import ContextParallelPlan


class ContextParallelPasses(torch.autograd.Function):
    """(out, lse) of a process's queries, differentiable once in q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, plan, options, keep: bool, reduce_dtype):
        count = _count_of(plan, k, v, options["score_mod"] is not None)
        if count > 1:
            out, lse, buffers = _in_stages().attention_in_stages(count, q, k, v, plan.mask, plan, options, keep)
        else:
            k_buffer, v_buffer = buffers = gathered((k, v), plan)
            out, lse = block_sparse_attention(q, k_buffer, v_buffer, plan.mask, return_lse=True, **options)
        ctx.save_for_backward(q, out, lse, *(buffers if keep else (k, v)))
        ctx.count, ctx.plan, ctx.options, ctx.keep = count, plan, options, keep
        ctx.dtypes = k.dtype, v.dtype
        ctx.grad_dtype = torch.promote_types(q.dtype, reduce_dtype)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        # In a trace AOTAutograd itself refuses second derivatives.
        return (_gradients if is_compiling() else _gradients_once)(ctx, dout, dlse)


def _gradients(ctx, dout, dlse) -> tuple:
    q, out, lse, *kv = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    plan, options = ctx.plan, ctx.options
    options = options | {"grad_dtype": None if ctx.grad_dtype is q.dtype else ctx.grad_dtype, "dq_dtype": q.dtype}
    if ctx.count > 1:
        call = _in_stages().gradients_in_stages
        dq, dk, dv = call(ctx.count, dout, dlse, q, kv, out, lse, plan.mask, plan, options)
    else:
        k, v = kv if ctx.keep else gathered(kv, plan)
        dq, dk, dv = attention_backward(dout, q, k, v, out, lse, plan.mask, dlse=dlse, **options)
        dk, dv = reduced((dk, dv), plan, ctx.dtypes)
    return dq, dk, dv, None, None, None, None


_gradients_once = differentiable_once(_gradients)


def _count_of(plan: ContextParallelPlan, k: Tensor, v: Tensor, scored: bool) -> int:
    """Number of stages of a call, the same in all processes.

    scored: whether there is a score_mod, which gets numbers of heads.
    """
    if scored or plan.stages == 1 or (not is_compiling() and in_graph_trace()):
        return 1
    row = sum(t.element_size() * t.shape[0] * t.shape[1] * t.shape[3] for t in (k, v))
    return stages.count_of(plan.stages, row * plan.tile * plan.most_moved, k.shape[1])


def _in_stages() -> Any:
    """The module with the passes in stages."""
    if not is_compiling():
        return stages
    from . import stages_op  # imports torch's compiler, which takes seconds

    return stages_op
