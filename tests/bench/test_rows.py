"""The benchmark's rows on a CPU, small: operands are built, results of ours and of peers are compared with the truth.

A case's `measure` sets up ours and every peer, each of which verifies its result. Suites of attention: see
test_bench_attention.py.
"""

import gc
import itertools
import json
import shutil

import pytest
import torch

from bench import __main__ as command
from bench import (
    cases,
    cases_experts,
    cases_float8,
    cases_layers,
    cases_structured,
    cases_training,
    patterns,
    peers,
    peers_float8,
    record,
)
from bench import cases_float8_attention as float8_attention
from bench import cases_models as models
from bench.peers import Operands, WrongResult, compare, verified
from bench.rows import FASTEST, OURS
from sparse_collective import random_bsr
from sparse_collective.nn import Float8BsrLinear, Float8SwiGLU

M, N, K = 96, 80, 64
SMALL = {"device": "cpu", "block": (32, 32), "density": 0.25}
STACK = SMALL | {"layers": 3, "dim": 64, "heads": 2, "hidden": 256, "shape": (2, 64), "backend": "aot_eager"}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Operands on the CPU; compiled functions start anew."""
    make = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, dtype=dtype)  # noqa: E731
    of_rows = lambda M, K, block, n: random_bsr((M, K), block, per_row=n, dtype=torch.bfloat16)  # noqa: E731
    for module in (cases, cases_float8, cases_structured, cases_training):
        for name, value in (("randn", make), ("of_rows", of_rows)):
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(float8_attention, "device", lambda: "cpu")
    matrix = patterns.matrix
    monkeypatch.setattr(patterns, "matrix", lambda mask, block, dtype: matrix(mask, block, dtype, "cpu"))
    torch._dynamo.reset()


@pytest.fixture
def cubes(monkeypatch):
    """Cubes of 256."""
    for module in (cases, cases_training):
        monkeypatch.setattr(module, "CUBE", 256)


def taking(**us):
    """A timer that runs each call twice and returns these microseconds, or 1."""

    def measure(calls, *, warm_s, rounds):
        for call in calls.values():
            for _ in range(2):
                call()
        return {name: [float(us.get(name, 1.0))] * rounds for name in calls}

    return measure


def measured(case, absent=(), **us):
    """Measure a case with our time 2 and others 1. No peer may fail but those that are absent on a CPU."""
    case.timer = taking(**us or {OURS: 2.0})
    row = case.measure(3)
    errors = {peer.name: peer.error for peer in row.peers if peer.error and peer.name not in absent}
    assert not errors and not row.ours.error
    assert json.loads(json.dumps(row.as_dict()))["timings"][0]["name"] == OURS
    return row


@pytest.mark.parametrize("suite", command.SUITES)
def test_rows_are_told_apart_and_have_their_peer(suite):
    quick, full = ({case.name: case for case in command.SUITES[suite].cases(mode)} for mode in ("quick", "full"))
    assert len(full) == len(list(command.SUITES[suite].cases("full"))) and set(quick) <= set(full)
    for case in full.values():
        names = [peer.name for peer in case.peers]
        assert len(set(names)) == len(names) and (case.against in names or case.against == FASTEST)
        assert case.problem.flops > 0 and case.problem.bytes > 0


# -- peers ------------------------------------------------------------------------------------------------------


def dense(activation=None, bias=True, dtype=torch.bfloat16) -> Operands:
    a, b = torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype).t()
    return Operands(a, b, torch.randn(N, dtype=dtype) if bias else None, activation)


def sparse(block=(32, 16), transposed=False) -> Operands:
    b = torch.randn(N, K).t() if transposed else torch.randn(K, N)
    return Operands(random_bsr((M, K), block, density=0.5, dtype=torch.float32), b, transposed=transposed)


def test_only_what_is_right_is_verified():
    """Not another result or shape, one NaN, one large error, or an output that holds the right numbers already."""
    right, zero = torch.randn(64, 256), torch.zeros(4, 4)
    one_nan, one_large = right.clone(), right.clone()
    one_nan[3, 5], one_large[3, 5] = float("nan"), 100.0
    for out, reference in ((right.bfloat16(), right), (zero, zero)):
        assert verified(out.clone, lambda: (slice(None), reference)) == out.clone
    for out, reference in (
        (2 * right, right), (right[:, :128], right), (one_nan, right), (one_large, right), (zero + 1, zero)
    ):  # fmt: skip
        with pytest.raises(WrongResult, match="wrong result: off by"):
            verified(out.clone, lambda: (slice(None), reference))
    with pytest.raises(WrongResult):
        verified(lambda: right, lambda: (slice(None), right.clone()))


@pytest.mark.parametrize(
    "peer, x",
    [
        *((peer, lambda: dense(bias=False)) for peer in (peers.cublas, peers.cublas_fp16_sums, peers.cublas_tf32)),
        *((peers.cublaslt_epilogue, lambda activation=name: dense(activation)) for name in (None, "relu", "gelu_tanh")),
    ],
)
def test_peers_of_torch(peer, x):
    x = x()
    out, (rows, reference) = peer(x, 3.0).setup()(), x.sample
    compare(out[rows], reference, 0.006 if out.dtype is torch.bfloat16 else 1e-5)


def test_fastest_skips_settings_that_crash_or_are_wrong():
    right = torch.randn(4, 4)

    def make(setting):
        def call():
            if setting == "crashes":
                raise RuntimeError("out of resources")
            return right + (setting == "wrong")

        return call

    def fastest(*settings):
        return peers.fastest(make, settings, lambda: (slice(None), right), taking(fast=1.0, slow=2.0))

    assert fastest("crashes", "slow", "wrong", "fast")[0] == "fast"
    with pytest.raises(RuntimeError, match="out of resources"):
        fastest("crashes", "wrong")


# -- GEMMs and block-sparse GEMMs -------------------------------------------------------------------------------

HALF = peers.SEMI_STRUCTURED  # no such product on a CPU


@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_dense_rows(layout):
    assert measured(cases.dense(136, 80, 96, layout)).ratio == 0.5
    row = measured(cases.fp16_sums(136, 80, 96, layout))
    assert row.ratio == 0.5 and not torch.backends.cuda.matmul.allow_fp16_accumulation
    for precision in cases.TF32_TOLERANCE:
        assert measured(cases.tf32(136, 80, 96, layout, precision)).ratio == 0.5
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh"])
def test_rows_of_epilogues(activation):
    assert measured(cases.epilogue(136, 80, 96, activation)).ratio == 0.5


@pytest.mark.parametrize("pattern", ["uniform", *patterns.PATTERNS])
@pytest.mark.parametrize("op", ["bsr_matmul", "bsr_linear"])
def test_sparse_rows(cubes, op, pattern):
    row = measured(cases.sparse(32, 32, 1 / 4, op=op, K=256, pattern=pattern))
    assert row.problem.density == pytest.approx(1 / 4, abs=0.06)
    assert row.ratio == pytest.approx(0.5 * 4 * row.problem.density)


def test_rows_of_few_tokens_and_of_experts():
    assert measured(cases.skinny(8, 256, 64, 64, 1 / 4)).ratio == 0.5
    case = cases.grouped(512, 64, 96, (32, 32), 0.5, experts=4, run=64, device="cpu")
    row = measured(case, absent=("torch grouped_mm, dense",))
    assert row.problem.items == 4 and row.ratio == 0.5


def test_a_wrong_result_is_no_row(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out.copy_(a @ b + 1))
    with pytest.raises(WrongResult):
        peers.cublas(dense(bias=False), 1.0).setup()
    monkeypatch.setattr(cases_float8, "gemm", lambda a, b, out, **_: out.fill_(1.0))
    with pytest.raises(WrongResult):
        cases_float8.float8(136, 80, 96, "tensor", False).ours()


# -- FP8 and 2:4 ------------------------------------------------------------------------------------------------


def scaled_mm(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum, out):
    """Scales of blocks in torch's place, with the layouts that torch requires on a GPU."""
    assert a.stride(1) == b.stride(0) == 1 and out.dtype == out_dtype and not use_fast_accum
    assert scale_a.shape == (a.shape[0], a.shape[1] // 128) and scale_a.stride(0) == 1
    assert scale_b.shape == (b.shape[0] // 128, -(-b.shape[1] // 128)) and scale_b.stride(0) == 1
    scale_a, scale_b = (s.repeat_interleave(128, 1) for s in (scale_a, scale_b.repeat_interleave(128, 0)))
    return out.copy_((a.float() * scale_a) @ (b.float() * scale_b[:, : b.shape[1]]))


FP8_SCALES = [*itertools.product(["tensor", "row"], [False, True]), (peers_float8.BLOCKS, False)]


@pytest.mark.parametrize(("per", "fast"), FP8_SCALES)
def test_fp8_rows(emulated, monkeypatch, per, fast):
    if per == peers_float8.BLOCKS:
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    row = measured(cases_float8.float8(136, 256, 512, per, fast))
    assert row.ratio == 0.5 and row.plan.startswith("sm_90 ") and row.ours.note.startswith("error 1.")


@pytest.mark.parametrize("against", [cases_float8.DENSE, cases_float8.WIDE])
def test_sparse_fp8_rows(emulated, against):
    row = measured(cases_float8.sparse((64, 64), 1 / 2, against, size=256))
    assert row.plan.startswith("sm_90 ") and row.ratio == (0.25 if against == cases_float8.DENSE else 0.5)
    row = measured(cases_float8.few_tokens(8, (64, 64), size=256))
    assert "skinny" in row.plan and row.ratio == 0.5


def test_rows_of_fp8_caches(emulated, monkeypatch):
    monkeypatch.setattr(cases_float8.ceilings, "copy", lambda: lambda: None)
    row = measured(cases_float8.cached(2, 1024, cases_float8.WIDE_CACHE, heads=(8, 2, 64)))
    assert row.ratio == 0.5 and row.problem.kv_bytes == 2 * 2 * 1024 * 2 * 64


@pytest.mark.parametrize("per", ["head", "tokens"])
def test_rows_of_fp8_attention(emulated, per):
    for case in (
        float8_attention.dense((1, 200, 2, 128), True, per=per),
        float8_attention.sparse((1, 1024, 2, 64), 128, 1 / 8, fast=True, per=per),
    ):
        row = measured(case)
        assert row.ratio == 0.5 and "sm_90" in row.plan and row.ours.note.startswith("error ")


@pytest.mark.parametrize(
    "make",
    [
        lambda: cases_structured.structured(136, 80, 96, "NN", peers.CUBLAS),
        lambda: cases_structured.structured(136, 80, 96, "NT", peers.CUBLAS),
        lambda: cases_structured.blocks((64, 128), 0.5, 40, size=256),
        lambda: cases_structured.structured_float8(144, 80, 96, "row", False, cases_structured.DENSE),
        lambda: cases_structured.structured_float8(144, 80, 96, "tensor", True, cases_structured.DENSE),
        lambda: cases_structured.blocks_float8((64, 128), 0.5, 40, size=256),
    ],
)
def test_rows_of_2_4(make):
    row = measured(make(), absent=(HALF,))
    assert row.ratio == 0.5 and row.ours.flops == row.rival.flops


# -- layers and training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "density"), [("bf16", 0.5), ("fp8", 0.5), ("2:4", 0.5), ("2:4", None)], ids=lambda each: str(each)
)
def test_rows_of_layers(kind, density):
    case = cases_layers.swiglu(kind, 256, 384, 70, density, block=(64, 64), device="cpu", backend="aot_eager")
    row = measured(case)
    share = (density or 1.0) * (0.5 if kind == "2:4" else 1.0)
    assert row.ratio == 0.5 and row.ours.flops == row.rival.flops == 3 * 2 * 256 * 384 * 70 * share


def test_rows_of_experts():
    pytest.importorskip("transformers")
    row = measured(cases_experts.routed_experts(128, 64, 70, 0.5, experts=4, block=(64, 64), device="cpu"))
    assert row.ratio == 0.5 and row.ours.flops == row.rival.flops == 3 * 2 * 128 * 64 * 140 * 0.5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("gate_up", "before the gate"), ("quantize_gated", "of the hidden numbers"), ("down", "result: off")],
)
def test_a_wrong_step_of_an_fp8_layer(monkeypatch, wrong, words):
    """Each step alone, whose results are a tenth too large."""
    if wrong == "quantize_gated":
        right = cases_layers.quantize_gated
        monkeypatch.setattr(cases_layers, wrong, lambda z: (lambda v, s: (v, s * 1.1))(*right(z)))
    else:
        kind = Float8BsrLinear if wrong == "gate_up" else Float8SwiGLU
        right = kind._product
        monkeypatch.setattr(kind, "_product", lambda layer, x: right(layer, x) * 1.1)
    case = cases_layers.swiglu("fp8", 256, 384, 70, 0.5, block=(64, 64), device="cpu")
    with pytest.raises(WrongResult, match=words):
        case.ours()


