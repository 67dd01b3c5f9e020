"""Checks of context-parallel attention in stages of heads (attention/distributed/passes.py), in several processes."""

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention import create_block_mask, patterns
from attention.distributed import context_parallel_attention, passes, plan_context_parallel

from ..recomputed import recomputed
from .distributed_checks import LENGTH, documents, mesh_of, qkv


@contextlib.contextmanager
def transfers():
    """The transfers that begin in stages. There are stages of any size, although this process has traced calls."""
    begun = mock.Mock(side_effect=passes.begin_together)
    with (
        mock.patch.object(passes, "STAGE_BYTES", 1),
        mock.patch.object(passes, "_TRACED", set()),
        mock.patch.object(passes, "begin_together", begun),
    ):
        yield begun


def causal(device, stages):
    return plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True, stages=stages)


def step(plan, device, call=context_parallel_attention, **options):
    """out, lse and the gradients of 8 heads of q, and 4 of k and v."""
    *tensors, dout = (torch.cat([t, t.flip(2)], 1) for t in qkv(device))
    leaves = [plan.shard(t, 2).requires_grad_() for t in tensors]
    out, lse = call(*leaves, plan, return_lse=True, deterministic=True, **options)
    gradients = torch.autograd.grad((out, lse), leaves, (plan.shard(dout, 2), torch.ones_like(lse)))
    return out.detach(), lse.detach(), *gradients


def assert_equal(results):
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def results_of_one_stage(device):
    """Outputs and gradients are those of one stage, bit for bit."""
    mesh, lengths = mesh_of(device), (LENGTH, LENGTH)
    listed = torch.rand(8, 8, 8, device="cpu", generator=torch.Generator().manual_seed(1)) < 0.4
    near = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 300), 1, 1, *lengths, device=device)
    packed = patterns.packed_documents(documents(device), lengths=lengths, causal=True)
    for mask in (
        patterns.causal(lengths, device=device),
        near,
        packed,
        near | packed,
        patterns.BlockMask.from_blocks(listed.to(device), lengths=lengths, causal=True),
    ):
        results = []
        for most, count in ((1, 0), (2, 2), (3, 2), (4, 4)):
            plan = plan_context_parallel(mask, mesh, stages=most, deal="head_tail")
            for options in ({}, {"keep_kv": True}):
                with transfers() as begun:
                    results.append(step(plan, device, **options))
                assert begun.call_count == (2 * count + 2 if count else 0)
        assert_equal(results)


def later_heads_see_less(b, h, q, kv):
    return (q >= kv) & (q - kv <= 400 - 40 * h)


def calls_that_read_the_head(device):
    """A mask_mod or a score_mod that may read the head: one stage."""
    mask = create_block_mask(later_heads_see_less, 1, 8, LENGTH, LENGTH, device=device)
    mesh = mesh_of(device)
    with transfers() as begun:
        assert_equal([step(plan_context_parallel(mask, mesh, stages=n, deal="head_tail"), device) for n in (1, 4)])
        step(causal(device, 4), device, score_mod=lambda score, b, h, q, kv: score)
        assert not begun.called


def selective_checkpointing(device):
    """Nothing is saved of the comparison of the first call, nor of what it makes for stages."""
    *tensors, dout = qkv(device)

    def block(q, k, v, plan):
        turned = torch.cat((-q[..., 32:], q[..., :32]), -1)
        out = context_parallel_attention(turned, k, v, plan, deterministic=True)
        return torch.cat((out[..., 32:], out[..., :32]), -1).square()

    results = []
    again = functools.partial(recomputed, block)
    for call, stages in itertools.product((block, again, functools.partial(again, attention=True)), (1, 2)):
        plan = causal(device, stages)
        leaves = [plan.shard(t, 2).requires_grad_() for t in tensors]
        with transfers() as begun:
            out = call(*leaves, plan)
            results.append((out.detach(), *torch.autograd.grad(out, leaves, plan.shard(dout, 2))))
        assert begun.called == (stages == 2)
    assert_equal(results)


def counted_operations(device):
    """FlopCounterMode counts those of one stage."""
    operations = []
    for stages in (1, 4):
        with transfers(), FlopCounterMode(display=False) as counter:
            step(causal(device, stages), device)
        counts = counter.get_flop_counts()["Global"]
        operations.append({op: n for op, n in counts.items() if "attention" in str(op)})
    assert operations[0] == operations[1] and len(operations[0]) == 2


def errors_in_a_stage(device):
    """The next call is right after an error of all processes, such as too little memory."""
    plan = causal(device, 4)
    with transfers():
        results = [step(plan, device)]
        for name in ("attention_backward", "block_sparse_attention"):
            with mock.patch.object(passes, name, side_effect=MemoryError), pytest.raises(MemoryError):
                step(plan, device)
            results.append(step(plan, device))
    assert_equal(results)


def traced_calls(device):
    """A call that torch.compile traces has one stage, and so have later calls, but those with a plan in use."""

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def compiled(*args, **options):
        return context_parallel_attention(*args, **options)

    plan = causal(device, 4)
    with transfers() as begun:
        results = [step(plan, device)]
        assert begun.called
        begun.reset_mock()
        results += [step(plan, device, compiled), step(causal(device, 4), device)]
        assert not begun.called
        results.append(step(plan, device))
        assert begun.called
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-2, atol=1e-2)


CHECKS = [
    results_of_one_stage,
    calls_that_read_the_head,
    selective_checkpointing,
    counted_operations,
    errors_in_a_stage,
    traced_calls,
]
