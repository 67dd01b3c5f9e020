"""deterministic=False: a K that thread blocks share by adding to one tile in memory, in any order.

The protocol of cute_kernels/atomic_sm90.py is played on the host. The products also run on the CPU, with torch in the
kernels' place.
"""

import random

import pytest
import torch

from cute_kernels import candidates, checks, explain, gemm, heuristics, path
from cute_kernels import ops as dense_ops
from cute_kernels.arch import ARCHS
from cute_kernels.config import BlockFacts, GemmConfig, GemmFacts
from cute_kernels.heuristics import Extents
from cute_kernels.k_tiles import DenseSource, split_k_tiles
from cute_kernels.legality import unsupported
from cute_kernels.runtime import workspace
from cute_kernels.scheduler import TileScheduler
from sparse_collective import BsrMatrix, bsr_grouped_linear, bsr_linear, bsr_matmul
from sparse_collective.balance import work_order

from .bsr_parts import bsr, dense, width
from .reference import assert_as_good_as_torch, exact_and_torch, normal, poisoned
from .test_gemm import check_outputs, matrices
from .test_k_tiles import numbers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPEC = ARCHS["sm_90"]
SPLITS = {(128, 256): 2, (128, 128): 3, (128, 64): 8, (64, 256): 4, (64, 128): 16}  # one a tile: all take the same code
CONFIGS = [c for c in candidates.atomic_sm90(None, SPEC) if c.split == SPLITS[c.tile_m, c.tile_n]]

# The protocol, played on the host


class Memory:
    """A workspace: for each (tile, warpgroup) the sums of its two pieces, and a counter."""

    def __init__(self, slots: int, groups: int):
        self.sums = {(t, w, piece): 0 for t in range(slots) for w in range(groups) for piece in range(2)}
        self.counts = {(t, w): 0 for t in range(slots) for w in range(groups)}


def warpgroup(memory, tiles, rank, split, w, lengths, stored):
    """AtomicSumSm90.reduce, and the store, for each work tile; a sum is a number with a bit for each K-tile."""
    for tile in tiles:
        share = split_k_tiles(DenseSource(lengths[tile], 1).for_tile(0, 0, None), rank, split, 1)
        own = sum(1 << i for i in range(share.first, share.first + share.count))
        for piece in range(2) if share.count else ():
            memory.sums[tile, w, piece] += own
            yield
        memory.counts[tile, w] += 1
        before = memory.counts[tile, w] - 1
        yield
        if before == split - 1:
            found = []
            for piece in range(2):
                found.append(memory.sums[tile, w, piece])
                yield
            for piece in range(2):
                memory.sums[tile, w, piece] = 0
                yield
            memory.counts[tile, w] = 0
            yield
            stored.append((tile, w, *found))


@pytest.mark.parametrize("split", [2, 3, 5])
@pytest.mark.parametrize("slots", [1, 4, 7])
def test_the_protocol(split, slots):
    """Whoever hurries: every tile is stored once, as the sum of all; and each call leaves the workspace as it was."""
    groups, workers = 2, 2
    for seed in range(40):
        draw, memory = random.Random(seed), Memory(slots, groups)
        for _ in range(2):  # calls
            lengths, stored = [draw.choice((0, 1, 2, 9)) for _ in range(slots)], []
            roles = [
                warpgroup(memory, range(worker, slots, workers), rank, split, w, lengths, stored)
                for worker in range(workers)
                for rank in range(split)
                for w in range(groups)
            ]
            while roles:
                at = draw.randrange(len(roles))
                for _ in range(draw.choice((1, 1, 20))):
                    if next(roles[at], "ended") == "ended":
                        roles.pop(at)
                        break
            whole = [(1 << length) - 1 for length in lengths]
            assert sorted(stored) == [(t, w, whole[t], whole[t]) for t in range(slots) for w in range(groups)]
            assert not any(memory.sums.values()) and not any(memory.counts.values())


