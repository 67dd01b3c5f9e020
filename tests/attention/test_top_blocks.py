"""The kernels of select_blocks, on the emulator and on GPUs: the exact top k of rows of scores, against torch's topk of
distinct integers, and an indexer's scores, against FP32."""

import pytest
import torch

from attention import select_blocks
from attention.selected import top_blocks
from attention.selected.pooling import largest
from attention.selected.selection import dispatch, scores, sums
from attention.selected.selection.config import CAPACITIES, TopFacts, facts_for
from attention.selected.selection.family import SCORES, TOP
from attention.selected.selection.score_config import ScoreFacts
from attention.selected.selection.score_config import facts_for as score_facts_for
from cute_kernels.testing.reference import normal

from ..emulator.ops import needs_compiler, on_emulator
from .parts import captured, nothing_waits

INF = float("inf")
EMULATED = [pytest.param(arch, marks=[needs_compiler, getattr(pytest.mark, arch)]) for arch in ("sm_80", "sm_90")]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
WHERE = pytest.mark.parametrize("where", [*EMULATED, CUDA])


def padded(score: torch.Tensor) -> torch.Tensor:
    """Scores whose rows are multiples of four, filled with NaN."""
    blocks = score.shape[3]
    found = torch.full((*score.shape[:3], -(-blocks // 4) * 4), float("nan"), device=score.device)
    found[..., :blocks] = score
    return found


def expected(score, top: int, first, columns, block_size, local, initial, causal, whole) -> torch.Tensor:
    """The lists by torch ops."""
    position = torch.arange(score.shape[2], device=score.device)[:, None] + first
    key = top_blocks._keys(score, position, columns, block_size, causal, local, initial, whole)
    index = top_blocks._best(key, top)
    return torch.nn.functional.pad(index, (0, top - index.shape[-1]), value=-1)


def check(where: str, score: torch.Tensor, top: int, *terms, facts: TopFacts | None = None) -> None:
    """Lists of CPU scores (B, G, rows, blocks)."""
    B, G, rows, blocks = score.shape
    right = expected(score, top, *terms)
    if where == "cuda":
        score = score.cuda()
    given, found = padded(score), torch.full((B, rows, G, top), -7, dtype=torch.int32, device=score.device)
    if where == "cuda":
        dispatch.top_blocks(facts or dispatch.facts_of(0, blocks, top), given, found, *terms)
    else:
        with on_emulator(where):
            dispatch.top_blocks(facts or dispatch.facts_of(-1, blocks, top), given, found, *terms)
    assert torch.equal(found.cpu(), right)


def odd(*shape) -> torch.Tensor:
    """Scores with infinities, both zeros and denormal numbers."""
    score = torch.randn(shape) * 1e30
    score[..., ::3], score[..., 5], score[..., 7], score[..., 8], score[..., 10] = -INF, INF, -0.0, 0.0, -1e-45
    return score


def nan(*shape) -> torch.Tensor:
    """Scores with NaN of both signs, in some rows more than a list is long."""
    score = torch.randn(shape)
    score[..., 1::7], score[..., 5], score[..., 6] = float("nan"), -float("nan"), INF
    score[0, 0, 0, 40:-40] = -float("nan")
    return score


SCORES_OF = {
    "normal": torch.randn,
    "few values": lambda *shape: torch.randint(0, 3, shape).float(),
    "mostly zeros": lambda *shape: (torch.randn(shape) - 2).relu(),
    "ascending": lambda *shape: torch.arange(shape[-1]).float().expand(shape),
    "descending": lambda *shape: -torch.arange(shape[-1]).float().expand(shape),
    "equal": torch.zeros,
    "-inf": lambda *shape: torch.full(shape, -INF),
    "odd": odd,
    "NaN": nan,
    "negative": lambda *shape: -torch.randn(shape).abs() - 1,
}
# (blocks, top): short rows by warps, others with a buffer
SIZES = {"warp": (253, 16), "warp, 64 scores per lane": (2001, 32), "CTA": (9001, 512), "CTA, short list": (5000, 3)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", SCORES_OF)
@WHERE
def test_lists(where, kind, size):
    blocks, top = SIZES[size]
    score = SCORES_OF[kind](1, 2, 3, blocks)
    check(where, score, top, 4 * blocks - 3, 4 * blocks, 4, 1, 1, True, True)
    check(where, score, top, 0, 4 * blocks - 1, 4, 0, 0, False, True)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("terms", [(16, 1, 0), (16, 2, 3), (5, 5, 0), (5, 0, 5), (40, 3, 1), (300, 0, 0)])
@WHERE
def test_causal_rows(where, terms, whole):
    """From rows that see nothing to those that see more than top, with a shorter last block."""
    top, local, initial = terms
    for block_size, columns in ((4, 205), (16, 700), (1, 60)):
        score = torch.randn(2, 2, 50, -(-columns // block_size))
        for first in (-20, columns // 2, columns - 50):
            check(where, score, top, first, columns, block_size, local, initial, True, whole)


@pytest.mark.parametrize("capacity", CAPACITIES[:2])
@WHERE
def test_long_lists(where, capacity):
    """As long as the buffer allows, in rows of which chunks have to be compacted, and of less than a chunk."""
    facts = TopFacts("sm_90a" if where != "sm_80" else "sm_80", capacity)
    for blocks in (facts.longest - 1, facts.longest + 1, 4 * facts.longest + 3):
        for score in (torch.randn(1, 1, 2, blocks), torch.arange(blocks).float().expand(1, 1, 2, -1)):
            check(where, score, facts.longest, 0, blocks, 1, 0, 0, False, False, facts=facts)


@WHERE
def test_the_kernel_of_long_rows_selects_from_short_ones(where):
    facts = TopFacts("sm_90a" if where != "sm_80" else "sm_80", CAPACITIES[0])
    check(where, torch.randn(1, 2, 70, 70), 16, 0, 70 * 64, 64, 1, 1, True, False, facts=facts)


def test_facts():
    assert facts_for("sm_90a", 1024, 16) == TopFacts("sm_90a", 0, 32)
    assert facts_for("sm_90a", 2049, 16).capacity == 2048 and facts_for("sm_90a", 1024, 33).capacity == 2048
    assert facts_for("sm_90a", 2**20, 1025).capacity == 4096
    assert facts_for("sm_90a", 2**20, 8192).capacity == 16384 and facts_for("sm_90a", 2**20, 8193) is None
    assert TOP.unsupported(TopFacts("sm_86", 16384)).startswith("lists of 8192 blocks need 135")
    text = SCORES.unsupported(ScoreFacts("sm_90a", "bfloat16", 128, 8, True, 1, False))
    assert text == "8 heads of 128 need too much shared memory; use at most 5"
    assert score_facts_for("sm_80", "bfloat16", 128, 4, True, 1, False) is None


# Scores of an indexer

# (heads, heads of k, rows, keys, D), block_size, causal, pool, activation, groups
INDEXERS = {
    "QSA": ((4, 1, 150, 1050, 128), 4, True, "mean", "relu", 1),
    "NSA": ((8, 2, 130, 1300, 128), 4, False, "mean", None, 2),
    "MSA": ((4, 1, 150, 301, 128), 128, True, "max", None, 4),
    "three heads of 40": ((3, 1, 20, 300, 40), 1, False, "max", "relu", 1),
    "max of 4": ((2, 1, 140, 301, 64), 4, True, "max", "relu", 1),
    "max of 16": ((2, 2, 140, 301, 64), 16, False, "max", None, 2),
    "max of 64": ((2, 1, 300, 260, 64), 64, True, "max", None, 2),
    "long": ((1, 1, 500, 1700, 64), 4, True, "mean", "relu", 1),
    "tokens": ((2, 2, 400, 500, 64), 1, True, "mean", None, 2),
    "more rows than keys": ((1, 1, 300, 200, 64), 1, True, "max", None, 1),
    "eight heads": ((8, 1, 130, 200, 64), 4, True, "mean", "relu", 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", INDEXERS)
@pytest.mark.parametrize("where", [EMULATED[1], CUDA])
def test_scores(where, name, dtype):
    (heads, k_heads, rows, keys, D), block_size, causal, pool, activation, groups = INDEXERS[name]
    q, k = normal(2, heads, rows, D, dtype=dtype), normal(2, k_heads, keys, D, dtype=dtype)
    terms = block_size, causal, pool, activation, groups
    mine, k_mine = scores.operands(q, k, block_size, pool, activation, groups)
    right = mine.double() @ k_mine.double()[:, :, None].mT
    right = (right.relu() if activation else right).sum(2)
    if pool == "max" and block_size > 1:
        position = torch.arange(rows)[:, None] + keys - rows
        right = largest(right, position, block_size, causal)

    def compute(q, k):
        made = scores.scores_of(q, k, *terms)
        assert isinstance(made, scores.KernelScores)
        return [
            (begin, made.compute(begin, min(begin + part, rows)).cpu())
            for part in (128, rows)
            for begin in range(0, rows, part)
        ]

    if where == "cuda":
        parts = compute(q.cuda(), k.cuda())
    else:
        with on_emulator(where, sms=3):
            parts = compute(q, k)
    for begin, part in parts:
        blocks = min(part.shape[3], right.shape[3])
        expected = right[:, :, begin : begin + part.shape[2], :blocks]
        if causal:  # blocks that a row does not see are never read
            seen = (torch.arange(begin, begin + part.shape[2])[:, None] + keys - rows) // block_size
            seen = torch.arange(blocks) <= seen
            part, expected = (t[..., :blocks].masked_fill(~seen, 0.0) for t in (part, expected))
        atol = 1e-4 + 1e-6 * float(right.abs().max())  # rows of sums of FP16 heads are scaled
        torch.testing.assert_close(part[..., :blocks].double(), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_split_heads(dtype):
    """The sum of heads is multiplied as two 16-bit numbers, here at most 65,504 where that of FP16 heads exceeds it."""
    q, k = normal(1, 16, 20, 64, dtype=dtype), normal(1, 1, 30, 64, dtype=dtype)
    q[:, :, :10] = (q[:, :, :10] * 20_000).clamp(-65504, 65504)
    parts, keys = scores.operands(q, k, 1, "mean", None, 1)
    right = q.double().sum(1) @ k[:, 0].double().mT
    found = (parts.double() @ keys.double()[:, :, None, :30].mT).sum(2)[:, 0]
    factor = 2 ** (found / right).abs().log2().median(-1, keepdim=True).values.round()
    assert parts.shape[2] == 2 and (factor == 1).all() == (dtype is torch.bfloat16)
    assert ((found / factor - right).abs() < 1e-4 * right.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 2, 16, 37, 128), (1, 1, 3, 20, 40), (1, 2, 7, 5, 250)])
@WHERE
def test_sums(where, shape, dtype):
    """The kernel's sums are those of torch ops, with FP16 sums from 1e-6 to beyond 65,504, NaN and infinities."""
    B, groups, heads, rows, D = shape
    factor = torch.logspace(-6, 4.5, rows)[:, None]
    q = (torch.randn(B, groups * heads, rows, D) * factor).clamp(-65504, 65504).to(dtype)
    q[0, 0, 1, 2], q[0, 1, 2, 3], q[:, :, 3] = INF, float("nan"), 0
    right = sums.split_sums(q, groups)
    if where == "cuda":
        found = sums.split_sums(q.cuda(), groups).cpu()
    else:
        with on_emulator(where):
            found = sums.split_sums(q, groups)
    assert found.isfinite().double().mean() > 0.99
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


# Models


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "tokens", "keys", "top", "terms"),
    [
        (4, 4096, 65536, 512, (4, True, "mean", "relu", 1)),
        (4, 2048, 131072, 512, (4, True, "mean", "relu", 1)),
        (4, 8192, 8192, 512, (4, True, "mean", "relu", 1)),
        (4, 1024, 65536, 16, (128, True, "max", None, 4)),
        (64, 4096, 65536, 16, (64, True, "mean", None, 4)),
        (1, 256, 65536, 2048, (1, True, "mean", "relu", 1)),
    ],
    ids=["QSA 64k", "QSA 128k", "QSA 8k", "MSA", "NSA", "tokens"],
)
def test_models(heads, tokens, keys, top, terms):
    """Lists of select_blocks equal torch's of the same scores."""
    block_size, causal, pool, activation, groups = terms
    q, k = (normal(1, n, size, 128, device="cuda") for n, size in ((heads, tokens), (1, keys)))
    found = select_blocks(
        q, k, top, block_size, causal=True, local=1, initial=1, pool=pool, activation=activation, groups=groups
    )
    made = scores.scores_of(q, k, *terms)
    for begin in range(0, tokens, 512):
        score = made.compute(begin, min(begin + 512, tokens))
        first = keys - tokens + begin
        right = expected(score, top, first, keys, block_size, 1, 1, True, pool == "mean")
        assert torch.equal(found[:, begin : begin + 512], right)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [65536, 131072])
def test_rows_longer_than_shared_memory(blocks):
    score = torch.randn(1, 1, 64, blocks, device="cuda")
    found = torch.empty(1, 64, 1, 2048, dtype=torch.int32, device="cuda")
    terms = 0, blocks, 1, 0, 0, False, False
    dispatch.top_blocks(dispatch.facts_of(0, blocks, 2048), score, found, *terms)
    assert torch.equal(found, expected(score, 2048, *terms))


@pytest.mark.gpu
def test_a_graph():
    """QSA's selection, whose scores are computed in parts."""
    q, k = (normal(1, n, 8192, 128, device="cuda") for n in (4, 1))
    call = lambda: select_blocks(q, k, 512, 4, causal=True, local=1, activation="relu")  # noqa: E731
    first = call()
    with nothing_waits():
        call()
    graph, found = captured(call)
    graph.replay()
    assert torch.equal(found, first)
    q.copy_(normal(1, 4, 8192, 128, device="cuda"))
    graph.replay()
    assert torch.equal(found, call()) and not torch.equal(found, first)


@pytest.mark.gpu
def test_under_torch_compile():
    q, k = (normal(1, n, 1000, 128, device="cuda") for n in (4, 1))
    call = lambda q, k: select_blocks(q, k, 64, 4, causal=True, local=1, activation="relu")  # noqa: E731
    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True)(q, k), call(q, k))


@pytest.mark.gpu
def test_repeated_runs_are_identical():
    score = torch.randint(0, 50, (1, 1, 512, 32768), device="cuda").float()
    runs = []
    for _ in range(3):
        found = torch.empty(1, 512, 1, 512, dtype=torch.int32, device="cuda")
        dispatch.top_blocks(dispatch.facts_of(0, 32768, 512), score, found, 0, 32768, 1, 0, 0, False, False)
        runs.append(found)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
