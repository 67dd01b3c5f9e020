"""attention() to caches: lengths of items, pages, and few queries whose K and V are split among CTAs."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention import attention, eager, reference
from attention.decode import choose
from attention.decode.packing import DecodeScheduler, DecodeTile, PackedWindowSource
from attention.forward.config import FlashFacts, WindowKind
from attention.forward.seqlen import SeqlenInfo
from attention.plan import FlashPlan
from cute_kernels.runtime import families

from .emulate_blocks import number
from .fuzz import ON_GPU, RELAXED, settings
from .reference import band_mask
from .test_attention_tiles import BOUNDS

BF16 = torch.bfloat16
with_parts = choose.with_parts


def cache(B, heads, capacity, D, Dv, lengths, page_size=None, dtype=BF16, device="cpu", q_shape=None):
    """(q, {k, v, seqlens_k, block_table}); what no item has is NaN, and page numbers are garbage there.

    Pages are in (pages, page_size, heads, D) order in memory, shuffled.
    """
    generator = torch.Generator().manual_seed(B * capacity + D)
    q = torch.randn(*q_shape, D, generator=generator).to(dtype)
    k, v = (torch.randn(B, heads, capacity, d, generator=generator) for d in (D, Dv))
    for b, length in enumerate(lengths):
        k[b, :, max(length, 0) :] = v[b, :, max(length, 0) :] = math.nan
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    table = None
    if page_size:
        each = capacity // page_size
        spare = 3
        order = torch.randperm(B * each + spare, generator=generator)[: B * each]
        pages = []
        for t in (k, v):
            page = t.new_full((B * each + spare, page_size, heads, t.shape[-1]), math.nan)
            page[order] = t.transpose(1, 2).reshape(B * each, page_size, heads, -1)
            pages.append(page.transpose(1, 2))
        k, v = pages
        table = order.view(B, each).to(torch.int32)
        for b, length in enumerate(lengths):
            first = -(-max(length, 0) // page_size)
            table[b, first::2], table[b, first + 1 :: 2] = -1, 2**30
    k, v = ((t.transpose(1, 2).to(device, dtype).transpose(1, 2) if page_size else t.to(device, dtype)) for t in (k, v))
    tables = {"seqlens_k": seqlens.to(device), "block_table": None if table is None else table.to(device)}
    return q.to(device), {"k": k, "v": v, **tables}


def truth(q, parts, **terms):
    """(out, lse) in fp64."""
    wide = {name: parts[name].double() for name in "kv"}
    return reference.attention_cached(q.double(), **(parts | wide), **terms, return_lse=True)


def check(got, exact):
    """Rows of out differ by little of what they have, and none is NaN."""
    (out, lse), (exact, exact_lse) = got, exact
    bound = exact.abs().amax(-1, keepdim=True) * 2.0**-6
    wrong = (out.double() - exact).abs() > bound
    assert out.isfinite().all() and not wrong.any(), f"{wrong.sum()} of {wrong.numel()} elements differ"
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-3, rtol=1e-3)


# Protocol


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("shared", [1, 3, 8, 70])
def test_splits_of_packed_rows(shared, bounds):
    """Each item's tiles are visited once by its splits together, and hold all that its rows see, full ones no more."""
    (left, right), tile = bounds, 16
    band = WindowKind(left is not None, right is not None)
    for sq, sk, splits in itertools.product((1, 2, 9), (0, 1, 16, 47, 129), (1, 2, 7)):
        source = PackedWindowSource(band, 64, tile, left or 0, right or 0, shared, splits)
        span, mask = SeqlenInfo(0, sq, sk), band_mask(sq, sk, left, right)
        packed = mask.repeat_interleave(shared, 0)
        for m in range(-(-sq * shared // 64)):
            part = packed[m * 64 : (m + 1) * 64]
            visits, counts = [], []
            for split in range(splits):
                tiles = source.for_tile(DecodeTile(m, 0, 0, split), span)
                count, ends = number(tiles.count), [number(e) for e in tiles.ends]
                assert count >= 0 and ends == sorted(ends) and ends[-1] == count
                for i in range(count):
                    n = number(tiles.at(i))
                    visits.append(n)
                    columns = part[:, n * tile : (n + 1) * tile]
                    if i > 0 and not tiles.kinds[next(s for s, end in enumerate(ends) if i < end)]:
                        assert columns.shape[1] == tile and bool(columns.all())
                counts.append(count)
            assert max(counts) - min(counts) <= 1 and len(set(visits)) == len(visits)
            assert visits == sorted(visits, reverse=True)
            hidden = torch.ones(sk, dtype=torch.bool)
            for n in visits:
                hidden[n * tile : (n + 1) * tile] = False
            assert not part[:, hidden].any()
        for row in range(sq * shared):
            begin, end = (number(x) for x in source.bounds(row, span))
            assert [begin <= c < end for c in range(sk)] == packed[row].tolist()


def test_every_work_item_once():
    scheduler = DecodeScheduler(3, 4, 5, 6)
    found = {(t.m, t.h_kv, t.b, t.split) for t in map(scheduler.decode, range(scheduler.count))}
    assert found == set(itertools.product(range(3), range(4), range(5), range(6)))


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_parts_make_the_whole(splits):
    """Parts with a softmax of their own, and weights from their LSEs; empty ones count for nothing."""
    lengths = [0, 1, 47, 200]
    q, parts = cache(4, 2, 256, 64, 64, lengths, q_shape=(4, 8, 3))
    source = PackedWindowSource(WindowKind(right=True), 64, 16, 0, 0, 4, splits)
    exact, exact_lse = truth(q, parts, causal=True)
    for b, h in itertools.product(range(4), range(2)):
        span = SeqlenInfo(b, 3, lengths[b])
        outs, lses = [], []
        for split in range(splits):
            tiles = source.for_tile(DecodeTile(0, h, b, split), span)
            mine = {number(tiles.at(i)) for i in range(number(tiles.count))}
            columns = [c for c in range(256) if c // 16 in mine]
            rows = q[b, 4 * h : 4 * h + 4].transpose(0, 1).reshape(12, 64).double()
            scores = torch.full((12, 256), -math.inf, dtype=torch.float64)
            for row in range(12):
                begin, end = (number(x) for x in source.bounds(row, span))
                visible = [c for c in columns if begin <= c < end]
                scores[row, visible] = parts["k"][b, h, visible].double() @ rows[row] / 8
            lse = scores.logsumexp(-1)
            weights = (scores - lse[:, None]).exp().nan_to_num(0.0)
            outs.append(weights @ parts["v"][b, h].double().nan_to_num(0.0))
            lses.append(lse)
        lses, outs = torch.stack(lses), torch.stack(outs)
        largest = lses.amax(0)
        weights = (lses - torch.where(largest.isneginf(), 0.0, largest)).exp()
        total = weights.sum(0)
        out = (weights[..., None] * outs).sum(0) * torch.where(total > 0, 1 / total, 0.0)[:, None]
        out = out.view(3, 4, 64).transpose(0, 1)
        torch.testing.assert_close(out, exact[b, 4 * h : 4 * h + 4])
        torch.testing.assert_close((largest + total.log()).view(3, 4).T, exact_lse[b, 4 * h : 4 * h + 4])


def test_best_splits():
    for items, tiles in itertools.product((1, 2, 8, 33, 64, 131, 132, 133, 500, 5000), (1, 2, 7, 128, 1024)):
        count = choose.best_splits(items, tiles, 132)
        assert 1 <= count <= max(1, min(tiles, 264))
        assert count == 1 or items < 132 or tiles > 7
    assert choose.best_splits(8, 128, 132) == 16 and choose.best_splits(8, 1024, 132) == 16
    assert choose.best_splits(64, 128, 132) == 2 and choose.best_splits(132, 128, 132) == 1
    assert choose.best_splits(1, 1024, 132) == 128 and choose.best_splits(8, 1, 132) == 1
    # 8 heads of K and V, two CTAs an SM, tiles of 64 rows.
    for (batch, rows), count in {(1, 2**14): 32, (1, 2**17): 33, (8, 2**14): 4, (16, 2**14): 2}.items():
        assert choose.best_splits(8 * batch, rows // 64, 264) == count


def test_which_calls_it_serves():
    def serves(B, H, heads, Sq):
        return choose.serves(torch.empty(B, H, Sq, 64), torch.empty(B, heads, 4096, 64), 132)

    assert serves(1, 32, 8, 1) and serves(64, 32, 8, 16) and serves(1, 16, 1, 9)
    assert not serves(8, 32, 8, 17) and not serves(1, 32, 8, 4096)


class Compiled:
    """In the compiled function's place: its arguments in order, as torch and Python have them."""

    names = "q k v out lse seqlens_k block_table parts part_lses scale_log2 softcap left right splits ctas".split()

    def __init__(self, facts):
        self.facts = facts

    def __call__(self, *args):
        names = self.names if self.facts.path == "sm_90" else self.names[:-1]
        self.got = dict(zip(names, args, strict=True))


@pytest.mark.parametrize("path", ["sm_80", "sm_90"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_what_the_kernel_is_called_with(monkeypatch, page_size, path):
    monkeypatch.setattr(families, "function_for", Compiled)
    q, parts = cache(2, 2, 4096, 128, 64, [7, 9], page_size, q_shape=(2, 8, 3))
    plan = FlashPlan("attention", (2, 8, 3, 64), q.dtype, q.device, scalars=(0.5, 0.0, 0, 0))
    facts = FlashFacts("sm_90a", path, None, head_dim=128, head_dim_v=64)
    made = []
    monkeypatch.setattr(choose, "with_parts", lambda f, *rest: made.append(f) or with_parts(f, *rest))
    choose.use(plan, facts, q, parts["k"], parts["seqlens_k"], parts["block_table"], (None, None), 132)
    tables = parts["seqlens_k"], parts["block_table"]
    plan.function(q, parts["k"], parts["v"], "out", "lse", *tables, *plan.scalars)
    got, facts, splits = made[0].got, plan.facts, 4096 // plan.facts.config.tile_n
    assert got["seqlens_k"] is tables[0] and got["block_table"] is tables[1]
    assert facts.split and facts.seqlens and facts.page_size == (page_size or 0)
    assert got.get("ctas") == (264 if path == "sm_90" else None)
    assert 1 < got["splits"] <= splits and (got["left"], got["right"]) == (0, 0)
    assert got["parts"].shape == (got["splits"], 2, 8, 3, 64) and got["part_lses"].shape == (got["splits"], 2, 8, 3)
    assert got["parts"].dtype == got["part_lses"].dtype == torch.float32 and got["scale_log2"] == 0.5
    assert facts.smem_bytes <= 232_448


# CPU tensors and errors


@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_cpu(page_size):
    lengths = [0, 5, 64, 130]
    q, parts = cache(4, 2, 192, 64, 96, lengths, page_size, q_shape=(4, 4, 3))
    out, lse = attention(q, **parts, causal=True, return_lse=True)
    assert not out[0].count_nonzero() and lse[0].isneginf().all()
    check((out, lse), truth(q, parts, causal=True))
    if page_size is None:
        for b, length in enumerate(lengths[1:], 1):
            one = attention(q[b : b + 1], *(parts[n][b : b + 1, :, :length] for n in "kv"), causal=True)
            assert torch.equal(one[0], out[b])
    else:
        flat, plain = cache(4, 2, 192, 64, 96, lengths, q_shape=(4, 4, 3))
        assert torch.equal(flat, q) and torch.equal(attention(q, **plain, causal=True), out)


def test_lengths_and_pages_that_are_not_there():
    q, parts = cache(2, 2, 64, 64, 64, [64, 64], q_shape=(2, 2, 1))
    full = attention(q, **parts)
    assert torch.equal(attention(q, **(parts | {"seqlens_k": torch.tensor([99, 64], dtype=torch.int32)})), full)
    negative = attention(q, **(parts | {"seqlens_k": torch.tensor([-5, 64], dtype=torch.int32)}))
    assert not negative[0].count_nonzero() and torch.equal(negative[1], full[1])
    q, parts = cache(2, 2, 64, 64, 64, [64, 64], 16, q_shape=(2, 2, 1))
    parts["block_table"][0] = 1000
    assert not attention(q, **parts)[0].count_nonzero()


NO_PAGES = torch.zeros(0, 2, 16, 64, dtype=BF16)


def changed(page_size=None, **other):
    q, parts = cache(2, 2, 64, 64, 64, [64, 5], page_size, q_shape=(2, 4, 1))
    return {"q": q, **parts, **other}


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (changed(seqlens_k=[1, 2]), TypeError, "seqlens_k must be a torch.Tensor"),
        (changed(seqlens_k=torch.zeros(2)), TypeError, "seqlens_k is torch.float32; it must be torch.int32"),
        (changed(seqlens_k=torch.zeros(3, dtype=torch.int32)), ValueError, "it must be .2,., q's batch"),
        (changed(seqlens_k=torch.zeros(4, dtype=torch.int32)[::2]), ValueError, "not contiguous"),
        (changed(16, seqlens_k=None), ValueError, "a block_table needs seqlens_k"),
        (changed(16, block_table=torch.zeros(2, 4)), TypeError, "block_table is torch.float32"),
        (changed(16, block_table=torch.zeros(2, dtype=torch.int32)), ValueError, "it must be .2, pages of an item."),
        (changed(16, v=torch.zeros(1, 2, 16, 64, dtype=BF16)), ValueError, "11 and 1 pages"),
        (changed(k=torch.zeros(2, 2, 63, 64, dtype=BF16)), ValueError, "differ in heads or length"),
        (changed(16, k=NO_PAGES, v=NO_PAGES), ValueError, "k and v have no pages"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        attention(**arguments)


@pytest.mark.parametrize("rows", [8, 24])
def test_page_sizes(rows):
    pages = torch.zeros(4, 2, rows, 64, dtype=BF16)
    table = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="a power of two from 16 on works"):
        attention(torch.zeros(2, 4, 1, 64, dtype=BF16), pages, pages, seqlens_k=table[:, 0].clone(), block_table=table)


def test_nothing_cached():
    q, parts = cache(2, 2, 0, 64, 64, [0, 0], q_shape=(2, 4, 1))
    assert not attention(q, **parts).count_nonzero()
    assert attention(q[:0], *(parts[n][:0] for n in "kv"), seqlens_k=parts["seqlens_k"][:0]).shape == (0, 4, 1, 64)


# On a GPU


def run(q, parts, splits=None, **terms):
    """attention(), with so many splits, and twice the same bits."""
    if splits is None:
        return attention(q, **parts, **terms)
    with choose.splits(splits):
        first = attention(q, **parts, **terms, return_lse=True)
        again = attention(q, **parts, **terms, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "other bits"
    return first


LENGTHS = [0, 1, 127, 128, 129, 300, 511, 512]


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("shared", [1, 2, 4, 5, 8, 16])
def test_gpu_heads(path, shared, splits):
    """One kernel and its split sister."""
    for sq in (1, 2, 5, 9) if path == "sm_90" else (1, 9):
        q, parts = cache(8, 2, 512, 128, 128, LENGTHS, device="cuda", q_shape=(8, 2 * shared, sq))
        check(run(q, parts, splits, causal=True), truth(q, parts, causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256)], ids=str)
def test_gpu_head_dims(path, dims, splits):
    q, parts = cache(8, 2, 512, *dims, LENGTHS, device="cuda", dtype=torch.float16, q_shape=(8, 8, 3))
    check(run(q, parts, splits), truth(q, parts))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "terms", [{"window": (70, 0)}, {"window": (200, 9), "softcap": 3.0}, {"window": (None, 2)}], ids=str
)
def test_gpu_masks(path, terms):
    q, parts = cache(8, 2, 512, 128, 128, LENGTHS, device="cuda", q_shape=(8, 8, 7))
    for splits in (2, 4):
        check(run(q, parts, splits, **terms), truth(q, parts, **terms))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size, splits", [(16, 1), (16, 3), (64, 3), (128, 3), (256, 3)])
def test_gpu_pages(path, page_size, splits):
    q, parts = cache(8, 2, 512, 128, 128, LENGTHS, page_size, device="cuda", q_shape=(8, 8, 3))
    check(run(q, parts, splits, causal=True), truth(q, parts, causal=True))


@pytest.mark.gpu
@pytest.mark.sm_90
@pytest.mark.parametrize("dims, page_size", [((256, 256), 32), ((96, 64), 16)], ids=str)
def test_gpu_pages_of_other_dims(dims, page_size):
    q, parts = cache(8, 1, 512, *dims, LENGTHS, page_size, device="cuda", q_shape=(8, 8, 1))
    check(run(q, parts, 3), truth(q, parts))


@pytest.mark.gpu
def test_gpu_long_queries(path):
    """Several tiles of rows: a chunk of a prompt."""
    q, parts = cache(3, 2, 512, 128, 128, [512, 100, 257], 64, device="cuda", q_shape=(3, 8, 100))
    for splits in (1, 3):
        check(run(q, parts, splits, causal=True), truth(q, parts, causal=True))


@pytest.mark.gpu
@pytest.mark.sm_90
def test_gpu_without_lengths():
    """Few queries take the kernel by themselves, and what it stores stays within out."""
    q, parts = cache(2, 2, 3000, 128, 128, [3000, 3000], device="cuda", q_shape=(2, 8, 2))
    exact = truth(q, parts)
    room = torch.full((4, 8, 4, 128), 7.0, dtype=BF16, device="cuda")
    plan = eager.plan_attention(q, parts["k"], parts["v"], return_lse=True)
    assert any("decoding" in note for note in plan.notes)
    for splits in (None, 1, 7):
        terms = {"return_lse": True} if splits is None else {}
        got = run(q, {n: parts[n] for n in "kv"}, splits, out=room[1:3, :, 1:3], **terms)
        check(got, exact)
    inside = torch.zeros_like(room, dtype=torch.bool)
    inside[1:3, :, 1:3] = True
    assert (room[~inside] == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
def test_gpu_graph(path, page_size):
    """Lengths are read at each replay."""
    q, parts = cache(4, 2, 512, 128, 128, [512] * 4, page_size, device="cuda", q_shape=(4, 8, 1))

    def call():
        return run(q, parts, 3, causal=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), choose.splits(3):
        got = attention(q, **parts, causal=True, return_lse=True)
    for lengths in ([512, 1, 0, 200], [3, 300, 129, 128]):
        parts["seqlens_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        check(got, truth(q, parts, causal=True))


# Page size and mask: each is a kernel, and another one with splits.
KERNELS = [(None, {"causal": True}), (16, {"causal": True}), (64, {"window": (70, 3)})]


def check_any(data, device):
    """Any lengths, those that cannot be among them, heads, rows and splits."""
    page_size, terms = data.draw(st.sampled_from(KERNELS), "kernel")
    heads, shared, rows = (data.draw(st.integers(1, most), name) for name, most in (("H", 3), ("shared", 9), ("Sq", 9)))
    capacity = data.draw(st.integers(1, 600 // (page_size or 1)), "capacity") * (page_size or 1)
    edges = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, -1, capacity, capacity + 1])
    lengths = data.draw(st.lists(st.one_of(edges, st.integers(0, capacity)), min_size=1, max_size=9), "lengths")
    q, parts = cache(
        len(lengths),
        heads,
        capacity,
        64,
        64,
        lengths,
        page_size,
        device=device,
        q_shape=(len(lengths), heads * shared, rows),
    )
    splits = data.draw(st.sampled_from([None, 1, 2, 5, 40]), "splits")
    more = {"return_lse": True} if splits is None else {}
    check(run(q, parts, splits, **terms, **more), truth(q, parts, **terms))


@settings(max_examples=40, **RELAXED)
@given(st.data())
def test_any_cache_host_side(emulated, data):
    check_any(data, "cpu")


@pytest.mark.gpu
@settings(ON_GPU, max_examples=60)
@given(st.data())
def test_any_cache_on_the_gpu(path, data):
    check_any(data, "cuda")
