"""Context parallelism on one device: the kernels of 2 and 4 simulated ranks in BF16, and what the ranks exchange.

Merged outputs and gradients are compared with the truth, and must not err more than those of one process.
"""

from unittest import mock

import pytest
import torch

from attention import attention_backward, block_sparse_attention
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

    def send(out, x, received, sent, group):
        pieces.append(x.split(sent))

    def receive(out, x, received, sent, group):
        out.copy_(torch.cat([of_rank[plan.rank] for of_rank in pieces]))

    with mock.patch.object(exchange, "_all_to_all", send):
        for t, plan in zip(tensors, made, strict=True):
            move([t.clone()], plan, *args)
    found = []
    with mock.patch.object(exchange, "_all_to_all", receive):
        for t, plan in zip(tensors, made, strict=True):
            found += move([t], plan, *args)
    return found


def of_ranks(mask, q, k, v, dout, size, **options):
    """out, dq, dk and dv of all ranks, merged; as context_parallel_attention computes them."""
    made = plans(mask, size)
    q, k, v, dout = ([plan.shard(t, 2) for plan in made] for t in (q, k, v, dout))
    k, v = (exchanged(exchange.gathered, shards, made) for shards in (k, v))
    results = []
    for plan, *tensors, dout_shard in zip(made, q, k, v, dout, strict=True):
        out, lse = block_sparse_attention(*tensors, plan.mask, return_lse=True)
        options |= {"grad_dtype": torch.float32, "dq_dtype": out.dtype}
        results.append((out, *attention_backward(dout_shard, *tensors, out, lse, plan.mask, **options)))
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
                found = of_ranks(mask, *tensors, dout, size, deterministic=deterministic)
                compare(found, whole, exact, f"{size} ranks, deterministic={deterministic}")
