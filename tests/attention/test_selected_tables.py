"""Tables of selected blocks: the kernels on the emulator and on GPUs, against torch operations."""

import contextlib

import pytest
import torch

from attention import selected_attention
from attention.block_sparse import tile_order
from attention.masks.block_lists import table_of
from attention.masks.block_mask import BlockMask
from attention.selected import blocks
from attention.selected.blocks import SelectedBlocks, mask_of, ranges_of, tables_of
from attention.selected.tables.dispatch import ordered, selected_tables
from cute_kernels import explain
from cute_kernels.testing.reference import poisoned_empty
from cute_kernels.testing.selected_blocks import similar_lists

from ..emulator.ops import needs_compiler, on_emulator
from .parts import captured, nothing_waits, starts
from .selected_parts import call_of, lists

EMULATED = [pytest.param(arch, marks=[needs_compiler, getattr(pytest.mark, arch)]) for arch in ("sm_80", "sm_90")]
WHERE = pytest.mark.parametrize("where", [*EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)])


def made(where: str, function, *args, **terms):
    """A function of CPU tensors on the emulator or a GPU, into memory that is -1."""
    if where == "cuda":
        to = [t.cuda() if isinstance(t, torch.Tensor) else t for t in args]
        with poisoned_empty():
            found = function(*to, **terms)
        return found.cpu() if isinstance(found, torch.Tensor) else [t.cpu() for t in found]
    with on_emulator(where), poisoned_empty():
        return function(*args, **terms)


def check(where, indices, block_size, columns, packed, *, causal=False, copies=1, cu=None, side=128) -> None:
    """One call against tables_of."""
    length, groups = indices.shape[1:3]
    first, end = (None, None) if cu is None else ranges_of(*cu, (length, columns), causal)
    shift = columns - length if causal and cu is None else None
    args = indices, block_size, first, end, columns, packed
    words, counts, listed = made(where, selected_tables, *args, shift=shift, copies=copies, side=side)
    true_words, table = tables_of(*args, side)
    assert torch.equal(words, true_words)
    if shift is not None:
        last = (torch.arange(1, table.shape[2] + 1) * side - 1) // packed + shift
        table = table & (torch.arange(table.shape[3]) * 128 <= last[:, None])
    table = table.repeat_interleave(copies, 1)
    assert counts.shape == table.shape[:3] == listed.shape[:3] and listed.shape[3] <= table.shape[3]
    assert torch.equal(counts, table.sum(-1, dtype=torch.int32))
    place = torch.arange(listed.shape[3]) < counts[..., None]
    assert torch.equal(table_of(counts, listed.masked_fill(~place, 0), table.shape[3]), table)
    assert not (place[..., 1:] & (listed[..., 1:] <= listed[..., :-1])).any(), "ascending"


# name -> (shape of the lists less top, top, block_size, columns, packed, options)
CASES = {
    "QSA": ((1, 50, 1), 40, 4, 2800, 12, {"causal": True}),
    "QSA, combined": ((1, 23, 1), 100, 4, 2801, 12, {"causal": True}),
    "MSA": ((2, 17, 2), 16, 128, 5000, 16, {"causal": True}),
    "NSA": ((1, 33, 2), 5, 64, 2850, 16, {}),
    "blocks of 16": ((1, 60, 1), 33, 16, 4700, 7, {"causal": True}),
    "blocks of 1": ((1, 20, 1), 70, 1, 5000, 16, {}),
    "one row per token": ((1, 200, 1), 20, 4, 2400, 1, {"causal": True}),
    "one row per token, copied": ((2, 150, 2), 7, 64, 1400, 1, {"copies": 3}),
    "blocks of 64 rows": ((1, 30, 2), 16, 128, 5000, 16, {"causal": True, "side": 64}),
    "blocks of 64 rows, 128 per token": ((1, 3, 2), 3, 64, 570, 128, {"side": 64}),
    "blocks of 64 rows, 12 per token": ((1, 30, 1), 9, 64, 570, 12, {"causal": True, "side": 64}),
    "128 rows per token": ((1, 3, 2), 3, 64, 570, 128, {}),
    "one entry": ((1, 9, 1), 1, 64, 100, 32, {}),
    "one block": ((1, 40, 1), 2, 128, 77, 4, {"causal": True}),
    "long lists": ((1, 4, 1), 600, 4, 3600, 64, {}),
    "many blocks": ((1, 6, 1), 90, 1, 40000, 64, {}),
    "more tokens than keys": ((1, 300, 1), 3, 16, 90, 4, {"causal": True}),
    "more columns than lanes": ((1, 9, 1), 60, 128, 140_000, 16, {}),
}


