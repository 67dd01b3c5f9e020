"""`./run train`: the runs are comparable, losses fall, and the table, the picture and the result file are made."""

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("matplotlib")
from attention import attention  # noqa: E402
from demo.long_context import pattern  # noqa: E402
from demo.train import __main__ as command  # noqa: E402
from demo.train import long, runs, text  # noqa: E402
from demo.train.model import Decoder, Shape  # noqa: E402
from sparse_collective.nn import BsrLinear  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NAMES = runs.DENSE, runs.SPARSE, runs.WIDE, runs.ATTENTION
TINY = Shape(32, 64, layers=2, heads=2, context=16, block=16)


@pytest.fixture
def topics_alone(monkeypatch):
    """Without the docstrings, which take seconds to find."""
    found = {f"topic {name}": words for name, words in text.topics.items()}
    monkeypatch.setattr(text, "documents", lambda: found)


# -- the text ------------------------------------------------------------------------------------------------


def test_a_tenth_of_the_documents_is_held_out(topics_alone):
    train, held_out = text.split()
    assert sorted(train + held_out) == sorted(text.topics.values())
    assert 0.04 < len(held_out) / len(train + held_out) < 0.2 and text.split() == (train, held_out)
    assert bytes(text.as_bytes(["a", "é"]).tolist()).decode() == "a\n\né"


def test_docstrings_are_text_without_code():
    source = b'"""Of the module."""\nx = "no docstring"\ndef f():\n    """Of f.\n\n    More.\n    """\n'
    assert text.docstrings(source) == "Of the module.\n\nOf f.\n\nMore."
    assert text.docstrings(b"def f(:") == ""


# -- the models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [runs.GPU, runs.CPU], ids=["GPU", "CPU"])
def test_the_wider_run_takes_as_many_useful_operations_as_the_dense_one(plan):
    with torch.device("meta"):
        models = {name: Decoder(shape) for name, shape in plan.shapes().items()}
    flops = {name: model.flops() for name, model in models.items()}
    assert flops[runs.WIDE] == flops[runs.DENSE] > 1.4 * flops[runs.SPARSE]
    layers = [m for m in models[runs.WIDE].modules() if isinstance(m, BsrLinear)]
    assert len(layers) == 2 * plan.shape.layers and all(layer.density == plan.density for layer in layers)


def test_operations_are_those_of_products_and_attention():
    dim, hidden, seen = TINY.dim, TINY.hidden, (TINY.context + 1) / 2
    layer = 4 * dim * dim + 2 * dim * hidden + 2 * dim * seen
    assert Decoder(TINY).flops() == 6 * (TINY.layers * layer + dim * 256)


def test_a_full_density_is_the_dense_model():
    """And all but the feed-forward layers starts alike."""
    made = []
    for density in (None, 1.0):
        torch.manual_seed(0)
        made.append(Decoder(replace(TINY, density=density)))
    dense, sparse = made
    common = [name for name, _ in dense.named_parameters() if "feed_forward" not in name]
    assert all(torch.equal(dense.get_parameter(name), sparse.get_parameter(name)) for name in common)
    for old, new in zip(dense.layers, sparse.layers, strict=True):
        up, down = old.feed_forward.up, old.feed_forward.down
        block = (TINY.block, TINY.block)
        new.feed_forward[0] = BsrLinear.from_linear(up, block, 1.0, activation="gelu")
        new.feed_forward[1] = BsrLinear.from_linear(down, block, 1.0)
    tokens = torch.randint(256, (2, TINY.context))
    torch.testing.assert_close(sparse(tokens), dense(tokens))


@pytest.mark.parametrize("change", [{"density": 0.5}, {"window": 5, "global_bytes": 2}])
def test_no_byte_sees_later_ones(change):
    model, tokens = Decoder(replace(TINY, **change)), torch.randint(256, (2, TINY.context))
    before = model(tokens)
    tokens[:, 9:] = 7
    torch.testing.assert_close(model(tokens)[:, :9], before[:, :9])


# -- training ------------------------------------------------------------------------------------------------


def test_block_sparse_attention_that_sees_all_is_the_dense_model():
    """And its mask counts the keys that a byte sees."""
    dense, sparse = Decoder(TINY), Decoder(replace(TINY, window=TINY.context))
    sparse.load_state_dict(dense.state_dict())
    tokens = torch.randint(256, (2, TINY.context))
    torch.testing.assert_close(sparse(tokens), dense(tokens))
    near = replace(TINY, window=5, global_bytes=2)
    assert near.seen() == Decoder(near).mask(16, torch.device("cpu")).to_dense().sum() / 16 < TINY.seen() == 8.5


