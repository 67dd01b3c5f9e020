"""BlockMask: its lists, its conversions and what it tells of itself."""

import contextlib
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask

from attention.masks import block_lists, patterns
from attention.masks.block_mask import BlockMask, create_block_mask
from attention.masks.element_mask import BoundMask, trace_mask
from attention.masks.mask_mods import And, Band, GlobalTokens, SameDocument, window_bounds
from attention.selected.blocks import SelectedBlocks, mask_of
from sparse_collective import BsrMatrix, random_bsr
from tests.attention.mask_parts import (
    BLOCKSIZES,
    assert_exact,
    blocksizes,
    by_head,
    elements,
    fuzz,
    lengths_,
    positions,
)

# Lists and tables


@fuzz
@given(st.data(), st.integers(0, 5), st.integers(0, 7), st.integers(1, 2))
def test_lists_are_ascending_and_go_back_to_the_table(data, rows, cols, heads):
    bits = data.draw(st.lists(st.booleans(), min_size=heads * rows * cols, max_size=heads * rows * cols))
    table = torch.tensor(bits, dtype=torch.bool).view(1, heads, rows, cols)
    count, index = block_lists.lists_of(table)
    assert count.dtype == index.dtype == torch.int32 and index.shape == table.shape and index.is_contiguous()
    for line, n, found in zip(table.flatten(0, 2), count.flatten(), index.flatten(0, 2), strict=True):
        assert found[:n].tolist() == line.nonzero().flatten().tolist()
        assert sorted(found.tolist()) == list(range(cols))
    assert torch.equal(block_lists.table_of(count, index, cols), table)


def test_past_the_count_may_be_anything():
    count, index = torch.tensor([[[1]]], dtype=torch.int32), torch.tensor([[[[2, -7, 2**31 - 1]]]], dtype=torch.int32)
    mask = BlockMask(count, index, lengths=(64, 320), blocksize=(64, 64))
    assert mask.kv_num_blocks is count and mask.kv_indices is index and mask.full_kv_indices is index
    assert mask.tables()[0].tolist() == [[[[False, False, True, False, False]]]]
    assert mask.block_density() == 0.2


# Lists that are checked


def raw(counts=((1, 2),), columns=(((0, 9), (0, 2)),), full=None, **options):
    """A mask of 2 x 3 blocks from lists, checked."""
    tables = [torch.tensor(x, dtype=torch.int32)[None] for x in (counts, columns, *(full or ()))]
    return BlockMask(*tables, **{"lengths": (128, 180), "blocksize": (64, 64), **options})


