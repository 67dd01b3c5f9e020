"""The benchmarks' peers, as far as a CPU can tell: what they refuse, and that those which run compute our product."""

import importlib
import sys
import types

import pytest
import torch

from attention import BlockMask, mask_mods
from attention import reference as ours
from bench import peers, peers_attention
from bench.peers import Call, Operands, Setting, WrongResult, compare, verified
from bench.peers_attention import Attention
from sparse_collective import random_bsr

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


@pytest.fixture
def flash_attn(monkeypatch):
    """FlashAttention 4's module, in which a test puts its functions."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return sys.modules["flash_attn.cute.interface"]


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(peers_attention, "compiled", peers_attention.compiled.__wrapped__)


@pytest.mark.parametrize("transposed", [False, True])
def test_sample_and_out_fit_the_operands(transposed):
    x = sparse(transposed=transposed)
    rows, reference = x.sample
    assert rows[0] == 0 and rows[-1] == M - 1 and len(rows.unique()) == peers.SAMPLE
    torch.testing.assert_close(reference, (x.a.to_dense() @ x.b)[rows])
    out = x.out()
    assert out.shape == (M, N) and out.stride() == ((1, M) if transposed else (N, 1))


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
        (peers.cublas, lambda: dense(bias=False)),
        (peers.cublas_fp16_sums, lambda: dense(bias=False)),
        (peers.cublas_tf32, lambda: dense(bias=False)),
        (peers.cublas_fp32, lambda: dense(bias=False)),
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
    out, (rows, reference) = candidate.setup()(), x.sample
    compare(out[rows], reference, 0.006 if out.dtype is torch.bfloat16 else 1e-5)


def test_a_peer_that_computes_something_else(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out.copy_(a @ b + 1))
    with pytest.raises(WrongResult):
        peers.cublas(dense(bias=False), 1.0).setup()


def queries(rows, causal=False, window=None):
    """`rows` queries of 16 keys."""
    kv = torch.randn(1, 16, 2, 32, dtype=torch.bfloat16)
    return Attention(kv[:, :rows], kv, kv, causal, window=window)


FLASH_ATTN = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")


@pytest.mark.parametrize(
    "peer, x, error, message, missing",
    [
        (peers.cublas, dense, NotImplementedError, "cuBLAS does not fuse a bias", ()),
        (peers.cublaslt_epilogue, lambda: dense("silu"), NotImplementedError, "does not fuse silu", ()),
        (peers.cublaslt_epilogue, lambda: dense("relu", bias=False), NotImplementedError, "together with a bias", ()),
        (peers.quack_gemm, lambda: dense("gelu"), NotImplementedError, "quack, untuned does not fuse gelu", ()),
        (peers_attention.sdpa_flash, lambda: attention(blocks=torch.ones(4, 4, dtype=torch.bool)), NotImplementedError,
         "no block masks", ()),
        (peers_attention.sdpa_flash, lambda: queries(16, window=(3, 0)), NotImplementedError, "no window", ()),
        (peers_attention.sdpa_flash, lambda: queries(8, True), NotImplementedError, "with the first of 16 keys", ()),
        (peers.torch_bsr, sparse, RuntimeError, "", ()),  # blocks that are not square: of cuSPARSE and of MKL alike
        (peers.triton_bsr, lambda: sparse((48, 16)), (ImportError, ValueError), "triton|power of 2", ()),
        (peers.semi_structured, lambda: dense(bias=False), RuntimeError, "CUDA", ()),
        (peers.quack_gemm, dense, ImportError, "^quack-kernels cannot be imported", ("quack", "quack.gemm_interface")),
        (peers.triton_bsr, sparse, ImportError, "^triton cannot be imported", ("triton",)),
        (peers_attention.fa4, attention, ImportError, "^flash-attn-4 cannot be imported", FLASH_ATTN),
    ],
)  # fmt: skip
def test_refusals(monkeypatch, peer, x, error, message, missing):
    """Of what a peer does not compute, and of packages that are not installed, by their names."""
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(error, match=message or None):
        peer(x(), 1.0).setup()


def test_settings():
    for bm in (16, 32, 64, 128, 256):
        found = peers.settings_for(bm, 8192)
        assert len(found) >= 4 and all(8192 % s.columns == 0 for s in found)
    assert peers.settings_for(128, 8192)[: peers.QUICK] == [(128, 8, 3, 4), (256, 8, 3, 4), (128, 4, 4, 4)]
    assert {s.columns for s in peers.settings_for(32, 96)} == {32}
    assert peers.settings_for(32, 8) == [] and peers.settings_for(4096, 8192) == []


def test_fastest_skips_what_crashes_or_is_wrong():
    right, speeds = torch.randn(4, 4), {"fast": 1.0, "slow": 2.0}

    def make(setting):
        def call():
            if setting == "crashes":
                raise RuntimeError("out of resources")
            return right + (setting == "wrong")

        return call

    def fastest(*settings):
        measure = lambda calls, warm_s, rounds: {name: [speeds[name]] * rounds for name in calls}  # noqa: E731
        return peers.fastest(make, settings, lambda: (slice(None), right), measure)

    name, call = fastest("crashes", "slow", "wrong", "fast")
    assert name == "fast" and torch.equal(call(), right)
    with pytest.raises(RuntimeError, match="out of resources"):
        fastest("crashes", "wrong")
    with pytest.raises(ValueError, match="no setting"):
        fastest()


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


def test_pruned_keeps_the_larger_two_of_four():
    a = torch.randn(16, 32)
    kept = peers.pruned(a.clone()).view(-1, 4)
    assert ((kept != 0).sum(1) == 2).all()
    largest = a.view(-1, 4).abs().sort(dim=1, descending=True).values[:, :2]
    assert torch.equal(kept.abs().sort(dim=1, descending=True).values[:, :2], largest)


# -- attention ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_queries_of_blocks(uncompiled):
    """Sample and FlexAttention, uncompiled: that the compiled kernel skips blocks only a GPU can tell."""
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
    compare(peers_attention.flex_attention(x, 1.0).setup()()[b, i, h], reference)
    counts, indices = x.kept_blocks()
    assert counts.shape == (1, 1, 4) and counts.dtype is indices.dtype is torch.int32
    for row, (count, index) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0], strict=True)):
        assert index[:count].tolist() == mask[row].nonzero().flatten().tolist()
    with pytest.raises(ValueError, match="both given"):
        attention(causal=True, blocks=mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (9, 0), (None, 5), (7, None), (3, 4)])
@pytest.mark.parametrize("queries", [1, 24, 40])
def test_masks_are_those_of_our_reference(uncompiled, causal, window, queries):
    """Sample, whole output and FlexAttention's mask, with grouped heads; queries are aligned with the last keys."""
    q = torch.randn(2, queries, 4, 32)
    k, v = torch.randn(2, 40, 2, 32), torch.randn(2, 40, 2, 32)
    x = Attention(q, k, v, causal, window=window)
    must = ours.attention(*(t.double() for t in x.heads_first), causal=causal, window_size=window).transpose(1, 2)
    torch.testing.assert_close(x.exact(), must, rtol=1e-6, atol=1e-6)
    index, reference = x.sample
    torch.testing.assert_close(reference.double(), must[index], rtol=1e-4, atol=1e-5)
    assert x.bounds == mask_mods.window_bounds(window, causal)
    if (mask := peers_attention.flex_mask(x)) is not None:
        b = h = torch.zeros((), dtype=torch.int32)
        seen = mask.mask_mod(b, h, torch.arange(queries)[:, None], torch.arange(40))
        assert torch.equal(seen.expand(queries, 40), x.kept(torch.arange(queries)))