@pytest.mark.parametrize("sms", [7, 132])
def test_slots(sms):
    """Every number that a work tile may have lies in the workspace, with an order of tiles and without."""
    config = next(c for c in CONFIGS if c.split == 3)
    facts, extents = BlockFacts(128, 128, "int32"), Extents(1280, 300, 1024, 2)
    tiles_n = -(-extents.N // config.tile_n)
    words = heuristics.workspace_words(config, extents, facts, sms)
    plain = TileScheduler(10, tiles_n, extents.L, 4)
    assert plain.count * config.slot <= words
    crow = torch.tensor([0, 0, 8, 9, 9, 9, 9, 9, 9, 9, 9])
    workers = heuristics.resident_clusters(config, sms)
    assert workers == max(1, sms // 3)
    order = work_order(crow, row_tiles=1, steps=2, tiles_n=tiles_n, batch=extents.L, group=4, workers=workers)
    assert len(order) * config.slot <= words
    assert config.slot * 4 % 128 == 0, "slots begin with a line"
    assert heuristics.workspace_words(candidates.split_sm90(64, SPEC)[0][0], extents, facts, sms) == 0


# What is chosen, and what is refused


def picks(extents, block=None, kept=1.0):
    """The best of all candidates, and of those with one order of summation."""
    plain = candidates.candidates_sm90(block, SPEC)
    found = []
    for configs in (plain + candidates.atomic_sm90(block, SPEC), plain):
        found.append(min(configs, key=lambda c: heuristics.cost(c, extents, block, kept, 132)))
    return found


def test_where_it_is_chosen():
    """Few tiles and a long K; nothing changes elsewhere, and no workspace is larger than 64 MB."""
    for extents in (Extents(128, 4096, 14336), Extents(512, 512, 16384), Extents(128, 128, 65536)):
        assert picks(extents)[0].atomic
    for extents in (Extents(8192, 8192, 8192), Extents(1024, 1024, 256), Extents(64, 8192, 512)):
        any_order, plain = picks(extents)
        assert any_order == plain
    assert not any(config.atomic for config in candidates.candidates_sm90(None, SPEC))
    for config in candidates.atomic_sm90(None, SPEC):
        assert heuristics.cost(config, Extents(8192, 8192, 8192), None, 1.0, 132) == float("inf")
    assert candidates.atomic_sm90(BlockFacts(64, 32, "int32"), SPEC) == []


def test_what_is_refused():
    def reason(**changes):
        settings = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 6, "warps_m": 2, "warps_n": 1, "ring": 1}
        config = GemmConfig(**settings | {"split": 2, "atomic": True} | changes)
        return unsupported(GemmFacts("sm_90a", "sm_90", config))

    assert [reason(split=n) for n in (2, 3, 16)] == [""] * 3
    assert "nothing to add" in reason(split=1)
    assert "at most 16" in reason(split=17)
    for changes in ({"cluster_m": 2}, {"cluster_n": 2}, {"lag": 1}, {"warps_m": 1, "teams": 2}):
        assert "cooperative" in reason(**changes)
    older = GemmConfig(64, 64, 32, 4, 2, 2, split=2, atomic=True)
    assert "sm_90" in unsupported(GemmFacts("sm_80", "sm_80", older))


CALLS = {
    "gemm": lambda **more: gemm(normal(24, 40), normal(40, 16), **more),
    "bsr_matmul": lambda **more: bsr_matmul(bsr("bernoulli", (16, 16), "cpu"), normal(80, 16), **more),
    "bsr_linear": lambda **more: bsr_linear(normal(16, 80), bsr("bernoulli", (16, 16), "cpu"), **more),
    "bsr_grouped_linear": lambda **more: bsr_grouped_linear(normal(64, 80), *experts(), **more),
}


def experts():
    W = bsr("bernoulli", (16, 16), "cpu")
    return BsrMatrix(W.crow_indices, W.col_indices, W.values[None], (1, *W.shape)), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_on_the_cpu(call):
    """The reference has one order of summation; what is no bool, or contradicts torch's own setting, is refused."""
    torch.manual_seed(0)
    expected = call()
    torch.manual_seed(0)
    assert torch.equal(call(deterministic=False), expected)
    with pytest.raises(TypeError, match="deterministic must be True or False, got int"):
        call(deterministic=0)
    torch.use_deterministic_algorithms(True)
    try:
        call(deterministic=True)
        with pytest.raises(RuntimeError, match=r"deterministic=False.*use_deterministic_algorithms\(True\) is set"):
            call(deterministic=False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="other bits on every run"):
            call(deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_under_compile(monkeypatch):
    """The flag reaches the op that runs, with `out` and without."""
    seen = []
    found = checks.check_deterministic
    monkeypatch.setattr(checks, "check_deterministic", lambda op, flag: seen.append((op, flag)) or found(op, flag))
    a, b, W = normal(24, 40), normal(40, 16), bsr("bernoulli", (16, 16), "cpu")

    def layer(a, b, x, out):
        gemm(a, b, out=out, deterministic=False)
        return gemm(a, b, deterministic=False) + out, bsr_linear(x, W, deterministic=False)

    torch._dynamo.reset()
    out = torch.empty(24, 16, dtype=BF16)
    doubled, _ = torch.compile(layer, fullgraph=True, backend="eager")(a, b, normal(8, 80), out)
    assert torch.equal(doubled, out + out)
    assert {("gemm", False), ("bsr_linear", False)} <= set(seen)


def test_plans(emulated, monkeypatch):
    """The flag is part of a plan's key; on the sm_80 path, and where K is short, nothing changes."""
    monkeypatch.setenv("CUTE_KERNELS_TUNED", "0")
    a, b = torch.zeros(128, 14336, dtype=BF16), torch.zeros(512, 14336, dtype=BF16).t()
    plan = explain(gemm, a, b, deterministic=False)
    assert plan.facts.config.atomic and 0 < plan.workspace * 4 < 64 << 20
    assert "in any order (deterministic=False)" in str(plan)
    assert not explain(gemm, a, b).facts.config.atomic
    short = a[:, :64], b[:64]
    assert explain(gemm, *short, deterministic=False).facts == explain(gemm, *short).facts
    with path("sm_80"):
        assert explain(gemm, a, b, deterministic=False).facts == explain(gemm, a, b).facts
    gemm(a, b)
    gemm(a, b, deterministic=False)
    assert [plan.facts.config.atomic for plan in dense_ops._PLANS.values()] == [False, True]


# Products


@pytest.fixture(params=CONFIGS, ids=str)
def shared(request, monkeypatch):
    """Calls that permit any order take this configuration."""
    monkeypatch.setattr(candidates, "candidates_sm90", lambda block, spec: [])
    monkeypatch.setattr(candidates, "atomic_sm90", lambda block, spec: [request.param])
    monkeypatch.setenv("CUTE_KERNELS_TUNED", "0")
    for module in ("cute_kernels.ops", "sparse_collective.ops"):
        monkeypatch.setattr(f"{module}._PLANS", {})
    return request.param


pytestmark = pytest.mark.sm_90


def clean():
    """Every workspace is zeros, and there is one if a kernel has run."""
    torch.cuda.synchronize()
    assert workspace._BUFFERS
    return not any(buffer.view(torch.int32).any().item() for buffer in workspace._BUFFERS.values())


def check(a, b, *, out=None, op=gemm, args=None, **terms):
    """A product, twice where it has no `out`, against the truth of a @ b; returns its plan."""
    dtype = a.dtype if out is None else out.dtype
    exact, by_torch = exact_and_torch(a, b, dtype, **terms)
    args = (a, b) if args is None else args
    plan = explain(op, *args, out=out, deterministic=False, **terms)
    assert plan.facts.config.atomic and plan.workspace
    if out is None:
        out = poisoned(*exact.shape, dtype=dtype, device=a.device)
        assert_as_good_as_torch(op(*args, deterministic=False, **terms), exact, by_torch, k=a.shape[-1], plan=plan)
    assert op(*args, out=out, deterministic=False, **terms) is out
    assert_as_good_as_torch(out, exact, by_torch, k=a.shape[-1], plan=plan)
    assert a.device.type == "cpu" or clean()
    return plan


def check_bsr(W, b, *, linear=False, **terms):
    rows = dense(W)
    a, b2 = (b, rows.t()) if linear else (rows, b)
    op, args = (bsr_linear, (b, W)) if linear else (bsr_matmul, (W, b))
    return check(a, b2, op=op, args=args, **terms)


@pytest.mark.parametrize("k", [8, 64, 136, 264, 1000])
def test_sums_of_any_length(device, shared, k):
    """From one K-tile, of which all CTAs but one have none, to several each."""
    assert check(*matrices(200, 328, k, device)).facts.config == shared


@pytest.mark.parametrize("layouts", ["nt", "tn"])
def test_operands(device, shared, layouts):
    check(*matrices(200, 328, 456, device, layouts, FP16))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("transposed", [False, True])
def test_outputs(device, shared, dtype, transposed):
    """Bias, activation and residual once, whoever comes last; either major, and a view that TMA does not take."""
    check_outputs(check, dtype, transposed, device)


def test_batches(device, shared):
    check(normal(3, 136, 200, device=device), normal(3, 200, 264, device=device, k=200), activation="relu")


@pytest.mark.parametrize("linear", [False, True], ids=["matmul", "linear"])
@pytest.mark.parametrize("pattern", ["bernoulli", "empty_rows", "one_full_row", "no_blocks"])
@pytest.mark.parametrize("block", [(128, 128), (512, 112), (64, 256), (48, 112)], ids=str)
def test_block_sparse(device, shared, block, pattern, linear):
    """Rows without a block, and rows of fewer blocks than CTAs share them."""
    if shared.tile_m >= block[0] + 64:
        pytest.skip("the tile is two blocks high")
    W = bsr(pattern, block, device, grid=(5, 9))
    assert check_bsr(W, width(W, 136, device, linear), linear=linear).facts.config == shared


def test_block_sparse_terms(device, shared):
    W = bsr("empty_rows", (128, 112), device, grid=(3, 7), index_dtype=torch.int64)
    M, n = W.shape[0], 72
    terms = {"bias": normal(M, 1, device=device), "activation": "gelu"}
    check_bsr(W, width(W, n, device), residual=normal(M, n, device=device), **terms)
    check_bsr(W, width(W, n, device, True), linear=True, bias=normal(M, device=device), activation="gelu")


def test_a_batch_and_groups(device, shared):
    """One pattern for all items; and runs of tokens, of which one is padding."""
    W = bsr("empty_rows", (128, 128), device, grid=(3, 5))
    W = BsrMatrix(W.crow_indices, W.col_indices, normal(2, W.nnz, 128, 128, device=device, k=640), (2, 384, 640))
    items = W.to_dense()
    b = normal(2, 640, 72, device=device)
    check(items, b, op=bsr_matmul, args=(W, b))
    groups = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    x = normal(3 * 256, 640, device=device)
    out = bsr_grouped_linear(x, W, groups, deterministic=False)
    exact = torch.cat([x[:256] @ items[1].t(), x[256:512] * 0.0 @ items[0].t(), x[512:] @ items[0].t()]).double()
    assert (out.double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.gpu
class TestCuda:
    def test_tiny(self, shared):
        """What to run first: one tile, and exact numbers."""
        a, b = torch.ones(64, 256, dtype=BF16, device="cuda"), torch.ones(256, 64, dtype=BF16, device="cuda")
        assert explain(gemm, a, b, deterministic=False).facts.config == shared
        for _ in range(3):
            assert (gemm(a, b, deterministic=False) == 256).all()
        assert clean()

    def test_many_tiles_a_cta(self, shared):
        """CTAs go on to their next tile, while others still add to the last one."""
        for n in (4096, 4104):
            check(*matrices(1536, n, 520, "cuda", "nt"))
        W = bsr("power_law", (128, 128), "cuda", grid=(48, 24))
        check_bsr(W, width(W, 1032, "cuda"))

    def test_exact_numbers_over_and_over(self, shared):
        """Sums of small integers are exact in any order, so bits may not differ; shapes change from call to call."""
        shapes = [(128, 4096, 4096), (520, 264, 2056), (1, 1024, 8192), (128, 512, 64)]
        problems = []
        for m, n, k in shapes:
            a = torch.randint(-2, 3, (m, k), device="cuda").to(BF16)
            b = torch.randint(-2, 3, (n, k), device="cuda").to(BF16).t()
            problems.append((a, b, (a.float() @ b.float()).to(FP32)))
        for turn in range(60):
            a, b, right = problems[turn % len(problems)]
            assert torch.equal(gemm(a, b, out_dtype=FP32, deterministic=False), right)
        assert clean()

    def test_values_that_are_not_finite(self, shared):
        """An infinity in one call is none in the next."""
        a, b = matrices(200, 328, 1000, "cuda")
        bad = a.clone()
        bad[3, 5], bad[7, 900] = float("inf"), float("nan")
        gemm(bad, b, deterministic=False)
        check(a, b)

    def test_two_streams(self, shared):
        """Each has a workspace of its own."""
        a, b = matrices(520, 1032, 2056, "cuda", "nt")
        exact, by_torch = exact_and_torch(a, b, BF16)
        streams, outs = [torch.cuda.Stream() for _ in range(2)], []
        gemm(a, b, deterministic=False)
        torch.cuda.synchronize()
        for _ in range(30):
            for stream in streams:
                with torch.cuda.stream(stream):
                    outs.append(gemm(a, b, deterministic=False))
        assert clean()
        for stream in streams:
            assert (a.device.index, stream.cuda_stream, torch.float32) in workspace._BUFFERS
        for out in outs:
            assert_as_good_as_torch(out, exact, by_torch, k=2056)

    def test_a_graph(self, shared):
        """A captured call has a workspace of its own, so its replays may run beside other calls."""
        a, b = matrices(520, 1032, 2056, "cuda", "nt")
        exact, by_torch = exact_and_torch(a, b, BF16)
        gemm(a, b, deterministic=False)
        torch.cuda.synchronize()
        before = dict(workspace._BUFFERS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = gemm(a, b, deterministic=False)
            second = gemm(a, b, deterministic=False)
        assert workspace._BUFFERS == before
        other = torch.cuda.Stream()
        for _ in range(20):
            with torch.cuda.stream(other):
                graph.replay()
            beside = gemm(a, b, deterministic=False)
            torch.cuda.synchronize()
            for out in (first, second, beside):
                assert_as_good_as_torch(out, exact, by_torch, k=2056)
        assert clean()

    def test_under_compile(self, shared):
        a, b = matrices(200, 328, 1000, "cuda")
        out = torch.compile(lambda a, b: gemm(a, b, deterministic=False), fullgraph=True)(a, b)
        assert_as_good_as_torch(out, *exact_and_torch(a, b, BF16), k=1000)


def test_shares_cover_every_k_tile():
    """Splits that are no power of two."""
    for split in (3, 6, 12):
        for periods in range(30):
            whole = DenseSource(2 * periods, 1).for_tile(5, 0, None)
            shares = [split_k_tiles(whole, rank, split, 2) for rank in range(split)]
            found = [numbers(s.at(i).a) for s in shares for i in range(s.count)]
            assert found == [numbers(whole.at(i).a) for i in range(whole.count)]
