"""Swap the linear layers of a model for block-sparse ones, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from .. import checks as arguments
from .gated import GatedBsrLinear, GatedLinear
from .linear import BsrLinear
from .module import block_grid
from .pattern import top_keys, top_keys_of_rows
from .scores import Blocks, Scores

__all__ = ["Change", "Report", "SparsityConfig", "densify_", "sparsify_"]


@dataclass(frozen=True)
class SparsityConfig:
    """What sparsify_ makes of the layers of a model.

    blocksize: (bm, bk).
    density: in [0, 1], of each layer; or densities by name, of which the first pattern that fits a layer's name counts
        (as in a shell, {"*.mlp.*": 0.25, "*": 0.5}), and layers that none fits are left out.
    scores: by which blocks are kept: "magnitude", "gradient", or a function of Blocks such as InputNorms.
    even_rows: whether each block row keeps equally many, round(density * K / bk).

    Raises:
        TypeError, ValueError: a block's side or a density is unsupported.
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
        """The density of the layer of this name; None where no pattern fits it."""
        if not isinstance(self.density, Mapping):
            return self.density
        return next((d for pattern, d in self.density.items() if fnmatchcase(name, pattern)), None)


@dataclass(frozen=True)
class Change:
    """One linear layer: what became of it, or in `skipped` why nothing."""

    name: str
    shape: tuple[int, int]  # (M, K)
    before: int  # parameters
    after: int
    stored: int = 0  # blocks; none of a layer without blocks
    blocks: int = 0
    skipped: str = ""

    @property
    def density(self) -> float:
        return self.stored / max(1, self.blocks)


