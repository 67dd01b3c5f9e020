"""Plans of context parallelism by kernels, on the emulator and on GPUs, against those by torch operations."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch

from attention import patterns
from attention.distributed import deal as dealing
from attention.distributed import moves
from attention.distributed.plan import plans
from attention.masks.sharded import dispatch
from attention.masks.sharded.config import MOST_TILES

from ..emulator.ops import needs_compiler, on_emulator
from .test_distributed import MASKS, Launches
from .test_selected_tables import WHERE


def by_kernels(where: str, mask, *args, **terms):
    """plans(), which must not fall back to torch operations."""
    place = contextlib.nullcontext() if where == "cuda" else on_emulator(where)
    with place, mock.patch.object(moves, "tables_of", side_effect=AssertionError("torch operations")):
        return plans(mask.to("cuda") if where == "cuda" else mask, *args, **terms)


def facts(value):
    """The value with tensors on the CPU, and dataclasses and masks as tuples."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, patterns.BlockMask):
        shapes = [t.shape for t in value.lists()]
        return value.lengths, value.blocksize, shapes, facts(value.tables()), facts(value.mask_mod)
    if dataclasses.is_dataclass(value):
        return type(value), [facts(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [facts(each) for each in value] if isinstance(value, (list, tuple)) else value


def agree(where: str, mask, *args, **terms) -> None:
    for found, true in zip(by_kernels(where, mask, *args, **terms), plans(mask, *args, **terms), strict=True):
        assert facts(found) == facts(true)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", MASKS)
@WHERE
def test_plans(where, name, size):
    mask = MASKS[name]()
    for deal in ("auto", *dealing.DEALS):
        agree(where, mask, size, deal)
    agree(where, MASKS["nothing"](), 2, plans(MASKS["causal, whole tiles"](), 2, "balanced")[0])


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", MASKS)
@WHERE
def test_a_capacity(where, name, size):
    mask = MASKS[name]()
    for deal in (*dealing.DEALS, plans(mask, size)[0]):
        needed = plans(mask, size, deal)[0].capacity
        for capacity in (needed, needed + 1):
            agree(where, mask, size, deal, capacity=capacity)
    if needed and where != "cuda":  # an assertion on a GPU
        with pytest.raises(ValueError, match=f"capacity must be at least {needed}, the most"):
            by_kernels(where, mask, size, deal, capacity=needed - 1)


@pytest.mark.parametrize("size", [6, 7, 12])
@WHERE
def test_many_tiles(where, size):
    """Several for each thread, several words of bits, and rings whose windows cross their ends."""
    torch.manual_seed(size)
    rows = torch.rand(600, 1) ** 3
    mask = patterns.BlockMask.from_blocks(torch.rand(600, 600) < rows)
    agree(where, mask, size, "balanced", ranks=(0, size - 1))
    sparse = patterns.BlockMask.from_blocks(torch.rand(600, 600) < 0.001 * size)
    capacity = plans(sparse, size, "balanced")[0].capacity
    assert capacity < 600 // size
    agree(where, sparse, size, "balanced", ranks=(0, size - 1), capacity=capacity)


@WHERE
def test_lists_in_any_order(where):
    """Masks of equally many blocks in each row, of a step of a model, and batches."""
    index = torch.rand(2, 3, 20, 20).argsort(-1)[..., :7].int()
    agree(where, patterns.BlockMask.from_indices(index, (64, 64), lengths=(1280, 1280)), 4)
    agree(where, patterns.BlockMask.from_indices(index, (64, 64), lengths=(1250, 1250)), 4)


@WHERE
def test_entries_that_are_no_block(where):
    """They are neither needed nor work, whatever they are; the block after the last one is none, too."""
    for tiles, size in ((12, 3), (5, 2)):
        index = torch.arange(tiles, dtype=torch.int32).expand(1, 1, tiles, tiles)
        others = torch.tensor([-1, tiles, 2**20, 2**30, -(2**31)], dtype=torch.int32)[torch.arange(tiles) % 5]
        index = torch.where(index <= torch.arange(tiles)[:, None], index, others).contiguous()
        for block in (64, 128):
            lengths = tiles * block, tiles * block
            mask = patterns.BlockMask.from_indices(index, (block, block), lengths=lengths, padded=True)
            for deal in ("auto", *dealing.DEALS):
                agree(where, mask, size, deal)
            causal = patterns.BlockMask.from_blocks(torch.ones(tiles, tiles).tril() > 0, (block, block))
            for mine, true in zip(plans(mask, size), plans(causal, size), strict=True):
                assert torch.equal(mine.tiles, true.tiles) and torch.equal(mine.buffer, true.buffer)


@pytest.mark.parametrize(
    ("deal", "capacity", "most"), [("auto", None, 4), ("head_tail", None, 4), ("plan", None, 7), ("head_tail", 32, 6)]
)
@needs_compiler
def test_launches(deal, capacity, most):
    """Three kernels, a copy to the host, and for the tiles of another plan three operations. With a capacity three
    operations in place of the copy: sum, comparison, assertion."""
    mask = patterns.causal((16384, 16384))
    if deal == "plan":
        deal = plans(mask, 4)[0]
    real = dispatch.families.function_for
    with on_emulator("sm_90"):
        plans(mask, 4, deal, ranks=(1,), capacity=capacity)  # constants
        with Launches() as launches:

            def counted(facts):
                launches.count += 1
                return real(facts)

            with mock.patch.object(dispatch.families, "function_for", counted):
                with mock.patch.object(moves, "check_fits") as check:  # an assertion on a GPU
                    plans(mask, 4, deal, ranks=(1,), capacity=capacity)
    assert check.call_count == (capacity is not None)
    assert launches.count + 1 <= most  # the assertion, or tolist(), which is a copy on a GPU


def test_supports():
    mask = patterns.causal((1024, 1024))
    assert not dispatch.supports(mask, 8, 4), "on a CPU"
    with on_emulator("sm_90"):
        assert dispatch.supports(mask, 8, 4) and dispatch.supports(mask, MOST_TILES, 64)
        assert not dispatch.supports(mask, 0, 4) and not dispatch.supports(mask, MOST_TILES + 1, 4)
        assert not dispatch.supports(mask, MOST_TILES, 65) and not dispatch.supports(mask, 8, 2000)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 6, 7, 12])
def test_cuts(parts):
    """They cut as `balanced` does where windows are the first tiles of each ring."""
    cuts, order = dealing.cuts_of(4 * parts, parts)
    assert len(cuts) == parts - 1
    ring = torch.arange(4 * parts)
    pieces = torch.cat(dealing.balanced(ring[None], torch.zeros(4 * parts), parts))
    assert torch.equal(pieces[order].flatten(), ring)
