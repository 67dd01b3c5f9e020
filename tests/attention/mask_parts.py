"""Helpers of the tests of block masks: element masks and comparisons with them; masks as users hold them."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from attention import BlockMask, block_sparse_attention, torch_op
from attention.masks import block_lists
from cute_kernels.testing.reference import normal
from sparse_collective.bsr import BsrMatrix

from .parts import qkv

BLOCKSIZES = [(64, 64), (64, 128), (128, 64), (128, 128)]
LENGTHS = [(256, 384), (300, 200), (200, 333), (129, 129), (1, 500), (65, 1)]
blocksizes, lengths_ = st.sampled_from(BLOCKSIZES), st.tuples(st.integers(1, 400), st.integers(1, 400))
fuzz = settings(deadline=None, max_examples=40)


def positions(sq, sk):
    """(position of each row (Sq, 1), column (Sk,))."""
    return torch.arange(sk - sq, sk)[:, None], torch.arange(sk)


def blocks_of(dense, blocksize):
    """(some, every) bool (..., Mq, Mk) of an element mask, by a loop; past the last row there is nothing to see."""
    (sq, sk), (bq, bk) = dense.shape[-2:], blocksize
    rows, cols = -(-sq // bq), -(-sk // bk)
    some, every = torch.zeros(2, *dense.shape[:-2], rows, cols, dtype=torch.bool)
    for r in range(rows):
        for c in range(cols):
            block = dense[..., r * bq : (r + 1) * bq, c * bk : (c + 1) * bk]
            some[..., r, c] = block.flatten(-2).any(-1)
            every[..., r, c] = block.flatten(-2).all(-1) & ((c + 1) * bk <= sk)
    return some, every


def assert_exact(mask, dense):
    """The mask sees `dense`, computes no block in vain, and no block is partial that could be full."""
    dense = dense[(None,) * (4 - dense.dim())]
    assert torch.equal(mask.to_dense(), dense)
    some, every = blocks_of(dense, mask.blocksize)
    partial, full = mask.tables()
    assert torch.equal(full, every) and torch.equal(partial, some & ~every)
    assert not block_lists.flags(mask).any()


def elements(blocks, blocksize, lengths):
    dense = blocks.repeat_interleave(blocksize[0], -2).repeat_interleave(blocksize[1], -1)
    return dense[..., : lengths[0], : lengths[1]]


def by_head(b, h, q, kv):
    return (kv <= q) & (q - kv < 100 * (h + 1)) | (kv < 8 * b)


def random_mask(lengths, blocksize, heads=(2, 4), density=0.4, mask_mod=by_head, full=True, device="cpu"):
    """Some blocks partial, some full, some rows empty. With `full` mask_mod does not see all of full blocks."""
    rows, cols = (-(-n // side) for n, side in zip(lengths, blocksize, strict=True))
    blocks, partial = torch.rand(*heads, rows, cols) < density, torch.rand(*heads, rows, cols) < 0.5
    blocks[..., 0, :] &= torch.arange(heads[1])[:, None] != 1
    partial = partial.to(device) if mask_mod and full else None
    return BlockMask.from_blocks(blocks.to(device), blocksize, lengths=lengths, partial=partial, mask_mod=mask_mod)


# Masks that users hold

N = 384  # rows and columns of the scores, three blocks of 128
FIRST = ~torch.eye(3, dtype=torch.bool)
SECOND = FIRST.roll(1, 1)  # as many in each row
FORMS = ["flex", "bool", "bsr", "torch bsr"]
LISTS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]


def operands(device="cpu", Sq=N, Sk=N):
    return qkv(Sq, Sk, heads=4, device=device)


def held(form: str, blocks=FIRST, device="cpu"):
    """The blocks as what a user holds."""
    if form == "flex":
        return BlockMask.from_blocks(blocks.to(device)).to_flex()
    if form == "bool":
        return blocks.to(device).clone()
    W = BsrMatrix.from_dense(normal(N, N, device=device), (128, 128), mask=blocks.to(device))
    return W if form == "bsr" else W.to_torch()


def parts(form: str, mask) -> list[torch.Tensor]:
    if form == "flex":
        return [getattr(mask, name) for name in LISTS]
    if form == "bool":
        return [mask]
    return [mask.col_indices] if form == "bsr" else [mask.col_indices()]


def write(form: str, mask, blocks=SECOND) -> None:
    """Change it in place."""
    with torch.no_grad():
        other = held(form, blocks, parts(form, mask)[0].device)
        for old, new in zip(parts(form, mask), parts(form, other), strict=True):
            old.copy_(new)


def right(call, mask, blocks, run=block_sparse_attention) -> bool:
    expected = block_sparse_attention(*call, BlockMask.from_blocks(blocks.to(call[0].device)))
    return torch.equal(run(*call, mask), expected)


@pytest.fixture(name="conversions")
def conversions_fixture(monkeypatch) -> list:
    """Grows by one with each conversion, whichever way it goes: all make new tables or a new BlockMask of lists."""
    made, depth = [], []

    def spied(owner, name):
        real = getattr(owner, name)

        def spy(*args, **kwargs):
            made.extend([name] * (not depth))
            depth.append(name)
            try:
                return real(*args, **kwargs)
            finally:
                depth.pop()

        monkeypatch.setattr(owner, name, staticmethod(spy) if owner is BlockMask else spy)

    for name in ("from_flex", "from_blocks", "from_bsr"):
        spied(BlockMask, name)
    spied(torch_op.convert, "tables_of_flex")
    return made


def count(made: list, call, *args, **terms) -> int:
    before = len(made)
    call(*args, **terms)
    return len(made) - before


def packed_function(function, positions, sequences):
    """A mask function of transformers in packed sequences, as it composes one: before 5.18 or so without positions."""
    from transformers import masking_utils as hf

    if made := getattr(hf, "packed_sequence_compatibility_function", None):
        return made(function, positions, sequences)
    return hf.and_masks(function, hf.packed_sequence_mask_function(sequences))