@dataclass
class Report:
    """What sparsify_, densify_, mask_2_4_ or prune_2_4_ did, layer by layer; prints as a table."""

    changes: list[Change] = field(default_factory=list)

    @property
    def changed(self) -> list[Change]:
        return [c for c in self.changes if not c.skipped]

    @property
    def skipped(self) -> list[Change]:
        return [c for c in self.changes if c.skipped]

    def __str__(self) -> str:
        rows = [("layer", "shape", "density", "blocks", "parameters", "")]
        for c in self.changes:
            shape = "{} x {}".format(*c.shape)
            if c.skipped:
                rows.append((c.name, shape, "-", "-", f"{c.before:,}", f"skipped: {c.skipped}"))
            else:
                density, blocks = (f"{c.density:.3f}", f"{c.stored} of {c.blocks}") if c.blocks else ("-", "-")
                rows.append((c.name, shape, density, blocks, f"{c.before:,} -> {c.after:,}", ""))
        before, after = (sum(getattr(c, name) for c in self.changes) for name in ("before", "after"))
        rows.append((f"{len(self.changed)} of {len(self.changes)} layers", "", "", "", f"{before:,} -> {after:,}", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def sparsify_(
    model: nn.Module, config: SparsityConfig, filter_fn: Callable[[str, nn.Linear], bool] | None = None
) -> Report:
    """Put a BsrLinear in the place of each nn.Linear of a model, with the blocks that a config chooses.

    Left as they are, and reported: layers whose features the blocks do not divide, of another dtype than BsrLinear has,
    with hooks, with a weight that another module shares, and subclasses of nn.Linear, which other code may read in its
    own way (as nn.MultiheadAttention does). On the meta device layers get the shapes alone; load a state.

    Args:
        model: any module that contains nn.Linear; changed in place.
        config: see SparsityConfig.
        filter_fn: (name, layer) -> whether to swap it. Those that it refuses are not in the report.

    Raises:
        TypeError: `config` is no SparsityConfig.
        ValueError: `model` is an nn.Linear itself.
    """
    if not isinstance(config, SparsityConfig):
        raise TypeError(f"sparsify_ needs a SparsityConfig, got {type(config).__name__}")
    if isinstance(model, nn.Linear):
        raise ValueError("sparsify_ changes the layers inside of a model; of one layer use BsrLinear.from_linear")
    owners = Counter(
        id(p) for m in model.modules() for p in m._parameters.values() if p is not None
    )  # modules with this parameter

    def swap(name: str, linear: nn.Linear) -> tuple[nn.Module | None, Change] | None:
        if filter_fn is not None and not filter_fn(name, linear):
            return None
        density = config.density_of(name)
        if density is None:
            return None
        why = _why_not(linear, config, owners)
        if why:
            return None, Change(name, shape_of(linear), size_of(linear), size_of(linear), skipped=why)
        layer = _sparse(linear, config, density)
        stored, blocks = layer.nnz, math.prod(layer.grid)
        return layer, Change(name, shape_of(linear), size_of(linear), size_of(layer), stored, blocks)

    return replace_layers(model, nn.Linear, swap)


def densify_(model: nn.Module) -> Report:
    """Put an nn.Linear in the place of each BsrLinear of a model; dropped blocks are zeros.

    Left as they are, and reported: layers with a fused activation or with hooks.

    Raises:
        ValueError: `model` is a BsrLinear itself.
    """
    if isinstance(model, BsrLinear):
        raise ValueError("densify_ changes the layers inside of a model; of one layer use its to_linear()")

    def swap(name: str, layer: BsrLinear) -> tuple[nn.Module | None, Change]:
        why = "has hooks" if has_hooks(layer) else ""
        if layer.activation is not None and not layer.gated:
            why = f"applies {layer.activation}, which nn.Linear does not"
        if why:
            return None, Change(name, shape_of(layer), size_of(layer), size_of(layer), skipped=why)
        linear = layer.to_linear()
        blocks = math.prod(layer.grid)
        return linear, Change(name, shape_of(layer), size_of(layer), size_of(linear), blocks, blocks)

    return replace_layers(model, BsrLinear, swap)


def replace_layers(model: nn.Module, kind: type | tuple[type, ...], swap: Callable) -> Report:
    """Ask `swap` for a new module in the place of each of a kind; one that has several places gets one new module."""
    report, made = Report(), {}
    places = [(n, c, parent) for n, parent in model.named_modules() for c in parent._modules]
    for path, child, parent in places:
        module = parent._modules[child]
        if not isinstance(module, kind):
            continue
        if module not in made:
            answer = swap(f"{path}.{child}" if path else child, module)
            made[module] = None if answer is None else answer[0]
            if answer is not None:
                report.changes.append(answer[1])
        new = made[module]
        if new is not None:
            parent._modules[child] = new
    return report


def _why_not(linear: nn.Linear, config: SparsityConfig, owners: Counter) -> str:
    """Why a layer cannot be swapped, or ""."""
    if type(linear) not in (nn.Linear, GatedLinear):
        return f"is a {type(linear).__name__}"
    if has_hooks(linear):
        return "has hooks, which would be lost"
    if type(linear.weight.data) is not Tensor:
        return f"its weight is a {type(linear.weight.data).__name__}"
    if any(owners[id(p)] > 1 for p in linear.parameters(recurse=False)):
        return "shares a parameter with another module"
    try:
        arguments.check_dtypes(linear.weight.dtype, torch.int32, linear.weight.device)
        block_grid(linear.in_features, linear.out_features, config.blocksize)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def has_hooks(module: nn.Module) -> bool:
    return any(value for name, value in module.__dict__.items() if name.endswith("_hooks") and "state_dict" not in name)


def _sparse(linear: nn.Linear, config: SparsityConfig, density: float) -> BsrLinear:
    kind = GatedBsrLinear if isinstance(linear, GatedLinear) else BsrLinear
    more = {"activation": linear.activation} if kind is GatedBsrLinear else {}
    rows, cols = block_grid(linear.in_features, linear.out_features, config.blocksize)
    per_row = round(density * cols)
    if linear.weight.is_meta:  # which blocks is in the state that will be loaded; here, how many
        density = per_row / max(1, cols) if config.even_rows else density
        return kind.from_linear(linear, config.blocksize, density, **more)
    scores = Blocks.of(linear, config.blocksize).score(config.scores).view(rows, cols)
    if config.even_rows:
        keys = top_keys_of_rows(scores, per_row)
    else:
        keys = top_keys(scores, round(density * rows * cols))
    mask = torch.zeros(rows * cols, dtype=torch.bool, device=scores.device).index_fill_(0, keys, True)
    return kind.from_linear(linear, config.blocksize, mask=mask.view(rows, cols), **more)


def shape_of(layer: nn.Linear | BsrLinear) -> tuple[int, int]:
    return layer.out_features, layer.in_features


def size_of(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())
