"""What is converted of the mask that a user holds is kept with it, made again when it changes, and dies with it."""

import copy
import gc
import pickle
import threading
import types
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from attention import BlockMask, block_sparse, block_sparse_attention
from attention.masks import kept
from cute_kernels.runtime.derived import Derived, state_of

from . import emulate_attention
from .held_masks import FIRST, FORMS, LISTS, SECOND, N, count, held, parts, qkv, right, spied_conversions, write
from .mask_parts import by_head

every_form = pytest.mark.parametrize("form", FORMS)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture
def conversions(monkeypatch) -> list:
    return spied_conversions(monkeypatch)


# Kept


@every_form
def test_converted_once(form, conversions):
    call, mask = qkv(), held(form)
    assert count(conversions, block_sparse_attention, *call, mask) == 1
    for terms in ({}, {"return_lse": True}, {"softcap": 3.0}):
        assert count(conversions, block_sparse_attention, *call, mask, **terms) == 0
    assert count(conversions, block_sparse_attention, *qkv(), mask) == 0
    assert block_sparse.as_block_mask(*call[:2], mask) is block_sparse.as_block_mask(*call[:2], mask)
    assert count(conversions, block_sparse_attention, *call, held(form)) == 1, "another object of equal contents"
    assert right(call, mask, FIRST)


@every_form
def test_what_kernels_must_know_is_kept_too(form, conversions, monkeypatch):
    """On the host side of the GPU path: the order of the tiles and the mask with causal."""
    emulate_attention.install(monkeypatch)
    orders, real = [], block_sparse.tile_order
    monkeypatch.setattr(block_sparse, "tile_order", lambda *args: orders.append(1) or real(*args))
    call, mask = qkv(), held(form)
    first = [block_sparse_attention(*call, mask, causal=causal) for causal in (False, True)]
    made = len(conversions)
    assert len(orders) == 2
    again = [block_sparse_attention(*call, mask, causal=causal) for causal in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(orders) == 2 and len(conversions) == made
    write(form, mask)
    assert right(call, mask, SECOND) and len(orders) == 4, "once for the mask, once for what it is compared with"


def test_with_values_shares_it(conversions):
    mask = held("bsr")
    first = block_sparse.as_block_mask(*qkv()[:2], mask)
    assert block_sparse.as_block_mask(*qkv()[:2], mask.with_values(mask.values * 2)) is first and len(conversions) == 1


def test_a_bool_tensor_for_several_lengths(conversions):
    blocks = held("bool")
    for _ in range(2):
        for lengths in ((N, N), (300, N), (N, 300)):
            q, k, v = qkv("cpu", *lengths)
            expected = BlockMask(*BlockMask.from_blocks(blocks, lengths=lengths).lists(), lengths=lengths)
            assert torch.equal(block_sparse_attention(q, k, v, blocks), block_sparse_attention(q, k, v, expected))
    made = len(conversions) - 6
    assert made == 3
    for i in range(3 * kept.MOST_LENGTHS):
        kept.of_blocks(blocks, (N - i, N))
    assert len(kept.with_tensor(blocks).kept) == kept.MOST_LENGTHS
    with pytest.raises(ValueError, match="blocks has shape .3, 3.; lengths .400, 384. need"):
        block_sparse_attention(*qkv("cpu", 400, N), blocks)


# Made again


@every_form
def test_changed_in_place(form, conversions):
    call, mask = qkv(), held(form)
    for blocks in (FIRST, SECOND, FIRST):
        write(form, mask, blocks)
        assert right(call, mask, blocks)
        assert count(conversions, block_sparse_attention, *call, mask) == 0


@pytest.mark.parametrize("name", LISTS)
def test_each_list_counts(name):
    mask = held("flex")
    first = block_sparse.as_block_mask(*qkv()[:2], mask)
    getattr(mask, name).add_(0)
    second = block_sparse.as_block_mask(*qkv()[:2], mask)
    setattr(mask, name, getattr(mask, name).clone())
    third = block_sparse.as_block_mask(*qkv()[:2], mask)
    getattr(mask, name).data = getattr(mask, name).clone()
    fourth = block_sparse.as_block_mask(*qkv()[:2], mask)
    assert len({id(m) for m in (first, second, third, fourth)}) == 4


def test_attributes_replaced():
    call, mask = qkv(), held("flex")
    assert right(call, mask, FIRST)
    other = held("flex", SECOND)
    for name in LISTS:
        setattr(mask, name, getattr(other, name))
    assert right(call, mask, SECOND)
    mask.full_kv_num_blocks = mask.full_kv_indices = None
    assert not block_sparse_attention(*call, mask).count_nonzero(), "there were full blocks only"
    mask = create_block_mask(by_head, 2, 4, N, N, device="cpu")
    block_sparse_attention(*call, mask)
    mask.mask_mod = lambda b, h, q, kv: q - kv >= 5
    expected = block_sparse_attention(*call, BlockMask.from_flex(mask))
    assert torch.equal(block_sparse_attention(*call, mask), expected)
    mask.seq_lengths = (300, N)
    with pytest.raises(ValueError, match="is of lengths .300, 384., q and k of .384, 384."):
        block_sparse_attention(*call, mask)
    mask.BLOCK_SIZE = (256, 256)
    with pytest.raises(ValueError, match="64 or 128"):
        block_sparse_attention(*call, mask)


def test_memory_that_is_used_again():
    """Data that goes away and comes back to the same address is not the same data."""
    call, mask = qkv(), held("bool")
    assert right(call, mask, FIRST)
    for blocks in (SECOND, FIRST, SECOND):
        for _ in range(2):
            mask.data = blocks.clone()
        assert right(call, mask, blocks)
    mask.data = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="blocks has shape"):
        block_sparse_attention(*call, mask)


