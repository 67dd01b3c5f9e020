"""select_blocks against loops over tokens and blocks."""

from contextlib import nullcontext

import pytest
import torch

from attention import select_blocks, selected_attention
from attention.selected.selection.scores import aligned
from cute_kernels.testing.reference import normal, poisoned_empty

from ..emulator.ops import needs_compiler, on_emulator
from .parts import captured, nothing_waits

EMULATED = [pytest.param(arch, marks=[needs_compiler, getattr(pytest.mark, arch)]) for arch in ("sm_80", "sm_90")]
PLACES = pytest.mark.parametrize("where", ["cpu", *EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)])
INF = float("inf")


def indexer(Sq, Sk, heads=4, k_heads=1, D=16, B=2, device="cpu") -> tuple:
    """q_index and k_index of small integers, whose scores are exact in FP32 and often equal."""
    shapes = (B, heads, Sq, D), (B, k_heads, Sk, D)
    return tuple(torch.randint(-2, 3, shape).to(torch.bfloat16).to(device) for shape in shapes)


def plainly(q, k, top, block_size, *, causal=False, local=0, initial=0, pool="mean", activation=None, groups=None):
    """The lists, one token after another."""
    dtype, q, k, lists = q.dtype, q.cpu().double(), k.cpu().double(), groups or 1
    (B, heads, rows, _), columns = q.shape, k.shape[2]
    k = k.expand(-1, lists, -1, -1)
    blocks = [k[:, :, i : i + block_size] for i in range(0, columns, block_size)]
    if pool == "mean":
        k = torch.stack([block.mean(2).to(dtype).double() for block in blocks], 2)  # rounded, as documented
    found = torch.full((B, rows, lists, top), -1, dtype=torch.int32)
    for b in range(B):
        for g in range(lists):
            score = q[b].unflatten(0, (lists, heads // lists))[g] @ k[b, g].mT  # (heads of the group, rows, keys)
            score = (score.relu() if activation == "relu" else score).sum(0).float()
            for i in range(rows):
                p = i + columns - rows if causal else columns - 1
                visible = [n for n in range(len(blocks)) if n * block_size <= p]
                forced = {n for n in visible if n < initial or n > visible[-1] - local}

                def value(n, i=i, p=p, score=score):
                    if pool == "mean":
                        return score[i, n].item() if min((n + 1) * block_size, columns) <= p + 1 else None
                    return score[i, n * block_size : min((n + 1) * block_size, p + 1)].max().item()

                values = {n: INF if n in forced else value(n) for n in visible}
                candidates = [n for n in visible if values[n] is not None]
                nan = {n for n in candidates if values[n] != values[n]}  # above infinity, as in torch.topk
                rank = {n: (n not in forced, n not in nan, 0 if n in nan else -values[n], n) for n in candidates}
                ranked = sorted(candidates, key=rank.__getitem__)[:top]
                found[b, i, g, : len(ranked)] = torch.tensor(sorted(ranked), dtype=torch.int32)
    return found if groups else found[:, :, 0]


CASES = {
    "QSA": ((40, 40), {}, (6, 4), {"causal": True, "local": 1, "activation": "relu"}),
    "MSA": ((50, 300), {"k_heads": 4}, (3, 64), {"causal": True, "local": 1, "pool": "max", "groups": 4}),
    "tokens": ((20, 33), {"heads": 1}, (7, 1), {"causal": True}),
    "all": ((20, 70), {}, (9, 16), {"initial": 1, "local": 2}),
    "fewer visible than top": ((30, 20), {}, (4, 4), {"causal": True, "initial": 1, "pool": "max"}),
    "a shorter last block, averaged": ((20, 70), {"heads": 2}, (2, 16), {"causal": True, "groups": 2}),
    "max, relu": ((20, 70), {}, (2, 16), {"pool": "max", "activation": "relu"}),
}


@PLACES
@pytest.mark.parametrize("name", CASES)
def test_lists(where, name, monkeypatch):
    for limit in ("CHUNK", "PART"):
        monkeypatch.setattr(f"attention.selected.top_blocks.{limit}", 40_000)  # several parts
    lengths, shape, sizes, terms = CASES[name]
    q, k = indexer(*lengths, **shape, device=where if where == "cuda" else "cpu")
    with on_emulator(where) if where.startswith("sm_") else nullcontext(), poisoned_empty():
        found = select_blocks(q, k, *sizes, **terms)
    assert found.dtype is torch.int32 and torch.equal(found.cpu(), plainly(q, k, *sizes, **terms))


@PLACES
@pytest.mark.parametrize("name", [*CASES, "three heads"])
def test_nan_is_the_largest_score(where, name):
    """NaN of either sign, in one head, in all scores of a row, and beside infinities."""
    three = ((20, 70), {"heads": 3}, (2, 16), {"pool": "max", "activation": "relu"})
    lengths, shape, sizes, terms = CASES.get(name, three)
    q, k = indexer(*lengths, **shape)
    q[0, 0, 3], q[1, -1, 5, 2], k[0, :, 11], k[0, :, 2, 1] = float("nan"), float("nan"), -float("nan"), float("nan")
    if "activation" in terms:  # without one, heads are added before they are multiplied by infinities
        k[1, :, 9, 3], k[1, :, 18, 4] = INF, -INF
    expected = plainly(q, k, *sizes, **terms)
    q, k = (t.to(where if where == "cuda" else "cpu") for t in (q, k))
    with on_emulator(where) if where.startswith("sm_") else nullcontext(), poisoned_empty():
        found = select_blocks(q, k, *sizes, **terms)
    assert torch.equal(found.cpu(), expected)


@needs_compiler
@pytest.mark.sm_90
def test_expanded_keys_are_copied_for_tma():
    """TMA reads no stride of 0."""
    keys = torch.zeros(1, 1, 20, 64, dtype=torch.bfloat16)
    assert aligned(keys, 64) is keys
    assert 0 not in aligned(keys.expand(2, -1, -1, -1), 64).stride()
    q, k = indexer(40, 200, D=64)
    terms = {"pool": "max", "causal": True}
    with on_emulator("sm_90"), poisoned_empty():
        found = select_blocks(q, k[:1].expand(2, -1, -1, -1), 3, 16, **terms)
    assert torch.equal(found, plainly(q, k[:1].expand(2, -1, -1, -1), 3, 16, **terms))


@PLACES
def test_sums_of_heads_above_the_range_of_fp16(where):
    q, k = (t.half() for t in indexer(20, 70, heads=8, D=64))
    q *= torch.where(torch.arange(20)[:, None] % 2 == 0, 30_000, 1)
    terms = {"groups": 2, "causal": True}
    on = where if where == "cuda" else "cpu"
    with on_emulator(where) if where.startswith("sm_") else nullcontext(), poisoned_empty():
        found = select_blocks(q.to(on), k.to(on), 3, 4, **terms)
    assert torch.equal(found.cpu(), plainly(q, k, 3, 4, **terms))


def test_no_rows_and_no_columns():
    assert select_blocks(*indexer(0, 20), 3, 4).shape == (2, 0, 3)
    assert (select_blocks(*indexer(5, 0), 3, 4, groups=2) == -1).all()
    assert select_blocks(*indexer(5, 9, device="meta"), 3, 4).shape == (2, 5, 3)


def test_autocast_changes_nothing():
    q, k = (t.float() / 3 for t in indexer(40, 200))
    expected = select_blocks(q, k, 6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(select_blocks(q, k, 6, 4), expected)


def test_under_torch_compile():
    q, k = indexer(40, 40)
    call = lambda q, k: select_blocks(q, k, 6, 4, causal=True, local=1)  # noqa: E731
    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k), call(q, k))


def test_in_a_model():
    """Gradients reach q, k and v, and none the indexer."""
    q, k, v = (normal(1, 2, 64, 16, dtype=torch.float32).requires_grad_() for _ in range(3))
    indices = select_blocks(q, k, 4, 4, causal=True, local=1, groups=2)
    assert not indices.requires_grad
    selected_attention(q, k, v, indices, 4, causal=True).sum().backward()
    assert all(t.grad.abs().sum() > 0 for t in (q, k, v))


@pytest.mark.gpu
def test_a_graph():
    q, k = indexer(300, 4096, device="cuda")
    call = lambda: select_blocks(q, k, 64, 4, causal=True, local=1, activation="relu")  # noqa: E731
    call()
    with nothing_waits():
        call()
    graph, found = captured(call)
    q.copy_(indexer(300, 4096)[0])
    graph.replay()
    assert torch.equal(found, call())


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"top": 0}, ValueError, "top must be an int of at least 1"),
        ({"local": 2, "initial": 2}, ValueError, r"local \+ initial must be at most top"),
        ({"block_size": 8}, ValueError, "block_size must be one of 1, 4, 16"),
        ({"pool": "min"}, ValueError, 'pool must be "mean" or "max"'),
        ({"activation": "gelu"}, ValueError, 'activation must be "relu" or None'),
        ({"groups": 3}, ValueError, r"multiple of groups \(3\)"),
        ({"q_index": torch.zeros(2, 0, 9, 16).bfloat16()}, ValueError, "heads of q_index must be at least 1"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"k_index": torch.zeros(2, 1, 9, 16)}, TypeError, "k_index is torch.float32"),
        ({"k_index": torch.zeros(1, 1, 9, 16).bfloat16()}, ValueError, "same batch size"),
        ({"q_index": 1}, TypeError, "q_index must be a torch.Tensor"),
    ],
)
def test_errors(changes, error, text):
    q, k = indexer(10, 10)
    with pytest.raises(error, match=f"select_blocks: .*{text}"):
        select_blocks(**{"q_index": q, "k_index": k, "top": 3, "block_size": 4} | changes)
