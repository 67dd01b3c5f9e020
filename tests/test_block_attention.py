"""block_sparse_attention as the GPU runs it; and its host side and sources on CPU tensors (emulate_blocks.py)."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention import BlockMask, block_sparse, block_sparse_attention, patterns, reference
from attention.masks.element_mask import check_extents, element_mask
from attention.masks.mask_mods import And, Band, RowRange, SameDocument

from . import emulate_attention
from .attention_parts import qkv
from .mask_parts import BLOCKSIZES, by_head

BF16 = torch.bfloat16


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def attend(request, monkeypatch):
    """block_sparse_attention on the GPU; or its host side on CPU tensors. `attend.device` is where its tensors are."""

    def attend(q, k, v, mask, **terms):
        return block_sparse_attention(q, k, v, mask, **terms)

    attend.device = "cuda" if request.param == "cuda" else "cpu"
    if request.param == "emulated":
        emulate_attention.install(monkeypatch)
    return attend


def check(attend, q, k, v, mask, **terms):
    """The result on poisoned memory against fp64; each element within what rounding P and O to 16 bits may do to it."""
    out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device=q.device)
    _, lse = attend(q, k, v, mask, return_lse=True, out=out, **terms)
    wide, scores = (t.double() for t in (q, k, v)), {**terms, "block_mask": mask}
    q, k, v = wide
    exact, exact_lse = reference.attention(q, k, v, return_lse=True, **scores)
    error = (out.double() - exact).abs()
    bound = 2.0**-7 * reference.attention(q, k, v.abs(), **scores) + 1e-4
    assert (error <= bound).all(), f"worst at {(error / bound).argmax()}: {(error / bound).max():.3} times the bound"
    torch.testing.assert_close(lse.double(), exact_lse, atol=4e-3, rtol=1e-4)
    return out


def random_mask(lengths, blocksize, heads=(2, 4), density=0.4, mask_mod=by_head, full=True, device="cpu"):
    """Some blocks partial, some full, some rows empty. With `full` mask_mod does not see all of full blocks."""
    rows, cols = (-(-n // side) for n, side in zip(lengths, blocksize, strict=True))
    blocks, partial = torch.rand(*heads, rows, cols) < density, torch.rand(*heads, rows, cols) < 0.5
    blocks[..., 0, :] &= torch.arange(heads[1])[:, None] != 1
    partial = partial.to(device) if mask_mod and full else None
    return BlockMask.from_blocks(blocks.to(device), blocksize, lengths=lengths, partial=partial, mask_mod=mask_mod)


@pytest.mark.parametrize("lengths", [(256, 512), (300, 130), (129, 450)], ids=str)
@pytest.mark.parametrize("blocksize", BLOCKSIZES, ids=str)
def test_block_shapes(attend, path, blocksize, lengths):
    q, k, v = qkv(*lengths, 128, device=attend.device)
    check(attend, q, k, v, random_mask(lengths, blocksize, device=attend.device))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (192, 192), (256, 256)], ids=str)
def test_head_dimensions(attend, path, dims, block):
    lengths = (200, 450)
    mask = random_mask(lengths, (block, block), device=attend.device)
    check(attend, *qkv(*lengths, *dims, device=attend.device), mask)


@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (2, 1)], ids=str)
def test_masks_that_serve_all(attend, path, heads):
    mask = random_mask((300, 400), (128, 128), heads, device=attend.device)
    check(attend, *qkv(300, 400, device=attend.device), mask)


def documents(length, device):
    return torch.randint(0, 3, (2, length), generator=torch.Generator().manual_seed(1)).sort(-1).values.int().to(device)


PATTERNS = {
    "window": lambda n, bs, dev: patterns.sliding_window(n, (100, 0), bs, device=dev),
    "sinks": lambda n, bs, dev: patterns.sliding_window(n, (100, 0), bs, global_columns=10, causal=True, device=dev),
    "documents": lambda n, bs, dev: patterns.documents(documents(n[0], dev), documents(n[1], dev), blocksize=bs),
    "dilated": lambda n, bs, dev: patterns.dilated(n, 3, bs, device=dev),
    "top k": lambda n, bs, dev: patterns.top_k(torch.rand(4, 3, 4).to(dev), 2, bs, lengths=n),
    "slashes": lambda n, bs, dev: patterns.vertical_slash(
        torch.tensor([5, 290], device=dev), torch.tensor([0, 130], device=dev), lengths=n, blocksize=bs
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(attend, path, name):
    lengths = (333, 400)
    check(attend, *qkv(*lengths, device=attend.device), PATTERNS[name](lengths, (128, 128), attend.device))


@pytest.mark.parametrize("mask_mod", [None, by_head], ids=["no mask_mod", "by_head"])
def test_causal(attend, path, mask_mod):
    lengths = (300, 420)
    mask = random_mask(lengths, (64, 64), density=0.6, mask_mod=mask_mod, full=False, device=attend.device)
    check(attend, *qkv(*lengths, device=attend.device), mask, causal=True)
    assert block_sparse.with_causal(mask) is block_sparse.with_causal(mask), "made once"


def test_softcap_and_scale(attend, path):
    mask = random_mask((200, 300), (64, 64), device=attend.device)
    check(attend, *qkv(200, 300, device=attend.device), mask, softcap=5.0, scale=0.3)


def test_empty(attend, path):
    mask = BlockMask.from_blocks(torch.zeros(2, 3, dtype=torch.bool, device=attend.device), lengths=(200, 300))
    out = check(attend, *qkv(200, 300, device=attend.device), mask)
    assert not out.count_nonzero()


def test_uneven_rows(attend, path):
    blocks = torch.rand(4, 6, 8) < 0.2
    blocks[2, 3] = True
    mask = BlockMask.from_blocks(blocks.to(attend.device), (64, 64), mask_mod=by_head)
    check(attend, *qkv(384, 512, device=attend.device), mask)


@given(st.data())
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_table(attend, path, data):
    lengths = data.draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    blocksize, heads = data.draw(st.sampled_from(BLOCKSIZES)), data.draw(st.sampled_from([(1, 1), (2, 4), (1, 4)]))
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    causal = data.draw(st.booleans())
    mask = random_mask(lengths, blocksize, heads, data.draw(st.floats(0, 1)), full=not causal, device=attend.device)
    check(attend, *qkv(*lengths, device=attend.device), mask, causal=causal)


@given(st.data())
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_documents(attend, path, data):
    """Element masks that read tensors: documents of any lengths, with any window, in the same two kernels."""
    lengths = data.draw(st.tuples(st.integers(1, 400), st.integers(1, 400)), "lengths")
    count, bound = data.draw(st.integers(1, 6), "documents"), st.one_of(st.none(), st.integers(0, 200))
    cu = [
        torch.tensor(
            sorted(data.draw(st.lists(st.integers(0, n), min_size=count + 1, max_size=count + 1), "cu_seqlens"))
        )
        for n in lengths
    ]
    terms = {"window": data.draw(st.tuples(bound, bound), "window"), "causal": data.draw(st.booleans(), "causal")}
    terms["blocksize"] = data.draw(st.sampled_from([(64, 64), (128, 128)]), "blocksize")
    torch.manual_seed(data.draw(st.integers(0, 2**20), "seed"))
    mask = patterns.packed_documents(*(t.to(attend.device) for t in cu), lengths=lengths, **terms)
    check(attend, *qkv(*lengths, device=attend.device), mask)


@pytest.mark.gpu
class TestOnGpu:
    def data(self, lengths=(512, 640)):
        return *qkv(*lengths, device="cuda"), random_mask(lengths, (64, 64), full=False, device="cuda")

    def test_same_bits(self, path):
        q, k, v, mask = self.data()
        first = block_sparse_attention(q, k, v, mask)
        assert all(torch.equal(first, block_sparse_attention(q, k, v, mask)) for _ in range(20))

    @pytest.mark.parametrize("known", [False, True])
    def test_graph(self, path, known):
        """Captured, with what is made of the mask made before or in the graph."""
        q, k, v, mask = self.data()
        expected = block_sparse_attention(q, k, v, mask, causal=True)
        if not known:
            parts = mask.lists()
            mask = BlockMask(*parts, lengths=mask.lengths, blocksize=mask.blocksize, mask_mod=mask.mask_mod)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = block_sparse_attention(q, k, v, mask, causal=True)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(block_sparse_attention(q, k, v, mask, causal=True), expected)

    def test_nothing_waits(self, path):
        """No call waits for the GPU, neither the first one with a mask nor later ones."""
        q, k, v, mask = self.data()
        block_sparse_attention(q, k, v, mask, causal=True)
        fresh = random_mask((512, 640), (64, 64), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                block_sparse_attention(q, k, v, fresh, causal=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_flex_attention_s_mask(self, path):
        from torch.nn.attention.flex_attention import create_block_mask

        q, k, v, _ = self.data()
        flex = create_block_mask(by_head, 2, 4, 512, 640, device="cuda")
        mask = BlockMask.from_flex(flex)
        assert torch.equal(block_sparse_attention(q, k, v, flex), block_sparse_attention(q, k, v, mask))
        check(block_sparse_attention, q, k, v, mask)


class TestOrder:
    def order(self, blocks, tile_m=64):
        mask = BlockMask.from_blocks(blocks, (128, 128))
        return block_sparse.tile_order(mask, *blocks.shape[:2], tile_m).tolist()

    def test_equal_rows_keep_theirs(self):
        assert self.order(torch.ones(2, 3, 4, 5, dtype=torch.bool)) == list(range(2 * 3 * 8))

    def test_long_rows_come_first(self):
        blocks = torch.zeros(1, 2, 4, 9, dtype=torch.bool)
        blocks[..., 0] = True
        blocks[0, 1, 2] = True
        order = self.order(blocks)
        assert order[:2] == [8 + 7 - 5, 8 + 7 - 4], "both tiles of the long row; tiles count from the last of a head"
        assert order[2:] == [n for n in range(16) if n not in order[:2]]

    def test_heads_together(self):
        """Of two heads the longest rows come first, whichever it is of them; then those of the next two."""
        blocks = torch.ones(1, 4, 3, 3, dtype=torch.bool).tril()
        mask = BlockMask.from_blocks(blocks, (128, 128))
        order = block_sparse.tile_order(mask, 1, 4, 128, l2_heads=2).tolist()
        assert order == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


class TestElementMasks:
    def test_keys(self):
        ids = torch.zeros(3, dtype=torch.int32)
        key = lambda mask: element_mask(mask, CPU)[0]  # noqa: E731
        assert key(Band(3, 0)) == key(Band(3, 0)) != key(Band(4, 0))
        assert key(SameDocument(ids, ids, False)) == key(SameDocument(more := ids + 1, more, False))
        assert key(SameDocument(more, ids, False)) == key(SameDocument(ids, more, False))
        assert key(SameDocument(more, ids, False)) != key(SameDocument(ids.long(), ids, False))
        assert key(capturing(3)) == key(capturing(3)) != key(capturing(4))
        assert element_mask(And(RowRange(ids, ids + 0), by_head), CPU)[0].tensors == [("int32", 1, 0)] * 2

    def test_tensors(self):
        """Each once, as views: a bool is a byte, a scalar has a dimension, and strides stay."""
        flags, table, scalar = torch.ones(4, dtype=torch.bool), torch.zeros(5, 8).t(), torch.tensor(3)
        mask, tensors = element_mask(lambda b, h, q, kv: flags[q] & flags[kv] & (table[q, h] < scalar), CPU)
        assert mask.tensors == [("bool", 1, 0), ("float32", 2, None), ("int64", 1, 0)]
        assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in (flags, table, scalar)]
        assert [t.dtype for t in tensors] == [torch.uint8, torch.float32, torch.int64]

    @pytest.mark.parametrize(
        "mask_mod, text",
        [
            (lambda b, h, q, kv: q - kv, "must return a bool tensor, got a tensor of torch.int32"),
            (lambda b, h, q, kv: q < torch.zeros(3), "as a whole; index it by b, h, q or kv"),
            (lambda b, h, q, kv: torch.zeros(3, dtype=torch.uint8)[q] > 0, "kernels have float32, bfloat16"),
        ],
    )
    def test_what_no_kernel_can_take(self, mask_mod, text):
        with pytest.raises(TypeError, match=text):
            element_mask(mask_mod, CPU)

    def test_a_tensor_that_is_too_short(self):
        ids = torch.zeros(200, dtype=torch.int32)
        mask, tensors = element_mask(lambda b, h, q, kv: ids[q] == ids[kv // 2], CPU)
        check_extents(mask, tensors, 1, 1, (200, 1000))
        with pytest.raises(IndexError, match=r"dimension 0 of a tensor of shape \(200,\) with q, which goes up to 200"):
            check_extents(mask, tensors, 1, 1, (201, 1000))


CPU = torch.device("cpu")


def capturing(value):
    return lambda b, h, q, kv: q - kv < value


@pytest.mark.parametrize(
    "change, text",
    [
        ({"mask": ((256, 300), (1, 1))}, "is of lengths .256, 300., q and k of .200, 300."),
        ({"mask": ((200, 300), (3, 1))}, "has 3 batch items and 1 heads; it must have 2 or 1"),
        ({"mask": ((200, 300), (1, 3))}, "has 1 batch items and 3 heads; it must have 2 or 1 and 4 or 1"),
        ({"causal": 1}, "causal must be True or False"),
    ],
)
def test_errors(monkeypatch, change, text):
    lengths, heads = change.pop("mask", ((200, 300), (1, 1)))
    mask = random_mask(lengths, (128, 128), heads, mask_mod=None)
    with pytest.raises((ValueError, TypeError), match=text):
        block_sparse.plan_block_sparse(*qkv(200, 300), mask, **change)