def test_one_query_that_sees_all_is_sdpa_s():
    assert peers_attention.sdpa_flash(queries(1, True), 1.0).setup()().shape == (1, 1, 2, 32)


def test_each_query_is_compared_by_itself():
    """The first query sees one key, and its output outweighs all others."""
    x = Attention(*(torch.randn(1, 2048, 2, 32) for _ in range(3)), True)
    wrong = x.exact().float()
    wrong[:, 1024:] *= 1.03
    verified(wrong.clone, lambda: x.sample)
    with pytest.raises(WrongResult, match="but not where queries see few keys"):
        x.verified(wrong.clone)
    assert x.verified(lambda: x.exact().float()) is not None


def test_fa4_gets_windows_as_it_takes_them(flash_attn):
    """Computed by our reference; its results are in the suite's whole run."""
    seen = []

    def attend(q, k, v, causal=False, window_size=(None, None)):
        seen.append((causal, window_size))
        out = ours.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal, window_size=window_size)
        return out.transpose(1, 2).contiguous(), None

    flash_attn.flash_attn_func = attend
    q, kv = torch.randn(2, 24, 4, 32), torch.randn(2, 40, 2, 32)
    peers_attention.fa4(Attention(q, kv, kv, True, window=(9, None)), 1.0).setup()
    peers_attention.fa4(Attention(q, kv, kv, True), 1.0).setup()
    assert seen[0] == (True, (9, 0)) and seen[-1] == (True, (None, None))


def test_flex_attention_of_small_blocks_gets_tiles_of_their_size(monkeypatch):
    given = []

    def attend(q, k, v, *, block_mask, enable_gqa, kernel_options):
        given.append(kernel_options)
        return ours.attention(q, k, v, block_mask=BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool)))

    def flex(side, **more):
        blocks = torch.ones(256 // side, 256 // side, dtype=torch.bool)
        x = Attention(*(torch.randn(1, 256, 2, 32) for _ in range(3)), blocks=blocks, block_size=(side, side))
        return peers_attention.flex_attention(x, 1.0, **more).setup().note

    monkeypatch.setattr(peers_attention, "compiled", lambda key: attend)
    assert flex(128) == "" and given[-1] is None
    assert "BLOCK_M 64" in flex(64)
    assert given[-1] == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    flex(64, settings=3, measure=lambda calls, **_: {c: [i + 1.0] for i, c in enumerate(calls)})
    assert {options["num_stages"] for options in given if options} == {2, 3, 4}
