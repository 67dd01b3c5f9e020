"""Context parallelism on one device: the kernels of 2 and 4 simulated ranks in BF16, and what the ranks exchange.

Outputs and gradients of the whole sequence are compared with the truth, and must not err more than those of one
process: those of one kernel over all sources, and those of a kernel per source, merged by LSE.
"""

import functools
from unittest import mock

import pytest
import torch

from attention import attention_backward, block_sparse_attention, merge
from attention.distributed import exchange
from attention.distributed.plan import plans
from cute_kernels.testing.reference import assert_as_good_as_torch, poisoned_empty

from .distributed_checks import truth
from .parts import ON_GPU, qkv, where_fixture  # noqa: F401 (a fixture is used by name)
from .test_distributed import MASKS

LARGER = 1.2  # Frobenius errors may be by as much: other roundings of as many terms


def exchanged(move, tensors, made, *args):
    """`gathered` or `reduced` of each rank: once to record what it sends, and once with what it receives."""
    pieces = []

    def send(transfers, group):
        pieces.extend(transfer.x.split(transfer.sent) for transfer in transfers)
        return []

    def receive(transfers, group):
        for transfer in transfers:
            transfer.out.copy_(torch.cat([of_rank[plan.rank] for of_rank in pieces]))
        return []

    with mock.patch.object(exchange, "begin", send):
        for t, plan in zip(tensors, made, strict=True):
            move([t.clone()], plan, *args)
    found = []
    with mock.patch.object(exchange, "begin", receive):
        for t, plan in zip(tensors, made, strict=True):
            found += move([t], plan, *args)
    return found


def at_once(plan, q, k, v, dout, **options):
    """out, dq, dk and dv of a rank and its buffers, as context_parallel_attention computes them."""
    out, lse = block_sparse_attention(q, k, v, plan.mask, return_lse=True)
    return out, *attention_backward(dout, q, k, v, out, lse, plan.mask, **options)


def by_source(plan, q, k, v, dout, **options):
    """The same, of own tiles and then of each source's: what a rank could compute while others' tiles arrive."""
    sources, begin = [], 0
    for count in (len(plan.own), *plan.receive_counts):
        end = begin + count * plan.tile
        if count:
            offsets = {"q_offset": 0, "k_offset": begin}
            part = plan.mask.shard((q.shape[2], end - begin), **offsets)
            sources.append(((q, k[:, :, begin:end], v[:, :, begin:end]), part, offsets))
        begin = end
    unrounded = functools.partial(torch.empty, q.shape, dtype=torch.float32, device=q.device)
    parts = [block_sparse_attention(*t, mask, out=unrounded(), return_lse=True, **at) for t, mask, at in sources]
    out, lse = merge(*zip(*parts, strict=True), dtype=q.dtype)
    options |= {"dq_dtype": torch.float32}
    found = [attention_backward(dout, *t, out, lse, mask, **at, **options) for t, mask, at in sources]
    dq, dk, dv = zip(*found, strict=True)
    return out, sum(dq).to(q.dtype), torch.cat(dk, 2), torch.cat(dv, 2)


def of_ranks(mask, q, k, v, dout, size, attend=at_once, **options):
    """out, dq, dk and dv of all ranks, in the order of the whole sequence."""
    made = plans(mask, size)
    q, k, v, dout = ([plan.shard(t, 2) for plan in made] for t in (q, k, v, dout))
    k, v = (exchanged(exchange.gathered, shards, made) for shards in (k, v))
    options |= {"grad_dtype": torch.float32, "dq_dtype": q[0].dtype}
    results = [attend(*of_rank, **options) for of_rank in zip(made, q, k, v, dout, strict=True)]
    out, dq, dk, dv = zip(*results, strict=True)
    dk, dv = (exchanged(exchange.reduced, parts, made, [out[0].dtype]) for parts in (dk, dv))
    return [made[0].unshard(parts, 2) for parts in (out, dq, dk, dv)]


def of_one_process(mask, q, k, v, dout, **options):
    out, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
    return out, *attention_backward(dout, q, k, v, out, lse, mask, **options)


def compare(found, whole, exact, what):
    for name, mine, one, true in zip(("out", "dq", "dk", "dv"), found, whole, exact, strict=True):
        mine, one = mine.cpu(), one.cpu()
        try:
            assert_as_good_as_torch(mine, true, one, k=true.shape[2])
        except AssertionError as error:
            raise AssertionError(f"{what}, {name}: {error}") from None
        errors = [(t.double() - true).norm().item() for t in (mine, one)]
        assert errors[0] <= LARGER * errors[1], f"{what}, {name}: {errors[0]:.3e}, of one process {errors[1]:.3e}"


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "per head", "per head, small blocks"])
@pytest.mark.parametrize("where", [pytest.param(("cpu", None), id="reference"), *ON_GPU], indirect=True)
def test_kernels_of_ranks(where, name, D):
    mask = MASKS[name]()
    length = mask.lengths[0]
    *tensors, dout = (t.to(where) for t in (*qkv(length, length, D, H=2, heads=1), qkv(length, 0, D, H=2)[0]))
    exact = truth(*tensors, dout, mask)
    mask = mask.to(where)
    for deterministic in (False, True) if where == "cuda" else (None,):
        with poisoned_empty():
            whole = of_one_process(mask, *tensors, dout, deterministic=deterministic)
            for size in (2, 4):
                for attend in (at_once, by_source):
                    found = of_ranks(mask, *tensors, dout, size, attend, deterministic=deterministic)
                    compare(found, whole, exact, f"{size} ranks, {attend.__name__}, deterministic={deterministic}")
