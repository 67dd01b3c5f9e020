"""Context-parallel attention: in 2 and 4 processes with gloo, and with the processes simulated on one device."""

import functools
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention import attention, block_sparse_attention, create_block_mask, patterns
from attention.distributed import deal as dealing
from attention.distributed import moves
from attention.distributed.ops import ScoreAtPositions
from attention.distributed.plan import plans

from ..ranks import Ranks
from . import distributed_checks, stage_checks

LENGTH = 1000  # of 8 tiles, the last one ragged


def per_head(blocks=(128, 128), length=1024):
    torch.manual_seed(0)
    rows, columns = (length // side for side in blocks)
    listed = torch.rand(2, rows, columns) < 0.3
    return patterns.BlockMask.from_blocks(listed, blocks, lengths=(length, length), causal=True)


def documents(length):
    cu = torch.tensor([0, 70, 300, 301, 640, 980], dtype=torch.int32)
    return patterns.packed_documents(cu, lengths=(length, length), causal=True)


def heavy_ends():
    """The first and the last quarter of the rows have 60 blocks, the others 4."""
    blocks = torch.arange(64) < torch.tensor([60, 4, 4, 60]).repeat_interleave(16)[:, None]
    return patterns.BlockMask.from_blocks(blocks)


MASKS = {
    "causal": lambda: patterns.causal((LENGTH, LENGTH)),
    "causal, whole tiles": lambda: patterns.causal((1024, 1024)),
    "full": lambda: patterns.sliding_window((LENGTH, LENGTH), (None, None)),
    "window": lambda: patterns.sliding_window((1024, 1024), (200, 0), global_columns=10),
    "documents": lambda: documents(LENGTH),
    "per head": per_head,
    "per head, small blocks": lambda: per_head((64, 64)),
    "tall blocks": lambda: per_head((128, 64)),
    "wide blocks": lambda: per_head((64, 128)),
    "function": lambda: create_block_mask(lambda b, h, q, kv: (q // 90 == kv // 90) | (kv < h * 5), 1, 2, 700, 700),
    "one tile": lambda: patterns.causal((5, 5)),
    "nothing": lambda: patterns.BlockMask.from_blocks(torch.zeros(8, 8, dtype=torch.bool)),
}


def qkv(length, seed=0):
    torch.manual_seed(seed)
    make = functools.partial(torch.randn, dtype=torch.float64)
    return make(1, 2, length, 64), make(1, 1, length, 64), make(1, 1, length, 64)


def simulated(mask, q, k, v, size, deal, score_mod=None, capacity=None):
    """Attention of `size` processes, of tensors that hold all tokens; with gradients."""
    made = plans(mask, size, deal, capacity=capacity)
    parts = []
    for plan in made:
        columns = (plan.buffer[:, None] * plan.tile + torch.arange(plan.tile)).flatten()
        past = columns >= plan.length
        kb, vb = (t[:, :, columns.clamp(max=plan.length - 1)].masked_fill(past[:, None], 0) for t in (k, v))
        score = score_mod and ScoreAtPositions(score_mod, *plan.numbers, plan.tile, plan.length)
        parts.append(block_sparse_attention(plan.shard(q, 2), kb, vb, plan.mask, score_mod=score))
    return made[0].unshard(parts, 2)


@pytest.mark.parametrize("deal", ["auto", *dealing.DEALS])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", MASKS)
def test_shards_are_the_whole(name, size, deal):
    mask = MASKS[name]()
    tensors = [t.requires_grad_() for t in qkv(mask.lengths[0])]
    whole, parts = block_sparse_attention(*tensors, mask), simulated(mask, *tensors, size, deal)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(whole)
    wanted, found = (torch.autograd.grad(out, tensors, dout) for out in (whole, parts))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_score_functions_see_positions():
    mask = documents(LENGTH)
    tensors = qkv(LENGTH)

    def score_mod(score, b, h, q, kv):
        return score - 0.01 * (h + 1) * (q - kv)

    whole = block_sparse_attention(*tensors, mask, score_mod=score_mod)
    torch.testing.assert_close(simulated(mask, *tensors, 3, "auto", score_mod), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("deal", dealing.DEALS)
@pytest.mark.parametrize("length", [0, 1, 128, 1000, 4096])
def test_each_token_has_one_process(length, deal, size):
    plan = plans(patterns.causal((length, length)), size, deal)[0]
    count = -(-length // 128)
    assert sorted(plan.tiles.flatten().tolist()) == list(range(dealing.padded(count, size, deal)))
    assert all((tiles.diff() > 0).all() for tiles in plan.tiles)
    x = torch.arange(length).view(1, length)
    shards = [p.shard(x, 1, value=-1) for p in plans(patterns.causal((length, length)), size, deal)]
    assert len({t.shape for t in shards}) == 1 and sum(int((t == -1).sum()) for t in shards) == (
        dealing.padded(count, size, deal) * 128 - length
    )
    torch.testing.assert_close(plan.unshard(shards, 1), x)
    for own, shard in zip(plans(patterns.causal((length, length)), size, deal), shards, strict=True):
        assert torch.equal(own.shard(x[..., None], -2, value=-1), shard[..., None])
    assert torch.equal(plan.unshard(shards, -1), x)


@pytest.mark.parametrize(
    ("mask", "deal"),
    [
        (patterns.causal((8192, 8192)), "head_tail"),
        (patterns.sliding_window((8192, 8192), (256, 0)), "contiguous"),
        (patterns.sliding_window((8192, 8192), (None, None)), "contiguous"),
        (heavy_ends(), "balanced"),
    ],
    ids=["causal", "window", "full", "heavy ends"],
)
def test_the_deal_that_is_chosen(mask, deal):
    made = plans(mask, 4)
    assert {plan.deal for plan in made} == {deal}
    work = [int((plan.mask.kv_num_blocks + plan.mask.full_kv_num_blocks).sum()) for plan in made]
    assert max(work) <= 1.05 * sum(work) / len(work)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_balanced_work(size):
    """Random rows: within half of the largest for each cut, and log2(size) cuts."""
    work = torch.rand(240, generator=torch.Generator().manual_seed(size)).mul(100).ceil().double()
    parts = work[dealing.dealt(work, size, "balanced")].sum(1)
    assert (parts - work.sum() / size).abs().max() <= 50 * (size - 1).bit_length()


def test_only_needed_tiles_move():
    """A process with 16 tiles in a row needs two tiles of the one before it, if the window has 256 tokens."""
    made = plans(patterns.sliding_window((8192, 8192), (255, 0)), 4, "contiguous")
    assert [plan.moved_tiles() for plan in made] == [0, 2, 2, 2]
    k = torch.empty(1, 2, made[0].local_length, 64, dtype=torch.bfloat16)
    assert made[1].moved_bytes(k, k) == 2 * 2 * 128 * 2 * 64 * 2
    for plan in made:  # each column of the buffer has a block
        assert (plan.mask.tables()[0] | plan.mask.tables()[1]).any(2).all()


@pytest.mark.parametrize("deal", dealing.DEALS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", MASKS)
def test_a_capacity(name, size, deal):
    """Each process gets as many tiles of each other, the needed ones among them, and attention is the same."""
    mask = MASKS[name]()
    exact = plans(mask, size, deal)
    each, needed = exact[0].tiles.shape[1], exact[0].capacity
    assert needed == max(max(plan.receive_counts) for plan in exact)
    for capacity in {needed, each, each + 5}:
        made = plans(mask, size, deal, capacity=capacity)
        for plan, other in zip(made, exact, strict=True):
            moved = [min(capacity, each) * (rank != plan.rank) for rank in range(size)]
            assert plan.capacity == max(moved)
            assert plan.receive_counts == plan.send_counts == moved and torch.equal(plan.tiles, other.tiles)
            begin = each
            for rank, count in enumerate(moved):
                tiles = plan.tiles[plan.rank] if rank == plan.rank else plan.buffer[begin : begin + count]
                begin += count
                assert set(other.buffer.tolist()) & set(plan.tiles[rank].tolist()) <= set(tiles.tolist())
                assert (tiles.diff() > 0).all()
            for rank, places in enumerate(plan.sends.split(plan.send_counts)):
                receiver = made[rank]
                before = each + sum(receiver.receive_counts[: plan.rank])
                there = receiver.buffer[before : before + len(places)]
                assert rank == plan.rank or torch.equal(plan.tiles[plan.rank][places], there)
    tensors = qkv(mask.lengths[0])
    whole = block_sparse_attention(*tensors, mask)
    found = simulated(mask, *tensors, size, deal, capacity=needed)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    if needed:
        with pytest.raises(
            ValueError, match=f"capacity must be at least {needed}, the most tiles that a process needs"
        ):
            plans(mask, size, deal, capacity=needed - 1)


class Launches(TorchDispatchMode):
    """Count the operations that launch a kernel on a GPU, and refuse those that wait for one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.__name__.partition(".")[0] not in ("nonzero", "_local_scalar_dense", "masked_select", "_unique2")
        aliases = [value.alias_info for value in func._schema.returns]
        views = aliases and all(alias is not None and not alias.is_write for alias in aliases)
        self.count += not (views or func.__name__.partition(".")[0] in ("empty", "new_empty", "_unsafe_view"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("deal", "most"), [("auto", 83), ("head_tail", 50)])
def test_a_plan_launches_few_kernels(deal, most):
    """By torch operations; see test_sharded_masks.py for kernels."""
    mask = patterns.causal((16384, 16384))
    with Launches() as launches:
        plans(mask, 4, deal, ranks=(1,))
    assert launches.count <= most


@pytest.mark.parametrize("deal", [*dealing.DEALS, "plan"])
def test_a_plan_with_a_capacity_does_not_wait(deal):
    """By torch operations, but for the check, which is an assertion on a GPU."""
    mask = patterns.causal((16384, 16384))
    deal = plans(mask, 4)[0] if deal == "plan" else deal
    with mock.patch.object(moves, "check_fits") as check, Launches():
        plans(mask, 4, deal, ranks=(1,), capacity=32)
    check.assert_called_once()


@pytest.mark.gpu
@pytest.mark.parametrize(("deal", "capacity"), [("auto", None), *((deal, 32) for deal in (*dealing.DEALS, "plan"))])
@pytest.mark.parametrize("by", ["kernels", "torch"])
def test_how_often_a_plan_waits(by, deal, capacity):
    mask = patterns.causal((16384, 16384), device="cuda")
    terms = {"deal": plans(mask, 4)[0] if deal == "plan" else deal, "capacity": capacity}
    with mock.patch.object(moves.kernels, "supports", lambda *_: by == "kernels"):
        plans(mask, 4, ranks=(1,), **terms)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                plans(mask, 4, ranks=(1,), **terms)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(warning.message) for warning in found) == (capacity is None)


@pytest.mark.gpu
def test_a_capacity_that_is_too_small_is_an_assertion():
    code = (
        "import torch; from attention import patterns; from attention.distributed.plan import plans; "
        "plans(patterns.causal((1024, 1024), device='cuda'), 2, 'contiguous', capacity=3); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode and "needs more tiles of another one than capacity" in done.stderr
    assert "device-side assert" in done.stderr


def test_dense_attention_agrees():
    q, k, v = qkv(LENGTH)
    torch.testing.assert_close(
        simulated(MASKS["causal"](), q, k, v, 4, "auto"), attention(q, k, v, causal=True), rtol=1e-5, atol=1e-5
    )


def test_errors():
    with pytest.raises(ValueError, match="as many queries as keys"):
        plans(patterns.causal((128, 256)), 2)
    with pytest.raises(ValueError, match="deal must be 'auto' or one of 'contiguous'"):
        plans(patterns.causal((128, 128)), 2, "zigzag")
    for kind, text, capacity, deal in (
        (TypeError, "capacity must be an int, a number of tiles, or None, got True", True, "balanced"),
        (TypeError, "capacity must be an int, a number of tiles, or None, got 2.0", 2.0, "balanced"),
        (ValueError, "capacity must not be negative, got -1", -1, "balanced"),
        (ValueError, "with capacity, deal must be a plan or one of 'contiguous'", 2, "auto"),
    ):
        with pytest.raises(kind, match=text):
            plans(patterns.causal((128, 128)), 2, deal, capacity=capacity)
    with pytest.raises(TypeError, match="mask must be a BlockMask"):
        plans(torch.ones(2, 2, dtype=torch.bool), 2)
    with pytest.raises(TypeError, match=r"make one with attention.create_block_mask .* or BlockMask.from_blocks"):
        plans(torch.ones(2, 2, dtype=torch.bool), 2)
    plan = plans(patterns.causal((256, 256)), 2)[0]
    for dim in (0, 1, 2, -2, -3):
        with pytest.raises(
            ValueError, match=rf"shard: x must have 256 tokens in dimension {dim}, got shape \(1, 100\)"
        ):
            plan.shard(torch.zeros(1, 100), dim)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        plan.shard([1], 0)
    part = torch.zeros(1, 128)
    with pytest.raises(ValueError, match="parts must be those of 2 processes"):
        plan.unshard([part], 1)
    for wrong in (torch.zeros(1, 256), torch.zeros(1, 100), torch.zeros(128, 1), torch.zeros(())):
        with pytest.raises(ValueError, match=r"unshard: parts\[1\] must have 128 tokens in dimension 1, got shape"):
            plan.unshard([part, wrong], 1)
    with pytest.raises(TypeError, match=r"parts\[0\] must be a tensor, got list"):
        plan.unshard([[0] * 128, part], 1)


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


RESULTS, *OTHERS = (check.__name__ for check in distributed_checks.CHECKS)


@pytest.mark.parametrize("check", [pytest.param(RESULTS, marks=pytest.mark.core), *OTHERS])
def test_against_one_process(ranks, check):
    ranks.run(f"{distributed_checks.__name__}:{check}")


@pytest.mark.parametrize("check", [check.__name__ for check in stage_checks.CHECKS])
def test_stages(ranks, check):
    ranks.run(f"{stage_checks.__name__}:{check}")


@pytest.mark.parametrize("check", ["error_in_one_rank", "death_of_one_rank"])
def test_a_rank_that_fails_ends_the_others(check):
    """Within the process group's timeout, with the reason."""
    Ranks(2, collective_seconds=4).fail(f"{distributed_checks.__name__}:{check}")


CHECKS = ["llama", "later_tokens", "packed", "windows", "score_functions", "checkpointing", "compiled", "refused"]


@pytest.mark.parametrize("check", CHECKS)
def test_transformers(ranks, check):
    pytest.importorskip("transformers")
    ranks.run(f"tests.attention.transformers_checks:{check}")
