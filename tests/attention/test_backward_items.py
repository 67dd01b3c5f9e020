"""Work items of backward that have some of the query heads of a head of K and V: their results, rule and order."""

import contextlib
import functools
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from attention import attention, attention_backward, block_sparse_attention, patterns
from attention.arguments import AttentionArgs
from attention.backward import dispatch, items, problem
from attention.backward.config import BackwardFacts
from attention.backward.heuristics import pick
from attention.distributed.plan import plans
from attention.forward.catalogue import MASKS, SCORES
from attention.forward.config import BlockKind, WindowKind
from attention.masks.element_mask import for_kernel, trace_mask
from cute_kernels import explain
from cute_kernels.runtime.call_plan import PlanCache
from cute_kernels.testing.reference import normal, poisoned_empty

from .emulate_blocks import number
from .parts import qkv, rows_first
from .test_gradients import CASES, blocks, check_case, check_packed, documents
from .test_gradients import machine_fixture as machine_fixture

# name -> query heads of a work item, of those that share a head of K and V; and one of CASES' functions
SPLIT = {
    "more rows, 1 of 4": (1, lambda d: (*qkv(300, 150, 128, B=2, H=4, heads=1, device=d), {"causal": True})),
    "window, 2 of 4": (2, lambda d: (*qkv(100, 300, 128, B=1, H=8, heads=2, device=d), {"window_size": (40, 20)})),
    "blocks, 1 of 2": (
        1,
        lambda d: (
            *qkv(500, 600, 128, B=1, H=4, heads=2, device=d),
            {"block_mask": blocks((128, 128), (500, 600), heads=4, device=d)},
        ),
    ),
    "blocks of rows first, 1 of 3": (
        1,
        lambda d: (
            *map(rows_first, qkv(300, 200, 64, B=2, H=6, heads=2, device=d)),
            {"block_mask": blocks((64, 64), (300, 200), heads=6, device=d), "softcap": 3.0},
        ),
    ),
    "mask_mod, 2 of 4": (2, lambda d: (*qkv(300, 300, 128, B=1, heads=1, device=d), {"block_mask": documents(d)})),
}


@contextlib.contextmanager
def split(heads):
    """A context in which work items have so many heads, and new plans are made; gives the mock that finds kernels."""
    rule, plans = (
        mock.patch.object(dispatch, name, value)
        for name, value in (("heads_of_an_item", lambda *_: heads), ("_PLANS", PlanCache(operands=3)))
    )
    with rule, plans, mock.patch.object(dispatch, "function_for", wraps=dispatch.function_for) as asked:
        yield asked


def has_split(asked):
    return "backward combine" in [call.args[0].family for call in asked.call_args_list]


@pytest.mark.parametrize("name", SPLIT)
def test_work_items_of_some_heads(machine, monkeypatch, name):
    """In "window" the first KV tile has no query tile."""
    heads, make = SPLIT[name]
    monkeypatch.setitem(CASES, name, make)
    with split(heads) as asked:
        check_case(name, *machine[:2])
    assert has_split(asked) == (machine[2] == "sm_90")


@pytest.mark.parametrize("name", ["packed", "packed, causal", "packed, 192"])
def test_work_items_of_one_head_of_packed_sequences(machine, name):
    with split(1) as asked:
        check_packed(name, *machine[:2])
    assert has_split(asked) == (machine[2] == "sm_90")


