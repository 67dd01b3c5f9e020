"""SparsityConfig: which blocks sparsify_ keeps of a model's weights; and the layer with these blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks as arguments
from ..pattern import top_keys, top_keys_of_rows
from .gated import GatedBsrLinear, GatedLinear
from .linear import BsrLinear
from .module import block_grid
from .pruning.scores import Blocks, Scores

__all__ = ["SparsityConfig", "density_of", "sparse_of", "why_no_grid"]


@dataclass(frozen=True)
class SparsityConfig:
    """Configuration of sparsify_: blocks, densities and scores of a model's layers.

    Attributes:
        blocksize: (bm, bk), multiples of 16.
        density: in [0, 1], of each layer; or densities by name patterns as in a shell, {"*.mlp.*": 0.25, "*": 0.5}. The
            first pattern that matches a layer's name applies; layers without a match are skipped. Each pattern must
            match a layer.
        scores: what ranks the blocks: "magnitude", "gradient", or a function of Blocks such as InputNorms.
        even_rows: True keeps the same number of blocks in each block row, round(density * K / bk).

    Raises:
        TypeError, ValueError: a block's side or a density is not supported.

    Example:
        config = SparsityConfig((128, 128), {"*.mlp.*": 0.25, "*": 0.5}, scores=norms)
    """

    blocksize: tuple[int, int] = (128, 128)
    density: float | Mapping[str, float] = 0.5
    scores: str | Scores = "magnitude"
    even_rows: bool = False

    def __post_init__(self) -> None:
        arguments.block_grid((0, 0), arguments.pair(self.blocksize, "blocksize"))
        for density in self.density.values() if isinstance(self.density, Mapping) else [self.density]:
            arguments.check_density(density)

    def density_of(self, name: str) -> float | None:
        """Density of the layer with this name; None if no pattern matches it."""
        if not isinstance(self.density, Mapping):
            return self.density
        return next((d for pattern, d in self.density.items() if fnmatchcase(name, pattern)), None)

    def stored(self, grid: tuple[int, int], density: float) -> int:
        """Number of stored blocks of a weight with (rows, cols) blocks."""
        rows, cols = grid
        return rows * round(density * cols) if self.even_rows else round(density * rows * cols)

    def mask(self, scores: Tensor, density: float) -> Tensor:
        """(rows, cols) bool, True for the `stored` blocks of largest score. scores: (rows, cols) float32."""
        grid = rows, cols = tuple(scores.shape)
        if self.even_rows:
            keys = top_keys_of_rows(scores, round(density * cols))
        else:
            keys = top_keys(scores, self.stored((rows, cols), density))
        mask = torch.zeros(math.prod(grid), dtype=torch.bool, device=scores.device).index_fill_(0, keys, True)
        return mask.view(grid)


def density_of(op: str, config: SparsityConfig, names: list[str]) -> float | None:
    """The density of a layer with these names; None where no pattern fits one."""
    found = {name: d for name in names if (d := config.density_of(name)) is not None}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{op}: one layer has the names {', '.join(map(repr, found))}, for which config.density has the densities "
            f"{', '.join(map(str, found.values()))}; give them one"
        )
    return next(iter(found.values()), None)


def why_no_grid(linear: nn.Linear, config: SparsityConfig) -> str:
    """The reason why blocks do not divide a linear layer, or ""."""
    try:
        block_grid(linear.in_features, linear.out_features, config.blocksize)
    except ValueError as error:
        return str(error)
    return ""


def sparse_of(linear: nn.Linear, config: SparsityConfig, density: float) -> BsrLinear:
    """The layer with the blocks of a linear one that a config chooses."""
    kind = GatedBsrLinear if isinstance(linear, GatedLinear) else BsrLinear
    more: dict[str, Any] = {"activation": linear.activation} if isinstance(linear, GatedLinear) else {}
    grid = block_grid(linear.in_features, linear.out_features, config.blocksize)
    if linear.weight.is_meta:  # which blocks is in the state that will be loaded; here, how many
        return kind.from_linear(
            linear, config.blocksize, config.stored(grid, density) / max(1, math.prod(grid)), **more
        )
    scores = Blocks.of(linear, config.blocksize).score(config.scores).view(grid)
    return kind.from_linear(linear, config.blocksize, mask=config.mask(scores, density), **more)
