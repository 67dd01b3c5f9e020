"""Peers of gradients and layers: torch's Triton kernels, and a sampled product in Triton as STK formulates it."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_collective import BsrMatrix
from tests.reference import truth

from . import peers, timing
from .peers import Call, Operands, fastest, needs, verified
from .rows import Candidate

SAMPLED_ADDMM = "torch's Triton sampled_addmm"
SDD = "Triton, a program a block"
TRANSPOSED_COPY = "torch's Triton BSR, of a transposed copy"
TRITON_LAYER = "Triton, a kernel a product"
BLOCKS = 16  # compared, of a sampled product


class SddSetting(NamedTuple):
    """How the kernel runs: depth of a K-tile, warps, pipeline stages."""

    depth: int
    warps: int
    stages: int


# Those of large blocks first: blocks of 16 do with one warp.
SDD_SETTINGS = tuple(SddSetting(*each) for each in ((64, 8, 3), (64, 8, 4), (64, 4, 4), (32, 8, 4), (64, 1, 4)))


def some_blocks(a: Tensor, b: Tensor, W: BsrMatrix) -> tuple[Tensor, Tensor]:
    """(numbers of some stored blocks, evenly spread, and these blocks of a @ b in fp32)."""
    (bm, bk), rows = W.blocksize, W.row_of_block()
    chosen = torch.linspace(0, W.nnz - 1, min(W.nnz, BLOCKS), dtype=torch.float64).long().to(a.device)
    places = [(int(rows[p]) * bm, int(W.col_indices[p]) * bk) for p in chosen.tolist()]
    blocks = [truth(a[m : m + bm], b[:, n : n + bk], dtype=torch.float32) for m, n in places]
    return chosen, torch.stack(blocks)


def sampled_addmm(operands: Callable[[], tuple], flops: float) -> Candidate:
    """torch's own: it first copies the pattern's values to its output. operands() is (W, a, b)."""

    def setup() -> Call:
        needs("triton", "triton")  # without it torch's function is not there
        ops = needs("torch.sparse._triton_ops", "torch")
        W, a, b = operands()
        pattern, out = W.detach().to_torch(), W.with_values(torch.zeros_like(W.values)).to_torch()
        call = Call(lambda: ops.sampled_addmm(pattern, a, b, beta=0.0, out=out, skip_checks=True).values())
        return verified(call, lambda: some_blocks(a, b, W))

    return Candidate(SAMPLED_ADDMM, flops, setup)


def sdd_call(W: BsrMatrix, a: Tensor, b: Tensor, out: Tensor, setting: SddSetting) -> Callable[[], Tensor]:
    """The Triton kernel's call for the stored blocks of a @ b.

    Raises:
        ImportError: there is no Triton.
        ValueError: the setting does not divide K.
    """
    needs("triton", "triton")
    if a.shape[1] % setting.depth:
        raise ValueError(f"K is {a.shape[1]}, no multiple of {setting.depth}")
    kernel, rows = needs("bench.triton_sdd", "triton").sdd, W.row_of_block().int()
    return lambda: kernel(a, b, rows, W.col_indices, out, *setting)


def triton_sdd(
    operands: Callable[[], tuple], flops: float, quick: bool = False, measure: Callable = timing.interleaved
) -> Candidate:
    """The fastest setting of the Triton kernel, of the first peers.QUICK if `quick`. operands() is (W, a, b)."""

    def setup() -> Call:
        W, a, b = operands()
        make = functools.partial(sdd_call, W, a, b, torch.zeros_like(W.values))
        settings = list(SDD_SETTINGS[: peers.QUICK if quick else None])
        setting, call = fastest(make, settings, lambda: some_blocks(a, b, W), measure)
        return Call(call, note=str(setting))

    return Candidate(SDD, flops, setup)


def copied(view: BsrMatrix) -> BsrMatrix:
    """A matrix of its own of a transposed view: torch's kernel takes no view."""
    return BsrMatrix(view.crow_indices, view.col_indices, view.values, view.shape)


def transposed_copy(operands: Callable[[], tuple], flops: float, quick: bool = False, **options) -> Candidate:
    """W' dy' by torch's Triton kernel, of a copy of W that was transposed before. operands() is (W, dy)."""
    x = Operands(lambda: copied(operands()[0].t()), lambda: operands()[1].t(), transposed=True)
    return peers.triton_bsr(x, flops, name=TRANSPOSED_COPY, quick=quick, **options)


def triton_layer(x: Tensor, W: BsrMatrix, values: Tensor, setting: peers.Setting, sdd: SddSetting) -> Callable:
    """layer(x, values) -> y, differentiable, its three products by Triton kernels: as MegaBlocks' layers are made.

    Backward copies the values in the order of the transpose.

    Args:
        x: (tokens, K), to which shape it is bound.
        W: (M, K), the pattern.
        values: (nnz, bm, bk), the very tensor that the layer is called with: it may change in place.
        setting, sdd: of torch's kernel, and of the sampled product.
    """
    needs("triton", "triton")
    ops, view = needs("torch.sparse._triton_ops", "torch"), W.t()
    (tokens, K), M = x.shape, W.shape[0]
    weight, order = W.with_values(values.detach()).to_torch(), view.numbers.long()
    moved = torch.empty_like(view.values)
    transposed = BsrMatrix(view.crow_indices, view.col_indices, moved, view.shape).to_torch()
    meta = {"SPLIT_N": tokens // setting.columns, "GROUP_SIZE_ROW": setting.group}
    meta |= {"num_warps": setting.warps, "num_stages": setting.stages}

    def product(a, b: Tensor, rows: int) -> Tensor:
        """(tokens, rows): a @ b' transposed, of b (tokens, columns of a)."""
        out = b.new_empty(tokens, rows).t()
        return ops.bsr_dense_addmm(out, a, b.t(), beta=0, out=out, meta=meta).t()

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, values):
            ctx.save_for_backward(x)
            return product(weight, x, M)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            moved.copy_(values.detach().index_select(0, order).mT)
            dvalues = sdd_call(W, dy.t(), x, torch.empty_like(values), sdd)()
            return product(transposed, dy, K), dvalues

    return Layer.apply


def fastest_layer(
    step: Callable, x: Tensor, dy: Tensor, W: BsrMatrix, values: Tensor, measure: Callable = timing.interleaved
) -> Call:
    """The fastest of some settings of triton_layer: step(layer) makes its forward and backward, which gives x's
    gradient and leaves that of the values there. Both are compared with the truth."""

    def make(settings: tuple) -> Callable[[], Tensor]:
        call = step(triton_layer(x, W, values, *settings))
        call()
        chosen, blocks = some_blocks(dy.t(), x.detach(), W)
        peers.compare(values.grad[chosen], blocks)
        return call

    def expected() -> tuple[Tensor, Tensor]:
        rows = torch.linspace(0, len(dy) - 1, min(len(dy), peers.SAMPLE), dtype=torch.float64).long().to(dy.device)
        return rows, truth(dy[rows], W.with_values(values.detach()).to_dense(), dtype=torch.float32)

    settings = list(itertools.product(peers.settings_for(W.blocksize[0], len(x))[:2], SDD_SETTINGS[:2]))
    setting, call = fastest(make, settings, expected, measure)
    return Call(call, note=", ".join(map(str, setting)))
