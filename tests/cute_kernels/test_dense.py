"""gemm beyond the conformance cases: broadcast batches, views, numbers that are told apart, plans that are known."""

import itertools
import math
from functools import partial

import pytest
import torch

import cute_kernels
from cute_kernels import explain, gemm
from cute_kernels import functions as F
from cute_kernels.testing.reference import normal, operand, poisoned

from ..gemm_calls import assert_right, check

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("nn", "nt", "tn", "tt")


def matrices(m, n, k, device, layouts="nn"):
    return operand(m, k, layouts[0], device=device), operand(k, n, layouts[1], device=device, k=k)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_facts(device, path, layouts):
    facts = check(gemm, *matrices(1024, 768, 520, device, layouts), out=poisoned(768, 1024, device=device).t()).facts
    assert facts.path == path
    assert facts.majors == ("m" if layouts[0] == "t" else "k", "k" if layouts[1] == "t" else "n", "m")


SIZES = [(1, 1, 1), (127, 129, 65), (1, 7, 3), (33, 1, 17), (64, 61, 64), (2, 2, 4), (1, 264, 128), (264, 1, 128)]


@pytest.mark.parametrize(("m", "n", "k"), [*SIZES, (1, 8, 1), (8, 1, 1)])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_what_tma_refuses_the_sm_80_kernel_serves(device, m, n, k, layouts):
    """And explain says so."""
    a, b = matrices(m, n, k, device, layouts)
    plan = check(gemm, a, b)
    strides = [s for t in (a, b) for extent, s in zip(t.shape, t.stride(), strict=True) if extent > 1 and s != 1]
    if any(s % 8 for s in strides):
        assert plan.facts.path == "sm_80" and min(plan.facts.aligns) < 8
        if explain(gemm, *matrices(64, 64, 64, device)).facts.path == "sm_90":
            assert any("not on path sm_90" in note and "16 bytes" in note for note in plan.notes)
            with cute_kernels.path("sm_90"), pytest.raises(ValueError, match="not on path sm_90: .*16 bytes"):
                gemm(a, b)


