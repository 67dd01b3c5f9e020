"""Choosing the pattern: prune once or by a schedule, drop and regrow blocks while training.

change_pattern_ keeps the number of blocks and writes values and indices in place, without a synchronization: nothing
is planned or compiled again. It takes some 60 small operations of torch, and a temporary copy of one tensor of blocks.
prune_ lowers the number of blocks, and makes them anew. A CUDA graph that was captured before either has the old
pattern's tables in it, and must be captured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.runtime.torch_compat import has_unreduced_gradient, is_dtensor

from ...pattern import Pattern, indices_of, ranks, top_keys, top_keys_of_rows
from ...pattern_update import moved, origins, update_pattern_
from ..linear import BsrLinear
from ..module import put_data
from ..parametrized import check_not_computed
from ..shards import check_same, hash_of, moved_shards, replace_shards, shard_dim
from .scores import Blocks, Group, Scores, magnitude_of

__all__ = ["CubicSchedule", "carry_optimizer_state", "change_pattern_", "cosine_fraction", "prune_"]

SENT = "the kind of scores, or the gradient or optimizer state to move"  # for messages, see _sent


@dataclass(frozen=True)
class CubicSchedule:
    """Density by training step, from `start` to `end`: it falls fast at first, and slower as fewer blocks are left.

    density(t) = end + (start - end) * (1 - (t - first) / (last - first)) ** 3 between the steps `first` and `last`.
    Source: Zhu and Gupta, "To prune, or not to prune", 2017, for densities instead of sparsities.

    Raises:
        ValueError: densities are not in [0, 1] or rise, or last is not after first.

    Example:
        schedule = CubicSchedule(end=0.125, first=0, last=1000)
        prune_(layer, schedule(step))
    """

    end: float
    first: int
    last: int
    start: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.end <= self.start <= 1:
            raise ValueError(f"densities must be 0 <= end <= start <= 1, got end={self.end} and start={self.start}")
        if self.last <= self.first:
            raise ValueError(f"last must come after first, got {self.first} and {self.last}")

    def __call__(self, step: int) -> float:
        done = min(1.0, max(0.0, (step - self.first) / (self.last - self.first)))
        return self.end + (self.start - self.end) * (1 - done) ** 3


def cosine_fraction(step: int, fraction: float, last: int) -> float:
    """Fraction of blocks to drop and regrow at a step: fraction / 2 * (1 + cos(pi * step / last)), and 0 after `last`.

    Source: Evci et al., "Rigging the Lottery" (RigL), 2020.

    Example:
        change_pattern_(layer, cosine_fraction(step, 0.3, last=10_000), grow="random")
    """
    return 0.0 if step >= last else fraction / 2 * (1 + math.cos(math.pi * step / last))


@torch.no_grad()
def prune_(
    layer: BsrLinear,
    density: float | None = None,
    *,
    per_row: int | None = None,
    scores: str | Tensor | Scores = "magnitude",
    optimizer: torch.optim.Optimizer | None = None,
    group: Group = None,
) -> BsrLinear:
    """Keep the stored blocks of highest score, and drop the others; return the layer.

    Args:
        layer: a BsrLinear; `values` remains the same Parameter, with fewer blocks.
        density: fraction of all blocks, stored or not; keeps round(density * blocks).
        per_row: instead of density, the number of blocks that each block row keeps. Synchronizes with the GPU.
        scores: "magnitude", "gradient" (see scores.SCORES), a function of Blocks such as InputNorms, or a tensor
            (nnz,). NaN ranks first; among equal scores the earlier block does.
        optimizer: its state is moved with the blocks, see carry_optimizer_state.
        group: a torch.distributed process group whose ranks all hold this layer, as under DistributedDataParallel:
            compares what they select. Ranks of fully_shard are always compared.

    Raises:
        TypeError: the layer is not a BsrLinear, or is tensor-parallel.
        RuntimeError: values are sharded by fully_shard and gathered at present, or have gradients that are not reduced
            yet (set_requires_gradient_sync(False)); or ranks would select different blocks, or another rank raised.
        ValueError: not exactly one of density and per_row is passed, or more blocks are requested than are stored.

    Example:
        prune_(layer, 0.25, optimizer=optimizer)
    """
    _check_layer("prune_", layer)
    rows, cols = layer.grid

    def checked() -> tuple[tuple[Blocks, Tensor, int], list[Any]]:
        _check_shards("prune_", layer)
        if (density is None) == (per_row is None):
            raise ValueError(f"prune_: give either density or per_row, got {density} and {per_row}")
        blocks = Blocks.of(layer)
        own = blocks._own_scores(scores)
        if per_row is not None:
            shortest, count = int(layer.crow_indices.diff().min()) if rows else 0, per_row
            if not 0 <= per_row <= shortest:
                raise ValueError(f"prune_: per_row is {per_row}; the shortest block row has {shortest} blocks")
        else:
            assert density is not None
            count = round(density * rows * cols) if 0 <= density <= 1 else -1
            if not 0 <= count <= layer.nnz:
                raise ValueError(f"prune_: density {density} is not in [0, {layer.density:.4g}], the layer's own")
        return (blocks, own, count), [density is None, count, *_sent(layer, scores, optimizer)]

    blocks, own, count = _agreed("prune_", layer, group, f"density, per_row, {SENT}", checked)
    found, keys = blocks._of_all_ranks(own, scores), layer.pattern.keys()
    if per_row is not None:
        grid = torch.full((rows * cols,), -math.inf, device=keys.device)
        # Ranks in place of scores, so that a stored block of any score comes before an absent one.
        rank = torch.empty_like(found).scatter_(0, ranks(found).argsort(stable=True), _falling(found))
        grid.index_copy_(0, keys, rank)
        new = top_keys_of_rows(grid.view(rows, cols), count)
    else:
        new = keys[top_keys(found, count)]
    _agreed("prune_", layer, group, "scores=", lambda: (new, [new]))
    if len(new) == layer.nnz:
        return layer
    if len(new) == 0 and layer._shard_mesh is not None:
        raise ValueError("prune_: fully_shard has no parameters without elements; keep at least one block")
    _move(layer, keys, new, optimizer)
    return layer


def _falling(t: Tensor) -> Tensor:
    """(n,) n - 1, ..., 0"""
    return torch.arange(len(t) - 1, -1, -1, dtype=t.dtype, device=t.device)


@torch.no_grad()
def change_pattern_(
    layer: BsrLinear,
    fraction: float,
    *,
    grow: Tensor | str,
    drop: str | Tensor | Scores = "magnitude",
    even_rows: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    generator: torch.Generator | None = None,
    group: Group = None,
) -> BsrLinear:
    """Drop the stored blocks of lowest score, and store as many others, initialized to zero; return the layer.

    With grow=DenseGradients(...).block_norms(layer) this is RigL (Evci et al. 2020), with grow="random" SET (Mocanu et
    al. 2018), for blocks instead of elements. As in RigL, a dropped block may grow again; it then keeps its values.

    Args:
        layer: a BsrLinear. Values, their gradient and the indices are written in place.
        fraction: in [0, 1]; drops round(fraction * nnz) of the stored blocks.
        grow: scores (M / bm, K / bk), the highest of which grow; or "random".
        drop: scores of the stored blocks, see prune_.
        even_rows: True drops and grows the same number in each block row. The block rows must have equally many blocks.
        optimizer: its state is moved with the blocks, see carry_optimizer_state.
        generator: for grow="random", on the layer's device. All processes must use the same seed.
        group: compares the choices of its ranks, see prune_.

    Raises:
        TypeError: the layer is not a BsrLinear, or is tensor-parallel.
        RuntimeError: values are sharded by fully_shard and gathered at present, or have gradients that are not reduced
            yet (set_requires_gradient_sync(False)); or ranks would select different blocks, or another rank raised.
        ValueError: fraction or grow is invalid, or even_rows is passed for block rows of different lengths.

    Example:
        change_pattern_(layer, 0.3, grow=gradients.block_norms(layer), optimizer=optimizer)
    """
    _check_layer("change_pattern_", layer)
    rows, cols = layer.grid
    buffers: dict[str, Any] = layer._buffers  # see BsrModule.weight
    crow, col = buffers["crow_indices"], buffers["col_indices"]
    values = layer._parameters.get("values")
    values = layer.values if values is None else values
    nnz = col.shape[0]

    def checked() -> tuple[tuple[Blocks | None, Tensor, int], list[Any]]:
        _check_shards("change_pattern_", layer)
        if not 0 <= fraction <= 1:
            raise ValueError(f"change_pattern_: fraction is {fraction}; it must be in [0, 1]")
        _check_grow(grow, (rows, cols), generator)
        known = layer.weight if layer._shard_mesh is None else layer._weight
        if even_rows and not (known is not None and known.even):
            raise ValueError("change_pattern_: even_rows needs a layer whose block rows hold equally many blocks")
        plain = isinstance(drop, str) and drop == "magnitude" and layer._shard_mesh is None
        blocks = None if plain or nnz == 0 else Blocks.of(layer)
        own = magnitude_of(values.detach()) if blocks is None else blocks._own_scores(drop)
        dropped = round(fraction * (nnz // max(rows, 1) if even_rows else nnz))
        return (blocks, own, dropped), [even_rows, dropped, *_sent(layer, drop, optimizer)]

    blocks, own, dropped = _agreed("change_pattern_", layer, group, f"fraction, even_rows, {SENT}", checked)
    if nnz == 0:
        return layer
    found = own if blocks is None else blocks._of_all_ranks(own, drop)

    def chosen() -> tuple[Tensor, list[Tensor]]:
        candidates = _grow_scores(grow, (rows, cols), col.device, generator)
        return candidates, [found, candidates]

    candidates = _agreed("change_pattern_", layer, group, "grow= or drop=", chosen)
    gradient = values.grad
    moving: list[Tensor] = [values] if gradient is None else [values, gradient]
    moving += _state_of_blocks(optimizer, values, nnz).values()
    origin = update_pattern_(found, candidates, crow, col, cols, dropped, even_rows)
    for t in moving:
        t.copy_(_moved(t, origin))
    layer._pattern_changed(even=even_rows)
    return layer


def _check_grow(grow: Tensor | str, grid: tuple[int, int], generator: torch.Generator | None) -> None:
    if isinstance(grow, str):
        if grow != "random":
            raise ValueError(f'change_pattern_: grow={grow!r}; pass "random" or a tensor of scores')
        return
    if not isinstance(grow, Tensor):
        raise TypeError(f'change_pattern_: grow must be a tensor or "random", got {type(grow).__name__}')
    if generator is not None:
        raise ValueError('change_pattern_: a generator is for grow="random" alone')
    if tuple(grow.shape) != grid:
        raise ValueError(f"change_pattern_: grow has shape {tuple(grow.shape)}; the blocks are {grid}")


def _grow_scores(
    grow: Tensor | str, grid: tuple[int, int], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """(blocks,) float32."""
    if isinstance(grow, str):
        return torch.rand(grid[0] * grid[1], dtype=torch.float32, device=device, generator=generator)
    return grow.detach().to(device, torch.float32).flatten()


def _check_layer(op: str, layer: BsrLinear) -> None:
    if not isinstance(layer, BsrLinear):
        raise TypeError(f"{op} needs a BsrLinear, got {type(layer).__name__}; see BsrLinear.from_linear")
    if layer.crow_indices.is_meta:
        raise ValueError(f"{op}: the layer is on the meta device, and has no pattern yet")
    values = layer._parameters.get("values")
    if values is None:
        check_not_computed(op, layer)
    if hasattr(layer, "place"):
        raise TypeError(
            f"{op}: each rank holds a part of this tensor-parallel layer; change it before parallelize_module"
        )


def _check_shards(op: str, layer: BsrLinear) -> None:
    """Reject a layer whose shards FSDP2 has gathered, or whose gradients it has not reduced yet."""
    if layer._shard_mesh is None:
        return
    if not is_dtensor(layer.values):
        raise RuntimeError(
            f"{op}: values of this layer are gathered at present, as between forward and backward; call reshard() of "
            "the module that fully_shard was applied to"
        )
    if has_unreduced_gradient(layer.values):
        raise RuntimeError(
            f"{op}: FSDP2 holds gradients of this layer's blocks that are not reduced yet, and zero_grad() keeps them; "
            "call it after a backward pass with set_requires_gradient_sync(True) and set_requires_all_reduce(True)"
        )
    shard_dim(layer.values)


def _sent(layer: BsrLinear, scores: Any, optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """The facts that decide which tensors ranks that hold shards send each other; [] if they hold none."""
    if layer._shard_mesh is None:
        return []
    states = _state_of_blocks(optimizer, layer.values, layer.nnz)
    return [
        isinstance(scores, Tensor),  # or scores are gathered
        layer.values.grad is not None,
        [(name, t.dtype, tuple(t.shape)) for name, t in states.items()],
    ]


def _agreed(op: str, layer: BsrLinear, group: Group, what: str, make: Callable[[], tuple[Any, list[Any]]]) -> Any:
    """Return the first of the results of make(); compare the second ones on ranks that hold a layer or shards of it.

    All of these ranks raise if one raises in make(), or if they differ, before anything is sent or written.
    """
    meshes = [] if layer._shard_mesh is None else [layer._shard_mesh]
    if group is not None:
        from torch.distributed.device_mesh import DeviceMesh

        if torch.distributed.get_rank(group) < 0:
            raise ValueError(f"{op}: this rank is not in the process group that group= names")
        meshes.append(DeviceMesh.from_group(group, layer.col_indices.device.type))
    if not meshes:
        return make()[0]
    result = None

    def number() -> int:
        nonlocal result
        result, compared = make()
        return hash_of(*compared)

    check_same(
        op, what, number, meshes[0],
        "give all ranks the same: block_norms(layer, group=...) sums gradients, generators need one seed",
        extra_groups=[mesh.get_group() for mesh in meshes[1:]],
    )  # fmt: skip
    return result


def _moved(t: Tensor, origin: Tensor) -> Tensor:
    return moved_shards(t, origin) if is_dtensor(t) else moved(t, origin)


def _move(layer: BsrLinear, keys: Tensor, new: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Store the blocks `new` in place of `keys`, both ascending, and not as many."""
    values, gradient, pattern = layer.values, layer.values.grad, indices_of(new, *layer.grid)
    origin = origins(keys, new)
    gradient = None if gradient is None else _moved(gradient, origin)
    values.grad = None
    if is_dtensor(values):
        replace_shards(values, _moved(values.detach(), origin))
    else:
        put_data(values, moved(values, origin))
    values.grad = gradient
    layer.col_indices = pattern[1]
    layer.crow_indices.copy_(pattern[0])
    if optimizer is not None:
        _carry(optimizer, values, origin, len(keys))
    layer._random, layer._kept_pattern = False, None
    layer._adopt()


