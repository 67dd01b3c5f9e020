"""What training adds to a product: the weight's gradient, the transposed product, and a layer forward and backward.

Peers are torch's dense GEMMs and layers. A row counts the operations on stored blocks; a layer has three GEMMs.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from cute_kernels import explain
from cute_kernels.testing.reference import truth
from sparse_collective import BsrMatrix, bsr_linear, sddmm

from . import peers
from .cases import CUBE, DENSE_CUBE, of_rows, randn
from .cases_layers import sampled_rows
from .cases_models import EIGHTH, model_cases
from .peers import Call, Operands, verified
from .rows import Candidate, Case, Problem

LAYER = "nn.Linear"
COMPILED = "nn.Linear, compiled"
BLOCKS = 16  # compared, of a sampled GEMM


def cube(name: str = DENSE_CUBE) -> Candidate:
    """cuBLAS's dense product of the cube."""
    x = Operands(lambda: randn(CUBE, CUBE), lambda: randn(CUBE, CUBE))
    return peers.cublas(x, 2.0 * CUBE**3, name)


def some_blocks(a: torch.Tensor, b: torch.Tensor, W: BsrMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices of some stored blocks, evenly spread, and these blocks of a @ b in FP32)."""
    (bm, bk), rows = W.blocksize, W.row_of_block()
    chosen = torch.linspace(0, W.nnz - 1, min(W.nnz, BLOCKS), dtype=torch.float64).long().to(a.device)
    places = [(int(rows[p]) * bm, int(W.col_indices[p]) * bk) for p in chosen.tolist()]
    blocks = [truth(a[m : m + bm], b[:, n : n + bk], dtype=torch.float32) for m, n in places]
    return chosen, torch.stack(blocks)


def sampled(bm: int, bk: int, asked: float | None = None, accumulate: bool = False) -> Case:
    """sddmm(dy.t(), x, W): the gradient of the values, with 8192 tokens."""
    per_row = round(EIGHTH * CUBE / bk)
    problem = Problem("sddmm", CUBE, CUBE, CUBE, (bm, bk), per_row * bk / CUBE, epilogue="accumulate" * accumulate)

    @functools.cache
    def operands() -> tuple[BsrMatrix, torch.Tensor, torch.Tensor]:
        """(W, dy', x)"""
        return of_rows(CUBE, CUBE, (bm, bk), per_row), randn(CUBE, CUBE).t(), randn(CUBE, CUBE)

    def ours():
        W, a, b = operands()
        out = torch.zeros_like(W.values)
        call = verified(functools.partial(sddmm, a, b, W, out=out), lambda: some_blocks(a, b, W))
        return Call(functools.partial(call, accumulate=accumulate)), explain(sddmm, a, b, W, out=out)

    name = f"sddmm {bm}x{bk}, {EIGHTH}" + (", added" if accumulate else "")
    return Case("training", name, problem, ours, [cube()], DENSE_CUBE, asked)


def transposed(bm: int, bk: int, asked: float | None = None) -> Case:
    """bsr_linear(dy, W.t()): the gradient of x."""
    per_row = round(EIGHTH * CUBE / bk)
    problem = Problem("bsr_linear", CUBE, CUBE, CUBE, (bm, bk), per_row * bk / CUBE, layout="transposed")
    operands = functools.cache(lambda: (of_rows(CUBE, CUBE, (bm, bk), per_row), randn(CUBE, CUBE)))

    def ours():
        W, dy = operands()
        out, view = dy.new_empty(CUBE, CUBE), W.t()
        rows = sampled_rows(CUBE, dy.device)
        call = verified(
            Call(lambda: bsr_linear(dy, view, out=out)),
            lambda: (rows, truth(dy[rows], W.to_dense(), dtype=torch.float32)),
        )
        return call, explain(bsr_linear, dy, view, out=out)

    return Case("training", f"transposed {bm}x{bk}, {EIGHTH}", problem, ours, [cube()], DENSE_CUBE, asked)


def layer(bm: int, bk: int, asked: float | None = None, *, activation: str = "", tokens: int = CUBE) -> Case:
    """Forward and backward of x -> W x' at 12.5 %, gradients of x and of the values, beside nn.Linear.

    With an activation it has a bias, too, and both are compiled by torch.
    """
    per_row = round(EIGHTH * CUBE / bk)
    problem = Problem("layer", CUBE, tokens, CUBE, (bm, bk), per_row * bk / CUBE, epilogue=activation, products=3)
    shared = functools.cache(lambda: (randn(tokens, CUBE).requires_grad_(), randn(tokens, CUBE)))

    def step(function: Callable, *parameters: torch.Tensor) -> Call:
        x, dy = shared()
        run = torch.compile(function, fullgraph=True) if activation else function
        leaves = [x, *parameters]

        def call():
            for leaf in leaves:
                leaf.grad = None
            run(x, *parameters).backward(dy)
            return x.grad

        return Call(call)

    def ours():
        W = of_rows(CUBE, CUBE, (bm, bk), per_row)
        W.check_indices()
        values, bias = (W.values * CUBE**-0.5).requires_grad_(), randn(CUBE).requires_grad_()
        if activation:
            return step(
                lambda x, v, b: bsr_linear(x, W.with_values(v), bias=b, activation=activation), values, bias
            ), None
        return step(lambda x, v: bsr_linear(x, W.with_values(v)), values), None

    def dense():
        weight, bias = (randn(CUBE, CUBE) * CUBE**-0.5).requires_grad_(), randn(CUBE).requires_grad_()
        linear = torch.nn.functional.linear
        if activation:
            return step(lambda x, w, b: torch.nn.functional.gelu(linear(x, w, b)), weight, bias)
        return step(linear, weight)

    against = COMPILED if activation else LAYER
    name = f"layer {bm}x{bk}, {EIGHTH}, forward and backward" + (f", bias+{activation}, compiled" if activation else "")
    return Case("training", name, problem, ours, [Candidate(against, problem.flops, dense)], against, asked)


def training_cases(mode: str) -> Iterator[Case]:
    """Rows of 8192 tokens, features and outputs, and those of models."""
    for block, asked in (((128, 128), 0.82), ((64, 64), 0.55), ((32, 32), 0.3)):
        yield sampled(*block, asked)
    for block, asked in (((128, 128), 0.9), ((64, 64), 0.7), ((32, 32), 0.4)):
        yield transposed(*block, asked)
    yield layer(128, 128, 6.3)
    yield layer(64, 64, 4.5)
    yield layer(128, 128, 6.0, activation="gelu")
    yield from model_cases()
    if mode == "full":
        yield sampled(128, 128, accumulate=True)
        yield sampled(16, 16)
        yield transposed(16, 16)
        yield layer(32, 32)
        yield layer(256, 64)