@pytest.mark.gpu
@pytest.mark.sm_90
def test_parts_are_added_in_one_order():
    """dK and dV have the same bits on every run, though dQ has not."""
    q, k, v = (t.requires_grad_() for t in qkv(4096, 4096, 128, B=2, H=16, heads=4, device="cuda"))
    new = mock.patch.object(dispatch, "_PLANS", PlanCache(operands=3))
    with new, mock.patch.object(dispatch, "function_for", wraps=dispatch.function_for) as asked:
        out = attention(q, k, v, causal=True)
        dout = normal(*out.shape, device="cuda")
        first = torch.autograd.grad(out, (k, v), dout, retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(out, (k, v), dout, retain_graph=True)
            assert all(map(torch.equal, first, again))
    assert has_split(asked)


@pytest.mark.parametrize(
    "terms", [{"causal": True}, {"window_size": (70, None), "q_offset": 3, "k_offset": 0}], ids=str
)
def test_fp32_gradients_of_work_items_of_one_head(machine, terms):
    """They are those of items of all heads but for the order of additions; and dQ's dtype is another one."""
    device, computed, _ = machine
    q, k, v = qkv(200, 150, 128, B=2, H=3, heads=1, device=device)
    out, lse = attention(q, k, v, **terms, return_lse=True)
    dout, found = normal(*out.shape, device=device), []
    for heads in (1, 3):
        with split(heads), computed(), poisoned_empty():
            options = {"grad_dtype": torch.float32, "dq_dtype": q.dtype}
            found.append(attention_backward(dout, q, k, v, out, lse, **terms, **options))
    assert [t.dtype for t in found[0]] == [q.dtype, torch.float32, torch.float32]
    for mine, whole in zip(*found, strict=True):
        torch.testing.assert_close(mine, whole, rtol=0.02 if mine.dtype is q.dtype else 1e-4, atol=1e-4)


CAUSAL = WindowKind(right=True)

# name -> per_head, steps, tiles, and the query heads of a work item on 132 multiprocessors
RULE = {
    "64k tokens": (8, 256, 4096, 2), "4k": (8, 16, 256, 4), "2k": (8, 8, 128, 2), "1k": (8, 4, 64, 8),
    "2k, 8 sequences": (8, 8, 1024, 8), "not to be split": (8, None, 4096, 8), "own heads": (1, 256, 4096, 1),
    "3 of a head": (3, 64, 512, 1), "5": (5, 64, 1024, 1), "5, short": (5, 32, 1024, 5), "16": (16, 256, 4096, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", RULE)
def test_how_many_heads_a_work_item_has(name):
    *case, expected = RULE[name]
    assert items.heads_of_an_item(*case, 132) == expected


def test_memory_bounds_the_number_of_parts():
    assert [items.heads_of_an_item(8, 256, 4096, 132, fewest) for fewest in (1, 3, 9)] == [2, 4, 8]


# name -> rows, columns, options of the call, and whether its heads are split
CALLS = {
    "causal": (16384, 16384, {"causal": True}, True),
    "causal, as a window": (16384, 16384, {"window_size": (16384, 0)}, True),
    "a window": (16384, 16384, {"window_size": (1000, 0)}, False),
    "full": (16384, 16384, {}, False),
    "full, as a window": (16384, 16384, {"window_size": (None, 2**29)}, False),
    "few columns": (65536, 1024, {"causal": True}, False),
    "many columns": (1024, 65536, {"causal": True}, False),
    "in one order": (16384, 16384, {"causal": True, "deterministic": True}, False),
    "blocks": (65536, 65536, {"block_mask": lambda n: patterns.causal((n, n), device="meta")}, True),
    "fewer blocks, one bound": (16384, 16384, {"block_mask": lambda n: patterns.causal((n, n), device="meta")}, True),
    "fewer blocks, a window": (
        16384, 16384, {"block_mask": lambda n: patterns.sliding_window((n, n), (1000, 0), device="meta")}, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_which_calls_have_work_items_of_some_heads(name):
    rows, columns, options, expected = CALLS[name]
    make = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k, v = (make(1, heads, n, 128, requires_grad=True) for heads, n in ((64, rows), (8, columns), (8, columns)))
    call = functools.partial(attention, **options)
    if "block_mask" in options:
        mask = options["block_mask"](rows)
        call = lambda q, k, v: block_sparse_attention(q, k, v, mask)  # noqa: E731
    plan = explain(call, q, k, v, arch="sm_90", backward=True)
    assert ("backward combine" in [facts.family for facts in plan.backward]) == expected


@pytest.mark.parametrize(("sides", "expected"), [((None, 0), True), ((9000, 0), False), ((None, None), False)])
def test_shards_of_one_bound_have_work_items_of_some_heads(sides, expected):
    mask = plans(patterns.sliding_window((16384, 16384), sides), 4, deal="head_tail")[0].mask
    rows, columns = mask.lengths
    q, k, v = (torch.empty(1, h, n, 128, dtype=torch.bfloat16) for h, n in ((64, rows), (8, columns), (8, columns)))
    args = AttentionArgs(q, k, v, block_mask=mask)
    element = mask.mask_mod and for_kernel(trace_mask(mask.mask_mod, q.device))[0]
    blocks = BlockKind(*mask.blocksize, element)
    facts = pick(BackwardFacts("sm_90a", "sm_90", None, "bfloat16", 128, 128, blocks=blocks))
    assert (dispatch.mean_steps(args, facts, (None, None)) is not None) == expected


# name -> fields of BackwardFacts, and dQ buffers at head dimensions 64, 96 and 128
BUFFERS = {
    "full": ({}, (1, 2, 2)),
    "causal": ({"window": CAUSAL}, (1, 2, 2)),
    "a window": ({"window": replace(CAUSAL, left=True)}, (1, 1, 1)),
    "packed": ({"packed": True}, (1, 1, 1)),
    "softcap": ({"softcap": True}, (1, 1, 1)),
    "bias": ({"score": SCORES["bias"]}, (2, 1, 1)),
    "blocks": ({"blocks": BlockKind(128, 128, None)}, (1, 2, 2)),
    "mask_mod": ({"blocks": BlockKind(128, 128, MASKS["tensors"])}, (1, 1, 1)),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_dq(name):
    """In deterministic kernels as many as are faster, in others one."""
    fields, expected = BUFFERS[name]
    facts = [BackwardFacts("sm_90a", "sm_90", None, "bfloat16", dim, dim, **fields) for dim in (64, 96, 128)]
    assert tuple(pick(replace(f, deterministic=True)).config.sums for f in facts) == expected
    assert {pick(f).config.sums for f in facts} == {1}


@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize(("batch", "per_head", "group_heads"), [(1, 8, None), (2, 8, 2), (3, 6, 1), (2, 3, 3)])
def test_each_work_item_is_scheduled_once(batch, per_head, group_heads, from_last, monkeypatch):
    """Group by group, of which the last one has LAST_TILES tiles or is the only one."""
    monkeypatch.setattr(problem, "select_", lambda condition, a, b: a if condition else b)
    monkeypatch.setattr(problem, "LAST_TILES", 20)
    heads_kv, tiles = 3, 7
    groups = heads_kv * per_head // (group_heads or per_head)
    last = number(problem.last_group(groups * batch, tiles, 2))
    shape = tiles, 1, heads_kv * per_head, heads_kv, batch, 2, last, from_last
    scheduler = problem.KvScheduler(*shape, group_heads)
    found = [problem.KvTile(*map(number, scheduler.fields(i))) for i in range(number(scheduler.count))]
    expected = itertools.product(range(batch), range(groups), range(tiles))
    assert sorted((t.b, t.head_group, t.n) for t in found) == sorted(expected)
    assert all(number(scheduler.h_kv(t)) == t.head_group * heads_kv // groups for t in found)
    numbers = [t.b * groups + t.head_group for t in found]
    assert [i // 2 for i in numbers[: last * tiles]] == sorted(i // 2 for i in numbers[: last * tiles])
    assert last == 0 or (groups * batch - last) * tiles >= 20
    assert min(numbers[last * tiles :]) == last
