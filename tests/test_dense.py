"""gemm beyond the conformance cases: broadcast batches, views, numbers that are told apart, plans that are known."""

import math

import pytest
import torch

import cute_kernels
from cute_kernels import explain, gemm
from cute_kernels import functions as F

from .reference import assert_as_good_as_torch, exact_and_torch, normal, operand, poisoned

BF16, FP32 = torch.bfloat16, torch.float32


def check(a, b, *, out=None, out_dtype=None, **terms):
    """One product into poisoned memory against the truth; returns its plan."""
    dtype = out.dtype if out is not None else out_dtype or a.dtype
    exact, by_torch = exact_and_torch(a, b, dtype, **terms)
    if out is None:
        out = poisoned(*exact.shape, dtype=dtype, device=a.device)
    plan = explain(gemm, a, b, out=out, **terms)
    assert gemm(a, b, out=out, **terms) is out
    assert_as_good_as_torch(out, exact, by_torch, k=a.shape[-1], plan=plan)
    return plan


def matrices(m, n, k, device, layouts="nn", dtype=BF16):
    return (
        operand(m, k, layouts[0], dtype=dtype, device=device),
        operand(k, n, layouts[1], dtype=dtype, device=device, k=k),
    )


@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
def test_facts(device, path, layouts):
    facts = check(*matrices(1024, 768, 520, device, layouts), out=poisoned(768, 1024, device=device).t()).facts
    assert facts.path == path
    assert facts.majors == ("m" if layouts[0] == "t" else "k", "k" if layouts[1] == "t" else "n", "m")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (127, 129, 65), (1, 7, 3), (33, 1, 17), (64, 61, 64), (2, 2, 4)])
@pytest.mark.parametrize("layouts", ["nn", "tt"])
def test_what_tma_refuses_the_sm_80_kernel_serves(device, m, n, k, layouts):
    """And explain says so."""
    a, b = matrices(m, n, k, device, layouts)
    plan = check(a, b)
    strides = [s for t in (a, b) for extent, s in zip(t.shape, t.stride(), strict=True) if extent > 1 and s != 1]
    if any(s % 8 for s in strides):
        assert plan.facts.path == "sm_80" and min(plan.facts.aligns) < 8
        if explain(gemm, *matrices(64, 64, 64, device)).facts.path == "sm_90":
            assert any("not on path sm_90" in note and "16 bytes" in note for note in plan.notes)
            with cute_kernels.path("sm_90"), pytest.raises(ValueError, match="not on path sm_90: .*16 bytes"):
                gemm(a, b)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 264, 128), (264, 1, 128), (1, 8, 1), (8, 1, 1)])
def test_vectors(device, m, n, k):
    for layouts in ("nn", "nt", "tn", "tt"):
        check(*matrices(m, n, k, device, layouts))


@pytest.mark.parametrize(
    ("a", "b"), [((0, 16), (16, 8)), ((8, 16), (16, 0)), ((0, 3, 16), (16, 8)), ((0, 0), (0, 0)), ((3, 0, 16), (16, 8))]
)
def test_empty_results(device, path, a, b):
    out = gemm(normal(*a, device=device), normal(*b, device=device))
    assert out.shape == (*a[:-1], b[-1]) and out.dtype is BF16 and out.device.type == device


# Batches

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
    plan = check(a, b)
    copied = [note for note in plan.notes if "is copied" in note]
    assert len(copied) == {"crossed": 2, "ranks differ": 1}.get(name, 0), "copies are announced, and only copies"
    terms = {"activation": "silu", "residual": normal(*(a @ b).shape, device=device), "alpha": 0.5, "beta": -1.5}
    for bias in ((136,), (40, 1)):
        check(a, b, bias=normal(*bias, device=device), **terms)


