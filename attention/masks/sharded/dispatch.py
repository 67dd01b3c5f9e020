"""Launch the kernels that deal the tiles of a block mask to processes."""

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.runtime import families
from cute_kernels.runtime.device import device_arch, plans_kernel

from ..block_mask import BlockMask
from . import family  # noqa: F401 (importing it registers the family)
from .config import MOST_SIZE, MOST_TILES, MOST_WORDS, WORD, ShardFacts

MOST_BLOCKS = 2**31  # their number is int32


class Dealt(NamedTuple):
    """Some deals of a mask's tiles to processes.

    tiles: (deals, tiles) int64, the tiles of each process in turn, ascending. Unless a deal has all, others follow.
    places: (deals, size, tiles) int32, the place of each tile in the buffer of a process, -1 if it does not get it.
    counts: (deals, size, 1 + size) int32, the blocks of a process, and how many tiles it gets of each.
    """

    tiles: Tensor
    places: Tensor
    counts: Tensor


class Moves(NamedTuple):
    """The tiles of one process that move, see ContextParallelPlan, and the lists of its mask: counts and columns of
    partial blocks, and those of full ones."""

    own: Tensor
    sends: Tensor
    buffer: Tensor
    numbers: tuple[Tensor, Tensor]
    lists: tuple[Tensor, ...]


def supports(mask: BlockMask, tiles: int, size: int) -> bool:
    """True if the kernels deal this many tiles to `size` processes."""
    blocks = mask.batch * mask.heads * mask.n_block_rows * mask.n_block_cols
    limits = blocks < MOST_BLOCKS and size <= MOST_SIZE and size * -(-tiles // WORD) <= MOST_WORDS
    return plans_kernel(mask.device) and 0 < tiles <= MOST_TILES and limits


def dealt(
    mask: BlockMask, tile: int, owners: Tensor, cuts: Tensor, order: Tensor, balanced: int, piece: int, capacity: int
) -> Dealt:
    """Deal the tiles of a mask, and count what the processes need of each other. Does not synchronize.

    Args:
        owners: (deals, tiles) int32, the process that has a tile, or -1.
        cuts: (cuts, 3) int32, see distributed.deal.cuts_of.
        order: (size,) int32, the processes that have the pieces that are cut.
        balanced, piece: the deal that is computed by these cuts, or -1, and its tiles of a process.
        capacity: tiles that a process gets of each other, whether it needs them or not, but all that it needs; or -1,
            those that it needs.
    """
    deals, total = owners.shape
    size = len(order)
    empty = mask.kv_num_blocks.new_empty
    bits, work = empty(total, -(-total // WORD)), empty(total)
    arch = device_arch(mask.kv_num_blocks.get_device())[0].target
    function = families.function_for(ShardFacts(arch, "rows"))
    function(mask.lists(), bits, work, tile // mask.blocksize[0], tile // mask.blocksize[1], mask.n_block_cols)
    tiles = empty(deals, total, dtype=torch.int64)
    deals_made = Dealt(tiles, empty(deals, size, total), empty(deals, size, 1 + size))
    function = families.function_for(ShardFacts(arch, "deals"))
    function(bits, work, owners, cuts, order, *deals_made, balanced, piece, capacity)
    return deals_made


def listed(
    mask: BlockMask, tile: int, tiles: Tensor, places: Tensor, counts: Tensor, rank: int, sizes: tuple[int, int, int]
) -> Moves:
    """The moves of a process by one of the deals. Does not synchronize.

    Args:
        tiles: (size, tiles of one) int64, those of a deal.
        places, counts: see Dealt, of this deal.
        sizes: number of tiles in own, sends and buffer.
    """
    block_q, block_k = mask.blocksize
    per_row, per_column, each = tile // block_q, tile // block_k, tiles.shape[1]
    empty, shape = counts.new_empty, (2, mask.batch, mask.heads, each * per_row)
    moved, numbers = tiles.new_empty(sum(sizes)), (empty(each), empty(sizes[2]))
    count, index = empty(shape), empty(*shape, sizes[2] * per_column)
    cut_row = mask.n_block_rows - 1 if mask.lengths[0] % block_q else -1
    function = families.function_for(ShardFacts(device_arch(counts.get_device())[0].target, "lists"))
    outputs = moved, *numbers, count, index
    function(mask.lists(), tiles, places, counts, *outputs, rank, per_row, per_column, cut_row, mask.n_block_cols)
    own, sends, buffer = moved.split(sizes)
    return Moves(own, sends, buffer, numbers, (count[0], index[0], count[1], index[1]))