def test_through_which_tensors_writes_are_seen():
    """Aliases that share the version counter. The indices that a torch.sparse_bsr tensor was built from do not."""
    call, mask = qkv(), held("torch bsr")
    for alias in (mask.col_indices(), mask.crow_indices(), mask.detach(), mask.detach().col_indices()):
        first = block_sparse.as_block_mask(*call[:2], mask)
        (alias.mul_(1) if alias.layout is torch.strided else alias.copy_(alias.clone()))
        assert block_sparse.as_block_mask(*call[:2], mask) is not first
    view = held("bool")
    assert right(call, view, FIRST)
    view.view(-1)[:] = SECOND.flatten()
    assert right(call, view, SECOND)
    view.detach().copy_(FIRST)
    assert right(call, view, FIRST)
    crow, col = (t.clone() for t in (mask.crow_indices(), mask.col_indices()))
    built = torch.sparse_bsr_tensor(crow, col, mask.values(), mask.shape)
    before = state_of(built.crow_indices(), built.col_indices())
    col.add_(0)
    assert built.col_indices().data_ptr() == col.data_ptr()
    assert state_of(built.crow_indices(), built.col_indices()) == before, (
        "torch tells nothing: kept.of_torch_bsr says so"
    )


@every_form
def test_tensors_of_inference_mode(form, conversions):
    """torch does not count what is written to them, so they are converted at each call."""
    with torch.inference_mode():
        call, mask = qkv(), held(form)
        assert mask.kv_indices.is_inference() if form == "flex" else parts(form, mask)[0].is_inference()
        for blocks in (FIRST, SECOND):
            write(form, mask, blocks)
            assert right(call, mask, blocks)
    assert right(call, mask, SECOND)
    assert count(conversions, block_sparse_attention, *call, mask) == 1
    mask = held(form)
    with torch.inference_mode():
        block_sparse_attention(*call, mask)
        assert count(conversions, block_sparse_attention, *call, mask) == 0, "made outside"
        write(form, mask)
        assert right(call, mask, SECOND)


# Dies with the object


@every_form
def test_nothing_outlives_the_object(form):
    mask = held(form)
    block_sparse_attention(*qkv(), mask)
    made = weakref.ref(block_sparse.as_block_mask(*qkv()[:2], mask))
    alive, lists = weakref.ref(mask), weakref.ref(made().full_index)
    assert alive() is not None and made() is not None
    del mask
    assert alive() is None and made() is None and lists() is None


def test_a_mask_mod_that_refers_to_the_mask():
    """As of a module whose method makes its mask."""

    def references() -> list:
        holder = types.SimpleNamespace(window=100)

        def near(b, h, q, kv):
            return (q - kv).abs() < holder.window

        holder.mask = create_block_mask(near, None, None, N, N, device="cpu")
        made = block_sparse.as_block_mask(*qkv()[:2], holder.mask)
        made._set(derived=types.SimpleNamespace(element=near))  # as block_sparse.Derived of a GPU's mask
        return [weakref.ref(near), weakref.ref(holder.mask), weakref.ref(made)]

    found = references()
    gc.collect()
    assert [ref() for ref in found] == [None, None, None]