def test_batch_strides(device, path):
    """Expanded, permuted and sliced batches, and outputs that are not contiguous."""
    a, b = normal(5, 40, 72, device=device), normal(72, 136, device=device, k=72)
    check(a, b.expand(5, 72, 136))
    check(a[:1].expand(5, 40, 72), normal(5, 72, 136, device=device, k=72))
    check(a[::2], normal(3, 72, 136, device=device, k=72))
    check(normal(40, 3, 72, device=device).transpose(0, 1), b)
    check(a[1:4], b, out=poisoned(40, 3, 136, device=device).transpose(0, 1))
    check(a[1:4, 8:24], b, out=poisoned(3, 64, 136, device=device)[:, 16:32])
    check(normal(2, 3, 40, 72, device=device)[:, 1:], normal(2, 2, 72, 136, device=device, k=72))
    out = poisoned(3, 2, 40, 136, device=device).transpose(0, 1)
    assert check(normal(2, 3, 40, 72, device=device), b, out=out).staged


# Views


def test_views_of_larger_matrices(device, path):
    big = normal(300, 304, device=device)
    check(big[10:202, 16:152], normal(200, 400, device=device, k=136)[8:144, 64:328])
    check(big[:192, :136], big[64:200, :264])
    check(big.t()[8:200, 16:152], normal(264, 136, device=device, k=136).t())


def test_one_row_of_a_wider_matrix(device, path):
    """The stride of an extent of 1 is never stepped along, so it may be anything."""
    wide = normal(8, 71, device=device)
    tall = normal(64, 64, device=device, k=64)
    check(wide[:1, :64], tall)
    check(wide[:1, :64], tall, out=poisoned(3, 71, device=device)[:1, :64])
    check(tall, wide[:1, :64].t())
    check(tall, tall[:, :1])
    check(normal(200, 1, device=device), normal(1, 64, device=device))


@pytest.mark.parametrize("view", ["offset of 1", "step of 2", "odd rows", "flipped strides", "rows that overlap"])
def test_views_without_alignment(device, view):
    """What TMA cannot read, down to matrices without a contiguous mode, and matrices whose rows overlap."""
    big = normal(200, 401, device=device)
    a = {
        "offset of 1": lambda: normal(200, 400, device=device)[:, 1:137],
        "step of 2": lambda: normal(200, 400, device=device)[:, 0:272:2],
        "odd rows": lambda: big[:, :136],
        "flipped strides": lambda: big[:136, 3:203:2].t(),
        "rows that overlap": lambda: normal(1000, device=device).as_strided((200, 136), (3, 1)),
    }[view]()
    b = normal(136, 72, device=device, k=136)
    assert check(a, b).facts.path == "sm_80"
    assert check(b.t(), a.t()).facts.path == "sm_80"
    check(a, normal(72, 137, device=device, k=136)[:, 1:].t())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_outputs_with_gaps(device, path, dtype):
    """Every second row or column of a buffer, and nothing of the others."""
    for rows, cols in ((slice(0, 400, 2), slice(16, 280)), (slice(5, 205), slice(0, 528, 2))):
        buffer = torch.full((420, 544), 7.0, dtype=dtype, device=device)
        out = buffer[rows, cols].fill_(math.nan)
        assert not check(*matrices(200, 264, 136, device), out=out, activation="gelu").facts.tma_store or rows.step
        out.fill_(7.0)
        assert (buffer == 7.0).all(), "memory around the output was written"


# Terms