WRONG = {
    "count negative": ({"counts": ((1, -1),)}, r"kv_num_blocks\[0, 0, 1\] must be in \[0, 2\], got -1"),
    "count too large": ({"counts": ((1, 3),)}, r"kv_num_blocks\[0, 0, 1\] must be in \[0, 2\], got 3"),
    "column too large": ({"counts": ((2, 2),)}, r"kv_indices\[0, 0, 0, 1\] must be in \[0, 3\), got 9"),
    "column negative": ({"columns": (((-1, 0), (0, 1)),)}, r"kv_indices\[0, 0, 0, 0\] must be in \[0, 3\), got -1"),
    "unsorted": ({"columns": (((0, 0), (2, 1)),)}, r"kv_indices\[0, 0, 1, 1\] is 1 after 2; .*sorted"),
    "duplicate": ({"columns": (((0, 0), (1, 1)),)}, r"kv_indices\[0, 0, 1, 1\] is 1 after 1; .*unique"),
    "full unsorted": ({"full": (((2, 0),), (((1, 0), (1, 1)),))}, r"full_kv_indices\[0, 0, 0, 1\] is 0 after 1"),
    "both": ({"full": (((0, 1),), (((1, 0), (0, 1)),))}, r"block 0 of row 1 \(batch 0, head 0\) is both partial"),
    "full past the end": (
        {"full": (((1, 0),), (((2, 0), (0, 1)),))},
        "block 2 of row 0 .* extends past the last of 180",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lists_are_named(name):
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        raw(**options)
    raw(**options, check=False)


def test_right_lists_pass_and_are_read_once(monkeypatch):
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or original(t))
    raw()
    raw(full=(((1, 1),), (((1, 0), (1, 1)),)))
    assert reads == [(5,), (5,)]
    raw(full=(((0, 1),), (((1, 0), (2, 1)),)), columns=(((0, 9), (0, 1)),), lengths=(100, 192))


@settings(fuzz, max_examples=200)
@given(st.data())
def test_check_agrees_with_a_plain_loop(data):
    rows, cols = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    cut = data.draw(st.booleans())
    seen, right, tables = [set() for _ in range(rows)], True, []
    for full in (False, True):
        width = data.draw(st.integers(1, cols))
        count = data.draw(st.lists(st.integers(-1, width + 1), min_size=rows, max_size=rows))
        index = [data.draw(st.lists(st.integers(-1, cols), min_size=width, max_size=width)) for _ in range(rows)]
        for r in range(rows):
            right &= 0 <= count[r] <= width
            row = index[r][: max(count[r], 0)]
            right &= row == sorted(set(row)) and all(0 <= c < cols for c in row) and not seen[r] & set(row)
            right &= not (full and cut and cols - 1 in row)
            seen[r] |= set(row)
        tables += [torch.tensor([[count]], dtype=torch.int32), torch.tensor([[index]], dtype=torch.int32)]
    with contextlib.nullcontext() if right else pytest.raises(ValueError, match="kv_|partial|full"):
        BlockMask(*tables, lengths=(64 * rows, 64 * cols - cut), blocksize=(64, 64))


# Conversions


@fuzz
@given(st.data(), lengths_, blocksizes, st.booleans())
def test_from_blocks(data, lengths, blocksize, causal):
    rows, cols = (-(-n // side) for n, side in zip(lengths, blocksize, strict=True))
    lead = data.draw(st.sampled_from([(), (3,), (2, 1), (2, 3)]))
    blocks = torch.rand(*lead, rows, cols) < data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    p, kv = positions(*lengths)
    dense = elements(blocks, blocksize, lengths) & ((kv <= p) | (not causal))
    mask = BlockMask.from_blocks(blocks, blocksize, lengths=lengths, causal=causal)
    assert_exact(mask, dense)
    assert mask.mask_mod == (Band(None, 0, lengths[1] - lengths[0]) if causal else None)


def test_from_blocks_where_mask_mod_decides():
    blocks, decided = torch.rand(2, 4, 3) < 0.7, torch.rand(4, 3) < 0.5
    odd = elements(~decided, (64, 128), (256, 384))

    def mask_mod(b, h, q, kv):
        return odd[q, kv] | ((q + kv) % 2 == 1)

    mask = BlockMask.from_blocks(blocks, (64, 128), partial=decided, mask_mod=mask_mod)
    partial, full = mask.tables()
    assert torch.equal(partial[0], blocks & decided) and torch.equal(full[0], blocks & ~decided)
    q, kv = torch.arange(256)[:, None], torch.arange(384)
    assert torch.equal(mask.to_dense()[0], elements(blocks, (64, 128), (256, 384)) & mask_mod(0, 0, q, kv))
    assert not BlockMask.from_blocks(blocks, (64, 128), mask_mod=mask_mod).full_kv_num_blocks.any()
    both = BlockMask.from_blocks(blocks, (64, 128), partial=decided, mask_mod=mask_mod, causal=True)
    assert torch.equal(both.to_dense(), mask.to_dense() & (kv <= q + 128))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_from_bsr():
    single, shape = random_bsr((256, 384), (64, 128), density=0.4), ((64, 128), (256, 384))
    for pattern in (single, single.to_torch()):
        assert_exact(BlockMask.from_bsr(pattern), elements(block_pattern(single), *shape))
    cut = BlockMask.from_bsr(single, lengths=(250, 380), causal=True)
    p, kv = positions(250, 380)
    assert_exact(cut, elements(block_pattern(single), (64, 128), (250, 380)) & (kv <= p))
    several = [random_bsr((256, 384), (64, 128), per_row=2) for _ in range(6)]
    batch = BsrMatrix.stack(several)
    tables = torch.stack([block_pattern(m) for m in several])
    for pattern in (batch, batch.to_torch()):
        assert torch.equal(BlockMask.from_bsr(pattern).tables()[1], tables[None])
        assert torch.equal(BlockMask.from_bsr(pattern, heads=3).tables()[1], tables.view(2, 3, 4, 3))
    values = single.values.expand(5, -1, -1, -1).clone()
    five = BsrMatrix(single.crow_indices, single.col_indices, values, (5, 256, 384))
    assert torch.equal(BlockMask.from_bsr(five).tables()[1], block_pattern(single)[None, None])
    for wrong, more, error, text in (
        (batch, {"heads": 4}, ValueError, "heads must divide the number of patterns, 6, got 4"),
        (random_bsr((64, 128), (32, 64), per_row=1), {}, ValueError, "block_q must be 64 or 128, got 32"),
        ([], {}, TypeError, "must be a BsrMatrix or a torch.sparse_bsr tensor, got list"),
    ):
        with pytest.raises(error, match=text):
            BlockMask.from_bsr(wrong, **more)


def block_pattern(matrix):
    table = torch.zeros(matrix.n_block_rows, matrix.n_block_cols, dtype=torch.bool)
    table[matrix.row_of_block(), matrix.col_indices] = True
    return table


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("lengths", [(256, 384), (128, 200), (200, 333)])
def test_as_flex_attention(lengths, blocksize):
    flex = create_flex_mask(by_head, 2, 3, *lengths, device="cpu", BLOCK_SIZE=blocksize)
    ours = create_block_mask(by_head, 2, 3, *lengths, BLOCK_SIZE=blocksize)
    theirs = BlockMask.from_flex(flex, check=True)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for a, b in zip(ours.tables(), theirs.tables(), strict=True):
        # Blocks that go past the last row are never full in FlexAttention; here they may be.
        whole = lengths[0] // blocksize[0]
        assert torch.equal(a[:, :, :whole], b[:, :, :whole])
    assert torch.equal(torch.logical_or(*ours.tables()), torch.logical_or(*theirs.tables()))
    if lengths[1] % blocksize[1] == 0:
        assert theirs.kv_indices.data_ptr() == flex.kv_indices.data_ptr()
        assert theirs.full_kv_num_blocks.data_ptr() == flex.full_kv_num_blocks.data_ptr()
    back = ours.to_flex()
    assert back.shape == (2, 3, *lengths) and back.mask_mod is by_head
    assert torch.equal(BlockMask.from_flex(back).to_dense(), ours.to_dense())


def flex(*lists, lengths, **more):
    return FlexBlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(64, 64), seq_lengths=lengths, **more)


def test_flex_masks_made_by_hand():
    count, index = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 9], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_flex(flex(count, index, lengths=(128, 320), compute_q_blocks=False), check=True)
    assert mask.mask_mod is None and mask.n_block_cols == 5
    assert mask.kv_indices.shape[-1] == 2 and not mask.full_kv_num_blocks.any()
    assert mask.to_dense().sum() == 3 * 64 * 64
    assert mask.to_flex().q_num_blocks.tolist() == [[[2, 1, 0, 0, 0]]]
    mask = BlockMask.from_flex(flex(torch.zeros_like(count), index, count, index, lengths=(128, 100)), check=True)
    partial, full = (t[0, 0].tolist() for t in mask.tables())  # the second column of blocks ends inside a block
    assert partial == [[False, False], [False, True]] and full == [[True, False], [True, False]]
    assert mask.to_flex().q_num_blocks.tolist() == [[[0, 1]]]
    unsorted = flex(count, index.new_tensor([[[[1, 0], [1, 0]]]]), lengths=(128, 128))
    with pytest.raises(ValueError, match=r"kv_indices\[0, 0, 1, 1\] is 0 after 1"):
        BlockMask.from_flex(unsorted, check=True)
    with pytest.raises(ValueError, match="block_q must be 64 or 128, got 256"):
        BlockMask.from_flex(create_flex_mask(by_head, 1, 1, 256, 256, device="cpu", BLOCK_SIZE=256))
    with pytest.raises(TypeError, match="FlexAttention's BlockMask, got BlockMask"):
        BlockMask.from_flex(mask)


@pytest.mark.parametrize("chunk", [1, 100_000, 2**25])
def test_parts_do_not_change_the_result(chunk, monkeypatch):
    monkeypatch.setattr(block_lists, "CHUNK", chunk)
    mask = create_block_mask(by_head, 2, 2, 300, 500, BLOCK_SIZE=(64, 128))
    b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    assert_exact(mask, by_head(b, h, torch.arange(300)[:, None], torch.arange(500)))
    p, kv = positions(300, 500)
    assert_exact(patterns.causal((300, 500), (64, 128)), kv <= p)


def test_mask_mods_that_depend_on_little():
    for mask_mod in (lambda b, h, q, kv: kv < 100, lambda b, h, q, kv: q >= 100, lambda b, h, q, kv: h == 1):
        mask = create_block_mask(mask_mod, None, 2, 130, 200, BLOCK_SIZE=(64, 64))
        h, q, kv = torch.arange(2)[:, None, None], torch.arange(130)[:, None], torch.arange(200)
        assert_exact(mask, mask_mod(0, h, q, kv).expand(1, 2, 130, 200))


def test_one_pattern_whose_elements_differ_by_head():
    mask = BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), mask_mod=lambda b, h, q, kv: (q + kv + h) % 2 == b)
    dense = mask.to_dense(batch=2, heads=3)
    assert dense.shape == (2, 3, 256, 256)
    assert torch.equal(dense[0, 0], ~dense[0, 1]) and torch.equal(dense[0, 0], dense[1, 1])
    assert torch.equal(mask.elements(100, 140, 2, 3), dense[:, :, 100:140])


