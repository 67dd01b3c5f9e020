"""BlockMask.from_indices with entries that are no block: forward and backward, masks made of it, and errors."""

import copy
import pickle

import pytest
import torch

from attention import BlockMask, block_sparse_attention, torch_op
from attention.backward.dispatch import ranks_of
from attention.block_sparse import with_causal
from cute_kernels.testing.reference import normal, poisoned_empty

from ..emulator.ops import needs_compiler, on_emulator
from .parts import assert_right, qkv
from .test_gradients import check as check_gradients
from .test_gradients import machine_fixture as machine_fixture

LENGTHS = 192, 320
NO_BLOCKS = (-1, -(2**31), 5, 31, 40, 2**30, 2**31 - 1)
EMULATED = [pytest.param(arch, marks=[needs_compiler, getattr(pytest.mark, arch)]) for arch in ("sm_80", "sm_90")]


def indices_with_holes(device="cpu") -> torch.Tensor:
    """(1, 2, 3, 4) columns below 5, of which some are no block, and of one row all."""
    columns = torch.rand(1, 2, 3, 5, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :4].int()
    holes = torch.tensor(NO_BLOCKS * 4, dtype=torch.int32)[:24].view_as(columns)
    columns = torch.where(torch.arange(24).view_as(columns) % 3 == 0, holes, columns)
    columns[0, 1, 1] = holes[0, 1, 1]
    return columns.to(device)


def upper(b, h, q, kv):
    return kv >= q


def padded(device="cpu", lengths=LENGTHS, mask_mod=None, **terms) -> BlockMask:
    terms = {"lengths": lengths, "mask_mod": mask_mod, "padded": True} | terms
    return BlockMask.from_indices(indices_with_holes(device), (64, 64), **terms)


TERMS = {"": {}, "mask_mod": {"mask_mod": upper}, "a cut block": {"lengths": (192, 300)}}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_tables(terms):
    """The tables of a mask, and of what is made of it, are those of a mask from a bool tensor."""
    mask, indices = padded(**terms), indices_with_holes()
    blocks = (indices[..., None] == torch.arange(5)).any(-2)
    true = BlockMask.from_blocks(blocks, (64, 64), lengths=mask.lengths, mask_mod=mask.mask_mod)
    assert torch.equal(mask.to_dense(), true.to_dense()) and mask.block_density() == true.block_density()
    assert torch.equal(mask.to_flex().to_dense(), true.to_flex().to_dense())
    assert torch.equal(ranks_of(mask), ranks_of(true))
    for change in (with_causal, lambda m: m[:, 1:], lambda m: m.crop((128, 250)), lambda m: m & true):
        assert torch.equal(change(mask).to_dense(), change(true).to_dense())
    rebuilt = torch_op.block_mask_of(*torch_op.crossing(mask))
    assert rebuilt.equal_rows and torch.equal(rebuilt.to_dense(), true.to_dense())


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("where", ["cpu", *EMULATED])
def test_forward(where, terms):
    mask = padded(**terms)
    q, k, v = qkv(*mask.lengths, B=1, H=2, heads=1)
    with poisoned_empty():
        if where == "cpu":
            out, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
        else:
            with on_emulator(where, sms=2):
                out, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
    assert_right(out, lse, q, k, v, block_mask=mask)
    assert not out[0, 1, 64:128].any() and (lse[0, 1, 64:128] == -torch.inf).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(machine, deterministic):
    device, kernels, _ = machine
    mask = padded(device)
    q, k, v = (t.requires_grad_() for t in qkv(*LENGTHS, B=1, heads=1, H=2, device=device))
    out = block_sparse_attention(q, k, v, mask, deterministic=deterministic)
    dout = normal(*out.shape, device=device)
    with kernels(), poisoned_empty():
        got = torch.autograd.grad(out, (q, k, v), dout)
    check_gradients(got, q, k, v, mask.to_dense(1, 2), dout, None)


