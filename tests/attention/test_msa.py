"""The interface of MiniMax's MSA kernels: its CSR matrix against loops, its attention against FP64, and transformers'
integration, which calls it (a stand-in loads the kernel, and takes CPU tensors for those of a GPU)."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from attention import selected_attention
from attention.integrations import msa
from attention.integrations.msa import build_k2q_csr, sparse_atten_func

from .parts import assert_right, nothing_waits, starts
from .parts import where_fixture as where_fixture
from .selected_parts import as_one_sequence, packed_call

QUERIES, KEYS = [40, 1, 0, 70], [300, 128, 9, 550]


def call_of(rows, columns, block_size=128, top=4, device="cpu", **more) -> tuple:
    """(q, k, v, q2k, lists (total_q, Hkv, top), lengths)"""
    call, cu = packed_call(rows, columns, block_size, top, more=(0, 0), device=device, **more)
    *qkv, indices, _ = call
    lengths = cu | {"max_seqlen_q": max(rows), "max_seqlen_k": max(columns)}
    return *qkv, indices.transpose(0, 1).contiguous(), indices, lengths


def csr_of(q2k, lengths, block_size=128, **more) -> tuple:
    total = int(lengths["cu_seqlens_k"][-1])
    cu = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
    return build_k2q_csr(q2k, *cu, block_size, total_k=total, max_seqlen_k=lengths["max_seqlen_k"], **more)


def loops(q2k, rows, columns, block_size) -> list:
    """Query tokens of each row, per head: block 0 of each sequence that has one, then block 1, and so on."""
    blocks = [-(-n // block_size) for n in columns]
    order = [(block, b) for block in range(max(blocks)) for b in range(len(rows)) if block < blocks[b]]
    first = starts(rows).tolist()
    return [
        [[t - first[b] for t in range(first[b], first[b + 1]) if block in head[t]] for block, b in order]
        for head in q2k.tolist()
    ]


@pytest.mark.parametrize(("block_size", "top"), [(128, 4), (64, 3), (16, 8)])
def test_csr(block_size, top):
    *_, q2k, _, lengths = call_of(QUERIES, KEYS, block_size, top)
    expected = loops(q2k, QUERIES, KEYS, block_size)
    for total_rows in (None, len(expected[0]), 60 + len(expected[0])):
        row_ptr, q_indices = csr_of(q2k, lengths, block_size, total_rows=total_rows)
        assert row_ptr.dtype == q_indices.dtype == torch.int32 and q_indices.shape == (2, q2k[0].numel())
        for head, (begins, tokens) in enumerate(zip(row_ptr.tolist(), q_indices.tolist(), strict=True)):
            found = [tokens[a:b] for a, b in zip(begins[:-1], begins[1:], strict=True)]
            assert found[: len(expected[0])] == expected[head] and not any(found[len(expected[0]) :])
            assert set(tokens[begins[-1] :]) <= {-1}


@pytest.mark.parametrize(("block_size", "top"), [(128, 4), (64, 3), (16, 8)])
def test_lists_come_back(block_size, top):
    """Ascending, without blocks that their sequences do not have."""
    *_, q2k, indices, lengths = call_of(QUERIES, KEYS, block_size, top)
    csr = csr_of(q2k, lengths, block_size)
    cu = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
    found = msa._lists_of(*csr, top, *cu, block_size, sum(QUERIES), max(KEYS))
    blocks = torch.tensor([-(-n // block_size) for n in KEYS]).repeat_interleave(torch.tensor(QUERIES))
    expected = indices.masked_fill((indices < 0) | (indices >= blocks[:, None, None]), 1000).sort().values
    assert torch.equal(found, expected.masked_fill(expected == 1000, -1))


@pytest.mark.parametrize("causal", [False, True])
def test_prefill(where, causal):
    q, k, v, q2k, indices, lengths = call_of(QUERIES, KEYS, device=where)
    options = {"causal": causal, "softmax_scale": 0.2, **lengths}
    out, lse = sparse_atten_func(q, k, v, *csr_of(q2k, lengths), 4, **options, return_softmax_lse=True)
    assert lse.shape == out.shape[:2] and lse.is_contiguous() and out.is_contiguous()
    cu = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
    *operands, seen = as_one_sequence(q, k, v, indices, 128, *cu, causal)
    mask = SimpleNamespace(to_dense=lambda *_: seen)
    assert_right(out.transpose(0, 1)[None], lse.T[None], *operands, block_mask=mask, scale=0.2)
    again = sparse_atten_func(q, k, v, *csr_of(q2k, lengths), 4, **options)
    assert torch.equal(again, out)


@pytest.mark.parametrize("queries", [1, 3])
def test_decode(where, queries, monkeypatch):
    """Equally many queries: the kernel of KV caches, also of a cache with room at its end."""
    calls = []

    def call(*args, **options):
        calls.append(options)
        return selected_attention(*args, **options)

    monkeypatch.setattr(msa, "selected_attention", call)
    q, k, v, q2k, indices, lengths = call_of([queries] * 2, [400] * 2, device=where)
    out, lse, same = sparse_atten_func(
        q, k, v, *csr_of(q2k, lengths), 4, **lengths, causal=True, return_softmax_lse=True, return_temperature_lse=True
    )
    cu = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
    *operands, seen = as_one_sequence(q, k, v, indices, 128, *cu, True)
    mask = SimpleNamespace(to_dense=lambda *_: seen)
    assert_right(out.transpose(0, 1)[None], lse.T[None], *operands, block_mask=mask)
    assert torch.equal(lse, same) and "seqused_k" in calls[-1] and "cu_seqlens_q" not in calls[-1]
    lengths |= {"cu_seqlens_q": starts([queries], where), "cu_seqlens_k": starts([300], where)}
    q, indices = q[:queries], indices[:queries].masked_fill(indices[:queries] > 2, -1)
    csr = csr_of(indices.transpose(0, 1).contiguous(), lengths)
    found = sparse_atten_func(q, k[:400], v[:400], *csr, 4, **lengths, causal=True)
    cu = {"cu_seqlens_q": lengths["cu_seqlens_q"], "cu_seqlens_k": lengths["cu_seqlens_k"]}
    expected = selected_attention(q, k[:400], v[:400], indices, 128, causal=True, **cu)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert "seqused_k" in calls[-1]


def test_decode_with_a_head_dimension_that_caches_lack(monkeypatch):
    """512 has no kernel of KV caches."""
    calls = []
    monkeypatch.setattr(msa, "selected_attention", lambda *args, **options: calls.append(options) or (args[0], args[0]))
    lengths = {"cu_seqlens_q": starts([1, 1]), "cu_seqlens_k": starts([200, 200])}
    lengths |= {"max_seqlen_q": 1, "max_seqlen_k": 200}
    for head_dim in (256, 512):
        q, k, v = torch.randn(2, 4, head_dim), *torch.randn(2, 400, 2, head_dim)
        csr = csr_of(torch.zeros(2, 2, 1, dtype=torch.int32), lengths)
        sparse_atten_func(q, k, v, *csr, 1, **lengths)
    assert "seqused_k" in calls[0] and "cu_seqlens_q" in calls[1]


def test_paged_cache():
    q, k, v, q2k, _, lengths = call_of([2, 2], [512, 384])
    expected = sparse_atten_func(q, k, v, *csr_of(q2k, lengths), 4, **lengths, causal=True)
    pages = [torch.stack([*t[:512].split(128), *t[512:].split(128)])[torch.randperm(7)] for t in (k, v)]
    where = torch.stack([(pages[0] == page).flatten(1).all(1) for page in [*k[:512].split(128), *k[512:].split(128)]])
    pages[1] = torch.stack([*v[:512].split(128), *v[512:].split(128)])[where.int().argmax(0)]
    table = where.int().argmax(1).int()
    table = torch.stack([table[:4], torch.cat([table[4:], table[:1]])])
    pages = [t.transpose(1, 2) for t in pages]
    for seqused_k in (None, torch.tensor([512, 384], dtype=torch.int32)):
        options = {"page_table": table, "seqused_k": seqused_k, "causal": True, **lengths}
        found = sparse_atten_func(q, *pages, *csr_of(q2k, lengths), 4, **options)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_gradients():
    q, k, v, q2k, indices, lengths = call_of([3, 3], [300, 300])
    csr, found = csr_of(q2k, lengths), []
    cu = {"cu_seqlens_q": lengths["cu_seqlens_q"], "cu_seqlens_k": lengths["cu_seqlens_k"]}
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    for out in (
        sparse_atten_func(*inputs, *csr, 4, **lengths, causal=True),
        selected_attention(*inputs, indices, 128, causal=True, **cu),
    ):
        found.append(torch.autograd.grad(out.square().sum(), inputs))
    torch.testing.assert_close(*found)


def test_nothing_is_selected():
    """No lists, no sequences, no tokens."""
    for rows, columns, top in (([3, 2], [300, 9], 0), ([], [], 4), ([0], [50], 4)):
        q, k, v = torch.randn(sum(rows), 4, 8), *torch.randn(2, sum(columns), 2, 8)
        lengths = {"cu_seqlens_q": starts(rows), "cu_seqlens_k": starts(columns)}
        lengths |= {"max_seqlen_q": max(rows, default=0), "max_seqlen_k": max(columns, default=0)}
        q2k = torch.full((2, len(q), top), -1, dtype=torch.int32)
        out = sparse_atten_func(q, k, v, *csr_of(q2k, lengths), top, **lengths)
        assert out.shape == q.shape and not out.count_nonzero()


def test_errors():
    q, k, v, q2k, _, lengths = call_of([3, 30], [300, 300])
    cu, csr = (lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]), csr_of(q2k, lengths)
    builds = [
        (lambda: build_k2q_csr(q2k, *cu, 32, total_k=600), ValueError, "block_size must be one of"),
        (lambda: build_k2q_csr(q2k, *cu, 128), ValueError, "total_k is required"),
        (lambda: build_k2q_csr(q2k, *cu, 128, total_k=600, return_schedule=True), ValueError, "return_schedule must"),
        (lambda: build_k2q_csr(q2k.long(), *cu, 128, total_k=600), TypeError, "q2k_indices must be an int32 tensor"),
        (lambda: build_k2q_csr(q2k, cu[0][1:], cu[1], 128, total_k=600), ValueError, r"shape \(sequences \+ 1,\)"),
    ]
    attends = [
        ({"schedule": csr}, ValueError, "schedule must be None"),
        ({"usable_SM_count": 8}, ValueError, "usable_SM_count must be -1"),
        ({"qk_dtype": torch.float16}, TypeError, "qk_dtype must be None or q's dtype"),
        ({"return_temperature_lse": True}, ValueError, "requires return_softmax_lse=True"),
        (
            {"return_temperature_lse": True, "return_softmax_lse": True, "lse_temperature_scale": 2.0},
            ValueError,
            "lse_temperature_scale must be 1.0",
        ),
        ({"page_table": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "k and v .* with page_table, got 3, 3"),
        ({"seqused_k": torch.ones(2, dtype=torch.int32)}, ValueError, "require each other and at most 16 queries"),
    ]
    for call, kind, message in builds:
        with pytest.raises(kind, match=message):
            call()
    for options, kind, message in attends:
        with pytest.raises(kind, match=message):
            sparse_atten_func(q, k, v, *csr, 4, **lengths, **options)
    with pytest.raises(ValueError, match="topK must be the length of the lists .*, got 3 for 132 entries of 33 query"):
        sparse_atten_func(q, k, v, *csr, 3, **lengths)
    with pytest.raises(ValueError, match="a row for each of the 2 heads of k"):
        sparse_atten_func(q, k, v, csr[0][:1], csr[1], 4, **lengths)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    q, k, v, q2k, _, lengths = call_of(QUERIES, KEYS, device="cuda")
    total, cu = len(k), (lengths["cu_seqlens_q"], lengths["cu_seqlens_k"])

    def call():
        csr = build_k2q_csr(q2k, *cu, 128, total_k=total, max_seqlen_k=lengths["max_seqlen_k"])
        return sparse_atten_func(q, k, v, *csr, 4, **lengths, causal=True)

    expected = call()
    with nothing_waits():
        found = call()
    assert torch.equal(found, expected)


def test_transformers_calls_it(monkeypatch):
    """MiniMax-M3 by transformers' integration of MSA, in prefill and decoding: equal to "eager"."""
    transformers = pytest.importorskip("transformers")
    integration = pytest.importorskip("transformers.integrations.msa_attention")
    minimax = pytest.importorskip("transformers.models.minimax_m3_vl")
    name = "msa_stand_in"
    transformers.AttentionInterface.register(name, integration.msa_attention_forward)
    transformers.AttentionMaskInterface.register(name, transformers.masking_utils.sdpa_mask)
    monkeypatch.setattr(integration, "_MSA_KERNEL", msa)
    monkeypatch.setattr(integration, "_validate_msa_init", lambda *_: None)  # it requires Blackwell
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    config = minimax.MiniMaxM3VLTextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, dense_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rotary_dim=16, max_position_embeddings=1024,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.5, mlp_layer_types=["dense", "dense"],
        index_head_dim=16, index_n_heads=2, index_topk_blocks=4, layer_types=["minimax_m3_sparse"] * 2,
    )  # fmt: skip
    torch.manual_seed(1)
    eager = transformers.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="eager").eval()
    tokens = torch.randint(3, 97, (2, 700))
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for implementation in ("eager", name):
        eager.set_attn_implementation(implementation)
        found.append(torch.stack(eager.generate(tokens, **options).logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=2e-3)
