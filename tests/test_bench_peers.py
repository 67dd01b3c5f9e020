"""The benchmarks' peers, as far as a CPU can tell: what they refuse, and that those which run compute our product."""

import importlib
import sys
import types

import pytest
import torch

from attention import BlockMask, mask_mods
from attention import reference as ours
from bench import peers, peers_attention
from bench.peers import Call, Operands, Setting, agrees, verified
from bench.peers_attention import Attention
from sparse_collective import random_bsr

from .reference import truth

M, N, K = 96, 80, 64


def dense(activation=None, bias=True, dtype=torch.bfloat16) -> Operands:
    a, b = torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype).t()
    return Operands(a, b, torch.randn(N, dtype=dtype) if bias else None, activation)


def sparse(block=(32, 16), transposed=False, dtype=torch.float32) -> Operands:
    def b():
        return torch.randn(N, K, dtype=dtype).t() if transposed else torch.randn(K, N, dtype=dtype)

    return Operands(lambda: random_bsr((M, K), block, density=0.5, dtype=dtype), b, transposed=transposed)


def attention(causal=False, blocks=None, kv_heads=2) -> Attention:
    q = torch.randn(2, 128, 4, 32, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 128, kv_heads, 32, dtype=torch.bfloat16) for _ in range(2))
    return Attention(q, k, v, causal, blocks, (32, 32))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_sample_is_the_reference(activation):
    x = dense(activation)
    rows, reference = x.sample
    assert rows[0] == 0 and rows[-1] == M - 1 and len(rows.unique()) == peers.SAMPLE
    expected = truth(x.a, x.b, x.bias, activation)[rows]
    torch.testing.assert_close(reference, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_out_has_the_layout(transposed):
    out = sparse(transposed=transposed).out()
    assert out.shape == (M, N) and out.stride() == ((1, M) if transposed else (N, 1))


def test_agrees():
    reference = torch.randn(64, 256)
    assert agrees(reference.bfloat16(), reference)
    assert not agrees(reference[:, :128], reference)
    for wrong in (float("nan"), 100.0):
        out = reference.clone()
        out[3, 5] = wrong
        assert not agrees(out, reference)
    assert agrees(torch.zeros(4, 4), torch.zeros(4, 4)) and not agrees(torch.ones(4, 4), torch.zeros(4, 4))


def test_verified_refuses_another_result():
    index, right = slice(None), torch.randn(8, 8)
    assert verified(lambda: right.clone(), lambda: (index, right))() is not right
    with pytest.raises(peers.WrongResult, match="wrong result: off by"):
        verified(lambda: 2 * right, lambda: (index, right))
    with pytest.raises(peers.WrongResult, match="inf"):
        verified(lambda: torch.zeros(8, 9), lambda: (index, right))


def test_verified_refuses_what_writes_nothing():
    """An output that holds the right numbers already."""
    right = torch.randn(8, 8)
    out = right.clone()
    with pytest.raises(peers.WrongResult):
        verified(lambda: out, lambda: (slice(None), right))


@pytest.mark.parametrize(
    "peer, x",
    [
        (peers.cublas, lambda: dense(bias=False)),
        (peers.cublaslt_epilogue, dense),
        (peers.cublaslt_epilogue, lambda: dense("relu")),
        (peers.cublaslt_epilogue, lambda: dense("gelu_tanh")),
        (peers.torch_bsr, lambda: sparse((32, 32))),
        (peers.torch_bsr, lambda: sparse((32, 32), transposed=True)),
    ],
)
def test_peers_of_torch(peer, x):
    x = x()
    candidate = peer(x, 3.0)
    assert candidate.flops == 3.0
    out = candidate.setup()()
    rows, reference = x.sample
    assert agrees(out[rows], reference, 0.006 if out.dtype is torch.bfloat16 else 1e-5)


def test_torch_as_shipped_refuses_blocks_that_are_not_square():
    with pytest.raises(RuntimeError):  # of cuSPARSE and of MKL alike
        peers.torch_bsr(sparse((32, 16)), 1.0).setup()


def test_a_peer_that_computes_something_else(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out.copy_(a @ b + 1))
    with pytest.raises(peers.WrongResult):
        peers.cublas(dense(bias=False), 1.0).setup()


@pytest.mark.parametrize(
    "peer, x, message",
    [
        (peers.cublas, dense, "cuBLAS does not fuse a bias"),
        (peers.cublaslt_epilogue, lambda: dense("silu"), "does not fuse silu"),
        (peers.cublaslt_epilogue, lambda: dense("relu", bias=False), "only together with a bias"),
        (peers.quack_gemm, lambda: dense("gelu"), "quack, untuned does not fuse gelu"),
        (peers_attention.sdpa_flash, lambda: attention(blocks=torch.ones(4, 4, dtype=torch.bool)), "no block masks"),
    ],
)
def test_refusals(peer, x, message):
    with pytest.raises(NotImplementedError, match=message):
        peer(x(), 1.0).setup()


@pytest.mark.parametrize(
    "peer, x, modules, package",
    [
        (peers.quack_gemm, dense, ("quack", "quack.gemm_interface"), "quack-kernels"),
        (peers.triton_bsr, sparse, ("triton",), "triton"),
        (
            peers_attention.fa4,
            attention,
            ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"),
            "flash-attn-4",
        ),
    ],
)
def test_a_missing_package_is_named(monkeypatch, peer, x, modules, package):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ImportError, match=f"^{package} cannot be imported"):
        peer(x(), 1.0).setup()