@pytest.mark.parametrize("options", [{}, {"accumulate": True}], ids=str)
@pytest.mark.parametrize("op", ["sampled", "transposed", "layer"])
def test_rows_of_gradients(cubes, emulated, monkeypatch, op, options):
    if op != "sampled" and options:
        options = {"activation": "gelu"} if op == "layer" else {}
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    row = measured(getattr(cases_training, op)(32, 32, **options))
    assert row.ratio == (0.5 if op == "layer" else 0.0625) and bool(row.plan) == (op != "layer")


@pytest.mark.parametrize("graph", [False, True])
def test_a_step_moves_the_weights_and_the_pattern(device, monkeypatch, graph):
    """Only our step: in the peer's step the pattern stays."""
    layers, init = [], models.BsrLinear.__init__
    monkeypatch.setattr(models.BsrLinear, "__init__", lambda self, *a, **k: layers.append(self) or init(self, *a, **k))
    case = models.changing(graph=graph, size=256, tokens=64, **SMALL | {"device": device})
    call, _ = case.ours()
    for step, layer, moves in ((call, layers[0], True), (case.peers[0].setup(), layers[1], False)):
        seen = []
        for _ in range(3):
            step()
            seen.append((layer.col_indices.clone(), layer.values.detach().clone()))
        for (col, values), (next_col, next_values) in itertools.pairwise(seen):
            assert torch.equal(col, next_col) != moves and not torch.equal(values, next_values)


