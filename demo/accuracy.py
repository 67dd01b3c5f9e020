"""Errors of block-sparse GEMMs on a real layer with pruned weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from bench.table import grid
from sparse_collective import BsrMatrix, bsr_linear

from .layer import FeedForward, dense_forward

TIMES_TORCH = 3.0  # torch's dense fp16 product errs too, and is the yardstick where two products follow each other


@dataclass(frozen=True)
class Accuracy:
    """One block shape at one density, against the same pruned weights in fp32 and against the whole layer."""

    blocksize: tuple[int, int]
    density: float
    error: float  # ||ours - fp32|| / ||fp32||
    torch_error: float  # the same for torch's dense fp16 product of the masked weights

    @property
    def agrees(self) -> bool:
        """Whether ours errs no more than rounding explains; False for NaN."""
        return self.error <= max(TIMES_TORCH * self.torch_error, rounding(torch.float16))


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of rounding one number to `dtype`."""
    return torch.finfo(dtype).eps / 2


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """||actual - truth|| / ||truth||, in fp32."""
    return ((actual.float() - truth.float()).norm() / truth.float().norm()).item()


def block_name(blocksize: Sequence[int]) -> str:
    """(128, 64) as 128x64."""
    return "x".join(map(str, blocksize))


def measure(layer: FeedForward, blocksize: tuple[int, int], density: float) -> Accuracy:
    """Prune both weights by the norm of their blocks, run the layer on this project's products, compare."""
    w1, w2 = (BsrMatrix.from_dense(w, blocksize, density=density) for w in (layer.w1, layer.w2))
    masked = w1.to_dense(), w2.to_dense()
    truth = dense_forward(layer, *masked, torch.float32)
    hidden = bsr_linear(layer.x, w1, bias=layer.b1, activation="gelu")  # (tokens, 1536)
    ours = bsr_linear(hidden, w2, bias=layer.b2)  # (tokens, 384)
    return Accuracy(
        blocksize=blocksize,
        density=density,
        error=relative_error(ours, truth),
        torch_error=relative_error(dense_forward(layer, *masked, ours.dtype), truth),
    )


def accuracy_table(rows: Sequence[Accuracy]) -> Table:
    """Errors of the block-sparse GEMMs and of torch's dense ones, against FP32 with the same pruned weights."""
    table = grid([], ["blocks", "kept", "error of ours", "of torch, dense", "agrees"], title="The pruned layer, FP16")
    for i, row in enumerate(rows):
        errors = (f"{error:.1e}" for error in (row.error, row.torch_error))
        verdict = "yes" if row.agrees else "[bold red]NO[/]"
        last = i + 1 < len(rows) and rows[i + 1].blocksize != row.blocksize
        table.add_row(block_name(row.blocksize), f"{row.density:.1%}", *errors, verdict, end_section=last)
    return table
