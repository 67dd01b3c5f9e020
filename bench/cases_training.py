"""What training adds to a product: the weight's gradient, the transposed product, and a layer forward and backward.

Dense peers are torch's own; others are Triton kernels, see peers_training. Of what is useful, a row counts stored
blocks alone; of a layer three products.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from cute_kernels import explain
from sparse_collective import BsrMatrix, bsr_linear, sddmm
from tests.reference import truth

from . import peers
from . import peers_training as training
from .cases import CUBE, DENSE_CUBE, of_rows, randn
from .cases_models import EIGHTH, model_cases, sampled_rows
from .peers import Call, Operands, verified
from .rows import Candidate, Case, Problem

LAYER = "nn.Linear"
COMPILED = "nn.Linear, compiled"


def cube(name: str = DENSE_CUBE) -> Candidate:
    """cuBLAS's dense product of the cube."""
    x = Operands(lambda: randn(CUBE, CUBE), lambda: randn(CUBE, CUBE))
    return peers.cublas(x, 2.0 * CUBE**3, name)


def sampled(bm: int, bk: int, asked: float | None = None, accumulate: bool = False, triton: str = "") -> Case:
    """sddmm(dy.t(), x, W): the gradient of the values, of 8192 tokens.

    triton: how many settings of a Triton kernel are tried, "quick" or "full"; "" for no such peers.
    """
    per_row = round(EIGHTH * CUBE / bk)
    problem = Problem("sddmm", CUBE, CUBE, CUBE, (bm, bk), per_row * bk / CUBE, epilogue="accumulate" * accumulate)

    @functools.cache
    def operands() -> tuple[BsrMatrix, torch.Tensor, torch.Tensor]:
        """(W, dy', x)"""
        return of_rows(CUBE, CUBE, (bm, bk), per_row), randn(CUBE, CUBE).t(), randn(CUBE, CUBE)

    def ours():
        W, a, b = operands()
        out = torch.zeros_like(W.values)
        call = verified(functools.partial(sddmm, a, b, W, out=out), lambda: training.some_blocks(a, b, W))
        return Call(functools.partial(call, accumulate=accumulate)), explain(sddmm, a, b, W, out=out)

    name = f"sddmm {bm}x{bk}, {EIGHTH}" + (", added" if accumulate else "")
    others = [cube()]
    if triton:
        others.append(training.triton_sdd(operands, problem.flops, quick=triton == "quick"))
        others.append(training.sampled_addmm(operands, problem.flops))
    return Case("training", name, problem, ours, others, DENSE_CUBE, asked)


def transposed(bm: int, bk: int, asked: float | None = None, triton: str = "") -> Case:
    """bsr_linear(dy, W.t()): the gradient of x. triton: see sampled."""
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

    others = [cube()]
    if triton:
        others.append(training.transposed_copy(operands, problem.flops, quick=triton == "quick"))
    return Case("training", f"transposed {bm}x{bk}, {EIGHTH}", problem, ours, others, DENSE_CUBE, asked)


def layer(
    bm: int, bk: int, asked: float | None = None, *, activation: str = "", tokens: int = CUBE, triton: bool = False
) -> Case:
    """Forward and backward of x -> W x' at 12.5 %, gradients of x and of the values, beside nn.Linear.

    With an activation it has a bias, too, and both are compiled by torch. triton: a layer of Triton kernels is a peer.
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

    def of_triton() -> Call:
        W, (x, dy) = of_rows(CUBE, CUBE, (bm, bk), per_row), shared()
        values = (W.values * CUBE**-0.5).requires_grad_()
        return training.fastest_layer(lambda apply: step(apply, values), x, dy, W, values)

    against = COMPILED if activation else LAYER
    name = f"layer {bm}x{bk}, {EIGHTH}, forward and backward" + (f", bias+{activation}, compiled" if activation else "")
    others = [Candidate(against, problem.flops, dense)]
    if triton:
        others.append(Candidate(training.TRITON_LAYER, problem.flops, of_triton))
    return Case("training", name, problem, ours, others, against, asked)


def training_cases(mode: str) -> Iterator[Case]:
    """Rows of 8192 tokens, features and outputs, and those of models. "quick" has few Triton peers, which compile."""
    full = mode == "full"
    for block, asked in (((128, 128), 0.82), ((64, 64), 0.55), ((32, 32), 0.3)):
        yield sampled(*block, asked, triton=mode if full or block == (128, 128) else "")
    for block, asked in (((128, 128), 0.9), ((64, 64), 0.7), ((32, 32), 0.4)):
        yield transposed(*block, asked, triton=mode if full or block == (128, 128) else "")
    yield layer(128, 128, 6.3, triton=True)
    yield layer(64, 64, 4.5, triton=full)
    yield layer(128, 128, 6.0, activation="gelu")
    yield from model_cases(mode)
    if full:
        yield sampled(128, 128, accumulate=True)
        yield sampled(16, 16, triton=mode)
        yield transposed(16, 16, triton=mode)
        yield layer(32, 32, triton=True)
        yield layer(256, 64)
