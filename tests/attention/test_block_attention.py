"""block_sparse_attention: results against fp64; the order of its tiles, and what kernels know of element masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask

from attention import BlockMask, block_sparse, block_sparse_attention, create_block_mask, flops, patterns, torch_op
from attention.backward import dispatch
from attention.masks.element_mask import check_extents, element_mask
from attention.masks.mask_mods import And, Band, RowRange, SameDocument
from attention.masks.tile_order import order_of_tiles
from cute_kernels.testing.reference import normal, seed

from ..fuzz.run import RELAXED, settings
from .mask_parts import BLOCKSIZES, by_head, random_mask
from .parts import check, qkv, where_fixture  # noqa: F401 (used by name)

CPU = torch.device("cpu")


def documents(length, device):
    return torch.randint(0, 3, (2, length), generator=torch.Generator().manual_seed(1)).sort(-1).values.int().to(device)


def uneven(lengths, device):
    blocks = torch.rand(4, 6, 8) < 0.2
    blocks[2, 3] = True
    return BlockMask.from_blocks(blocks.to(device), (64, 64), lengths=lengths, mask_mod=by_head)


def equal_rows(top, side, mask_mod=None):
    """`top` blocks a row, in no order; other ones for each head."""

    def make(lengths, device):
        rows, cols = (-(-n // side) for n in lengths)
        indices = (
            torch.rand(1, 4, rows, cols, generator=torch.Generator().manual_seed(3))
            .argsort(-1)[..., :top]
            .int()
            .contiguous()
        )
        return BlockMask.from_indices(indices.to(device), (side, side), lengths=lengths, mask_mod=mask_mod)

    return make


def padded(side, mask_mod=None):
    """Four entries a row, of which some are no block, and in one row of blocks all; other ones for each head."""

    def make(lengths, device):
        rows, cols = (-(-n // side) for n in lengths)
        generator = torch.Generator().manual_seed(3)
        indices = torch.rand(1, 4, rows, cols + 3, generator=generator).argsort(-1)[..., :4].int()
        for number, other in ((cols, -1), (cols + 1, -(2**31)), (cols + 2, 2**31 - 1)):
            indices.masked_fill_(indices == number, other)
        indices[:, 1, 1] = torch.tensor([cols, 2**30, -1, -1])
        terms = {"lengths": lengths, "mask_mod": mask_mod, "padded": True}
        return BlockMask.from_indices(indices.contiguous().to(device), (side, side), **terms)

    return make


def some(*args, **more):
    return lambda n, dev: random_mask(n, *args, device=dev, **more)


DIMS = [(64, 64), (96, 96), (192, 128), (192, 192), (256, 256)]
WIDE = (333, 400)
CALLS = {  # name: lengths, (lengths, device) -> mask, other operands, terms
    **{
        f"{blocks} of {lengths}": (lengths, some(blocks), {"D": 128}, {})
        for blocks in BLOCKSIZES
        for lengths in [(256, 512), (300, 130), (129, 450)]
    },
    **{
        f"head_dims {D} and {Dv}, {side}": ((200, 450), some((side, side)), {"D": D, "Dv": Dv}, {})
        for D, Dv in DIMS
        for side in (64, 128)
    },
    **{f"a mask for {heads}": ((300, 400), some((128, 128), heads), {}, {}) for heads in [(1, 1), (1, 4), (2, 1)]},
    "equal rows": ((300, 512), equal_rows(3, 64), {}, {}),
    "equal rows, whose last column of blocks is cut": ((300, 500), equal_rows(3, 128), {}, {}),
    "equal rows with a mask_mod": ((300, 512), equal_rows(2, 64, by_head), {}, {}),
    "padded rows": ((300, 512), padded(64), {}, {}),
    "padded rows, whose last column of blocks is cut": ((300, 500), padded(128), {}, {}),
    "padded rows with a mask_mod": ((300, 512), padded(64, by_head), {}, {}),
    "causal": ((300, 420), some((64, 64), density=0.6, mask_mod=None), {}, {"causal": True}),
    "causal mask_mod": ((300, 420), some((64, 64), density=0.6, full=False), {}, {"causal": True}),
    "softcap and scale": ((200, 300), some((64, 64)), {}, {"softcap": 5.0, "scale": 0.3}),
    "uneven rows": ((384, 512), uneven, {}, {}),
    "nothing": ((200, 300), some((128, 128), density=0.0), {}, {}),
    "window": (WIDE, lambda n, dev: patterns.sliding_window(n, (100, 0), device=dev), {}, {}),
    "sinks": (
        WIDE,
        lambda n, dev: patterns.sliding_window(n, (100, 0), global_columns=10, causal=True, device=dev),
        {},
        {},
    ),
    "documents": (WIDE, lambda n, dev: patterns.documents(*(documents(length, dev) for length in n)), {}, {}),
    "dilated": (WIDE, lambda n, dev: patterns.dilated(n, 3, device=dev), {}, {}),
    "top k": (WIDE, lambda n, dev: patterns.top_k(torch.rand(4, 3, 4).to(dev), 2, lengths=n), {}, {}),
    "slashes": (
        WIDE,
        lambda n, dev: patterns.vertical_slash(*torch.tensor([[5, 290], [0, 130]], device=dev), lengths=n),
        {},
        {},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(where, name):
    lengths, make, operands, terms = CALLS[name]
    mask = make(lengths, where)
    check(*qkv(*lengths, **operands, device=where), block_mask=mask, **terms)
    assert block_sparse.with_causal(mask) is block_sparse.with_causal(mask), "made once"


@settings(max_examples=15, **RELAXED)
@given(st.data())
def test_any_documents(where, data):
    """Element masks that read tensors: documents of any lengths, with any window, in the same two kernels."""
    lengths = data.draw(st.tuples(st.integers(1, 400), st.integers(1, 400)), "lengths")
    count, bound = data.draw(st.integers(1, 6), "documents"), st.one_of(st.none(), st.integers(0, 200))
    cuts = (st.lists(st.integers(0, n), min_size=count + 1, max_size=count + 1) for n in lengths)
    cu = [torch.tensor(sorted(data.draw(each, "cu_seqlens")), device=where) for each in cuts]
    terms = {"window_size": data.draw(st.tuples(bound, bound), "window"), "causal": data.draw(st.booleans(), "causal")}
    terms["blocksize"] = data.draw(st.sampled_from([(64, 64), (128, 128)]), "blocksize")
    torch.manual_seed(data.draw(st.integers(0, 2**20), "seed"))
    check(*qkv(*lengths, device=where), block_mask=patterns.packed_documents(*cu, lengths=lengths, **terms))


@pytest.mark.gpu
def test_flex_attention_s_mask(path):
    q, k, v = qkv(512, 640, device="cuda")
    flex = create_flex_mask(by_head, 2, 4, 512, 640, device="cuda")
    mask = BlockMask.from_flex(flex)
    assert torch.equal(block_sparse_attention(q, k, v, flex), block_sparse_attention(q, k, v, mask))
    check(q, k, v, block_mask=mask)


@pytest.mark.parametrize(("lengths", "mask_mod"), [((300, 512), None), ((300, 500), None), ((300, 512), by_head)])
def test_equal_rows_in_the_registered_op(lengths, mask_mod):
    """The op is called with the list alone, and the mask that it makes of it launches nothing, either."""
    mask = equal_rows(3, 64, mask_mod)(lengths, "cpu")
    parts = torch_op.crossing(mask)
    rebuilt = torch_op.block_mask_of(*parts)
    assert len(parts[1]) == 1 and rebuilt.equal_rows and rebuilt.lengths == mask.lengths
    assert all(torch.equal(a, b) for a, b in zip(rebuilt.lists(), mask.lists(), strict=True))
    q, k, v = qkv(*lengths)
    compiled = torch.compile(lambda *call: block_sparse_attention(*call, mask) * 1, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), block_sparse_attention(q, k, v, mask))
    assert flops.block_scores(q, k, *parts[1:4:2], parts[0]) == flops.block_scores(
        q, k, mask.lists(), mask.blocksize, "lists"
    )


def test_equal_rows_of_a_tensor_that_is_written_to():
    """A compiled function makes a mask of it in each call, so nothing of its former contents may be used."""
    indices, found = torch.tensor([[[[0], [1], [2], [2]]]], dtype=torch.int32), []
    for _ in range(2):
        for _ in range(2):
            mask = BlockMask.from_indices(indices, (64, 64), lengths=(256, 256))
            found.append(torch_op.block_mask_of(*torch_op.crossing(mask)))
            for lists, expected in zip(dispatch.lists_of(found[-1]), mask.transposed(), strict=True):
                assert torch.equal(lists, expected)
        indices.copy_(3 - indices)
    assert found[0] is found[1] and found[2] is found[3] and found[1] is not found[2]


def test_order_of_tiles():
    """Heads one after the other, with near tiles by length; and the last tiles, of 9 or 18 blocks, by length alone."""
    lengths = torch.tensor([[3, 9, 5, 7], [2, 2, 4, 4], [1, 2, 3, 4]], dtype=torch.int32)
    sections = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.int32)
    near = {"sections": sections, "count": 2}
    assert order_of_tiles(lengths, 9, 1, **near).tolist() == [1, 0, 3, 2, 7, 4, 6, 5, 11, 10, 9, 8]
    assert order_of_tiles(lengths, 9, 2, **near).tolist() == [1, 0, 3, 2, 7, 6, 11, 10, 4, 5, 9, 8]
    assert order_of_tiles(lengths, 9, 1, 2, **near).tolist() == [1, 7, 0, 4, 3, 2, 6, 5, 11, 10, 9, 8]
    assert order_of_tiles(lengths, 9, 1).tolist() == [1, 3, 2, 0, 6, 7, 4, 5, 11, 10, 9, 8]
    assert order_of_tiles(torch.zeros_like(lengths), 9, 2, **near).tolist() == [0, 1, 2, 3, 4, 7, 5, 6, 8, 9, 10, 11]


class TestOrder:
    def order(self, blocks, tile_m=64, l2_heads=1, near=1024, sms=1):
        mask = BlockMask.from_blocks(blocks, (128, 128))
        table = block_sparse.tile_order(mask, *blocks.shape[:2], tile_m, l2_heads, near, sms)
        assert torch.equal(table[:, 0].sort().values, torch.arange(len(table)))
        return table[:, 0].tolist()

    def test_equal_rows_keep_theirs(self):
        assert self.order(torch.ones(2, 3, 4, 5, dtype=torch.bool)) == list(range(2 * 3 * 8))

    def test_long_rows_come_first(self):
        blocks = torch.zeros(1, 2, 4, 9, dtype=torch.bool)
        blocks[..., 0] = True
        blocks[0, 1, 2] = True
        order = self.order(blocks, sms=132)
        assert order[:2] == [8 + 7 - 5, 8 + 7 - 4], "both tiles of the long row; tiles count from the last of a head"
        assert order[2:] == [n for n in range(16) if n not in order[:2]]

    def test_documents_together(self):
        """Tiles of a document follow those of the one before, and none depends on what lists hold past its end."""
        blocks = torch.block_diag(*[torch.ones(2, 2).tril()] * 3).bool()[None, None]
        assert self.order(blocks, 128, near=2) == [4, 5, 2, 3, 0, 1]

    def test_heads_together(self):
        """The longest rows of two heads come first, then those of the next two."""
        order = self.order(torch.ones(1, 4, 3, 3, dtype=torch.bool).tril(), 128, l2_heads=2)
        assert order == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def capturing(value):
    return lambda b, h, q, kv: q - kv < value


class TestElementMasks:
    def test_keys(self):
        ids = torch.zeros(3, dtype=torch.int32)
        key = lambda mask: element_mask(mask, CPU)[0]  # noqa: E731
        assert element_mask(Band(3, 0), CPU) == element_mask(Band(3, 0), CPU) != element_mask(Band(4, 0), CPU)
        assert key(SameDocument(ids, ids, False)) == key(SameDocument(more := ids + 1, more, False))
        assert key(SameDocument(more, ids, False)) == key(SameDocument(ids, more, False))
        assert key(SameDocument(more, ids, False)) != key(SameDocument(ids.long(), ids, False))
        three, four = capturing(3), capturing(4)
        assert element_mask(three, CPU) == element_mask(capturing(3), CPU) != element_mask(four, CPU)
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


def test_causal_bound_that_becomes_an_argument(place):
    """A causal mask's bound is a constant of its first kernel and an argument from its second value on; masks of the
    same function made before and after take a kernel of their own."""
    seed(3)
    for rows, cols in ((128, 128), (256, 128), (128, 128)):
        reach = torch.arange(rows, device=place) + 1
        near = lambda b, h, q, kv, reach=reach: (q - kv).abs() < reach[q]  # noqa: E731
        q, kv = normal(1, 2, rows, 64, device=place), normal(1, 2, cols, 64, device=place)
        mask = create_block_mask(near, None, None, rows, cols, device=place)
        found = block_sparse_attention(q, kv, kv, mask, causal=True)
        i, j = torch.arange(rows, device=place)[:, None], torch.arange(cols, device=place)
        seen = ((i - j).abs() < i + 1) & (j <= i + cols - rows)
        scores = (q.double() @ kv.double().mT / 8).masked_fill(~seen, -torch.inf)
        exact = scores.softmax(-1).nan_to_num(0.0) @ kv.double()
        torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)
