"""The training suite's rows, small and on the CPU: what they compute, what they are held against, what is asked."""

import gc
import itertools
import sys

import pytest
import torch

from bench import cases_models as models
from bench import cases_training as gradients
from bench import findings_training as findings
from bench.peers import WrongResult
from bench.rows import OURS
from sparse_collective import random_bsr

SMALL = {"device": "cpu", "block": (32, 32), "density": 0.25}
STACK = SMALL | {"layers": 3, "dim": 64, "heads": 2, "hidden": 256, "shape": (2, 64), "backend": "aot_eager"}


def taking(**us):
    """In timing.interleaved's place: runs each call twice, and says that it took so many microseconds."""

    def measure(calls, *, warm_s, rounds):
        for call in calls.values():
            for _ in range(2):
                assert call().isfinite().all()
        return {name: [float(us.get(name, 1.0))] * rounds for name in calls}

    return measure


def measured(case, **us):
    case.timer = taking(**us)
    return case.measure(3)


def test_rows_and_what_is_asked_of_them():
    quick, full = (list(gradients.training_cases(mode)) for mode in ("quick", "full"))
    for rows in (quick, full):
        assert len({case.name for case in rows}) == len(rows)
        for case in rows:
            assert case.against in [peer.name for peer in case.peers]
            assert len({peer.name for peer in case.peers}) == len(case.peers)
            assert case.problem.flops > 0 and case.problem.bytes > 0
    asked = {case.name: case.asked for case in quick}
    assert asked.items() <= {case.name: case.asked for case in full}.items()
    assert asked["SwiGLU 4096 to 14336, 128x128, 0.05, inference, compiled"] == 14
    assert asked["training step of 12 transformer blocks, 128x128, 0.125, compiled"] == 0.9
    for how in ("", ", in a CUDA graph"):
        assert asked[f"layer 128x128, 0.125, step with a change by SET{how}"] == 1 / 4
    flops = {case.name: case.problem.flops for case in quick}
    assert flops["layer 128x128, 0.125, forward and backward"] == 3 * 2 * 8192**3 / 8
    step = flops["training step of 12 transformer blocks, 128x128, 0.125, compiled"]
    assert step == 12 * 2 * 3 * (2 * 8192 * 2048 * 8192) / 8


@pytest.mark.parametrize("options", [{}, {"accumulate": True}, {"triton": "quick"}], ids=str)
@pytest.mark.parametrize("op", ["sampled", "transposed", "layer"])
def test_rows_of_gradients(emulated, monkeypatch, op, options):
    """Ours is right, and cuBLAS beside it; without Triton its peers say so."""
    monkeypatch.setattr(gradients, "CUBE", 256)
    monkeypatch.setattr(gradients, "randn", lambda *shape: torch.randn(*shape, dtype=torch.bfloat16))
    monkeypatch.setattr(gradients, "of_rows", lambda M, K, block, n: random_bsr((M, K), block, per_row=n))
    monkeypatch.setitem(sys.modules, "triton", None)
    if op != "sampled" and "accumulate" in options:
        options = {"activation": "gelu"} if op == "layer" else {}
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    row = measured(getattr(gradients, op)(32, 32, 0.5, **options), **{OURS: 2.0})
    assert (
        row.ratio in (0.5, 0.0625) and row.problem.density == 1 / 8
    )  # of the dense cube's, which does eight times more
    assert all("triton cannot be imported" in peer.error for peer in row.peers[1:]) and bool(row.plan) == (
        op != "layer"
    )


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_swiglu_under_inference(device, fresh):
    more = SMALL | {"device": device, "block": (64, 64)}
    case = models.swiglu(128, 256, 64, backend="aot_eager", **more)
    row = measured(case, **{models.DENSE_SWIGLU: 5.0})
    assert row.ratio == 5.0 and case.problem.density == 0.25
    assert case.problem.flops == 3 * 2 * 128 * 256 * 64 / 4


def test_a_wrong_result_is_no_row(monkeypatch, fresh):
    monkeypatch.setattr(models.SwiGLU, "forward", lambda self, x: self.down(2 * self.gate_up(x)))
    with pytest.raises(WrongResult):
        models.swiglu(128, 256, 64, backend="eager", **SMALL).ours()
    monkeypatch.setattr(models, "change_pattern_", lambda layer, *_, **__: layer.values.data.mul_(1.01))
    models.changing("SET", size=256, tokens=64, **SMALL).ours()
    monkeypatch.setattr(models.BsrLinear, "forward", lambda self, x: 1.1 * torch.nn.functional.linear(x, self.weight))
    with pytest.raises(WrongResult):
        models.changing("SET", size=256, tokens=64, **SMALL).ours()