@pytest.mark.parametrize("shape", [(264,), (1, 264), (200, 1)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
def test_biases(device, path, shape, dtype):
    check(*matrices(200, 264, 136, device), bias=normal(*shape, dtype=dtype, device=device))


def test_biases_with_a_stride(device, path):
    bias = normal(528, device=device)
    for each in (bias[1::2], bias.expand(1, 528)[:, ::2], normal(1, device=device).expand(264)):
        check(*matrices(200, 264, 136, device), bias=each)


def test_a_bias_counts_columns_where_m_is_n(device, path):
    """(N,) does, and (N, 1) counts rows."""
    a, b = matrices(64, 64, 64, device)
    check(a, b, bias=normal(64, device=device))
    check(a, b, bias=normal(64, 1, device=device))


def test_scalars(device, path):
    """alpha and beta are arguments of one kernel, not new kernels; alpha = 1 is a kernel without the product."""
    a, b = matrices(200, 264, 136, device)
    residual = normal(200, 264, device=device)
    facts = {check(a, b, residual=residual, alpha=x, beta=y).facts for x, y in ((0.5, 2.0), (-3.0, 0.0), (0.0, 1.0))}
    assert len(facts) == 1
    check(a, b, residual=residual)
    check(a, b, alpha=2)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_residual_may_be_expanded_or_the_output(device, path, transposed):
    a, b = matrices(200, 264, 136, device)
    check(a, b, residual=normal(1, 264, device=device).expand(200, 264), beta=0.5)
    out = normal(264, 200, device=device).t() if transposed else normal(200, 264, device=device)
    exact, by_torch = exact_and_torch(a, b, BF16, residual=out, beta=0.5)
    assert gemm(a, b, residual=out, beta=0.5, out=out) is out
    assert_as_good_as_torch(out, exact, by_torch, k=136)


def test_own_functions(device, path):
    """Two functions of equal code and different constants are two kernels."""
    a, b = matrices(64, 64, 64, device)

    def scaled(by):
        return lambda x: x * by

    assert torch.equal(gemm(a, b, epilogue=scaled(2.0)), gemm(a, b, epilogue=scaled(1.0)) * 2)
    check(a, b, epilogue=lambda x: F.minimum(F.maximum(x, -0.5), 0.5), out_dtype=FP32)
    check(a, b, epilogue=lambda x: x * F.sigmoid(x) + 1.0)


def test_relu_keeps_nan(device, path):
    a, b = matrices(64, 64, 64, device)
    a[3] = math.nan
    out = gemm(a, b, activation="relu")
    assert out[3].isnan().all() and not out[4].isnan().any()


def test_new_tensors_of_known_metadata(device, path):
    """The second call takes the stored plan: with other addresses, contents and scalars it must be right too."""
    for alpha in (1.0, 0.5, 2.0, 1.0):
        a, b = matrices(72, 136, 64, device)
        exact, by_torch = exact_and_torch(a, b, BF16, alpha=alpha)
        assert_as_good_as_torch(gemm(a, b, alpha=alpha), exact, by_torch, k=64)


def test_known_plans_are_not_confused_on_two_tensors(device):
    """Calls that differ in one argument, each of them after all others."""
    a, b = matrices(64, 64, 64, device)
    square = normal(64, 64, device=device)
    variants = [{"alpha": 2.0}, {"epilogue": lambda x: x + 1.0}, {"epilogue": lambda x: x - 1.0}, {"out_dtype": FP32}]
    variants += [{"activation": name} for name in (None, "relu", "silu")]
    variants += [{"bias": bias} for bias in (square[0], square[0].float(), square[:, :1])]
    variants += [{"residual": square}, {"residual": square.t()}, {"out": square.clone()}, {"out": square.clone().t()}]
    variants += [{"out": normal(64, 128, dtype=FP32, device=device)[:, ::2]}]
    for terms in variants * 2:
        rest = {name: value for name, value in terms.items() if name not in ("out", "out_dtype")}
        dtype = terms["out"].dtype if "out" in terms else terms.get("out_dtype", BF16)
        assert_as_good_as_torch(gemm(a, b, **terms), *exact_and_torch(a, b, dtype, **rest), k=64)
    for name in ("sm_80", explain(gemm, a, b).facts.path):
        with cute_kernels.path(name):
            assert_as_good_as_torch(gemm(a, b), *exact_and_torch(a, b, BF16), k=64)
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
        assert_as_good_as_torch(out, *exact_and_torch(a, b, BF16), k=136)
        assert_as_good_as_torch(second, *exact_and_torch(out, b.t(), BF16), k=264)
