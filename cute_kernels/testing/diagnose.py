"""Location of wrong elements of a GEMM's result: their tiles, and the warps or warpgroups that own them.

A whole wrong tile points at a K-tile or a coordinate, a wrong warp at its fragment or its store, a wrong last row or
column of tiles at a predicate, and NaN at memory that was never written, or read where it must not be.
"""

from collections import Counter

import torch
from torch import Tensor

from cute_kernels.matmul.problem import STATS_ROWS

MOST_TILES = 4
MOST_OWNERS = 4


def diagnose(out: Tensor, exact: Tensor, plan=None, *, floor: float = 2.0**-20) -> str:
    """Return at most 12 lines: the share of wrong elements, the first one, and their tiles and warps, worst first.

    `plan` is what cute_kernels.explain gives for the call; without it, or for a CPU plan, no tile is named.
    """
    bound = 2 * torch.finfo(out.dtype).eps * exact.abs() + 4 * floor
    wrong = ~((out.double() - exact).abs() <= bound)  # NaN is wrong
    total = int(wrong.sum())
    if total == 0:
        return "no element is far off by itself: the result is imprecise everywhere"
    nan = out.isnan() & ~exact.isnan()
    first = tuple(wrong.nonzero()[0].tolist())
    note = "  (NaN: never written, or read from outside)" if bool(nan[first]) else ""
    lines = [
        f"{total} of {out.numel()} elements are wrong, {int(nan.sum())} of them NaN",
        f"first at {first}: got {out[first].item():.6g}, expected {exact[first].item():.6g}{note}",
    ]
    facts = getattr(plan, "facts", None)
    if facts is None:
        return "\n".join(lines)
    blocks = f", blocks {facts.block.bm}x{facts.block.bk}" if facts.block else ""
    lines.append(f"path {facts.path}, {facts.config}{blocks}")
    where = Where(plan, kernel_view(exact, plan).shape)
    tiles: Counter[tuple] = Counter()
    owners: Counter[str] = Counter()
    nan_tiles: Counter[tuple] = Counter()
    for place, count in patches(kernel_view(wrong, plan)):
        tiles[where.tile(place)] += count
        owners[where.owner(place)] += count
    for place, count in patches(kernel_view(nan, plan)):
        nan_tiles[where.tile(place)] += count
    for tile, count in tiles.most_common(MOST_TILES):
        poison = f", {nan_tiles[tile]} NaN" if nan_tiles[tile] else ""
        lines.append(f"{where.name(tile)}: {count} of {where.size(tile)} wrong{poison}")
    if len(tiles) > MOST_TILES:
        lines.append(f"and {len(tiles) - MOST_TILES} more of {where.tiles} tiles")
    lines += [f"{owner}: {count} wrong" for owner, count in owners.most_common(MOST_OWNERS)]
    return "\n".join(lines)


def kernel_view(t: Tensor, plan) -> Tensor:
    """(L, M, N): a tensor of the result's shape as the kernel sees its output."""
    index = 2 if plan.op == "gemm" else 1  # of (a, b, out, ...) and of (b, out, ...)
    view = dict(plan.views).get(index)
    t = view(t.contiguous()) if view else t
    t = t if t.dim() == 3 else t[None]
    return t.mT if plan.facts.transposed else t


def patches(mask: Tensor) -> list[tuple]:
    """((l, m, n), count) of the patches of 16 x 8 elements with any set; no tile or warp begins inside one."""
    patch = torch.tensor([1, 16, 8], device=mask.device)
    places, counts = (mask.nonzero() // patch * patch).unique(dim=0, return_counts=True)
    return list(zip(places.tolist(), counts.tolist(), strict=True))


class Where:
    """Owner of an element (l, m, n) of the kernel's output: its tile, and the warp within."""

    def __init__(self, plan, shape):
        self.facts, self.cfg = plan.facts, plan.facts.config
        self.batch, self.rows, self.cols = shape
        self.tile_m = getattr(self.cfg, "tile_m", STATS_ROWS)  # a tile of small blocks has one height
        self.block_rows = self.facts.block.bm if self.facts.block else self.rows
        self.tiles_m = -(-self.block_rows // self.tile_m)  # row tiles of a block row, or of all
        self.all_m, self.all_n = self.tiles_m * (self.rows // self.block_rows), -(-self.cols // self.cfg.tile_n)
        self.tiles = self.all_m * self.all_n * self.batch
        self.group, self.ctas = plan.group, plan.max_ctas

    def tile(self, place) -> tuple:
        """(l, tile row, tile column); the rows of tiles of a BSR product count within block rows, one after another."""
        l, m, n = place
        block_row, rest = divmod(m, self.block_rows)
        return l, block_row * self.tiles_m + rest // self.tile_m, n // self.cfg.tile_n

    def size(self, tile) -> int:
        """Elements of a tile that lie inside the output."""
        _, row, col = tile
        top = row % self.tiles_m * self.tile_m
        rows = min(self.tile_m, self.block_rows - top)
        return rows * min(self.cfg.tile_n, self.cols - col * self.cfg.tile_n)

    def name(self, tile) -> str:
        l, row, col = tile
        text = f"tile row {row} of {self.all_m}, column {col} of {self.all_n}"
        if self.facts.block:
            text += f" (block row {row // self.tiles_m})"
        return text + (f", batch {l}" if self.batch > 1 else "")

    def owner(self, place) -> str:
        """The consumer that computes an element: a warp on sm_80, a warpgroup and its 64-row slab on sm_90."""
        cfg = self.cfg
        if self.facts.family == "skinny":
            return "all warps, which share K"
        row, col = place[1] % self.block_rows % self.tile_m, place[2] % cfg.tile_n
        if self.facts.family == "small blocks":
            return f"consumer warpgroup {row // 64}"
        index_n = col // (cfg.tile_n // cfg.warps_n)
        if self.facts.path == "sm_80":
            index_m = row // (cfg.tile_m // cfg.warps_m)
            return f"warp {index_m + index_n * cfg.warps_m} (m {index_m}, n {index_n})"
        slab = row // 64
        group = slab % cfg.warps_m + index_n * cfg.warps_m
        if cfg.consumer_groups > 1:
            group += self.consumer_group(self.tile(place)) * cfg.warps_m * cfg.warps_n
        return f"consumer warpgroup {group}, 64-row slab {slab} of the tile"

    def consumer_group(self, tile) -> int:
        """Index of the consumer warpgroup that computes a tile of a ping-pong kernel: they alternate."""
        l, row, col = tile
        m, n = row // self.cfg.cluster_m, col // self.cfg.cluster_n  # in clusters, as the scheduler counts
        rows, cols = -(-self.all_m // self.cfg.cluster_m), -(-self.all_n // self.cfg.cluster_n)
        panel = n // self.group
        width = min(self.group, cols - panel * self.group)
        index = l * rows * cols + panel * rows * self.group + m * width + n - panel * self.group
        clusters = min(rows * cols * self.batch, self.ctas // self.cfg.cluster)
        return index // clusters % self.cfg.consumer_groups