@pytest.mark.parametrize("name", CASES)
@WHERE
def test_lists(where, name):
    lead, top, block_size, columns, packed, options = CASES[name]
    indices = lists(*lead, top=top, blocks=-(-columns // block_size))
    check(where, indices, block_size, columns, packed, **options)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
@WHERE
def test_packed_sequences(where, block_size, causal):
    rows, columns = (20, 0, 41, 9), (77, 13, 290, 0)
    cu = starts(rows, "cpu"), starts(columns, "cpu")
    indices = lists(1, sum(rows) + 3, 2, top=6, blocks=-(-290 // block_size))
    check(where, indices, block_size, sum(columns) + 5, 12, causal=causal, cu=cu)


@WHERE
def test_similar_lists(where):
    """Ascending, most of their entries are in one word of bits."""
    check(where, similar_lists(40, 512, 64)[None], 4, 2048, 12, causal=True)


@WHERE
def test_entries_that_are_no_block(where):
    indices = lists(1, 30, 1, top=9, blocks=60)
    others = torch.tensor([60, -2, 2**31 - 1, -(2**31)], dtype=torch.int32).expand(1, 30, 1, 4)
    check(where, torch.cat([indices, others, indices[..., :3]], -1), 16, 950, 12)
    check(where, torch.full((1, 30, 1, 4), -1, dtype=torch.int32), 16, 950, 12, causal=True)


@WHERE
def test_strided_lists(where):
    indices = lists(1, 2, 30, top=9, blocks=60)
    check(where, indices.transpose(1, 2), 64, 3800, 16)
    check(where, indices.transpose(1, 3), 64, 3800, 16)
    check(where, indices[..., ::2].transpose(1, 2), 64, 3800, 16)


@pytest.mark.parametrize(("tile_m", "l2_heads"), [(128, 1), (64, 1), (128, 3), (64, 2), (128, 100)])
@WHERE
def test_order(where, tile_m, l2_heads):
    """Rows of one length each, so that the order by length within heads is that of the tiles."""
    counts = torch.arange(5, dtype=torch.int32).expand(1, 3, 5).contiguous()
    mask = BlockMask.of_partial(
        counts, torch.zeros(1, 3, 5, 4, dtype=torch.int32), lengths=(600, 512), blocksize=(128, 128)
    )
    table = made(where, ordered, counts, 2, 3, -(-600 // tile_m), 128 // tile_m, l2_heads)
    number = table[:, 0].long()
    tiles = -(-600 // tile_m)
    assert torch.equal(number.sort().values, torch.arange(6 * tiles))
    rows = (tiles - 1 - number % tiles) // (128 // tile_m)
    assert torch.equal(table[:, 1:], rows.int()[:, None].expand(-1, 2))
    if tile_m == 128:
        mask._set(by_row=False)
        longest = tile_order(mask, 2, 3, tile_m, l2_heads, near=1, sms=132)
        heads = number // tiles // l2_heads
        assert torch.equal(heads, heads.sort().values), "heads in L2 come together"
        within = rows[:-1] >= rows[1:]
        assert within[heads[:-1] == heads[1:]].all() and len(longest) == len(number)


# The mask of a call


@pytest.mark.parametrize("packed", [1, 12])
@pytest.mark.parametrize("groups", [1, 2, 4])
@WHERE
def test_mask(where, packed, groups):
    """The mask that the kernel makes is that of torch operations."""
    device = "cuda" if where == "cuda" else "cpu"
    selected = SelectedBlocks(lists(2, 45, groups, top=6, blocks=80, device=device), 16, True, packed)
    true = mask_of(selected, 4, (45 * packed, 1270), kernel=False)
    with contextlib.nullcontext() if where == "cuda" else on_emulator(where):
        mask = mask_of(selected, 4, (45 * packed, 1270))
    assert mask.by_row and not true.by_row
    assert mask.kv_num_blocks.shape == true.kv_num_blocks.shape and mask.full_kv_indices.shape[-1] == 0
    assert torch.equal(mask.to_dense(2, 4), true.to_dense(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(mask.tables(), true.tables(), strict=True))


def test_long_sequences_use_torch(monkeypatch):
    monkeypatch.setattr(blocks, "supports", lambda *_: False)
    with on_emulator("sm_90"):
        mask = mask_of(SelectedBlocks(lists(1, 45, 1, top=6, blocks=80), 16, True), 4, (45, 1270))
    assert not mask.by_row


@pytest.mark.gpu
def test_a_graph_reads_the_lists_at_each_replay():
    indices = lists(1, 300, 2, top=16, blocks=100, device="cuda")

    def call():
        words, counts, listed = selected_tables(indices, 64, None, None, 6400, 16, shift=6100, copies=1)
        return words, counts, listed, ordered(counts, 1, 2, counts.shape[2], 1, 1)

    call()
    with nothing_waits():
        call()
    graph, out = captured(call)
    for _ in range(2):
        indices.copy_(lists(1, 300, 2, top=16, blocks=100, device="cuda"))
        graph.replay()
        words, counts, listed, table = call()
        assert torch.equal(out[0], words) and torch.equal(out[1], counts) and torch.equal(out[3], table)
        place = torch.arange(listed.shape[3], device="cuda") < counts[..., None]
        assert torch.equal(out[2][place], listed[place])


@pytest.mark.gpu
@pytest.mark.parametrize(("top", "block_size", "packed"), [(512, 4, 12), (16, 128, 16), (2048, 1, 1)])
def test_long_sequences(top, block_size, packed):
    """2,048 tokens of 131,072 keys, in the bitmaps and with the lists of QSA and MSA."""
    check("cuda", lists(1, 2048, 1, top=top, blocks=131072 // block_size), block_size, 131072, packed, causal=True)


@pytest.mark.parametrize(
    ("block_size", "deterministic", "family"),
    [(64, False, "gathered backward"), (64, True, "transposed lists"), (128, False, "transposed lists")],
)
def test_explain_backward(block_size, deterministic, family):
    """The kernels of the tables are collected; nothing is launched, and the lists have no contents."""
    q, k, v, indices, block_size = call_of(300, 300, block_size, 3, H=16, heads=4, groups=4, B=1)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    terms = {"causal": True, "deterministic": deterministic, "arch": "sm_90", "backward": True}
    plan = explain(selected_attention, q, k, v, indices, block_size, **terms)
    assert [f.family for f in plan.forward] == ["union tiles", "flash forward"]
    assert family in [f.family for f in plan.backward]