@pytest.mark.parametrize("where", EMULATED)
def test_without_padded_only_its_own_rows_are_affected(where):
    """An entry that is no block counts there as keys and values that are 0, and nothing is read outside of K and V."""
    q, k, v = qkv(*LENGTHS, B=1, H=2, heads=1)
    indices = indices_with_holes()
    mask = BlockMask.of_equal_rows(indices, True, lengths=LENGTHS, blocksize=(64, 64))
    with on_emulator(where, sms=2), poisoned_empty():
        out, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
    longer = [torch.cat([t, torch.zeros(1, 1, 4 * 64, 64)], 2) for t in (k, v)]  # a block of zeros for each entry
    places = torch.where((indices >= 0) & (indices < 5), indices, torch.arange(5, 9, dtype=torch.int32))
    true = BlockMask.from_indices(places, (64, 64), lengths=(LENGTHS[0], 9 * 64))
    assert_right(out, lse, q, *(t.to(q.dtype) for t in longer), block_mask=true)


def test_masks_made_of_them():
    """Slices, copies and FlexAttention's masks list the same blocks, and these lists are valid."""
    mask = padded(lengths=(192, 256))  # 4 columns, as wide as the lists
    partial, full = mask.tables()
    for made, which in ((mask[:, 1], slice(1, 2)), (mask[:, :, :], slice(None)), (copy.deepcopy(mask), slice(None))):
        assert torch.equal(made.tables()[0], partial[:, which]) and torch.equal(made.tables()[1], full[:, which])
        flex = made.to_flex()
        assert 0 <= flex.kv_indices.min() and flex.kv_indices.max() < 4
        assert torch.equal(BlockMask.from_flex(flex).tables()[0], partial[:, which])
    assert torch.equal(pickle.loads(pickle.dumps(mask)).kv_indices, mask.kv_indices)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("where", EMULATED)
def test_tensors_are_not_read_past_their_ends(where, full):
    """Tensors of a score_mod and FP8 scales of 128 keys; without masked elements the values do not count."""
    q, k, v = qkv(128, 384, B=1, H=1, heads=1)
    bias, scales = torch.randn(384), torch.rand(3, 1, 1, 3) + 0.5
    columns = torch.tensor([[[[0, 1, -1], [1, 2**30, 0]], [[0, 1, 1], [1, 0, 0]]]], dtype=torch.int32)
    calls = [((q, k, v), {"score_mod": lambda score, b, h, q, kv: score + bias[kv]})]
    if where == "sm_90":
        names = ("q_descale", "k_descale", "v_descale")
        terms = dict(zip(names, (scales[0, ..., :1], scales[1], scales[2]), strict=True))
        calls.append((tuple(t.to(torch.float8_e4m3fn) for t in (q, k, v)), terms))
    for operands, terms in calls:
        found = []
        for rows in (columns[:, :1], columns[:, 1:, :, :2]):  # with what is no block, and without
            mask = BlockMask.of_equal_rows(rows.contiguous(), full, lengths=(128, 384), blocksize=(64, 128))
            with on_emulator(where, sms=2), poisoned_empty():
                found.append(block_sparse_attention(*operands, mask, **terms))
        assert torch.isfinite(found[0]).all() and (full or torch.equal(*found))


def test_errors():
    indices = indices_with_holes()
    with pytest.raises(IndexError, match=r"indices\[0, 0, 0, 0\] must be in \[0, 5\), .* got -1; pass padded=True"):
        BlockMask.from_indices(indices, (64, 64), lengths=LENGTHS)
    indices[:] = torch.arange(4)
    indices[0, 1, 2, 3] = 5
    with pytest.raises(IndexError, match=r"indices\[0, 1, 2, 3\] must be in \[0, 5\), .* got 5"):
        BlockMask.from_indices(indices, (64, 64), lengths=LENGTHS, mask_mod=upper)
    assert BlockMask.from_indices(indices, (64, 64), lengths=LENGTHS, padded=True).equal_rows
    assert BlockMask.from_indices(indices.to("meta"), (64, 64), lengths=LENGTHS).equal_rows


def test_under_torch_compile():
    q, k, v = qkv(*LENGTHS, B=1, H=2, heads=1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v, indices):
        mask = BlockMask.from_indices(indices + 0, (64, 64), lengths=LENGTHS, padded=True)
        return block_sparse_attention(q, k, v, mask) * 1

    torch._dynamo.reset()
    assert torch.equal(compiled(q, k, v, indices_with_holes()), block_sparse_attention(q, k, v, padded()))
