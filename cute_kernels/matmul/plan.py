"""From an op's tensors to the kernel that will run: made once per metadata, then a dictionary look-up.

A `Plan` depends on shapes, strides, dtypes, devices and 16-byte alignments, never on contents or addresses. It holds
the compiled function and everything that its call needs besides the tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Plan:
    """What a call runs. `function` is None where a torch reference serves it: CPU tensors and empty results."""

    op: str
    out_shape: tuple
    out_dtype: torch.dtype
    device: torch.device
    function: Callable | None = None
    group: int = 1
    max_ctas: int = 1
    facts: Any = None  # of the kernel
    notes: list[str] = field(default_factory=list)
    views: tuple = ()  # per tensor of the call: None, or a function that re-views it for the kernel
    empty: bool = False
    staged: bool = False  # whether the kernel writes a contiguous result, which is then copied to out
    uneven_ctas: int = 1  # max_ctas of a sparse product whose rows differ in length
    family: Any = None  # of a block-sparse product's kernel
    tiles: tuple = ()  # of one whose work tiles may be ordered: sparse_collective.tile_order's Tiles
    ordered: tuple | None = None  # its function with an order of work tiles, tiles and CTAs, once it was needed
    spans: tuple = (0, 0, 0)  # bytes of the two operands and of out, 0 where they have gaps

    def __str__(self) -> str:
        lines = [f"{self.op} -> {tuple(self.out_shape)} {self.out_dtype} on {self.device}"]
        if self.empty:
            lines.append("kernel: none, the result is empty")
        elif self.facts is None:
            lines.append("kernel: none, CPU tensors run the torch reference")
        else:
            f = self.facts
            lines.append(f"path: {f.path}, compiled for {f.arch}")
            lines.append(f"configuration: {f.config}, raster panels of {self.group}")
            lines.append(f"operands: {f.dtype} -> {f.out_dtype}, majors {f.majors}, alignments {f.aligns} elements")
            if f.block:
                steps = f", MMA steps a K-tile {f.k_blocks}" if all(f.k_blocks) else ""
                lines.append(f"blocks: {f.block.bm}x{f.block.bk}{steps}")
                if f.block.batch:
                    runs = f", grouped in runs of {f.block.run} rows" if f.block.run else ""
                    lines.append(f"batch: {'one pattern' if f.block.batch == 'values' else 'a pattern an item'}{runs}")
        return "\n  ".join(lines + self.notes)


def viewed(views: tuple, *tensors) -> list:
    """The tensors as the kernel wants them; None stays None."""
    return [t if view is None or t is None else view(t) for t, view in zip(tensors, views, strict=True)]


def stage(plan: Plan, out, needed: bool) -> None:
    """Note whether `out` is written through a contiguous result: one whose leading dimensions have no single stride."""
    plan.staged = needed
    if needed:
        plan.notes.append(f"out is copied to: its leading dimensions, strides {out.stride()}, do not fold into one")


def bias_view(bias):
    """A bias as the kernel takes it: one mode of stride 1. A strided one is copied, a few kilobytes."""
    return None if bias.dim() == 1 and bias.stride(0) == 1 else lambda t: t.flatten().contiguous()