def test_settings():
    for bm in (16, 32, 64, 128, 256):
        found = peers.settings_for(bm, 8192)
        assert len(found) >= 4 and all(8192 % s.columns == 0 for s in found)
    assert peers.settings_for(128, 8192)[: peers.QUICK] == [(128, 8, 3, 4), (256, 8, 3, 4), (128, 4, 4, 4)]
    assert {s.columns for s in peers.settings_for(32, 96)} == {32}
    assert peers.settings_for(32, 8) == [] and peers.settings_for(4096, 8192) == []


def test_fastest_skips_what_crashes_or_is_wrong():
    right = torch.randn(4, 4)

    def make(setting):
        def call():
            if setting == "crashes":
                raise RuntimeError("out of resources")
            return right + (setting == "wrong")

        return call

    def measure(calls, warm_s, rounds):
        return {name: [{"fast": 1.0, "slow": 2.0}[name]] * rounds for name in calls}

    def expected():
        return slice(None), right

    name, call = peers.fastest(make, ["crashes", "slow", "wrong", "fast"], expected, measure)
    assert name == "fast" and torch.equal(call(), right)
    with pytest.raises(RuntimeError, match="out of resources"):
        peers.fastest(make, ["crashes", "wrong"], expected, measure)
    with pytest.raises(ValueError, match="no setting"):
        peers.fastest(make, [], expected, measure)


@pytest.mark.parametrize("transposed", [False, True])
def test_triton_settings_reach_the_kernel(monkeypatch, transposed):
    """With another product in the kernel's place; blocks need not be square."""
    x, seen = sparse((32, 16), transposed), []

    def addmm(added, a, b, *, beta, out, meta):
        assert beta == 0 and added.shape == out.shape
        seen.append(meta)
        return out.copy_(a.to_dense() @ b)

    monkeypatch.setattr(peers, "needs", lambda module, package: importlib.import_module("torch.sparse._triton_ops"))
    monkeypatch.setattr("torch.sparse._triton_ops.bsr_dense_addmm", addmm)
    candidate = peers.triton_bsr(x, 1.0, quick=True, measure=lambda calls, **_: {name: [1.0] for name in calls})
    call = candidate.setup()
    assert isinstance(call, Call) and call.note == str(Setting(16, 8, 3, 4))
    assert seen[0] == {"SPLIT_N": 5, "GROUP_SIZE_ROW": 4, "num_warps": 8, "num_stages": 3}


def test_triton_needs_powers_of_two():
    with pytest.raises((ImportError, ValueError), match="triton|power of 2"):
        peers.triton_bsr(sparse((48, 16)), 1.0).setup()


def test_pruned_keeps_the_larger_two_of_four():
    a = torch.randn(16, 32)
    kept = peers.pruned(a.clone()).view(-1, 4)
    assert ((kept != 0).sum(1) == 2).all()
    largest = a.view(-1, 4).abs().sort(dim=1, descending=True).values[:, :2]
    assert torch.equal(kept.abs().sort(dim=1, descending=True).values[:, :2], largest)


