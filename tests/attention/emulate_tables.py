"""Torch in the place of the kernels that make the tables of selected blocks, and transposed lists."""

import torch

from attention.masks.block_lists import lists_of, table_of
from attention.selected.blocks import SIDE, tables_of
from attention.selected.tables.config import OrderFacts

from ..signatures import insist_on_arguments


class EmulatedTables:
    """The function that stands for the compiled kernel of some facts."""

    def __init__(self, facts):
        self.facts = facts

    def __call__(self, *args):
        insist_on_arguments(self.facts, args)
        (make_order if isinstance(self.facts, OrderFacts) else self.make_tables)(*args)

    def make_tables(self, indices, words, counts, columns, first, end, kv_blocks, n_cols, packed, side, shift, copies):
        """`columns` past the counts are left as they are."""
        size = self.facts.block_size
        true_words, listed = tables_of(indices, size, first, end, kv_blocks * size, packed, side)
        words.copy_(true_words)
        last = (torch.arange(1, counts.shape[2] + 1) * side - 1) // packed + shift
        listed = listed[..., :n_cols] & (torch.arange(n_cols) * SIDE <= last[:, None])
        listed = listed.repeat_interleave(copies, 1)
        counts.copy_(listed.sum(-1))
        assert counts.max() <= columns.shape[3]
        for b, h, m in listed.any(-1).nonzero().tolist():
            found = listed[b, h, m].nonzero()[:, 0]
            columns[b, h, m, : len(found)] = found


class EmulatedTranspose:
    """The same for transposed lists."""

    def __init__(self, facts):
        self.facts = facts

    def __call__(self, *args):
        insist_on_arguments(self.facts, args)
        (make_bitmaps if self.facts.rows else transpose)(*args)


def make_bitmaps(counts, columns, bits):
    listed = torch.arange(columns.shape[3]) < counts[..., None]
    assert (columns[listed] >= 0).all() and (columns[listed] < bits.shape[3] * 32).all()
    table = table_of(counts, columns.masked_fill(~listed, 0), bits.shape[3] * 32).unflatten(-1, (-1, 32))
    bits.copy_((table.long() << torch.arange(32)).sum(-1))


def transpose(bits, counts, rows):
    table = (bits[..., None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(-2).mT.bool()  # (B, H, columns, Mq)
    assert not table[:, :, counts.shape[2] :].any()
    count, index = lists_of(table[:, :, : counts.shape[2]])
    counts.copy_(count)
    rows.copy_(index)


def make_order(counts, table, heads, tiles_m, tiles_q, l2_heads):
    batch = len(table) // (heads * tiles_m)
    row = tiles_m - 1 - torch.arange(tiles_m)
    counts = counts.expand(batch, heads, -1)[..., row // tiles_q].flatten(0, 1)  # (heads, tiles from the last one on)
    numbers = torch.arange(batch * heads * tiles_m).view(-1, tiles_m)
    order = torch.cat([part.mT.flatten() for part in numbers.split(l2_heads)])
    table.copy_(torch.stack([order, *[counts.flatten()[order]] * 2], -1))
