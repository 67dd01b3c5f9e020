"""Two questions, kept apart: does the product compute what it should, and what does pruning cost."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_collective import BsrMatrix, bsr_linear

from .layer import FeedForward, dense_forward
from .prune import prune

TIMES_TORCH = 3.0  # torch's dense fp16 product errs too, and is the yardstick where two products follow each other


@dataclass(frozen=True)
class Accuracy:
    """One block shape at one density, against the same pruned weights in fp32 and against the whole layer."""

    blocksize: tuple[int, int]
    density: float
    max_error: float  # |ours - fp32|, largest
    error: float  # ||ours - fp32|| / ||fp32||
    torch_error: float  # the same for torch's dense fp16 product of the masked weights
    cosine: float  # between ours and the unpruned output, mean over the tokens
    change: float  # ||ours - unpruned|| / ||unpruned||

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


def sparse_forward(layer: FeedForward, w1: BsrMatrix, w2: BsrMatrix) -> Tensor:
    """The pruned layer on this project's products."""
    hidden = bsr_linear(layer.x, w1, bias=layer.b1, activation="gelu")  # (tokens, 1536)
    return bsr_linear(hidden, w2, bias=layer.b2)  # (tokens, 384)


def measure(layer: FeedForward, blocksize: tuple[int, int], density: float) -> Accuracy:
    """Prune both weights the same way, run the layer, compare."""
    w1, w2 = prune(layer.w1, blocksize, density), prune(layer.w2, blocksize, density)
    masked = w1.to_dense(), w2.to_dense()
    truth = dense_forward(layer, *masked, torch.float32)
    ours = sparse_forward(layer, w1, w2)
    return Accuracy(
        blocksize=blocksize,
        density=density,
        max_error=(ours.float() - truth).abs().max().item(),
        error=relative_error(ours, truth),
        torch_error=relative_error(dense_forward(layer, *masked, ours.dtype), truth),
        cosine=F.cosine_similarity(ours.float(), layer.expected.float(), dim=1).mean().item(),
        change=relative_error(ours, layer.expected),
    )


def study(layer: FeedForward, blocksizes: Iterable[tuple[int, int]], densities: Iterable[float]) -> list[Accuracy]:
    """Every block shape at every density."""
    densities = tuple(densities)
    return [measure(layer, blocksize, density) for blocksize in blocksizes for density in densities]
