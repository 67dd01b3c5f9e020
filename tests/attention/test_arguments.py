"""AttentionArgs: every argument reaches its field, its type and the schema; offsets are no part of a plan's key."""

import inspect
from unittest.mock import patch

import pytest
import torch

from attention import attention, attention_backward, block_sparse_attention, dispatch, ops, patterns, shards
from attention.arguments import BACKWARD_TERMS, TERMS, AttentionArgs
from attention.backward import dispatch as backward
from attention.masks.score_mods import RelativeBias
from bench.host import launches_replaced
from cute_kernels.runtime import families
from cute_kernels.runtime.arguments import terms_of

OPS = pytest.mark.parametrize("op", [attention, block_sparse_attention, attention_backward], ids=lambda op: op.__name__)


def arguments(op) -> list[str]:
    return [name for name in inspect.signature(op).parameters if name != "others"]


@OPS
def test_every_argument_reaches_its_field(op, monkeypatch):
    got = []
    monkeypatch.setattr(ops, "call", got.append)
    monkeypatch.setattr(shards, "_eager", lambda *args: got.extend(args))
    call = {name: object() for name in arguments(op)}
    op(**call)
    args, *others = got
    if op is attention_backward:
        assert others == [call.pop(name) for name in ("out", "lse", "dout", "dlse", "grad_dtype", "dq_dtype")]
    assert args._asdict() == args._field_defaults | call


def test_the_schema_has_every_argument():
    terms = terms_of(AttentionArgs, TERMS).split(", ")
    assert [term.partition("=")[0].split()[1] for term in terms] == list(TERMS)
    assert "SymInt[]? window_size=None" in terms and "bool causal=False" in terms
    operands = {"q", "k", "v", "out", "block_mask", "score_mod"}
    assert set(TERMS) | operands == set(AttentionArgs._fields) and set(BACKWARD_TERMS) < set(TERMS)


# -- offsets --------------------------------------------------------------------------------------------------


@pytest.fixture
def launched():
    """The arguments of all kernels, which do nothing."""
    calls = []

    def function_for(facts):
        return lambda *arguments: calls.append((facts.family, arguments))

    with launches_replaced():
        with patch.object(families, "function_for", function_for), patch.object(backward, "function_for", function_for):
            yield calls


def heads(*lengths) -> list[torch.Tensor]:
    return [torch.zeros(1, 2, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in lengths]


FORMS = {
    "causal": {"causal": True},
    "score_mod": {"score_mod": RelativeBias(torch.zeros(2, 2048), 0)},
    "blocks": {"block_mask": patterns.sliding_window((128, 512), (64, 0))},
}


@pytest.mark.parametrize("form", FORMS)
def test_one_plan_serves_every_chunk_of_a_prefill(form, launched):
    op = block_sparse_attention if form == "blocks" else attention
    for q_offset in (0, 128, 256, 384):
        q, k, v = heads(128, 512, 512)
        op(q, k, v, **FORMS[form], q_offset=q_offset, k_offset=7).sum().backward()
        offsets = {family: given[-2] for family, given in launched if given[-2:] and isinstance(given[-2], tuple)}
        assert offsets == dict.fromkeys(("flash forward", "flash backward"), (q_offset, 7))
        launched.clear()
    assert len(dispatch._PLANS.plans) == len(backward._PLANS.plans) == 1
    assert all(plan.facts.offsets for plan in (*dispatch._PLANS.plans.values(), *backward._PLANS.plans.values()))


def test_offsets_are_checked_in_each_call(launched):
    q, k, v = (t.detach() for t in heads(128, 512, 512))
    attention(q, k, v, causal=True, q_offset=0)
    for offset, error in ((-1, ValueError), (2**31, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="q_offset must be"):
            attention(q, k, v, causal=True, q_offset=offset)
    table = torch.zeros(600)
    for op, call in (
        (attention, {"score_mod": lambda score, b, h, i, j: score + table[i]}),
        (
            block_sparse_attention,
            {"block_mask": patterns.causal((128, 512)).with_mask_mod(lambda b, h, i, j: table[i] < j)},
        ),
    ):
        op(q, k, v, **call, q_offset=64)
        op(q, k, v, **call, q_offset=600 - 128)
        with pytest.raises(IndexError):
            op(q, k, v, **call, q_offset=601 - 128)
