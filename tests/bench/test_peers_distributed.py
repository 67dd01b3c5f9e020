"""Context-parallel attention and its peers in `python -m bench distributed`, on the CPU, small: in two processes."""

import dataclasses

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

from attention.distributed.plan import plans
from bench import cases_distributed_attention as cases
from bench import distributed, peers_distributed

from ..ranks import Ranks

aten = torch.ops.aten


@pytest.fixture(scope="module", name="ranks")
def ranks_fixture():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def test_rows(ranks):
    ranks.run(f"{__name__}:rows_run")


def rows_run(device):
    """All rows, whose calls run once: times are not taken."""

    def once(calls, *_, **__):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1.0)

    flash_on_cpu()
    cases.HEADS, cases.KV_HEADS, cases.HEAD_DIM, cases.SHARDS, cases.timed = 4, 2, 16, 2, once
    cases.PROBLEMS = [dataclasses.replace(problem, length=512, longer=1024) for problem in cases.PROBLEMS]
    found = {row.name: row.run(device) for row in cases.rows()}
    for name, entry in found.items():
        assert distributed.line({"name": name, "ranks": 2, **entry})
    sharded = [entry for name, entry in found.items() if name.endswith(", sharded")]
    assert len(sharded) == 8
    for entry in sharded:
        assert max(entry["errors"] + entry["ulysses_errors"]) < 0.01 and entry["ulysses_forward"] == 0.5
    for name in ("torch_errors", "torch_ring_errors"):
        assert max(sharded[0][name]) < 0.01, (name, sharded[0][name])
    assert sharded[0]["torch_backward"] == sharded[0]["torch_ring_backward"] == 0.5


@pytest.mark.parametrize("problem, most", zip(cases.PROBLEMS, [1, 1.01, 1, 1.01], strict=True))
def test_moved_over_needed(problem, most, monkeypatch):
    """Two ranks need no row but those that move: documents begin inside of tiles, windows end inside of them."""
    monkeypatch.setattr(cases, "HEADS", 8)
    plan = plans(problem.mask(16384, torch.device("cpu")), 2)[1]
    rows = cases.needed(plan, 4)
    assert rows.shape == (4, plan.moved_tiles() * 128) and 1 <= rows.numel() / rows.sum() <= most


def test_a_peer_that_is_wrong_is_not_timed(ranks):
    ranks.run(f"{__name__}:wrong_peer")


def wrong_peer(device):
    problem = dataclasses.replace(cases.PROBLEMS[1], length=512)
    peers_distributed.AllToAll.forward = staticmethod(lambda ctx, x: x.clone())
    cases.HEADS, cases.KV_HEADS, cases.HEAD_DIM = 4, 2, 16
    cases.timed = lambda calls, *_, **__: dict.fromkeys(calls, 1.0)
    entry = cases.on_ranks(problem, device)
    assert max(entry["ulysses_errors"]) > 0.1 and "ulysses_forward" not in entry and entry["forward"] == 0.5

    peers_distributed.AllToAll.forward = staticmethod(lambda ctx, x: x.no_such_name)
    entry = cases.on_ranks(problem, device)
    assert "no_such_name" in entry["ulysses_errors"] and "ulysses_forward" not in entry and entry["forward"] == 0.5


def flash_on_cpu() -> None:
    """Give the CPU the ops of torch's FlashAttention, which torch's context parallelism calls for parts of q, k, v."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    flash_on_cpu.library = library

    def scaled_dot_product_attention(q, k, v, is_causal, enable_gqa):  # replaced by name
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    nnf.scaled_dot_product_attention = scaled_dot_product_attention


def scores_of(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if is_causal else scores


def per_query_head(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in tensors]


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    wide_k, wide_v = per_query_head(q, k, v)
    scores, nothing = scores_of(q, wide_k, is_causal), torch.empty(())
    out, lse = (scores.softmax(-1) @ wide_v).to(q.dtype), scores.logsumexp(-1)
    return out, lse, None, None, q.shape[2], k.shape[2], nothing, nothing, nothing


def flash_backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *_, scale=None):
    """Gradients from some keys, with the output and LSE of all."""
    wide_k, wide_v = per_query_head(q, k, v)
    p, dout = (scores_of(q, wide_k, is_causal) - lse[..., None]).exp(), dout.float()
    ds = p * (dout @ wide_v.mT - (dout * out.float()).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (ds.mT @ q.float(), p.mT @ dout))
    return (ds @ wide_k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
