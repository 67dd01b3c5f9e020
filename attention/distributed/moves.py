"""Tiles of K and V that each process needs from which other, and the block lists of a process over its buffer.

Everything is computed on the mask's device. The host reads one tensor: the work of each process, and the number of
tiles that it needs of each other, for all deals that are tried. On a GPU three kernels compute it, ByKernels. By torch,
it comes from one table of the mask's blocks, ByTorch. Tables have a row and a column of blocks for each tile, those of
the empty tiles and one more, which no process has.

With a capacity, the host knows these numbers: needs are filled with tiles that are not needed, the first ones first,
until each process gets as many of each other, and all of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.runtime.derived import Derived, captured
from cute_kernels.runtime.torch_compat import assert_on_gpu, in_graph_trace

from ..masks import block_lists
from ..masks.block_mask import BlockMask
from ..masks.sharded import dispatch as kernels
from ..masks.sharded.dispatch import Moves
from . import deal as dealing

CONSTANTS = Derived()  # owners, cuts and order of sharded.dispatch


class ByTorch:
    """The deals that are tried, by torch operations. Synchronizes once; with a capacity it does not synchronize.

    Attributes:
        tiles: for each deal, int64 (size, tiles of one), ascending.
        loads, counts: see numbers_of; with a capacity there are no loads.
    """

    def __init__(
        self, mask: BlockMask, tile: int, size: int, names: Sequence[str], total: int, tiles: Tensor | None,
        capacity: int | None,
    ):  # fmt: skip
        """tiles: those of the only deal, whose tiles are known; None: deals of `names`. total: of the longest deal."""
        self.mask, self.tile, self.tables = mask, tile, tables_of(mask, tile, total)
        listed = listed_of(self.tables, total)
        work, count = listed.sum(1), -(-mask.lengths[0] // tile)
        self.tiles = [dealing.dealt(work[:count], size, name) for name in names] if tiles is None else [tiles]
        owned, self.need = needs_of(listed, self.tiles)
        if capacity is None:
            self.loads, self.counts = numbers_of(owned, self.need, work)
        else:
            self.loads, self.counts = [], [counts_of(size, total // size, capacity)]
            fill(self.need[0], self.tiles[0], capacity)

    def moves(self, deal: int, rank: int) -> Moves:
        """Moves of a process by one of the deals. Does not synchronize."""
        tiles = self.tiles[deal]
        own, sends, buffer = moves_of(self.need[deal], tiles, rank, self.counts[deal])
        block_q, block_k = self.mask.blocksize
        q, k = blocks_of(tiles[rank], self.tile // block_q), blocks_of(buffer, self.tile // block_k)
        count, index = block_lists.lists_of(self.tables.index_select(3, q).index_select(4, k))
        lists = count[0], index[0], count[1], index[1]
        return Moves(own, sends, buffer, (tiles[rank].int(), buffer.int()), lists)


class ByKernels:
    """The same by kernels."""

    def __init__(
        self, mask: BlockMask, tile: int, size: int, names: Sequence[str], total: int, tiles: Tensor | None,
        capacity: int | None,
    ):  # fmt: skip
        self.mask, self.tile = mask, tile
        count, device = -(-mask.lengths[0] // tile), mask.device
        names = names if tiles is None else ()
        piece = dealing.padded(count, size, "balanced") // size

        def make() -> tuple[Tensor, ...]:
            cuts, order = (torch.tensor(each, device="cpu") for each in dealing.cuts_of(piece * size, size))
            owners = torch.full((len(names), total), -1, device="cpu")
            for row, name in zip(owners, names, strict=True):
                if name != "balanced":
                    dealt = dealing.dealt(torch.zeros(count, device="cpu"), size, name)
                    row[: dealt.numel()] = dealt.flatten().argsort() // dealt.shape[1]
            return tuple(table.int().to(device) for table in (owners, cuts.view(-1, 3), order))

        key = device, count, size, total, *names
        if captured(mask.kv_num_blocks) and key not in CONSTANTS.kept:
            raise RuntimeError(
                "plan_context_parallel: before a CUDA graph captures it, plan once with this deal and these numbers of "
                "tokens and processes"
            )
        owners, cuts, order = CONSTANTS.get(key, mask.kv_num_blocks, make, tuple)
        if tiles is not None:
            owners = (tiles.flatten().argsort() // tiles.shape[1]).int()[None]
        balanced = names.index("balanced") if "balanced" in names else -1
        most = -1 if capacity is None else capacity
        self.dealt = kernels.dealt(mask, tile, owners, cuts, order, balanced, piece, most)
        lengths = [dealing.padded(count, size, name) for name in names] if tiles is None else [total]
        self.tiles = [row[:n].view(size, -1) for row, n in zip(self.dealt.tiles, lengths, strict=True)]
        if capacity is not None:
            self.loads, self.counts = [], [counts_of(size, total // size, capacity)]
            counts = self.dealt.counts[0, :, 1:]  # each at least as large as in self.counts
            check_fits(counts.sum() <= size * (total // size + (size - 1) * capacity), counts)
            return
        host = self.dealt.counts.tolist()  # what follows, the GPU waits for
        self.loads = [[row[0] for row in deal] for deal in host]
        self.counts = [[row[1:] for row in deal] for deal in host]

    def moves(self, deal: int, rank: int) -> Moves:
        counts, (_, places, needs) = self.counts[deal], self.dealt
        own, total = counts[rank][rank], sum(row[rank] for row in counts)
        sizes = own, total - own, sum(counts[rank])
        return kernels.listed(self.mask, self.tile, self.tiles[deal], places[deal], needs[deal], rank, sizes)


def tables_of(mask: BlockMask, tile: int, count: int) -> Tensor:
    """(partial, full) blocks, bool (2, B, H, rows, columns): those of `count` tiles and of one that is empty.

    A row of blocks that ends past the last row of scores has partial blocks only.
    """
    rows, columns = (count + 1) * tile // mask.blocksize[0], (count + 1) * tile // mask.blocksize[1]
    tables = torch.zeros(2, mask.batch, mask.heads, rows, columns, dtype=torch.bool, device=mask.device)
    indices, cols = (mask.kv_indices, mask.full_kv_indices), mask.n_block_cols
    used = tables[:, :, :, : mask.n_block_rows]
    block_lists.mark(used[0], mask.kv_num_blocks, indices[0], cols)
    if indices[0] is not indices[1]:  # else there are no full blocks
        block_lists.mark(used[1], mask.full_kv_num_blocks, indices[1], cols)
    used[..., cols].zero_()
    if mask.lengths[0] % mask.blocksize[0]:
        last = used[:, :, :, -1]
        last[0] |= last[1]
        last[1].zero_()
    return tables


def listed_of(tables: Tensor, count: int) -> Tensor:
    """The number of blocks of each tile of scores, float64 (count + 1, count + 1), of all heads together."""
    each = tables.unflatten(4, (count + 1, -1)).unflatten(3, (count + 1, -1))
    return each.sum((0, 1, 2, 4, 6), dtype=torch.float64)  # integers, exact; not cast by autocast


def needs_of(listed: Tensor, tried: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what the processes have and need by each deal. Does not synchronize.

    Args:
        listed: (tiles + 1, tiles + 1), see listed_of; its last row and column are 0.
        tried: the deals, int64 (size, tiles of one) each.

    Returns:
        owned, need: (deals, size, tiles + 1) float64, 1 for the tiles that a process has, and those of K and V that it
            needs.
    """
    size, empty = len(tried[0]), len(listed) - 1
    most = max(tiles.shape[1] for tiles in tried)
    pad = torch.nn.functional.pad
    deals = torch.stack([t if t.shape[1] == most else pad(t, (0, most - t.shape[1]), value=empty) for t in tried])
    owned = listed.new_zeros(len(tried), size, empty + 1).scatter_(2, deals, 1.0)
    return owned, torch.matmul(owned, listed).clamp_(max=1)