def test_tensors_leave_no_entry():
    before = len(kept._WITH)
    for form in ("bool", "torch bsr"):
        mask = held(form)
        block_sparse_attention(*qkv(), mask)
        assert len(kept._WITH) == before + 1
        del mask
        assert len(kept._WITH) == before


def test_copies_of_a_mask():
    call, mask = qkv(), create_block_mask(by_head, 2, 4, N, N, device="cpu")
    expected = block_sparse_attention(*call, mask)
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(block_sparse_attention(*call, other), expected)
    other = copy.copy(mask)
    other.mask_mod = lambda b, h, q, kv: q < 0
    assert not torch.equal(block_sparse_attention(*call, other), expected)
    assert torch.equal(block_sparse_attention(*call, mask), expected)


@every_form
def test_threads(form):
    call, mask, found = qkv(), held(form), []

    def run():
        for _ in range(20):
            found.append(right(call, mask, FIRST))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and all(found)


def test_the_memo_forgets_the_oldest():
    memo, source = Derived(most=3), torch.zeros(1)
    made = [memo.get(i, source, object, tuple) for i in range(3)]
    assert [memo.get(i, source, object, tuple) for i in range(3)] == made
    assert memo.get(0, source, object, tuple, "another state") is not made[0] and len(memo.kept) == 3
    memo.get(3, source, object, tuple)
    assert list(memo.kept) == [1, 2, 3]
    assert memo.get(1, source, object, tuple, None) is not made[1] and memo.get(1, source, object, tuple) is made[1]


# On a GPU


@pytest.mark.gpu
@every_form
class TestOnGpu:
    def test_right(self, path, form):
        call, mask = qkv("cuda"), held(form, device="cuda")
        for blocks in (FIRST, SECOND):
            write(form, mask, blocks)
            assert all(right(call, mask, blocks) for _ in range(3))

    def test_nothing_waits(self, form):
        call, masks = qkv("cuda"), [held(form, device="cuda") for _ in range(2)]
        block_sparse_attention(*call, masks[0], causal=True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                block_sparse_attention(*call, masks[1], causal=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_another_stream_waits(self, form):
        """Converted on one stream behind other work, used on another at once."""
        call, mask = qkv("cuda"), held(form, device="cuda")
        expected = block_sparse_attention(*call, BlockMask.from_blocks(FIRST.cuda()))
        block_sparse_attention(*call, held(form, device="cuda"))  # all is compiled
        torch.cuda.synchronize()
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(one):
            torch.cuda._sleep(100_000_000)
            block_sparse_attention(*call, mask)
        with torch.cuda.stream(other):
            out = block_sparse_attention(*call, mask)
        other.synchronize()
        assert torch.equal(out, expected)

    @pytest.mark.parametrize("known", [False, True])
    def test_graph(self, form, known, conversions):
        """What is made in a capture is part of the graph and is not kept."""
        call, mask = qkv("cuda"), held(form, device="cuda")
        expected = block_sparse_attention(*call, mask)
        if not known:
            mask = held(form, device="cuda")
        torch.cuda.synchronize()
        graph, before = torch.cuda.CUDAGraph(), len(conversions)
        with torch.cuda.graph(graph):
            out = block_sparse_attention(*call, mask)
        assert len(conversions) - before == (0 if known and form == "bsr" else 1)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
        assert count(conversions, block_sparse_attention, *call, mask) == (0 if known else 1)
        assert right(call, mask, FIRST)

    def test_a_replay_sees_what_was_written(self, form):
        """But for a BsrMatrix, whose indices must not be written to."""
        call, mask = qkv("cuda"), held(form, device="cuda")
        block_sparse_attention(*call, mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = block_sparse_attention(*call, mask)
        write(form, mask)
        graph.replay()
        written = block_sparse_attention(*call, BlockMask.from_blocks((FIRST if form == "bsr" else SECOND).cuda()))
        assert torch.equal(out, written)
        assert right(call, mask, SECOND)
