"""Transposed lists of block masks: the kernels on the emulator and on GPUs, against torch operations."""

import pytest
import torch

from attention.backward.dispatch import lists_of, ranks_of
from attention.block_sparse import with_causal
from attention.masks import block_lists
from attention.masks.block_mask import BlockMask
from attention.masks.transposed.dispatch import supports, transposed_lists

from ..emulator.ops import on_emulator
from .parts import captured, nothing_waits
from .test_selected_tables import WHERE, made


def shuffled(table):
    """Lists of a bool table (B, H, Mq, Mk), each in any order, then numbers that are no column."""
    count, index = block_lists.lists_of(table)
    listed = torch.arange(index.shape[3]) < count[..., None]
    key = torch.rand(index.shape).masked_fill(~listed, 2.0)
    order = key.argsort(-1)
    return count, index.masked_fill(~listed, 2**30).gather(-1, order)


def rows_of(count, index):
    """Lists as Python lists."""
    return [row[:n].tolist() for n, row in zip(count.flatten().tolist(), index.flatten(0, -2), strict=True)]


@pytest.mark.parametrize(
    ("shape", "density"),
    [((1, 2, 5, 3), 0.5), ((2, 1, 70, 33), 0.1), ((1, 1, 1, 1), 1.0), ((1, 2, 1100, 40), 0.3), ((1, 1, 3, 1100), 0.02)],
)
@WHERE
def test_lists(where, shape, density):
    table = torch.rand(shape) < density
    table[..., 0] |= torch.rand(shape[:-1]) < 0.9  # a column that nearly all rows list
    count, index = made(where, transposed_lists, *shuffled(table), shape[3])
    true_count, true_index = block_lists.lists_of(table.mT)
    assert torch.equal(count, true_count) and index.shape == true_index.shape
    assert rows_of(count, index) == rows_of(true_count, true_index)


@WHERE
def test_lists_of_parts(where):
    """Parts of 30 rows, the last of 10, have the lists of these rows alone."""
    table = torch.rand(2, 3, 70, 33) < 0.2
    count, index = made(where, transposed_lists, *shuffled(table), 33, 30)
    assert count.shape == (2, 9, 33) and index.shape == (2, 9, 33, 30)
    of_parts = torch.nn.functional.pad(table, (0, 0, 0, 20)).unflatten(2, (3, 30)).flatten(1, 2)
    assert rows_of(count, index) == rows_of(*block_lists.lists_of(of_parts.mT))


@pytest.mark.parametrize("full", [False, True])
def test_lists_of_a_mask(full):
    """They are those of BlockMask.transposed, of partial or of full blocks."""
    index = torch.rand(1, 2, 6, 9).argsort(-1)[..., :4].int()
    lengths = (6 * 64, 9 * 64)
    mask_mod = None if full else lambda b, h, q, kv: q > kv
    mask = BlockMask.from_indices(index, (64, 64), lengths=lengths, mask_mod=mask_mod)
    with on_emulator("sm_90"):
        found = lists_of(mask)
    for kind in (slice(0, 2), slice(2, 4)):
        assert rows_of(*found[kind]) == rows_of(*mask.transposed()[kind])


NO_COLUMNS = (-1, -(2**31), 9, 31, 40, 2**30, 2**31 - 1)


def with_holes(index):
    """Lists with entries that are no column, in all places, and a row that lists none."""
    holes = torch.tensor(NO_COLUMNS, dtype=torch.int32)[torch.randint(len(NO_COLUMNS), index.shape)]
    index = torch.where(torch.rand(index.shape) < 0.4, holes, index)
    index[..., 1, :] = -1
    return index


@WHERE
def test_what_is_no_column_is_ignored(where):
    """And does not change the lists of other rows."""
    index = with_holes(torch.rand(2, 3, 70, 9).argsort(-1)[..., :5].int())
    table = (index[..., None] == torch.arange(9)).any(-2)
    assert torch.equal(block_lists.table_of(torch.full(index.shape[:3], 5), index, 9), table)
    count, rows = made(where, transposed_lists, torch.full(index.shape[:3], 5, dtype=torch.int32), index, 9)
    assert rows_of(count, rows) == rows_of(*block_lists.lists_of(table.mT))


def test_lists_that_are_written_to():
    """A mask of equal rows is used again after the next step's lists were written to its tensor."""
    index = torch.rand(1, 2, 6, 9).argsort(-1)[..., :4].int()
    mask = BlockMask.from_indices(index, (64, 64), lengths=(6 * 64, 9 * 64))
    assert lists_of(mask)[2] is lists_of(mask)[2], "cached"
    ranks_of(mask), with_causal(mask)
    index.copy_(torch.rand(1, 2, 6, 9).argsort(-1)[..., :4])
    new = BlockMask.from_indices(index.clone(), (64, 64), lengths=(6 * 64, 9 * 64))
    assert rows_of(*lists_of(mask)[2:]) == rows_of(*new.transposed()[2:])
    assert torch.equal(ranks_of(mask), ranks_of(new))
    assert all(torch.equal(a, b) for a, b in zip(with_causal(mask).tables(), with_causal(new).tables(), strict=True))


def test_supports():
    index = torch.zeros(1, 1, 4, 2, dtype=torch.int32)
    assert supports(index, 32768) and not supports(index, 32769) and not supports(index[:, :, :0], 4)


@pytest.mark.gpu
def test_a_graph_reads_the_lists_at_each_replay():
    count, index = (t.cuda() for t in shuffled(torch.rand(1, 2, 300, 100) < 0.1))
    transposed_lists(count, index, 100)
    with nothing_waits():
        transposed_lists(count, index, 100)
    graph, out = captured(lambda: transposed_lists(count, index, 100))
    for _ in range(2):
        for old, new in zip((count, index), shuffled(torch.rand(1, 2, 300, 100) < 0.1), strict=True):
            old.copy_(new)
        graph.replay()
        assert rows_of(*(t.cpu() for t in out)) == rows_of(*(t.cpu() for t in transposed_lists(count, index, 100)))
