"""Gated feed-forward blocks of a model, which sparsify_ fuses into SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cute_kernels.annotations import Activation
from cute_kernels.reference import GATE

from .config import SparsityConfig, sparse_of, why_no_grid
from .feed_forward import SwiGLU
from .gated import GatedBsrLinear
from .module import block_grid
from .pruning.scores import Blocks
from .recognize import activation_of, numbers
from .report import Change, size_of
from .swap import shape_of

__all__ = ["Fused", "fuse_blocks"]

NAMES = ("gate_proj", "up_proj", "down_proj")
DIM, HIDDEN = 6, 8  # features of the small copy that is called


class Fused(NamedTuple):
    """Blocks to replace by SwiGLU, and what the report has in the place of their linear layers."""

    layers: dict[nn.Module, SwiGLU]
    changes: dict[nn.Module, list[Change]]  # by linear layer, of the fused blocks
    notes: dict[nn.Module, str]  # by linear layer, of blocks that are not fused


def fuse_blocks(
    names: Mapping[nn.Module, list[str]],
    config: SparsityConfig,
    densities: Mapping[nn.Linear, float],
    reasons: Mapping[nn.Linear, str],
) -> Fused:
    """Make a SwiGLU of each block of gate_proj, up_proj and down_proj that computes the same.

    Args:
        names: of all modules of the model, see names_of.
        densities: of the linear layers to replace.
        reasons: of each of them, why it cannot be replaced, whatever its blocks, or "".
    """
    fused = Fused({}, {}, {})
    for block, (path, *_) in names.items():
        linears: list[Any] = [block._modules.get(name) for name in NAMES]
        if not all(isinstance(linear, nn.Linear) for linear in linears) or not any(m in densities for m in linears):
            continue
        gate, up, down = linears
        activation, why = None, why_not(block, names, config, densities, reasons)
        if not why:
            activation, why = gated_activation(block)
        if why:
            fused.notes.update(dict.fromkeys(linears, f"not fused: {why}"))
            continue
        gate_up = gate_up_of(gate, up, config, densities[gate], activation)
        layer = fused.layers[block] = SwiGLU.of(gate_up, sparse_of(down, config, densities[down]))
        layer.train(block.training)
        before = size_of(gate) + size_of(up)
        fused.changes[gate] = [change_of(f"{path}.gate_up", before, gate_up, "gate_proj and up_proj, fused")]
        fused.changes[up] = []
        fused.changes[down] = [change_of(f"{path}.down", size_of(down), layer.down, "down_proj, fused")]
    return fused


def change_of(name: str, before: int, layer: Any, note: str) -> Change:
    return Change(name, shape_of(layer), before, size_of(layer), layer.nnz, math.prod(layer.grid), note=note)


def why_not(
    block: nn.Module,
    names: Mapping[nn.Module, list[str]],
    config: SparsityConfig,
    densities: Mapping[nn.Linear, float],
    reasons: Mapping[nn.Linear, str],
) -> str:
    """The reason why a block of three linear layers cannot become a SwiGLU, whatever it computes, or ""."""
    if "" in names[block]:
        return "the block is the model itself"
    for name in NAMES:
        linear: Any = block._modules[name]
        if linear not in densities:
            return f"{name} is not to be replaced"
        if reasons[linear]:
            return f"{name} {reasons[linear]}"
        if len(names[linear]) != len(names[block]):
            return f"{name} has another place outside of the block"
    gate, up, down = (block.get_submodule(name) for name in NAMES)
    assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    if why := why_no_grid(down, config):
        return f"down_proj {why}"
    if densities[gate] != densities[up]:
        return f"gate_proj and up_proj have the densities {densities[gate]} and {densities[up]}"
    return why_not_joint(gate, up, config)


def gated_activation(block: nn.Module) -> tuple[Activation | None, str]:
    """(activation, "") if forward(x) is down_proj(activation(gate_proj(x)) * up_proj(x)), or (None, reason)."""
    parts: dict[str, Any] = {}
    x = numbers(1, 64, DIM, ascending=True)
    for name, shape in zip(NAMES, ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN)), strict=True):
        bias = getattr(block.get_submodule(name), "bias", None) is not None
        linear = nn.Linear(shape[1], shape[0], bias, device="meta", dtype=torch.float64)  # draws no random numbers
        linear.weight = nn.Parameter(numbers(*shape, scale=0.5 + 0.1 * len(parts)))
        if bias:
            linear.bias = nn.Parameter(numbers(shape[0], scale=0.2 + 0.1 * len(parts)))
        parts[name] = linear
    with torch.no_grad():
        gate, up = parts["gate_proj"](x), parts["up_proj"](x)
        return activation_of(block, parts, {}, (x,), lambda act: parts["down_proj"](act(gate) * up))


def why_not_joint(gate: nn.Linear, up: nn.Linear, config: SparsityConfig) -> str:
    """The reason why two layers have no joint GatedBsrLinear, or ""."""
    if gate.weight.shape != up.weight.shape:
        return f"gate_proj is {tuple(gate.weight.shape)} and up_proj {tuple(up.weight.shape)}"
    if gate.out_features % GATE:
        return f"its {gate.out_features} hidden features are no multiple of {GATE}"
    if (gate.bias is None) != (up.bias is None):
        return "one of gate_proj and up_proj has a bias"
    for name in ("dtype", "device", "requires_grad"):
        if getattr(gate.weight, name) != getattr(up.weight, name):
            return f"{name} of gate_proj and up_proj differs"
    if gate.bias is not None and up.bias is not None and gate.bias.requires_grad != up.bias.requires_grad:
        return "requires_grad of their biases differs"
    try:
        block_grid(gate.in_features, 2 * gate.out_features, config.blocksize)
    except ValueError as error:
        return f"of gate_proj and up_proj together {error}"
    return ""


def gate_up_of(
    gate: nn.Linear, up: nn.Linear, config: SparsityConfig, density: float, activation: Activation | None
) -> GatedBsrLinear:
    """The joint layer of gate_proj and up_proj with the blocks that a config chooses."""
    if not gate.weight.is_meta:
        mask = joint_mask(gate, up, config, density)
        return GatedBsrLinear.from_linears(gate, up, config.blocksize, mask=mask, activation=activation)
    rows, cols = block_grid(gate.in_features, 2 * gate.out_features, config.blocksize)
    if own_patterns(config):
        stored = 2 * config.stored((rows // 2, cols), density)
    else:
        stored = config.stored((rows, cols), density)
    share = stored / max(1, rows * cols)
    return GatedBsrLinear.from_linears(gate, up, config.blocksize, share, activation=activation)


def own_patterns(config: SparsityConfig) -> bool:
    """True if no block holds rows of both gate_proj and up_proj: their rows alternate in groups of 64."""
    return GATE % config.blocksize[0] == 0


def joint_mask(gate: nn.Linear, up: nn.Linear, config: SparsityConfig, density: float) -> Tensor:
    """(2 H / bm, K / bk) bool: the blocks of the joint weight that are stored.

    Each layer has the blocks that it would have alone, where no block holds rows of both. Else blocks are scored by the
    sum over their parts, and a block is kept or dropped in both layers.
    """
    bm, bk = config.blocksize
    part = math.gcd(bm, GATE)  # rows of one layer that follow each other in a block
    rows, cols = gate.out_features // part, gate.in_features // bk
    scores = [Blocks.of(linear, (part, bk)).score(config.scores).view(rows, cols) for linear in (gate, up)]
    if own_patterns(config):
        return alternating([config.mask(s, density) for s in scores], GATE // part)
    joint = alternating(scores, GATE // part).unflatten(0, (-1, bm // part)).sum(1)
    return config.mask(joint, density)


def alternating(tables: list[Tensor], rows: int) -> Tensor:
    """Rows of two tables (n, ...) in turn, `rows` of each: (2 n, ...)."""
    return torch.stack([t.unflatten(0, (-1, rows)) for t in tables], 1).flatten(0, 2)
