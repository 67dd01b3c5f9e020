"""gemm on both paths: layouts, types, sizes, batches, views and epilogues against fp64; streams, threads, graphs.

Each op test also runs on the CPU, with torch in the kernels' place (the `device` fixture): that checks the host side.
"""

import threading

import pytest
import torch

import cute_kernels
from cute_kernels import explain, gemm
from cute_kernels import functions as F
from cute_kernels import ops as dense_ops
from cute_kernels.arch import ARCHS
from cute_kernels.matmul import candidates
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.runtime.families import unsupported

from .reference import (
    assert_as_good_as_torch,
    exact_and_torch,
    normal,
    operand,
    poisoned,
    poisoned_empty,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def check(a, b, *, out=None, out_dtype=None, **terms):
    """One product into poisoned memory against the truth; returns its plan."""
    dtype = out.dtype if out is not None else out_dtype or a.dtype
    exact, by_torch = exact_and_torch(a, b, dtype, **terms)
    if out is None:
        out = poisoned(*exact.shape, dtype=dtype, device=a.device)
    plan = explain(gemm, a, b, out=out, **terms)
    result = gemm(a, b, out=out, **terms)
    assert result is out
    assert_as_good_as_torch(out, exact, by_torch, k=a.shape[-1], plan=plan)
    return plan


def matrices(m, n, k, device, layouts="nn", dtype=BF16):
    return (
        operand(m, k, layouts[0], dtype=dtype, device=device),
        operand(k, n, layouts[1], dtype=dtype, device=device, k=k),
    )


def check_outputs(check, dtype, transposed, device):
    """By a test file's own `check`: either major, with a residual and a bias; and a view that TMA does not take."""
    a, b = matrices(200, 328, 456, device)
    out, residual = poisoned(200, 328, dtype=dtype, device=device), normal(200, 328, dtype=dtype, device=device)
    if transposed:
        out, residual = (torch.empty_like(t.t()).t().copy_(t) for t in (out, residual))
    check(a, b, out=out)
    check(a, b, out=out.fill_(float("nan")), bias=normal(328, device=device), residual=residual, activation="gelu")
    check(a, b, out=out.fill_(float("nan")), bias=normal(200, 1, device=device), alpha=0.5, activation="silu")
    buffer = poisoned(400, 660, dtype=dtype, device=device)
    view = buffer[3:331, 1:201].t() if transposed else buffer[3:203, 1:329]
    assert not check(a, b, out=view, activation="gelu").facts.tma_store


# Layouts and types

SAME = [(layouts, dtype, dtype) for layouts in ("nn", "nt", "tn", "tt") for dtype in (BF16, FP16)]
MIXED = [
    ("nn", BF16, FP16),
    ("nt", BF16, FP32),
    ("tn", BF16, FP32),
    ("nn", FP16, BF16),
    ("nn", FP16, FP32),
    ("tt", FP16, FP32),
]


@pytest.mark.parametrize(("layouts", "dtype", "out_dtype"), SAME + MIXED)
def test_layouts_and_types(device, path, layouts, dtype, out_dtype):
    plan = check(*matrices(200, 264, 136, device, layouts, dtype), out_dtype=out_dtype)
    assert plan.facts.path == path
    assert plan.facts.majors[:2] == ("m" if layouts[0] == "t" else "k", "k" if layouts[1] == "t" else "n")


@pytest.mark.parametrize(("layouts", "dtype"), [("nn", BF16), ("nt", FP16), ("tn", FP32)])
def test_m_major_output(device, path, layouts, dtype):
    a, b = matrices(200, 264, 136, device, layouts)
    plan = check(a, b, out=poisoned(264, 200, dtype=dtype, device=device).t())
    assert plan.facts.majors[2] == "m"


@pytest.mark.parametrize("out_dtype", [None, FP32])
def test_output_of_its_own(device, path, out_dtype):
    """Without `out`, and with torch.empty giving NaN."""
    a, b = matrices(200, 264, 136, device)
    exact, by_torch = exact_and_torch(a, b, out_dtype or BF16)
    with poisoned_empty():
        out = gemm(a, b, out_dtype=out_dtype)
    assert out.is_contiguous()
    assert_as_good_as_torch(out, exact, by_torch, k=136)


# Sizes

SIZES = [
    (1, 264, 128),
    (256, 1, 128),
    (1, 1, 8),
    (8, 8, 8),
    (128, 128, 1),
    (136, 248, 8),
    (72, 520, 200),
    (520, 72, 456),
    (256, 512, 64),
]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_sizes(device, path, m, n, k):
    """Rows and columns that are no multiple of a tile, but of 8; single rows and columns; K shorter than a K-tile."""
    layouts = "tn" if k == 1 else "nt" if n == 1 else "nn"
    assert check(*matrices(m, n, k, device, layouts)).facts.path == path


@pytest.mark.parametrize("layouts", ["nn", "nt"])
def test_large(device, path, layouts):
    check(*matrices(1024, 768, 2048, device, layouts))


CONFIGS = [
    pytest.param(name, config, id=f"{name}-{config}", marks=getattr(pytest.mark, name))
    for name in ("sm_80", "sm_90")
    for config in getattr(candidates, f"candidates_{name.replace('_', '')}")(None, ARCHS["sm_90"])
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_every_configuration(monkeypatch, name, config):
    """Each candidate of the heuristics on several tiles with ragged edges, whatever the cost model picks."""
    monkeypatch.setattr(candidates, f"candidates_{name.replace('_', '')}", lambda *args: [config])
    monkeypatch.setattr(dense_ops, "_PLANS", {})
    layouts = "nt" if unsupported(GemmFacts("sm_90a", name, config, majors=("k", "n", "n"))) else "nn"
    with cute_kernels.path(name):
        plan = check(*matrices(776, 1160, 456, "cuda", layouts), activation="relu")
        assert plan.facts.config == config
        check(*matrices(8, 1160, 72, "cuda", layouts), activation="relu")
        check(*matrices(776, 8, 8, "cuda", layouts), activation="relu")
        batch = normal(3, 264, 200, device="cuda"), operand(200, 136, layouts[1], batch=(3,), device="cuda", k=200)
        check(*batch, activation="relu")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (127, 129, 65), (1, 7, 3), (33, 1, 17), (64, 61, 64), (2, 2, 4)])
