"""Tiles of K and V that each process needs from which other, and the mask of a process over its buffer.

Everything is computed on the mask's device from one table of its blocks. The host reads one tensor: the work of each
process, and the number of tiles that it needs of each other, for all deals that are tried. Tables have a row and a
column of blocks for each tile, those of the empty tiles and one more, which no process has.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..masks import block_lists
from ..masks.block_mask import BlockMask
from ..masks.mask_mods import AtPositions, Band


def tables_of(mask: BlockMask, tile: int, count: int) -> Tensor:
    """(partial, full) blocks, bool (2, B, H, rows, columns): those of `count` tiles and of one that is empty.

    A row of blocks that ends past the last row of scores has partial blocks only.
    """
    rows, columns = (count + 1) * tile // mask.blocksize[0], (count + 1) * tile // mask.blocksize[1]
    tables = torch.zeros(2, mask.batch, mask.heads, rows, columns, dtype=torch.bool, device=mask.device)
    indices = mask.kv_indices, mask.full_kv_indices
    used = tables[:, :, :, : mask.n_block_rows]
    block_lists.mark(used[0], mask.kv_num_blocks, indices[0])
    if indices[0] is not indices[1]:  # else there are no full blocks
        block_lists.mark(used[1], mask.full_kv_num_blocks, indices[1])
    used[..., -1].zero_()
    if mask.lengths[0] % mask.blocksize[0]:
        last = used[:, :, :, -1]
        last[0] |= last[1]
        last[1].zero_()
    return tables


def listed_of(tables: Tensor, count: int) -> Tensor:
    """The number of blocks of each tile of scores, float64 (count + 1, count + 1), of all heads together."""
    each = tables.unflatten(4, (count + 1, -1)).unflatten(3, (count + 1, -1))
    return each.sum((0, 1, 2, 4, 6), dtype=torch.float64)  # integers, exact; not cast by autocast


def needs_of(listed: Tensor, work: Tensor, tried: Sequence[Tensor]) -> tuple[Tensor, list, list]:
    """Count what the processes need of each other by each deal. Synchronizes, once.

    Args:
        listed: (tiles + 1, tiles + 1), see listed_of; its last row and column are 0.
        work: (tiles + 1,) float64, blocks of each row of tiles.
        tried: the deals, int64 (size, tiles of one) each.

    Returns:
        need: (deals, size, tiles + 1) float64, 1 for the tiles of K and V that a process needs.
        loads: for each deal and process, blocks that it computes.
        counts: for each deal and process, how many tiles it needs of each process.
    """
    size, empty = len(tried[0]), len(listed) - 1
    most = max(tiles.shape[1] for tiles in tried)
    pad = torch.nn.functional.pad
    deals = torch.stack([t if t.shape[1] == most else pad(t, (0, most - t.shape[1]), value=empty) for t in tried])
    owned = listed.new_zeros(len(tried), size, empty + 1).scatter_(2, deals, 1.0)
    need = torch.matmul(owned, listed).clamp_(max=1)
    host = torch.cat([torch.matmul(owned, work)[..., None], torch.matmul(need, owned.mT)], 2).tolist()
    return need, [[row[0] for row in deal] for deal in host], [[[*map(int, row[1:])] for row in deal] for deal in host]


def moves_of(need: Tensor, tiles: Tensor, rank: int, counts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """(own, sends, buffer) of ContextParallelPlan, from the needs (size, tiles + 1) by this deal. Does not synchronize.

    Args:
        counts: of needs_of.
    """
    order = torch.cat([tiles[rank], tiles[:rank].flatten(), tiles[rank + 1 :].flatten()])
    wanted = torch.nonzero_static(need[rank].index_select(0, order), size=sum(counts[rank]))[:, 0]
    asked = need.index_select(1, tiles[rank])
    asked[rank].zero_()
    total = sum(row[rank] for process, row in enumerate(counts) if process != rank)
    sends = torch.nonzero_static(asked, size=total)[:, 1].contiguous()  # by receiver, ascending
    return wanted[: counts[rank][rank]], sends, order.index_select(0, wanted)


def local_mask(
    mask: BlockMask,
    tables: Tensor,
    tile: int,
    rows: Tensor,
    columns: Tensor,
    numbers: tuple[Tensor, Tensor],
    ragged: bool,
) -> BlockMask:
    """The mask of query tiles `rows` over the tiles `columns` of K and V, int64, and in int32 as `numbers`.

    ragged: True if some tiles may have padding.
    """
    block_q, block_k = mask.blocksize
    q, k = blocks_of(rows, tile // block_q), blocks_of(columns, tile // block_k)
    count, index = block_lists.lists_of(tables.index_select(3, q).index_select(4, k))
    mask_mod = mask.mask_mod
    if mask_mod is not None or ragged:
        mask_mod = AtPositions(mask_mod or Band(None, None), *numbers, tile, mask.lengths[0] if ragged else None)
    lengths = len(rows) * tile, len(columns) * tile
    lists = count[0], index[0], count[1], index[1]
    return BlockMask(*lists, lengths=lengths, blocksize=mask.blocksize, mask_mod=mask_mod, check=False)


def blocks_of(tiles: Tensor, each: int) -> Tensor:
    """The blocks of tiles, or their tokens, of which each has so many."""
    if each == 1:
        return tiles
    return (tiles[:, None] * each + torch.arange(each, device=tiles.device)).flatten()