# What a mask is


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_with_causal(blocksize):
    p, kv = positions(200, 333)
    window = patterns.sliding_window((200, 333), (90, 200), blocksize)
    assert_exact(window.with_causal(), window.to_dense() & (kv <= p))
    blocks = torch.rand(2, -(-200 // blocksize[0]), -(-333 // blocksize[1])) < 0.7
    some = BlockMask.from_blocks(blocks, blocksize, lengths=(200, 333))
    assert_exact(some.with_causal(), some.to_dense() & (kv <= p))
    assert some.with_causal().with_causal().mask_mod == Band(None, 0, 133)


def test_transposed():
    mask = create_block_mask(by_head, 2, 2, 300, 500, BLOCK_SIZE=(64, 128))
    lists = mask.transposed()
    for count, index, table in zip(lists[::2], lists[1::2], mask.tables(), strict=True):
        assert count.shape == (2, 2, 4) and index.shape == (2, 2, 4, 5)
        assert torch.equal(block_lists.table_of(count, index, 5), table.mT)


def test_read_only_and_repr():
    mask = patterns.causal((300, 400))
    with pytest.raises(AttributeError, match="lengths is read-only"):
        mask.lengths = (1, 1)
    with pytest.raises(AttributeError, match="mask_mod is read-only"):
        del mask.mask_mod
    facts = "batch=1, heads=1, lengths=(300, 400), blocksize=(128, 128), mask_mod="
    assert repr(mask) == f"BlockMask({facts}Band, device='cpu')"
    assert f"{facts}None" in repr(BlockMask.from_blocks(torch.ones(3, 4, dtype=torch.bool), lengths=(300, 400)))


def test_pickle():
    mask = patterns.sliding_window((300, 400), (70, 0), global_columns=4)
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.to_dense(), mask.to_dense())
    assert again.mask_mod == mask.mask_mod and hash(again.mask_mod) == hash(mask.mask_mod)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, BLOCK_SIZE=(64, 64)))