@pytest.mark.parametrize("layouts", ["nn", "tt"])
def test_odd_sizes(device, m, n, k, layouts):
    """Whatever TMA refuses, the sm_80 kernel serves by itself, and explain says so."""
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


@pytest.mark.parametrize("batch", [(), (3,)])
def test_empty_sum(device, path, batch):
    """K = 0: the epilogue of zeros."""
    a, b = normal(*batch, 40, 0, device=device), normal(0, 72, device=device)
    bias, residual = normal(72, device=device), normal(*batch, 40, 72, device=device)
    check(a, b, bias=bias, activation="gelu", residual=residual, beta=2.0)
    assert not gemm(a, b).any()


@pytest.mark.parametrize(
    ("a", "b"), [((0, 16), (16, 8)), ((8, 16), (16, 0)), ((0, 3, 16), (16, 8)), ((0, 0), (0, 0)), ((3, 0, 16), (16, 8))]
)
def test_empty_results(device, path, a, b):
    out = gemm(normal(*a, device=device), normal(*b, device=device))
    assert out.shape == (*a[:-1], b[-1]) and out.dtype is BF16 and out.device.type == device


# Batches

BATCHES = {
    "folded": ((3, 40, 72), (72, 136)),
    "both": ((3, 40, 72), (3, 72, 136)),
    "b only": ((40, 72), (3, 72, 136)),
    "of one": ((1, 40, 72), (3, 72, 136)),
    "of one b": ((3, 40, 72), (1, 72, 136)),
    "crossed": ((2, 1, 40, 72), (1, 3, 72, 136)),
    "two deep": ((2, 3, 40, 72), (2, 3, 72, 136)),
    "two deep folded": ((2, 3, 40, 72), (72, 136)),
    "ranks differ": ((2, 3, 40, 72), (3, 72, 136)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(device, path, name):
    a, b = BATCHES[name]
    plan = check(normal(*a, device=device), normal(*b, device=device, k=72))
    copied = [note for note in plan.notes if "is copied" in note]
    assert len(copied) == {"crossed": 2, "ranks differ": 1}.get(name, 0), "copies are announced, and only copies"


def test_batch_terms(device, path):
    """Every term of the epilogue is found for every matrix of a batch."""
    a, b = normal(3, 40, 72, device=device), normal(3, 72, 136, device=device, k=72)
    terms = {"activation": "silu", "residual": normal(3, 40, 136, device=device), "alpha": 0.5, "beta": -1.5}
    check(a, b, bias=normal(136, device=device), **terms)
    check(a, b, bias=normal(40, 1, device=device), **terms)
    check(a, b[0], bias=normal(40, 1, device=device), **terms)  # a row bias keeps the batch apart
    check(a, b[0], bias=normal(136, device=device), **terms)


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


def rectangle(buffer, rows, cols, transposed=False):
    """A view in a buffer filled with 7, for `untouched` to look around it."""
    view = buffer.fill_(7.0)[rows, cols]
    view.fill_(float("nan"))
    return view.t() if transposed else view


@pytest.mark.parametrize(
    ("rows", "cols", "transposed", "dtype"),
    [
        (slice(3, 203), slice(8, 272), False, BF16),
        (slice(3, 203), slice(8, 272), False, FP32),
        (slice(3, 203), slice(9, 273), False, BF16),
        (slice(3, 203), slice(9, 273), False, FP32),
        (slice(0, 400, 2), slice(16, 280), False, BF16),
        (slice(5, 205), slice(0, 528, 2), False, BF16),
        (slice(3, 267), slice(8, 208), True, BF16),
        (slice(1, 265), slice(7, 207), True, BF16),
    ],
)
def test_output_in_a_larger_buffer(device, path, rows, cols, transposed, dtype):
    """Every element of the view is written, and nothing around it."""
    buffer = torch.empty(420, 544, dtype=dtype, device=device)
    out = rectangle(buffer, rows, cols, transposed)
    check(*matrices(200, 264, 136, device), out=out)
    out.fill_(7.0)
    assert (buffer == 7.0).all(), "memory around the output was written"


@pytest.mark.parametrize("layouts", ["nn", "tt"])
def test_nothing_outside_is_read(device, path, layouts):
    """Operands inside NaN: a tile that hangs over an edge must find zeros there."""

    def inside_nan(rows, cols, layout):
        rows, cols = (cols, rows) if layout == "t" else (rows, cols)
        buffer = poisoned(rows + 64, cols + 64, device=device)
        view = buffer[16 : 16 + rows, 24 : 24 + cols]
        view.copy_(normal(rows, cols, device=device))
        return view.t() if layout == "t" else view

    for k in (8, 72, 136):
        check(inside_nan(200, k, layouts[0]), inside_nan(k, 264, layouts[1]))


def test_nan_and_inf_stay_in_their_row_and_column(device, path):
    a, b = matrices(200, 264, 136, device)
    clean, by_torch = exact_and_torch(a, b, BF16)
    a[17, 3], b[5, 100] = float("nan"), float("inf")
    out = gemm(a, b, out=poisoned(200, 264, device=device))
    assert out[17].isnan().all()
    column = torch.cat([out[:17, 100], out[18:, 100]])
    assert (column.isinf() | column.isnan()).all()
    rows = [i for i in range(200) if i != 17]
    cols = [i for i in range(264) if i != 100]
    out, clean, by_torch = (t[rows][:, cols] for t in (out, clean, by_torch))
    assert_as_good_as_torch(out, clean, by_torch, k=136)


# Epilogues


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations(device, path, activation):
    check(*matrices(200, 264, 136, device), activation=activation, out_dtype=FP32)


BIASES = [((264,), BF16), ((264,), FP32), ((1, 264), FP16), ((200, 1), BF16), ((200, 1), FP32)]


@pytest.mark.parametrize(("shape", "dtype"), BIASES)
def test_bias(device, path, shape, dtype):
    check(*matrices(200, 264, 136, device), bias=normal(*shape, dtype=dtype, device=device))


def test_bias_with_a_stride(device, path):
    bias = normal(528, device=device)
    check(*matrices(200, 264, 136, device), bias=bias[1::2])
    check(*matrices(200, 264, 136, device), bias=bias.expand(1, 528)[:, ::2])
    check(*matrices(200, 264, 136, device), bias=normal(1, device=device).expand(264))


def test_square_bias_is_a_column_bias(device, path):
    """(N,) counts columns also where M == N; (N, 1) counts rows."""
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


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_residual(device, path, dtype):
    a, b = matrices(200, 264, 136, device)
    check(a, b, residual=normal(200, 264, dtype=dtype, device=device), beta=0.5, out_dtype=dtype)
    check(a, b, residual=normal(264, 200, dtype=dtype, device=device).t(), beta=0.5, out_dtype=dtype)
    check(a, b, residual=normal(1, 264, dtype=dtype, device=device).expand(200, 264), beta=0.5, out_dtype=dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_residual_may_be_the_output(device, path, transposed):
    a, b = matrices(200, 264, 136, device)
    out = normal(264, 200, device=device).t() if transposed else normal(200, 264, device=device)
    exact, by_torch = exact_and_torch(a, b, BF16, residual=out, beta=0.5)
    assert gemm(a, b, residual=out, beta=0.5, out=out) is out
    assert_as_good_as_torch(out, exact, by_torch, k=136)


def test_own_function(device, path):
    a, b = matrices(200, 264, 136, device)
    scale = 3.0
    check(a, b, epilogue=lambda x: F.maximum(x, 0.0) * scale)

    def clipped(x):
        return F.minimum(F.maximum(x, -0.5), 0.5)

    check(a, b, epilogue=clipped, out_dtype=FP32)
    check(a, b, epilogue=lambda x: F.where(x > 0.0, x, 0.1 * x))


def test_functions_are_told_apart(device, path):
    """Two functions of equal code and different constants are two kernels."""

    def scaled(by):
        return lambda x: x * by

    a, b = matrices(64, 64, 64, device)
    once, twice = gemm(a, b, epilogue=scaled(1.0)), gemm(a, b, epilogue=scaled(2.0))
    assert torch.equal(twice, once * 2)


def test_everything_at_once(device, path):
    a, b = matrices(200, 264, 136, device)
    check(
        a,
        b,
        bias=normal(264, dtype=FP32, device=device),
        activation="gelu",
        residual=normal(200, 264, device=device),
        alpha=0.7,
        beta=-1.3,
        epilogue=lambda x: x * F.sigmoid(x) + 1.0,
    )
    check(
        a,
        b,
        bias=normal(200, 1, device=device),
        activation="silu",
        residual=normal(200, 264, dtype=FP32, device=device),
        alpha=0.7,
        out_dtype=FP32,
    )


def test_relu_keeps_nan(device, path):
    a, b = matrices(64, 64, 64, device)
    a[3] = float("nan")
    out = gemm(a, b, activation="relu")
    assert out[3].isnan().all() and not out[4].isnan().any()


# Calls that repeat, and calls at the same time


def test_new_tensors_of_known_metadata(device, path):
    """The second call takes the stored plan: with other addresses, contents and scalars it must be right too."""
    for alpha in (1.0, 0.5, 2.0, 1.0):
        a, b = matrices(72, 136, 64, device)
        exact, by_torch = exact_and_torch(a, b, BF16, alpha=alpha)
        assert_as_good_as_torch(gemm(a, b, alpha=alpha), exact, by_torch, k=64)


def test_known_plans_are_not_confused(device):
    """Calls on the same two tensors that differ in one argument, each of them after all others."""
    a, b = matrices(64, 64, 64, device)
    variants = [
        {},
        {"alpha": 2.0},
        {"activation": "relu"},
        {"activation": "silu"},
        {"epilogue": lambda x: x + 1.0},
        {"epilogue": lambda x: x - 1.0},
        {"out_dtype": FP32},
        {"bias": normal(64, device=device)},
        {"bias": normal(64, dtype=FP32, device=device)},
        {"bias": normal(64, 1, device=device)},
        {"residual": normal(64, 64, device=device)},
        {"residual": normal(64, 64, device=device).t()},
        {"out": normal(64, 64, device=device)},
        {"out": normal(64, 64, device=device).t()},
        {"out": normal(64, 128, dtype=FP32, device=device)[:, ::2]},
    ]
    for _ in range(2):
        for terms in variants:
            out, out_dtype = terms.get("out"), terms.get("out_dtype", BF16)
            dtype = out.dtype if out is not None else out_dtype
            rest = {name: value for name, value in terms.items() if name not in ("out", "out_dtype")}
            assert_as_good_as_torch(gemm(a, b, **terms), *exact_and_torch(a, b, dtype, **rest), k=64)
    for name in ("sm_80", "sm_80" if explain(gemm, a, b).facts.path == "sm_80" else "sm_90"):
        with cute_kernels.path(name):
            assert_as_good_as_torch(gemm(a, b), *exact_and_torch(a, b, BF16), k=64)
            assert explain(gemm, a, b).facts.path == name


def test_same_bits_on_every_run(device, path):
    a, b = matrices(1024, 1536, 520, device, "nt")
    out = poisoned(1024, 1536, device=device)
    first = gemm(a, b, activation="gelu")
    for _ in range(20 if device == "cuda" else 2):
        assert torch.equal(gemm(a, b, activation="gelu", out=out.fill_(float("nan"))), first)


@pytest.mark.gpu
class TestCuda:
    def test_graph(self, path):
        a, b = matrices(200, 264, 136, "cuda")
        bias, out = normal(264, device="cuda"), poisoned(200, 264, device="cuda")
        gemm(gemm(a, b, bias, "relu", out=out), b.t().contiguous())  # compiled and loaded before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemm(a, b, bias, "relu", out=out)
            second = gemm(out, b.t().contiguous())
        for _ in range(3):
            a.copy_(normal(200, 136, device="cuda"))
            out.fill_(float("nan"))
            graph.replay()
            exact, by_torch = exact_and_torch(a, b, BF16, bias=bias, activation="relu")
            assert_as_good_as_torch(out, exact, by_torch, k=136)
            assert_as_good_as_torch(second, *exact_and_torch(out, b.t(), BF16), k=264)

    def test_current_stream(self, path):
        """A kernel on any other stream would read the inputs before they are there."""
        a, b = matrices(200, 264, 136, "cuda")
        expected = gemm(a, b)
        late_a, late_b = torch.zeros_like(a), torch.zeros_like(b)
        out = poisoned(200, 264, device="cuda")
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late_a.copy_(a), late_b.copy_(b)
            gemm(late_a, late_b, out=out)
            copy = out.clone()
        stream.synchronize()
        assert torch.equal(out, expected) and torch.equal(copy, expected)

    def test_two_streams(self, path):
        problems = [matrices(512, 768, 1024, "cuda"), matrices(768, 512, 520, "cuda", "nt")]
        expected = [gemm(a, b) for a, b in problems]
        outs = [[] for _ in problems]
        streams = [torch.cuda.Stream() for _ in problems]
        torch.cuda.synchronize()
        for _ in range(20):
            for (a, b), stream, results in zip(problems, streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    results.append(gemm(a, b))
        torch.cuda.synchronize()
        for results, right in zip(outs, expected, strict=True):
            assert all(torch.equal(result, right) for result in results)

    def test_threads(self, path):
        """Four threads, each with its own stream and shape, the first calls compiling at the same time."""
        failures = []

        def work(i):
            try:
                a, b = inputs[i]
                with cute_kernels.path(path), torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                    outs = [gemm(a, b, alpha=0.5, activation="relu") for _ in range(20)]
                    torch.cuda.current_stream().synchronize()
                exact, by_torch = exact_and_torch(a, b, BF16, alpha=0.5, activation="relu")
                for out in outs:
                    assert_as_good_as_torch(out, exact, by_torch, k=a.shape[1])
            except BaseException as error:
                failures.append(error)

        inputs = [matrices(128 + 8 * i, 264, 136 + 64 * i, "cuda", ("nn", "nt")[i % 2]) for i in range(4)]
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]

    def test_no_synchronisation(self, path):
        a, b = matrices(200, 264, 136, "cuda")
        gemm(a, b)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            gemm(a, b)
        finally:
            torch.cuda.set_sync_debug_mode("default")
