"""One GPU's mixture of experts by kernels that move its rows, against torch's operations."""

from unittest import mock

import pytest
import torch

from sparse_collective.nn import routed_rows
from sparse_collective.nn.feed_forward import routed

from ..attention.test_selected_tables import WHERE
from .test_expert_rows import place_of

EXPERTS, GROUP_ROWS = 5, 64
CASES = {  # tokens, k, columns, numbers of other ranks' experts
    "top 2": (70, 2, 72, 0),
    "top 1": (9, 1, 264, 0),
    "choices elsewhere": (40, 3, 16, 4),
    "no tokens": (0, 2, 8, 0),
}


def operands(where, name, dtype=torch.float32):
    tokens, k, columns, others = CASES[name]
    generator, device = torch.Generator().manual_seed(2), "cuda" if where == "cuda" else "cpu"
    x, dy = torch.randn(2, tokens, columns, generator=generator)
    weights, choices = torch.rand(tokens, EXPERTS + others, generator=generator).topk(k)
    weights = weights * (choices < EXPERTS)
    matrices = torch.randn(EXPERTS + 1, columns, columns, generator=generator) * columns**-0.5
    matrices[EXPERTS] = 0
    x, dy, matrices = (t.to(device, dtype) for t in (x, dy, matrices))
    return x, choices.to(device), weights.to(device), matrices, dy


def run(x, choices, weights, matrices):
    """routed, with dense experts."""

    def layers(rows, expert_ids):
        runs = rows.unflatten(0, (-1, GROUP_ROWS))
        return (runs @ matrices[expert_ids.long().clamp(max=EXPERTS)]).sin().flatten(0, 1)

    return routed(x, choices, weights, EXPERTS, GROUP_ROWS, layers, elsewhere=True)


def by_torch(*args):
    with mock.patch.object(routed_rows, "served", lambda *_: False):
        return run(*args)


def by_kernels(where, *args):
    with mock.patch.object(routed_rows, "rows_of", wraps=routed_rows.rows_of) as used:
        y = run(*args)
    assert used.called
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
@WHERE
def test_results_and_gradients(where, name, dtype):
    x, choices, weights, matrices, dy = operands(where, name, dtype)
    found = []
    for way in (lambda *args: by_kernels(where, *args), by_torch):
        leaves = [t.clone().requires_grad_() for t in (x, weights, matrices)]
        with place_of(where):
            y = way(leaves[0], choices, leaves[1], leaves[2])
            y.backward(dy)
        assert y.dtype is dtype
        found.append([y, *(leaf.grad for leaf in leaves)])
    for mine, right in zip(*found, strict=True):
        slack = 2e-2 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine, right, rtol=slack, atol=slack)


@WHERE
def test_second_derivatives(where):
    """Gradients of a gradient's norm, as a gradient penalty has them."""
    x, choices, weights, matrices, dy = operands(where, "choices elsewhere")
    found = []
    for way in (lambda *args: by_kernels(where, *args), by_torch):
        leaves = [t.clone().requires_grad_() for t in (x, weights, matrices, dy)]
        with place_of(where):
            y = way(leaves[0], choices, leaves[1], leaves[2])
            firsts = torch.autograd.grad(y, leaves[:3], leaves[3], create_graph=True)
            sum(first.square().sum() for first in firsts).backward()
        found.append([leaf.grad for leaf in leaves])
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_cuda_graph_replays_other_choices():
    x, choices, weights, matrices, _ = operands("cuda", "top 2", torch.bfloat16)
    with torch.no_grad():
        run(x, choices, weights, matrices)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = by_kernels("cuda", x, choices, weights, matrices)
        choices.copy_(choices.flip(0))
        x.copy_(x.flip(1))
        graph.replay()
        assert torch.equal(y, run(x, choices, weights, matrices))


@pytest.mark.parametrize("shapes", [((3, 8), (3, 2), (3, 1)), ((4, 8), (3, 2), (3, 2)), ((3, 8), (3,), (3,))])
def test_shapes_that_do_not_fit(shapes):
    x, choices, weights = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match="need choices and weights"):
        routed(x, choices.long(), weights, 4, 64, lambda x, ids: x)