def test_a_step_is_held_against_what_amdahl_s_law_allows(device, fresh):
    """Of a step of 100, with 60 of its feed-forward at a quarter of the work, 55 remain."""
    times = {OURS: 50.0, models.DENSE_STEP: 100.0, models.FEED_FORWARD: 60.0}
    case = models.transformer(0.9, **STACK | {"device": device}, measure=taking(**times))
    row = case.measure(9)
    assert row.rival.name == models.ALLOWED and row.rival.median == 55.0 and row.ratio == pytest.approx(1.1)
    assert row.rival.note == "dense step, compiled, less 0.75 of its feed-forward alone"
    assert row.peer(models.DENSE_STEP).median == 100.0 and len(row.ours.us) == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3, "blocks of one kind share a graph"


def test_a_dense_step_that_fails_leaves_ours(monkeypatch, fresh):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(models.FeedForward, "dense", fails)
    row = models.transformer(0.9, **STACK, measure=taking()).measure(3)
    assert row.ours.us and row.ratio is None and all("too large" in peer.error for peer in row.peers)


@pytest.mark.parametrize(
    ("method", "even", "graph"), [*itertools.product(["SET", "RigL"], [True, False], [False]), ("SET", True, True)]
)
def test_only_ours_changes_its_pattern(device, monkeypatch, method, even, graph):
    changed, change = [], models.change_pattern_
    monkeypatch.setattr(
        models, "change_pattern_", lambda layer, *a, **k: changed.append(layer) or change(layer, *a, **k)
    )
    case = models.changing(method, even=even, graph=graph, size=256, tokens=64, **SMALL | {"device": device})
    row = measured(case, **{models.KEPT: 0.9})
    assert row.ratio == pytest.approx(0.9)
    # Each once in its set-up; ours in two steps there, and in those that are timed; or before its capture in three, and
    # in the capture.
    assert [changed.count(layer) for layer in dict.fromkeys(changed)] == [5, 1]


@pytest.mark.parametrize("graph", [False, True])
def test_a_step_moves_the_weights_and_the_pattern(device, graph):
    case = models.changing("SET", graph=graph, size=256, tokens=64, **SMALL | {"device": device})
    seen = []
    layers, init = [], models.BsrLinear.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.BsrLinear, "__init__", lambda self, *a, **k: layers.append(self) or init(self, *a, **k))
        call, _ = case.ours()
    for _ in range(3):
        call()
        seen.append((layers[0].col_indices.clone(), layers[0].values.detach().clone()))
    assert layers[0].weight.even
    for (col, values), (next_col, next_values) in itertools.pairwise(seen):
        assert not torch.equal(col, next_col) and not torch.equal(values, next_values)


def allocated() -> int:
    """Bytes of all tensors that there are, each storage once."""
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    tensors = [t for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_after_a_step(emulated):
    found = findings.memory(1024, 64, 0.25, (64, 64), "cpu", allocated)
    assert "error" not in found, found
    dense = 4 * 2 * 1024**2
    assert dense <= found["bytes"][findings.DENSE] <= 1.01 * dense
    assert dense / 4 <= found["bytes"][OURS] <= 1.05 * dense / 4
    assert findings.memory(100, 64, 0.25, (64, 64), "cpu", allocated)["error"].startswith("ValueError: out_features")


def test_checks():
    host = {"BsrLinear": 20.0, "nn.Linear": 17.5}
    memory, above = findings.checks(host, {"density": 0.125, "bytes": {OURS: 66.0, findings.DENSE: 512.0}})
    assert memory.value == pytest.approx(66 / 64) and memory.ok and memory.at_most
    assert above.value == 2.5 and above.ok
    assert not findings.checks({"BsrLinear": 21.0, "nn.Linear": 17.5}, None)[0].ok
    assert [check.value for check in findings.checks({"sddmm": 9.0}, {"error": "no memory"})] == [None, None]
    assert findings.checks({}, None) == []


def test_findings_are_shown_and_recorded(monkeypatch, capsys):
    monkeypatch.setattr(findings, "memory", lambda: {"density": 0.5, "bytes": {OURS: 60, findings.DENSE: 100}})
    found = findings.measure([], {}, "")
    assert found["memory"]["density"] == 0.5 and found["checks"][0]["ok"] is False
    assert "1.200, asked at most 1.05 MISSED" in capsys.readouterr().out
    assert findings.measure([], {}, "sddmm") == {"memory": None, "checks": []}
