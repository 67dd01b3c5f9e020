"""What BlockMask and the patterns refuse, and with what words."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.masks import patterns
from attention.masks.block_mask import BlockMask
from tests.mask_parts import by_head


def raw(counts=((1, 2),), columns=(((0, 9), (0, 2)),), full=None, **options):
    """A mask of 2 x 3 blocks from lists, checked."""
    tables = [torch.tensor(x, dtype=torch.int32)[None] for x in (counts, columns, *(full or ()))]
    return BlockMask(*tables, **{"lengths": (128, 180), "blocksize": (64, 64), **options})


WRONG = {
    "count negative": ({"counts": ((1, -1),)}, r"partial_count\[0, 0, 1\] is -1; it must be in \[0, 2\]"),
    "count too large": ({"counts": ((1, 3),)}, r"partial_count\[0, 0, 1\] is 3; it must be in \[0, 2\]"),
    "column too large": ({"counts": ((2, 2),)}, r"partial_index\[0, 0, 0, 1\] is 9; it must be in \[0, 3\)"),
    "column negative": ({"columns": (((-1, 0), (0, 1)),)}, r"partial_index\[0, 0, 0, 0\] is -1; it must be in"),
    "unsorted": ({"columns": (((0, 0), (2, 1)),)}, r"partial_index\[0, 0, 1, 1\] is 1 after 2; .*sorted"),
    "duplicate": ({"columns": (((0, 0), (1, 1)),)}, r"partial_index\[0, 0, 1, 1\] is 1 after 1; .*without duplicates"),
    "full unsorted": ({"full": (((2, 0),), (((1, 0), (1, 1)),))}, r"full_index\[0, 0, 0, 1\] is 0 after 1"),
    "both": ({"full": (((0, 1),), (((1, 0), (0, 1)),))}, r"block 0 of row 1 \(item 0, head 0\) is both partial"),
    "full past the end": ({"full": (((1, 0),), (((2, 0), (0, 1)),))}, "block 2 of row 0 .* goes past the last of 180"),
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
    raw(), raw(full=(((1, 1),), (((1, 0), (1, 1)),)))
    assert reads == [(5,), (5,)]
    raw(full=(((0, 1),), (((1, 0), (2, 1)),)), columns=(((0, 9), (0, 1)),), lengths=(100, 192))


@settings(deadline=None, max_examples=200)
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
    with contextlib.nullcontext() if right else pytest.raises(ValueError, match="partial|full"):
        BlockMask(*tables, lengths=(64 * rows, 64 * cols - cut), blocksize=(64, 64))


COUNT, INDEX = torch.zeros(1, 2, 3, dtype=torch.int32), torch.zeros(1, 2, 3, 4, dtype=torch.int32)
OPTIONS = {"lengths": (384, 512)}
REFUSED = {
    "no tensor": (lambda: BlockMask([1], INDEX, **OPTIONS), TypeError, "partial_count must be .* got list"),
    "dtype": (lambda: BlockMask(COUNT, INDEX.long(), **OPTIONS), TypeError, "partial_index must be .*int32.*int64"),
    "half": (lambda: BlockMask(COUNT, INDEX, COUNT, **OPTIONS), ValueError, "both full_count and full_index"),
    "dims": (lambda: BlockMask(COUNT[0], INDEX, **OPTIONS), ValueError, r"partial_count must be \(B, H, Mq\)"),
    "device": (lambda: BlockMask(COUNT, INDEX.to("meta"), **OPTIONS), ValueError, "partial_index is on meta"),
    "stride": (lambda: BlockMask(COUNT, INDEX.mT.contiguous().mT, **OPTIONS), ValueError, "partial_index.contiguous"),
    "rows": (lambda: BlockMask(COUNT, INDEX, lengths=(385, 512)), ValueError, "385 rows in .* need"),
    "heads": (lambda: BlockMask(COUNT, INDEX[:, :1], **OPTIONS), ValueError, "partial_index has shape"),
    "width": (lambda: BlockMask(COUNT, INDEX, lengths=(384, 384)), ValueError, "room for 4 blocks in a row, .* only 3"),
    "empty": (lambda: BlockMask(COUNT[:0], INDEX[:0], **OPTIONS), ValueError, "B and H must be at least 1"),
    "block": (lambda: BlockMask(COUNT, INDEX, blocksize=(96, 128), **OPTIONS), ValueError, "block_q is 96; .* 128"),
    "blocksize": (lambda: patterns.causal((64, 64), 128), TypeError, "blocksize must be two integers"),
    "length": (lambda: patterns.causal((64, -1)), ValueError, "Sk is -1; it must be in"),
    "long": (lambda: patterns.causal((2**30, 64)), ValueError, "Sq is 1073741824"),
    "mask_mod": (lambda: BlockMask(COUNT, INDEX, mask_mod=3, **OPTIONS), TypeError, "function of .* got int"),
    "mod's type": (
        lambda: BlockMask.from_mask_mod(lambda b, h, q, kv: q - kv, (64, 64)),
        TypeError,
        "must return a bool tensor, got a tensor of torch.int32",
    ),
    "blocks dtype": (lambda: BlockMask.from_blocks(INDEX), TypeError, "blocks must be a strided bool tensor"),
    "blocks dims": (lambda: BlockMask.from_blocks(INDEX[0, 0, 0] > 0), ValueError, "blocks must be .Mq, Mk"),
    "blocks shape": (
        lambda: BlockMask.from_blocks(INDEX > 0, lengths=(384, 513)),
        ValueError,
        r"lengths \(384, 513\) need \(..., 3, 5\)",
    ),
    "partial alone": (lambda: BlockMask.from_blocks(INDEX > 0, partial=INDEX > 0), ValueError, "without mask_mod"),
    "partial shape": (
        lambda: BlockMask.from_blocks(INDEX[0] > 0, partial=INDEX > 0, mask_mod=by_head),
        ValueError,
        "partial must broadcast to blocks",
    ),
    "window": (lambda: patterns.sliding_window((64, 64), 3), TypeError, "window must be .left, right"),
    "window bound": (lambda: patterns.sliding_window((64, 64), (-2, 0)), ValueError, "left bound is -2"),
    "window float": (lambda: patterns.sliding_window((64, 64), (1.5, 0)), TypeError, "window must be"),
    "globals": (lambda: patterns.sliding_window((64, 64), (1, 0), global_rows=-1), ValueError, "global_rows is -1"),
    "ids": (lambda: patterns.documents(torch.zeros(4)), TypeError, "q_ids must be .* int32 or int64"),
    "ids batch": (lambda: patterns.documents(INDEX[0, 0], INDEX[0, 0, 0]), ValueError, "kv_ids must be"),
    "cu": (lambda: patterns.packed_documents(torch.zeros(4), lengths=(4, 4)), TypeError, "cu_seqlens_q must be"),
    "cu shape": (
        lambda: patterns.packed_documents(INDEX[0, 0, 0], INDEX[0, 0, 0, :2], lengths=(4, 4)),
        ValueError,
        "cu_seqlens_k must have",
    ),
    "step": (lambda: patterns.dilated((64, 64), 0), ValueError, "step is 0"),
    "block step": (lambda: patterns.dilated_blocks((64, 64), 0), ValueError, "step is 0"),
    "reach": (lambda: patterns.dilated_blocks((64, 64), 1, reach=-1), ValueError, "reach is -1"),
    "scores": (lambda: patterns.top_k(INDEX, 1), TypeError, "scores must be .*floating"),
    "k": (lambda: patterns.top_k(INDEX.float(), -1), ValueError, "k is -1"),
    "lines": (
        lambda: patterns.vertical_slash(INDEX[0, 0], INDEX[0, 0, 0], lengths=(64, 64)),
        ValueError,
        "vertical and slash must be",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
