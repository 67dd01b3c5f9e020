"""What the tests of block masks share: element masks, and the comparison of a mask with one."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from attention.masks import block_lists

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