BATCHES = {
    "folded": ((3, 40, 72), (72, 136)),
    "b only": ((40, 72), (3, 72, 136)),
    "of one": ((1, 40, 72), (3, 72, 136)),
    "of one b": ((3, 40, 72), (1, 72, 136)),
    "crossed": ((2, 1, 40, 72), (1, 3, 72, 136)),
    "two deep": ((2, 3, 40, 72), (2, 3, 72, 136)),
    "two deep folded": ((2, 3, 40, 72), (72, 136)),
    "ranks differ": ((2, 3, 40, 72), (3, 72, 136)),
    "a sum of nothing": ((3, 40, 0), (0, 136)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(device, path, name):
    """Every term of the epilogue is found for every matrix; a row bias keeps a batch apart."""
    a, b = (normal(*shape, device=device, k=72) for shape in BATCHES[name])
    copied = [note for note in check(gemm, a, b).notes if "is copied" in note]
    assert len(copied) == {"crossed": 2, "ranks differ": 1}.get(name, 0), "copies are announced, and only copies"
    terms = {"activation": "silu", "residual": normal(*(a @ b).shape, device=device), "alpha": 0.5, "beta": -1.5}
    for bias in ((136,), (40, 1)):
        check(gemm, a, b, bias=normal(*bias, device=device), **terms)


# Calls: (a, b) or (a, b, terms); `n` draws on the device


def batches_in_memory(n):
    """Expanded, permuted and sliced batches, and outputs that are not contiguous."""
    a, b = n(5, 40, 72), n(72, 136, k=72)
    yield a, b.expand(5, 72, 136)
    yield a[:1].expand(5, 40, 72), n(5, 72, 136, k=72)
    yield a[::2], n(3, 72, 136, k=72)
    yield n(40, 3, 72).transpose(0, 1), b
    yield a[1:4], b, {"out": n(40, 3, 136).transpose(0, 1)}
    yield a[1:4, 8:24], b, {"out": n(3, 64, 136)[:, 16:32]}
    yield n(2, 3, 40, 72)[:, 1:], n(2, 2, 72, 136, k=72)
    yield n(2, 3, 40, 72), b, {"out": n(3, 2, 40, 136).transpose(0, 1)}


def one_row_of_a_wider_matrix(n):
    """The stride of an extent of 1 is never stepped along, so it may be anything."""
    wide, tall = n(8, 71), n(64, 64, k=64)
    yield wide[:1, :64], tall
    yield wide[:1, :64], tall, {"out": n(3, 71)[:1, :64]}
    yield tall, wide[:1, :64].t()
    yield tall, tall[:, :1]
    yield n(200, 1), n(1, 64)


def biases(n):
    """If M is N, (N,) counts columns and (N, 1) rows."""
    a, b, long = n(200, 136), n(136, 264, k=136), n(528)
    for shape, dtype in itertools.product(((264,), (1, 264), (200, 1)), (BF16, FP16, FP32)):
        yield a, b, {"bias": n(*shape, dtype=dtype)}
    for bias in (long[1::2], long.expand(1, 528)[:, ::2], n(1).expand(264)):
        yield a, b, {"bias": bias}
    for shape in ((136,), (136, 1)):
        yield a[:136], b[:, :136], {"bias": n(*shape)}


def empty_results(n):
    for a, b in (
        ((0, 16), (16, 8)),
        ((8, 16), (16, 0)),
        ((0, 3, 16), (16, 8)),
        ((0, 0), (0, 0)),
        ((3, 0, 16), (16, 8)),
    ):
        yield n(*a), n(*b)


def other_terms(n):
    a, b = n(200, 136), n(136, 264, k=136)
    yield a, b, {"residual": n(200, 264)}
    yield a, b, {"residual": n(1, 264).expand(200, 264), "beta": 0.5}
    yield a, b, {"alpha": 2}
    yield a, b, {"epilogue": lambda x: F.minimum(F.maximum(x, -0.5), 0.5), "out_dtype": FP32}
    yield a, b, {"epilogue": lambda x: x * F.sigmoid(x) + 1.0}


CALLS = [batches_in_memory, one_row_of_a_wider_matrix, biases, empty_results, other_terms]


@pytest.mark.parametrize("calls", CALLS)
def test_calls(device, path, calls):
    for a, b, *terms in calls(partial(normal, device=device)):
        plan = check(gemm, a, b, **dict(*terms))
    assert plan.staged or calls is not batches_in_memory, "the last one's output is permuted"


@pytest.mark.parametrize("view", ["offset of 1", "step of 2", "odd rows", "flipped strides", "rows that overlap"])
def test_views_without_alignment(device, view):
    """Operands that TMA cannot read, down to matrices without a contiguous mode, and matrices whose rows overlap."""
    big = normal(200, 401, device=device)
    a = {
        "offset of 1": lambda: normal(200, 400, device=device)[:, 1:137],
        "step of 2": lambda: normal(200, 400, device=device)[:, 0:272:2],
        "odd rows": lambda: big[:, :136],
        "flipped strides": lambda: big[:136, 3:203:2].t(),
        "rows that overlap": lambda: normal(1000, device=device).as_strided((200, 136), (3, 1)),
    }[view]()
    b = normal(136, 72, device=device, k=136)
    assert check(gemm, a, b).facts.path == check(gemm, b.t(), a.t()).facts.path == "sm_80"
    check(gemm, a, normal(72, 137, device=device, k=136)[:, 1:].t())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_outputs_with_gaps(device, path, dtype):
    """Every second row or column of a buffer, and nothing of the others."""
    for rows, cols in ((slice(0, 400, 2), slice(16, 280)), (slice(5, 205), slice(0, 528, 2))):
        buffer = torch.full((420, 544), 7.0, dtype=dtype, device=device)
        out = buffer[rows, cols]
        plan = check(gemm, *matrices(200, 264, 136, device), out=out, activation="gelu")
        assert not plan.facts.tma_store or rows.step
        out.fill_(7.0)
        assert (buffer == 7.0).all(), "memory around the output was written"


def test_scalars_are_arguments_of_one_kernel(device, path):
    a, b = matrices(200, 264, 136, device)
    residual, scalars = normal(200, 264, device=device), ((0.5, 2.0), (-3.0, -0.5), (0.0, 1.0))
    assert len({check(gemm, a, b, residual=residual, alpha=x, beta=y).facts for x, y in scalars}) == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_a_residual_may_be_the_output(device, path, transposed):
    a, b = matrices(200, 264, 136, device)
    out = normal(264, 200, device=device).t() if transposed else normal(200, 264, device=device)
    residual = out.clone()
    assert gemm(a, b, residual=out, beta=0.5, out=out) is out
    assert_right(out, gemm, a, b, residual=residual, beta=0.5)


def test_relu_keeps_nan(device, path):
    a, b = matrices(64, 64, 64, device)
    a[3] = math.nan
    out = gemm(a, b, activation="relu")
    assert out[3].isnan().all() and not out[4].isnan().any()


def test_known_plans_are_not_confused_on_two_tensors(device):
    """Calls that differ in one argument, each after all others, then with new tensors; functions of equal code, too."""
    for _ in range(2):
        (a, b), square = matrices(64, 64, 64, device), normal(64, 64, device=device)
        variants = [{"alpha": 2.0}, {"alpha": 0.5}, {"out_dtype": FP32}, {"residual": square}, {"residual": square.t()}]
        variants += [{"epilogue": lambda x, by=by: x + by} for by in (1.0, -1.0)]
        variants += [{"activation": name} for name in (None, "relu", "silu")]
        variants += [{"bias": bias} for bias in (square[0], square[0].float(), square[:, :1])]
        outs = square.clone(), square.clone().t(), normal(64, 128, dtype=FP32, device=device)[:, ::2]
        for terms in variants:
            dtype, rest = terms.get("out_dtype", BF16), {k: v for k, v in terms.items() if k != "out_dtype"}
            out = gemm(a, b, **terms)
            assert out.dtype is dtype
            assert_right(out, gemm, a, b, **rest)
        for out in outs:
            assert_right(gemm(a, b, out=out), gemm, a, b)
        for name in ("sm_80", explain(gemm, a, b).facts.path):
            with cute_kernels.path(name):
                assert_right(gemm(a, b), gemm, a, b)
                assert explain(gemm, a, b).facts.path == name


@pytest.mark.gpu
def test_a_graph_of_two_products(path):
    """The second reads what the first wrote."""
    a, b = matrices(200, 264, 136, "cuda")
    out = poisoned(200, 264, device="cuda")
    gemm(gemm(a, b, out=out), b.t().contiguous())  # compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, out=out)
        second = gemm(out, b.t().contiguous())
    for _ in range(3):
        a.copy_(normal(200, 136, device="cuda"))
        graph.replay()
        assert_right(out, gemm, a, b)
        assert_right(second, gemm, out, b.t())