def numbers_of(owned: Tensor, need: Tensor, work: Tensor) -> tuple[list, list]:
    """Count what needs_of returns. Synchronizes, once.

    Args:
        work: (tiles + 1,) float64, blocks of each row of tiles.

    Returns:
        loads: for each deal and process, blocks that it computes.
        counts: for each deal and process, how many tiles it needs of each process.
    """
    host = torch.cat([torch.matmul(owned, work)[..., None], torch.matmul(need, owned.mT)], 2).tolist()
    return [[row[0] for row in deal] for deal in host], [[[*map(int, row[1:])] for row in deal] for deal in host]


def counts_of(size: int, each: int, capacity: int) -> list[list[int]]:
    """Numbers of tiles that each process gets of each with a capacity: of its own all `each`."""
    return [[each if one == other else capacity for other in range(size)] for one in range(size)]


def fill(need: Tensor, tiles: Tensor, capacity: int) -> None:
    """Add tiles that are not needed, the first ones first, until each process gets as many as counts_of says.

    Args:
        need: (size, tiles + 1) float64, see needs_of.
        tiles: (size, tiles of one) int64.
    """
    of_each = need[:, tiles]  # (size, size, tiles of one)
    counts = of_each.sum(2)
    sizes = torch.full_like(counts, capacity).fill_diagonal_(tiles.shape[1])
    check_fits((counts <= sizes).all(), counts)
    free = 1 - of_each
    of_each += free * (free.int().cumsum(2) <= (sizes - counts)[..., None])
    need.scatter_(1, tiles.flatten().expand(len(tiles), -1), of_each.flatten(1))


def check_fits(fits: Tensor, counts: Tensor) -> None:
    """Check that each process gets the tiles that it needs of each other. On a GPU by an assertion there, which the
    host does not wait for.

    Args:
        fits: bool tensor of one element.
        counts: (size, size), how many tiles each process needs, or gets if that is more, of each.

    Raises:
        ValueError: on a CPU.
    """
    if fits.is_cuda:
        assert_on_gpu(fits, "plan_context_parallel: a process needs more tiles of another one than capacity")
    elif not in_graph_trace() and not fits:
        needed = int(counts.clone().fill_diagonal_(0).amax())
        raise ValueError(
            f"plan_context_parallel: capacity must be at least {needed}, the most tiles that a process needs of another"
        )


def moves_of(need: Tensor, tiles: Tensor, rank: int, counts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """(own, sends, buffer) of ContextParallelPlan, from the needs (size, tiles + 1) by this deal. Does not synchronize.

    Args:
        counts: see numbers_of, or counts_of with a capacity.
    """
    order = torch.cat([tiles[rank], tiles[:rank].flatten(), tiles[rank + 1 :].flatten()])
    wanted = torch.nonzero_static(need[rank].index_select(0, order), size=sum(counts[rank]))[:, 0]
    asked = need.index_select(1, tiles[rank])
    asked[rank].zero_()
    total = sum(row[rank] for process, row in enumerate(counts) if process != rank)
    sends = torch.nonzero_static(asked, size=total)[:, 1].contiguous()  # by receiver, ascending
    return wanted[: counts[rank][rank]], sends, order.index_select(0, wanted)


def blocks_of(tiles: Tensor, each: int) -> Tensor:
    """The blocks of tiles, or their tokens, of which each has so many."""
    if each == 1:
        return tiles
    return (tiles[:, None] * each + torch.arange(each, device=tiles.device)).flatten()