@torch.no_grad()
def carry_optimizer_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, old_pattern: Pattern, new_pattern: Pattern
) -> None:
    """Move an optimizer's state of each block, such as Adam's moments, to the block's position in a new pattern.

    New blocks get zeros. State with another shape than one entry per block, such as a step count, is unchanged. In
    place if the number of blocks is the same. prune_ and change_pattern_ call it if you pass `optimizer`.

    Args:
        optimizer: its state may be empty, before the first step.
        parameter: (nnz, bm, bk), the values.
        old_pattern, new_pattern: patterns of the same grid of blocks: `layer.pattern.clone()` before the change and
            `layer.pattern` after it.

    Raises:
        ValueError: the patterns have different grids, or the first dimension of a state tensor is not the number of
            blocks.

    Example:
        old = layer.pattern.clone()
        prune_(layer, 0.25)
        carry_optimizer_state(optimizer, layer.values, old, layer.pattern)
    """
    grids = [(p.total_rows, p.n_block_cols) for p in (old_pattern, new_pattern)]
    if grids[0] != grids[1]:
        raise ValueError(f"carry_optimizer_state: patterns of {grids[0]} and of {grids[1]} blocks")
    keys, new = old_pattern.keys(), new_pattern.keys()
    if len(keys):
        _carry(optimizer, parameter, origins(keys, new), len(keys))


def _carry(optimizer: torch.optim.Optimizer, parameter: Tensor, origin: Tensor, nnz: int) -> None:
    for name, t in _state_of_blocks(optimizer, parameter, nnz).items():
        new = _moved(t, origin)
        if new.shape == t.shape:
            t.copy_(new)
        else:
            optimizer.state[parameter][name] = new


def _state_of_blocks(optimizer: torch.optim.Optimizer | None, parameter: Tensor, nnz: int) -> dict[str, Tensor]:
    """The optimizer's state per block, by name; empty without an optimizer, or before its first step."""
    found = {}
    for name, t in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
        if not isinstance(t, Tensor):
            continue
        shape = t.shape
        if len(shape) < 2 and t.numel() == 1:
            continue
        if not shape or shape[0] != nnz:
            raise ValueError(
                f"the optimizer's {name} has shape {tuple(t.shape)}; only state with an entry for each of the {nnz} "
                "blocks can follow them"
            )
        found[name] = t
    return found