def test_to_moves_the_masks_tensors():
    mask = patterns.documents(torch.randint(3, (200,)), blocksize=(64, 64), causal=True)
    assert mask.to("cpu") is mask
    there = mask.to("meta")
    assert there.device.type == there.full_kv_indices.device.type == "meta"
    assert isinstance(there.mask_mod, And) and there.mask_mod.first.q_ids.device.type == "meta"
    assert mask.mask_mod.first.q_ids.device.type == "cpu"
    assert [f.name for f in dataclasses.fields(SameDocument)] == ["q_ids", "kv_ids", "batched"]


def test_to_moves_the_tensors_of_a_traced_mask():
    """Masks of selected blocks, and masks that backward and compiled calls rebuild, have one."""
    selected = SelectedBlocks(torch.zeros(1, 64, 1, 2, dtype=torch.int32), 64, True, 2)
    documents = patterns.documents(torch.randint(3, (128,)), blocksize=(64, 64))
    traced = BoundMask(trace_mask(documents.mask_mod, documents.device))
    for mask in (mask_of(selected, 1, (128, 64)), documents.with_mask_mod(traced)):
        assert mask.to("cpu") is mask and mask.mask_mod.traced.tensors
        there = mask.to("meta").mask_mod.traced
        assert all(t.device.type == "meta" for t in there.tensors)
        assert there.program is mask.mask_mod.traced.program and there.kind == mask.mask_mod.traced.kind
        assert all(t.device.type == "cpu" for t in mask.mask_mod.traced.tensors)
    assert mask.to("meta").with_causal().mask_mod.first.traced.tensors[0].is_meta


@pytest.mark.parametrize("lengths", [(0, 100), (100, 0), (0, 0)])
def test_without_elements(lengths):
    for mask in (
        patterns.causal(lengths),
        patterns.sliding_window(lengths, (3, 3), global_columns=2, global_rows=2),
        create_block_mask(by_head, None, None, *lengths),
        patterns.dilated_blocks(lengths, 2),
        patterns.vertical_slash(torch.tensor([3]), torch.tensor([3]), lengths=lengths),
        patterns.packed_documents(torch.tensor([0, 0, 0]), lengths=lengths),
    ):
        assert mask.to_dense().shape == (1, 1, *lengths) and mask.block_density() == 0.0
        assert not block_lists.flags(mask).any()
        mask.transposed()


def test_windows():
    assert window_bounds(None) == (None, None) and window_bounds(None, True) == (None, 0)
    assert window_bounds((-1, 5)) == (None, 5) and window_bounds((3, 5), True) == (3, 0)
    assert window_bounds((2**31, None)) == (None, None)
    assert Band(3, 0, 2) == Band(3, 0, 2) and GlobalTokens(1, 2) != GlobalTokens(2, 1)
    whole = create_block_mask(Band(None, None), None, None, 65, 128, BLOCK_SIZE=64)
    assert whole.full_kv_num_blocks.tolist() == [[[2, 2]]]