@pytest.mark.parametrize("change", [{"density": 0.5}, {"window": 5, "global_bytes": 2}])
def test_layers_share_a_graph_under_autocast(change):
    """One to train and one to evaluate, also of layers with different patterns."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = Decoder(replace(TINY, layers=3, **change))
    windows = torch.randint(256, (4, TINY.context + 1), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        eager = model.loss(windows)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=counter)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(windows)
        with torch.no_grad():
            assert abs(model.loss(windows) - eager) < 0.02
    loss.backward()
    assert abs(loss - eager) < 0.02 and counter.frame_count == 2
    assert all(p.grad is not None for p in model.parameters())
    torch.compiler.reset()


def test_the_rate_rises_and_falls():
    rates = [runs.learning_rate(step, 100, 3.0) for step in range(100)]
    assert max(rates) == rates[9] == 3.0 and rates[0] == pytest.approx(0.3)
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.3 < rates[-1] < 0.33


def test_the_command_in_a_tiny_form(topics_alone, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "why_no_gpu", lambda: "There is no CUDA GPU here.")
    monkeypatch.setattr(runs, "CPU", replace(runs.CPU, shape=TINY, evaluations=3, windows=32))
    png, out = tmp_path / "new" / "picture.png", tmp_path / "figures.json"
    assert command.main(["--steps", "30", "--png", str(png), "--json", str(out)]) == 0
    printed, data = capsys.readouterr().out, json.loads(out.read_text())
    assert png.read_bytes().startswith(b"\x89PNG") and "say nothing of the kernels" in printed
    assert [row["name"] for row in data["rows"]] == list(NAMES) and all(name in printed for name in NAMES)
    assert data["suite"] == "training-demo" and "--steps 30" in data["command"]
    assert f"--json {out.name}" in data["command"] and str(tmp_path) not in data["command"]
    assert data["environment"]["torch"] == torch.__version__ and data["plan"]["steps"] == 30
    for row in data["rows"]:
        assert row["held_out_loss"][-1] < row["held_out_loss"][0] - 0.3
        assert row["tokens"] == [0, *(n * 16 * 16 for n in (10, 20, 30))]
        assert row["seconds"] == sorted(row["seconds"]) and row["step_ms"] > 0 and row["peak_bytes"] is None
    dense, sparse, wide, attention = (row["flops_per_token"] for row in data["rows"])
    assert dense == wide > attention > sparse


def test_run_knows_the_command():
    """As it is called from a shell; of one model."""
    environment = {**os.environ, "CUTE_KERNELS_NO_VENV": "1", "PYTHON": sys.executable}
    usage = subprocess.run(["./run"], cwd=ROOT, capture_output=True, text=True)
    assert usage.returncode == 2 and re.search(r"\./run train .*python -m demo\.train", usage.stderr)
    done = subprocess.run(["./run", "train", "--help"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "--only {dense,sparse,wide,attention}" in done.stdout, done.stderr


def test_one_run_alone_and_ctrl_c_in_one_line(topics_alone, monkeypatch, tmp_path, capsys):
    asked = []

    def interrupted(name, *args, **more):
        asked.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "train", interrupted)
    monkeypatch.setattr(command, "why_no_gpu", lambda: "There is no CUDA GPU here.")
    assert command.main(["--only", "wide", "--png", str(tmp_path / "x.png")]) == 130
    assert asked == [runs.WIDE] and capsys.readouterr().err == "interrupted\n"


def test_what_is_wrong_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path):
        assert command.main(["--json", str(path), "--png", str(tmp_path / "x.png")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m demo.train: error: ") and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for wrong in (["--steps", "0"], ["--only", "all"]):
        with pytest.raises(SystemExit):
            command.main(wrong)


# -- long sequences ------------------------------------------------------------------------------------------


def test_long_sequences_in_a_tiny_form(topics_alone, monkeypatch, tmp_path, capsys):
    """The same mask gives the same losses. FlexAttention, which has no backward on a CPU, and FA4 are stood in for."""
    pytest.importorskip("transformers")
    plan = replace(long.CPU, length=160, window=24, global_tokens=5)

    def flex(module, q, k, v, mask, scaling, **_):
        at = torch.arange(plan.length)
        seen = mask.mask_mod(0, 0, at[:, None], at)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True)
        return found.transpose(1, 2).contiguous(), None

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale):
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max()) and int(cu_seqlens_q[-1]) == len(q)
        cu = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return attention(q, k, v, causal=causal, scale=softmax_scale, **cu), None

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__spec__ = ModuleSpec(name, None)  # which transformers looks at
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = varlen
    monkeypatch.setattr(long, "by_flex", flex)
    monkeypatch.setattr(long, "CPU", plan)
    monkeypatch.setattr(command, "why_no_gpu", lambda: "There is no CUDA GPU here.")
    png, out = tmp_path / "long.png", tmp_path / "long.json"
    assert command.main(["--long", "--png", str(png), "--json", str(out)]) == 0
    printed, data = capsys.readouterr().out, json.loads(out.read_text())
    assert png.read_bytes().startswith(b"\x89PNG") and data["suite"] == "long-context"
    found = {row["name"]: row for row in data["rows"]}
    assert list(found) == [*long.SAME_MASK, long.PACKED] and all(name in printed for name in found)
    assert not any(row["error"] for row in found.values()) and data["largest_difference"] < 1e-4
    ours, packed = (found[name]["loss"] for name in (long.OURS, long.PACKED))
    assert len(ours) == 4 and ours[-1] < ours[0] and abs(packed[-1] - ours[-1]) > 1e-4
    assert len(found[long.SDPA]["loss"]) == plan.slow_steps


def test_the_mask_of_long_sequences():
    """As the long prompt of the other demonstration sees it."""
    plan = replace(long.CPU, length=300, window=40, global_tokens=9)
    seen = pattern(plan.length, plan.window, plan.global_tokens, "cpu").to_dense()[0, 0]
    assert torch.equal(long.dense_mask(plan, torch.device("cpu"))[0, 0], seen)


@pytest.mark.parametrize("wrong", [["--long", "--minilm"], ["--long", "--only", "dense"]])
def test_options_that_exclude_each_other(wrong):
    with pytest.raises(SystemExit):
        command.parse(wrong)