def test_semi_structured_needs_a_gpu():
    candidate = peers.semi_structured(64, 64, 64, device="cpu")
    assert candidate.flops == 64**3
    with pytest.raises(RuntimeError, match="CUDA"):
        candidate.setup()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_queries_of_blocks(monkeypatch):
    """Sample and FlexAttention, uncompiled: that the compiled kernel skips blocks only a GPU can tell."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(peers_attention, "_COMPILED", {})
    mask = torch.rand(4, 4) < 0.4
    mask[1] = False  # queries that see nothing
    x = attention(blocks=mask)
    (b, i, h), reference = x.sample
    assert set(b.tolist()) == {0, 1} and set(h.tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(reference, x.exact()[b, i, h].float(), rtol=1e-4, atol=1e-4)
    seen = mask.repeat_interleave(32, 0).repeat_interleave(32, 1)
    q, k, v = (t.double() for t in x.heads_first)
    must = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).nan_to_num(0.0)
    torch.testing.assert_close(x.exact(), must.transpose(1, 2))
    assert agrees(peers_attention.flex_attention(x, 1.0).setup()()[b, i, h], reference)


def test_kept_blocks():
    mask = torch.tensor([[True, False, True], [False, False, False], [False, True, True]])
    counts, indices = attention(blocks=mask).kept_blocks()
    assert counts.shape == (1, 1, 3) and counts.dtype is indices.dtype is torch.int32
    for row, (count, index) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0], strict=True)):
        assert index[:count].tolist() == mask[row].nonzero().flatten().tolist()


def test_attention_takes_one_mask():
    with pytest.raises(ValueError, match="both given"):
        attention(causal=True, blocks=torch.ones(4, 4, dtype=torch.bool))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (9, 0), (None, 5), (7, None), (3, 4)])
@pytest.mark.parametrize("queries", [1, 24, 40])
def test_masks_are_those_of_our_reference(monkeypatch, causal, window, queries):
    """Sample, whole output and FlexAttention's mask, with grouped heads; queries are aligned with the last keys."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(peers_attention, "_COMPILED", {})
    q = torch.randn(2, queries, 4, 32)
    k, v = torch.randn(2, 40, 2, 32), torch.randn(2, 40, 2, 32)
    x = Attention(q, k, v, causal, window=window)
    must = ours.attention(*(t.double() for t in x.heads_first), causal=causal, window=window).transpose(1, 2)
    torch.testing.assert_close(x.exact(), must, rtol=1e-6, atol=1e-6)
    index, reference = x.sample
    torch.testing.assert_close(reference.double(), must[index], rtol=1e-4, atol=1e-5)
    left, right = x.bounds
    assert (left, right) == mask_mods.window_bounds(window, causal)
    if (mask := peers_attention.flex_mask(x)) is not None:
        b = h = torch.zeros((), dtype=torch.int32)
        seen = mask.mask_mod(b, h, torch.arange(queries)[:, None], torch.arange(40))
        assert torch.equal(seen.expand(queries, 40), x.kept(torch.arange(queries)).expand(queries, 40))


def test_window_and_lengths_that_sdpa_does_not_take():
    q, kv = torch.randn(1, 8, 2, 32, dtype=torch.bfloat16), torch.randn(1, 16, 2, 32, dtype=torch.bfloat16)
    for x, message in (
        (Attention(kv, kv, kv, window=(3, 0)), "no window"),
        (Attention(q, kv, kv, True), "with the first of 16 keys"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            peers_attention.sdpa_flash(x, 1.0).setup()
    one = Attention(q[:, :1], kv, kv, True)  # sees all
    assert peers_attention.sdpa_flash(one, 1.0).setup()().shape == (1, 1, 2, 32)


def test_each_query_is_compared_by_itself():
    """The first query sees one key, and its output outweighs all others."""
    x = Attention(*(torch.randn(1, 2048, 2, 32) for _ in range(3)), True)
    wrong = x.exact().float()
    wrong[:, 1024:] *= 1.03
    verified(lambda: wrong.clone(), lambda: x.sample)
    with pytest.raises(peers.WrongResult, match="not where they see many"):
        x.verified(lambda: wrong.clone())
    assert x.verified(lambda: x.exact().float()) is not None


def test_fa4_gets_windows_as_it_takes_them(monkeypatch):
    """With FlashAttention 4's interface, computed by our reference; its results are in the suite's whole run."""
    seen = []

    def attend(q, k, v, causal=False, window_size=(None, None)):
        seen.append((causal, window_size))
        out = ours.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal, window=window_size)
        return out.transpose(1, 2).contiguous(), None

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_func = attend
    q, kv = torch.randn(2, 24, 4, 32), torch.randn(2, 40, 2, 32)
    peers_attention.fa4(Attention(q, kv, kv, True, window=(9, None)), 1.0).setup()
    peers_attention.fa4(Attention(q, kv, kv, True), 1.0).setup()
    assert seen[0] == (True, (9, 0)) and seen[-1] == (True, (None, None))


def test_flex_attention_of_small_blocks_gets_tiles_of_their_size(monkeypatch):
    given = []

    def attend(q, k, v, *, block_mask, enable_gqa, kernel_options):
        given.append(kernel_options)
        return ours.attention(q, k, v, block_mask=BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool)))

    monkeypatch.setattr(peers_attention, "compiled", lambda key: attend)
    shape, blocks = (1, 256, 2, 32), torch.ones(2, 2, dtype=torch.bool)
    q, k, v = (torch.randn(*shape) for _ in range(3))
    x = Attention(q, k, v, blocks=blocks, block_size=(128, 128))
    assert peers_attention.flex_attention(x, 1.0).setup().note == "" and given[-1] is None
    small = Attention(q, k, v, blocks=torch.ones(4, 4, dtype=torch.bool), block_size=(64, 64))
    call = peers_attention.flex_attention(small, 1.0).setup()
    assert given[-1] == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3} and "BLOCK_M 64" in call.note
    measure = lambda calls, **_: {c: [i + 1.0] for i, c in enumerate(calls)}  # noqa: E731
    peers_attention.flex_attention(small, 1.0, settings=3, measure=measure).setup()
    assert {options["num_stages"] for options in given if options} == {2, 3, 4}
