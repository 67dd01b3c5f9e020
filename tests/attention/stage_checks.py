"""Checks of context-parallel attention in stages of heads (attention/distributed/stages.py), in several processes."""

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention import create_block_mask, patterns
from attention.distributed import context_parallel_attention, plan_context_parallel, stages

from ..recomputed import recomputed
from .distributed_checks import LENGTH, documents, mesh_of, qkv


@contextlib.contextmanager
def transfers():
    """The transfers that begin in stages, which are of any size."""
    begun = mock.Mock(side_effect=stages.begin_together)
    with mock.patch.object(stages, "STAGE_BYTES", 1), mock.patch.object(stages, "begin_together", begun):
        yield begun


def causal(device, most):
    return plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True, stages=most)


def per_head(device):
    listed = torch.rand(8, 8, 8, device="cpu", generator=torch.Generator().manual_seed(1)) < 0.4
    return patterns.BlockMask.from_blocks(listed.to(device), lengths=(LENGTH, LENGTH), causal=True)


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
    near = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 300), 1, 1, *lengths, device=device)
    packed = patterns.packed_documents(documents(device), lengths=lengths, causal=True)
    for mask in (
        patterns.causal(lengths, device=device),
        near,
        packed,
        near | packed,
        per_head(device),
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
    for call, most in itertools.product((block, again, functools.partial(again, attention=True)), (1, 2)):
        plan = causal(device, most)
        leaves = [plan.shard(t, 2).requires_grad_() for t in tensors]
        with transfers() as begun:
            out = call(*leaves, plan)
            results.append((out.detach(), *torch.autograd.grad(out, leaves, plan.shard(dout, 2))))
        assert begun.called == (most == 2)
    assert_equal(results)


def counted_operations(device):
    """FlopCounterMode counts those of one stage."""
    operations = []
    for most in (1, 4):
        with transfers(), FlopCounterMode(display=False) as counter:
            step(causal(device, most), device)
        counts = counter.get_flop_counts()["Global"]
        operations.append({op: n for op, n in counts.items() if "attention" in str(op)})
    assert operations[0] == operations[1] and len(operations[0]) == 2


def errors_in_a_stage(device):
    """The next call is right after an error of all processes, such as too little memory."""
    plan = causal(device, 4)
    with transfers():
        results = [step(plan, device)]
        for name in ("attention_backward", "block_sparse_attention"):
            with mock.patch.object(stages, name, side_effect=MemoryError), pytest.raises(MemoryError):
                step(plan, device)
            results.append(step(plan, device))
    assert_equal(results)


def traced_calls(device):
    """A call that torch.compile traces is that of an eager one, bit for bit and message for message: some processes may
    compile it and others not, as where a function is compiled too often."""
    backend = "inductor" if device == "cuda" else "aot_eager"
    calls = context_parallel_attention, torch.compile(context_parallel_attention, backend=backend, fullgraph=True)
    window = patterns.sliding_window((LENGTH, LENGTH), (300, 0), device=device)
    mesh = mesh_of(device)
    plans = [causal(device, 4), *(plan_context_parallel(mask, mesh, stages=2) for mask in (window, per_head(device)))]
    for plan, options in itertools.product(plans, ({}, {"keep_kv": True}, {"softcap": 20, "scale": 0.1})):
        torch.compiler.reset()  # of recompile_limit
        with transfers() as begun:
            results = []
            for call in (*calls, calls[plan.rank % 2]):
                begun.reset_mock()
                results.append(step(plan, device, call, **options))
                assert begun.call_count == 2 * plan.stages + 2
        assert_equal(results)


def order_of_traced_calls(device):
    """Independent calls in a graph exchange messages in its order, although Inductor orders other operations by memory,
    of which each process needs another amount."""
    plan = plan_context_parallel(mesh=mesh_of(device), length=1024, causal=True, stages=4, deal="contiguous")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = functools.partial(torch.randn, device=device, dtype=dtype)
    w, x, y = make(512, 512).requires_grad_(), make(256, 512), make(2048, 512)
    first, second = ([make(1, 4, plan.local_length, 128) for _ in range(3)] for _ in range(2))

    def attend(terms, q, k, v, keep):
        return context_parallel_attention(q + ((terms @ w) @ w).mean(), k, v, plan, keep_kv=keep)

    def both():
        return attend(x, *first, True), attend(y, *second, False)

    with transfers():
        for found, wanted in zip(torch.compile(both, fullgraph=True)(), both(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


CHECKS = [
    results_of_one_stage,
    calls_that_read_the_head,
    selective_checkpointing,
    counted_operations,
    errors_in_a_stage,
    traced_calls,
    order_of_traced_calls,
]
