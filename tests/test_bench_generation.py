"""The benchmark's suite of generation on a CPU: its work, and a whole row of a tiny model."""

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

from attention import eager  # noqa: E402
from bench import __main__ as command  # noqa: E402
from bench import cases_generation as generation  # noqa: E402

TINY = generation.GenerationProblem(
    batch=2, prompt=40, cache=64, tokens=12, layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16,
    vocabulary=97, dtype="float32",
)  # fmt: skip
EAGERLY = {"device": "cpu", "backend": "eager", "mode": None}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def test_cases_are_what_is_asked():
    quick, full = (list(generation.generation_cases(mode)) for mode in ("quick", "full"))
    assert [case.problem.batch for case in quick] == [1] and [case.problem.batch for case in full] == [1, 8]
    assert command.parser().parse_args(["generation"]).suites == ("generation",)
    for case in full:
        p = case.problem
        assert case.asked == 1.05 and [peer.name for peer in case.peers] == ["sdpa", "flex_attention", "eager"]
        assert p.prompt + p.tokens <= p.cache == 16384 and p.layers == 8 and p.tokens == 64


def test_work_is_that_of_weights_and_cache():
    model = generation.Generation(TINY, **EAGERLY).plain
    embedding = model.get_input_embeddings().weight.numel()
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert TINY.weights == sum(p.numel() for p in model.parameters()) - embedding - norms
    cached = 2 * TINY.batch * TINY.layers * 46 * TINY.kv_heads * TINY.head_dim
    assert TINY.bytes == 2 * (TINY.weights + cached)
    assert TINY.flops == TINY.batch * (2 * TINY.weights + 4 * TINY.layers * 46 * TINY.heads * TINY.head_dim)


def test_a_row(monkeypatch):
    """Ours is one graph, in which each layer calls attention with the cache's length: the decoding kernel's call."""
    calls = Counter()
    real = eager.attention

    def counted(q, k, v, **terms):
        calls["lengths" if terms.get("seqused_k") is not None else "none", q.shape[2]] += 1
        return real(q, k, v, **terms)

    monkeypatch.setattr(eager, "attention", counted)
    row = generation.generation(TINY, ("sdpa",), **EAGERLY).measure(rounds=5)
    assert row.ratio is not None and row.as_dict()["problem"]["prompt"] == TINY.prompt
    for timing in (row.ours, *row.peers):
        assert len(timing.us) == 3 and timing.note == "1 graphs, 0 graph breaks, 0 CUDA graphs skipped"
    steps = TINY.layers * (generation.CHECKED + 3 * TINY.tokens)
    assert calls == {("lengths", 1): steps}


def test_a_wrong_result_has_no_time(monkeypatch):
    def shorter(*args, seqused_k, **terms):
        return real(*args, seqused_k=seqused_k - 8, **terms)

    real = eager.attention
    monkeypatch.setattr(eager, "attention", shorter)
    with pytest.raises(ValueError, match="wrong result"):
        generation.generation(TINY, (), **EAGERLY).measure(rounds=5)
