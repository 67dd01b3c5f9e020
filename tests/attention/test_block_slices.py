"""Parts and combinations of block masks: crop, mask[...], mask & other, mask | other; packed sequences and pages."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask

from attention import BlockMask, attention, block_sparse_attention, create_block_mask, patterns
from cute_kernels.testing.reference import normal

from .mask_parts import random_mask
from .parts import packed, qkv

S = 400
LENGTHS = (S, S)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


def captures(device="cpu", batch=2):
    """A mask_mod that depends on each index and reads a tensor."""
    ids = (torch.arange(S) // torch.tensor([[90], [130]])).int().to(device)

    def mask_mod(b, h, q, kv):
        return (ids[b, q] == ids[b, kv]) & (kv <= q) & (q - kv < 40 * (h + 1))

    return mask_mod


def whole(device="cpu", blocksize=(64, 128)) -> BlockMask:
    return create_block_mask(captures(device), 2, 4, *LENGTHS, device=device, BLOCK_SIZE=blocksize)


def as_slice(part):
    return slice(part, part + 1 or None) if isinstance(part, int) else part


@pytest.mark.parametrize(
    "index",
    [
        (0,),
        (-1, 2),
        (slice(1, 2), slice(1, None, 2)),
        (slice(None), slice(None), 6),
        (slice(None), slice(None), slice(2, 4)),
        (1, 3, slice(0, None, 3)),
        (torch.tensor([1, 0]), torch.tensor(2)),
        (slice(0, 0, 1),),
    ],
)
def test_slices_see_their_part(index):
    mask = whole()
    if index == (slice(0, 0, 1),):
        with pytest.raises(ValueError, match="B and H must be at least 1"):
            mask[index]
        return
    padded = torch.zeros(2, 4, 448, S, dtype=torch.bool)
    padded[:, :, :S] = mask.to_dense()
    expected = padded.unflatten(2, (7, 64))
    inside = (torch.arange(448) < S).view(7, 64)
    for dim, part in enumerate(index):
        part = part.view(-1) if isinstance(part, torch.Tensor) else as_slice(part)
        expected = expected[(slice(None),) * dim + (part,)]
        inside = inside[part] if dim == 2 else inside
    expected = expected.flatten(2, 3)[:, :, inside.flatten()]
    assert torch.equal(mask[index].to_dense(), expected)
    if expected.shape[:2] == (1, 1):  # one item and one head serve all, with their own positions
        assert torch.equal(mask[index].to_dense(2, 4), expected.expand(2, 4, -1, -1))


def test_rows_by_a_tensor(place):
    mask = create_block_mask(lambda b, h, q, kv: kv <= q, None, None, 512, 512, device=place)
    part = mask[:, :, torch.tensor([3, 1], dtype=torch.int32, device=place)]
    dense = mask.to_dense().unflatten(2, (4, 128))
    assert part.lengths == (256, 512) and torch.equal(part.to_dense(), dense[:, :, [3, 1]].flatten(2, 3))


def test_attention_over_a_slice(place):
    """A chunk of a prefill: the rows of two blocks, of one item and two heads."""
    mask, (q, k, v) = whole(place), qkv(S, S, heads=4, device=place)
    part = mask[1, 1:3, 2:4]
    out = block_sparse_attention(q[:, 1:3, 128:256], k[:, 1:3], v[:, 1:3], part)
    expected = block_sparse_attention(q, k, v, mask)[1:, 1:3, 128:256]
    torch.testing.assert_close(out[1:], expected)


def test_slices_without_mask_mod_or_of_all():
    mask = random_mask(LENGTHS, (64, 64), mask_mod=None)
    assert torch.equal(mask[:, 1:2].to_dense(), mask.to_dense()[:, 1:2])
    assert mask[:] is mask and mask[:, :, :] is mask
    assert patterns.causal(LENGTHS)[0].batch == 1


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        ((2,), IndexError, r"batch index must be in \[-2, 2\) .*, got 2"),
        ((0, 4), IndexError, r"head must be in \[-4, 4\) .*, got 4"),
        ((0, 0, 7), IndexError, r"row of blocks must be in \[-7, 7\) .*, got 7"),
        ((0, 0, 0, 0), IndexError, "got 4 indices"),
        (("a",), TypeError, "must be an int, a slice or an integer tensor, got str"),
        ((torch.tensor([0.5]),), TypeError, "int32 or int64"),
        ((slice(None, None, -1),), ValueError, "step of a slice must be at least 1"),
        ((0, 0, torch.tensor([1])), ValueError, "a multiple of 64, got 400 rows; use an int or a slice"),
    ],
)
def test_slices_that_are_refused(index, error, text):
    with pytest.raises(error, match=text):
        whole()[index]


def test_captured_tensors_are_checked_before_a_slice():
    ids = torch.zeros(300, dtype=torch.int32)
    mask = BlockMask.from_blocks(torch.ones(4, 4, dtype=torch.bool), mask_mod=lambda b, h, q, kv: ids[q] == ids[kv])
    with pytest.raises(IndexError, match="indexes dimension 0 of a tensor of shape .300,."):
        mask[:, :, 2]


def test_crop():
    mask = whole()
    for lengths in ((300, 300), (1, 256), (256, 1), (0, 5), LENGTHS):
        assert torch.equal(mask.crop(lengths).to_dense(), mask.to_dense()[:, :, : lengths[0], : lengths[1]])
    blocks = random_mask(LENGTHS, (64, 64), mask_mod=None)  # its full blocks become partial at the last column
    assert torch.equal(blocks.crop((200, 150)).to_dense(), blocks.to_dense()[:, :, :200, :150])
    with pytest.raises(ValueError, match="lengths must be at most the mask's lengths"):
        mask.crop((S + 1, S))


def masks_of_more(place) -> dict:
    """Masks for 512 rows and columns."""
    ids = (torch.arange(512) // 77).int().to(place)

    def mask_mod(b, h, q, kv):
        return (ids[q] == ids[kv]) & (q >= kv)

    mask = create_block_mask(mask_mod, None, None, 512, 512, device=place)
    flex = create_flex_mask(mask_mod, None, None, 512, 512, device=place)
    return {"lists": mask, "flex": flex, "causal": patterns.causal((512, 512), device=place)}


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("form", ["lists", "flex", "causal"])
def test_a_longer_mask_is_cropped(form, compiles, place):
    mask, call = masks_of_more(place)[form], [t.requires_grad_() for t in qkv(300, 300, device=place)]
    run = (
        torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
        if compiles
        else block_sparse_attention
    )
    seen = (mask if form != "flex" else BlockMask.from_flex(mask)).to_dense()[:, :, :300, :300]
    exact = BlockMask.from_elements(seen)
    dout = normal(2, 4, 300, 64, device=place).to(call[0].dtype)
    results = [f(*call, m, causal=True) for f, m in ((run, mask), (block_sparse_attention, exact))]
    torch.testing.assert_close(*results)
    for a, b in zip(*(torch.autograd.grad(out, call, dout) for out in results), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("sq", "sk"), [(1, 512), (512, 300), (300, 512), (600, 600)])
def test_other_lengths_are_refused(sq, sk):
    text = "build it for these lengths" if sq > 512 else "pass BlockMask.crop.*or BlockMask.:, :, i. for rows of blocks"
    for mask in masks_of_more("cpu").values():
        with pytest.raises(ValueError, match=text):
            block_sparse_attention(*qkv(sq, sk), mask)


def test_decoding_with_a_slice_of_flex_attention(place):
    """As in torch's examples: mask_mod and seq_lengths of the slice are set by the user."""
    mask, position = masks_of_more(place)["flex"], torch.tensor([301], device=place)
    part = mask[:, :, position // 128]
    q, k, v = qkv(1, 512, device=place)
    with pytest.raises(
        ValueError, match="A slice keeps the seq_lengths of the whole mask: set seq_lengths and mask_mod"
    ):
        block_sparse_attention(q, k, v, part)
    part.seq_lengths = (1, 512)
    with pytest.raises(TypeError, match="Cannot use mask_mod from a sliced BlockMask"):
        block_sparse_attention(q, k, v, part)
    part.mask_mod = lambda b, h, q, kv: mask.mask_mod(b, h, q + position[0], kv)
    expected = block_sparse_attention(
        q, k, v, BlockMask.from_elements(BlockMask.from_flex(mask).to_dense()[:, :, 301:302])
    )
    torch.testing.assert_close(block_sparse_attention(q, k, v, part), expected)


def test_intersections():
    mask, window = whole(), patterns.sliding_window(LENGTHS, (50, 0), (64, 128))
    assert torch.equal((mask & window).to_dense(), mask.to_dense() & window.to_dense())
    blocks = random_mask(LENGTHS, (64, 128), mask_mod=None)
    assert torch.equal((blocks & window & mask).to_dense(), blocks.to_dense() & window.to_dense() & mask.to_dense())
    for other in (
        patterns.causal((S, 300), (64, 128)),
        patterns.causal(LENGTHS),
        random_mask(LENGTHS, (64, 128), (3, 1)),
    ):
        with pytest.raises(ValueError, match="of both masks|both masks of mask & other must have the same"):
            mask & other
    with pytest.raises(TypeError):
        mask & 3


def test_unions():
    window = patterns.sliding_window(LENGTHS, (50, 0), (64, 128))
    blocks, mask = random_mask(LENGTHS, (64, 128), mask_mod=None), whole()
    # Its function sees all elements, also in blocks that it does not list.
    chosen = random_mask(LENGTHS, (64, 128), mask_mod=lambda b, h, q, kv: (q + kv + h) % 3 > 0)
    for first, second in ((mask, window), (blocks, window), (chosen, window), (chosen, blocks), (chosen, mask)):
        expected = first.to_dense() | second.to_dense()
        assert torch.equal((first | second).to_dense(), expected) and torch.equal((second | first).to_dense(), expected)
    first, second = (BlockMask.from_blocks(t, mask_mod=chosen.mask_mod) for t in torch.rand(2, 3, 3) > 0.5)
    assert (first | second).mask_mod is chosen.mask_mod
    assert torch.equal((first | second).to_dense(), first.to_dense() | second.to_dense())
    with pytest.raises(ValueError, match=r"both masks of mask \| other must have the same blocksize"):
        mask | patterns.causal(LENGTHS)
    with pytest.raises(TypeError):
        mask | 3


def test_attention_over_a_union(place):
    q, k, v = qkv(S, S, heads=4, device=place)
    blocks = (torch.rand(1, 4, 4, 4) > 0.6).to(place)
    first = BlockMask.from_blocks(blocks, lengths=(S, S), mask_mod=lambda b, h, q, kv: (q + kv) % 3 > 0)
    mask = first | patterns.sliding_window((S, S), (50, 0), device=place)
    out = block_sparse_attention(q, k, v, mask)
    expected = block_sparse_attention(q, k, v, BlockMask.from_elements(mask.to_dense()))
    torch.testing.assert_close(out, expected)


@dataclass(frozen=True)
class Documents:
    """For a dataclass that compares its tensors."""

    ids: torch.Tensor

    def __call__(self, b, h, q, kv):
        return self.ids[q] == self.ids[kv]


def test_intersection_of_masks_of_one_class():
    masks = [create_block_mask(Documents(torch.arange(S) // size), None, None, S, S) for size in (70, 100)]
    first, second = (mask.to_dense() for mask in masks)
    assert torch.equal((masks[0] & masks[1]).to_dense(), first & second)


def test_packed_sequences(place):
    """The advice of the error for cu_seqlens, against attention with cu_seqlens."""
    q, k, v, cu_q, cu_k = packed([40, 300, 110], [40, 200, 110], device=place).values()
    every = BlockMask.from_blocks(torch.ones(4, 3, dtype=torch.bool, device=place), lengths=(450, 350))
    with pytest.raises(TypeError, match="patterns.packed_documents"):
        block_sparse_attention(q, k, v, every, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    mask = every & patterns.packed_documents(cu_q, cu_k, lengths=(450, 350), causal=True)
    out = block_sparse_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), mask)
    expected = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, atol=2e-2, rtol=2e-2)


def test_pages(place):
    """The advice of the error for a page_table, against attention with pages."""
    q, page_table = qkv(3, 1, device=place)[0], torch.tensor([[4, 1, 0], [3, 5, 2]], dtype=torch.int32, device=place)
    k, v = (normal(6, 2, 64, 64, device=place).to(q.dtype) for _ in range(2))
    lengths = torch.tensor([150, 70], dtype=torch.int32, device=place)
    mask = create_block_mask(lambda b, h, q, kv: kv <= q + lengths[b] - 3, 2, None, 3, 192, device=place)
    with pytest.raises(TypeError, match="gather the pages"):
        block_sparse_attention(q, k, v, mask, seqused_k=lengths, page_table=page_table)
    gathered = (t.transpose(0, 1)[:, page_table].transpose(0, 1).flatten(2, 3) for t in (k, v))
    out = block_sparse_attention(q, *gathered, mask)
    expected = attention(q, k, v, seqused_k=lengths, page_table=page_table, causal=True)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_other_keywords_are_refused():
    call = *qkv(), patterns.causal((200, 200))
    with pytest.raises(TypeError, match="has no argument 'window_size'; pass block_mask & patterns.sliding_window"):
        block_sparse_attention(*call, window_size=(5, 0))
    with pytest.raises(TypeError, match="has no argument 'dropout'$"):
        block_sparse_attention(*call, dropout=0.1)