def allocated(device: str) -> int:
    """Bytes of all tensors; on a CPU those that garbage collection knows, each storage once."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    tensors = [t for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_of_a_layer_after_a_step(device):
    """Values, gradients, AdamW's moments and tables of the pattern: a dense layer's times the density, and 5 %."""
    size, density, options = 1024 if device == "cpu" else 4096, 0.25, {"device": device, "dtype": torch.bfloat16}

    def held() -> int:
        before = allocated(device)
        layer = models.BsrLinear(size, size, False, (64, 64), density=density, **options)
        x = torch.randn(64, size, requires_grad=True, **options)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
        x = None
        return allocated(device) - before

    held()  # workspaces that all layers share
    dense = 4 * 2 * size**2
    assert density * dense <= held() <= 1.05 * density * dense


# -- generation and figures -------------------------------------------------------------------------------------


def test_rows_of_generation(monkeypatch):
    """The model's logits are right, and not with other lengths; ours is one graph."""
    pytest.importorskip("transformers")
    from attention import dispatch
    from bench import cases_generation as generation

    tiny = generation.GenerationProblem(
        batch=2, prompt=40, cache=64, tokens=12, layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16,
        vocabulary=97, dtype="float32",
    )  # fmt: skip
    eagerly = {"device": "cpu", "backend": "eager", "mode": None}
    row = generation.generation(tiny, ("sdpa",), **eagerly).measure(rounds=5)
    assert row.ratio is not None and row.ours.note == "1 graphs, 0 graph breaks, 0 CUDA graphs skipped"
    real = dispatch.attention

    def shorter(args):
        return real(args._replace(seqused_k=args.seqused_k - 8))

    monkeypatch.setattr(dispatch, "attention", shorter)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="wrong result"):
        generation.generation(tiny, (), **eagerly).measure(rounds=5)


def test_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(record.RESULTS / "nvidia-h200" / "block-sparse.json", tmp_path)
    assert command.main(["plot", str(tmp_path)]) == 0
    assert {file.stem for file in tmp_path.glob("*.png")} == {"speedup-density"}
    assert command.main(["plot", str(tmp_path / "absent")]) == 1
