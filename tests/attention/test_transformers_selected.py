"""transformers' models that select KV blocks with attn_implementation="cute_kernels" beside "eager", on the CPU."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")
minimax = pytest.importorskip("transformers.models.minimax_m3_vl")

from transformers import DynamicCache, StaticCache  # noqa: E402
from transformers.generation.configuration_utils import CompileConfig  # noqa: E402

from attention import patterns, selected_attention  # noqa: E402
from attention.distributed.plan import plans  # noqa: E402
from attention.integrations.transformers import register, selected, set_block_mask  # noqa: E402
from attention.integrations.transformers.attention_function import attend  # noqa: E402
from attention.integrations.transformers.distributed import PlannedMask  # noqa: E402
from attention.integrations.transformers.masks import make_mask  # noqa: E402

from . import transformers_zoo as zoo  # noqa: E402
from .selected_parts import lists, seen_of  # noqa: E402

register()
transformers.logging.set_verbosity_error()

CLOSE = {"rtol": 1e-3, "atol": 2e-4}  # of logits with a deviation of about 3, in float32
LENGTH, PADDING = 30, 11
MINIMAX = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, dense_intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, rotary_dim=8, max_position_embeddings=256, pad_token_id=0,
    bos_token_id=1, eos_token_id=None, initializer_range=0.5, mlp_layer_types=["dense", "dense"], index_head_dim=8,
    index_n_heads=2, index_block_size=4, index_topk_blocks=3,
)  # fmt: skip
SPARSE, FULL = "minimax_m3_sparse", "full_attention"
MODELS = {
    "a list per KV head": {"layer_types": [SPARSE, FULL]},
    "one list": {"layer_types": [SPARSE, FULL], "index_n_heads": 1, "index_block_size": 16, "index_topk_blocks": 1},
    "a list per head": {"layer_types": [SPARSE, SPARSE], "index_n_heads": 4},
    "blocks of 8": {"layer_types": [FULL, SPARSE], "index_block_size": 8, "index_topk_blocks": 2},
}
ONE = "one layer"
MODELS |= {ONE: {"layer_types": [SPARSE], "num_hidden_layers": 1, "mlp_layer_types": ["dense"]}}
models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster, for tensors this small
    yield
    torch.set_num_threads(threads)


@functools.cache
def pair(name):
    """(eager, ours), of the same weights."""
    config = minimax.MiniMaxM3VLTextConfig(**MINIMAX | MODELS[name])
    return pair_of(transformers.MiniMaxM3VLForCausalLM, config)


def pair_of(cls, config):
    torch.manual_seed(1)
    eager = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = cls._from_config(copy.deepcopy(config), attn_implementation="cute_kernels").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.fixture
def block_sizes(monkeypatch):
    """The block sizes and seqused_k of calls of selected_attention."""
    calls = []

    def call(q, k, v, indices, block_size, **options):
        calls.append((block_size, "seqused_k" in options))
        return selected_attention(q, k, v, indices, block_size, **options)

    monkeypatch.setattr(selected, "selected_attention", call)
    return calls


def tokens(batch=2, length=LENGTH, seed=2):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side, length=LENGTH):
    """(2, length); the first item has PADDING tokens of it."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, slice(0, PADDING) if side == "left" else slice(length - PADDING, length)] = 0
    return mask


def compare(eager, ours, inputs, real):
    """Logits and gradients, and logits without gradients, of the tokens that are True in `real`."""
    found = []
    for model in (eager, ours):
        out = model(**inputs).logits[real]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        model.zero_grad()
        (out * weight).sum().backward()
        found.append((out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits[real], out, **CLOSE)
    (expected, gradients), (out, others) = found
    assert expected.std() > 0.3
    torch.testing.assert_close(out, expected, **CLOSE)
    assert others.keys() == gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for key, gradient in gradients.items():
        scale = max(gradient.abs().max().item(), largest / 1000)
        torch.testing.assert_close(others[key] / scale, gradient / scale, rtol=0, atol=2e-3, msg=key)


def comparable_under_left_padding(name):
    """The indexer scores keys of padding, too. Their rows are 0 after the first layer, in "eager" a mean over all keys,
    so only the first layer selects the same."""
    return SPARSE not in MODELS[name]["layer_types"][1:]


SIDES = [(n, s) for n in MODELS for s in (None, "left", "right") if s != "left" or comparable_under_left_padding(n)]


@pytest.mark.parametrize(("name", "side"), SIDES)
@pytest.mark.parametrize("length", [12, LENGTH, 150])
def test_results_and_gradients(name, side, length):
    mask = None if side is None else padding(side, length)
    real = torch.ones(2, length, dtype=torch.bool) if mask is None else mask.bool()
    compare(*pair(name), {"input_ids": tokens(length=length), "attention_mask": mask}, real)


def test_padding_on_the_right_is_causal(block_sizes):
    """Rows of tokens do not see it, so tiles have all heads of a list."""
    _, ours = pair("a list per KV head")
    for side, calls in (("right", [(4, False)] * 2), ("left", [])):
        ours(tokens(), attention_mask=padding(side)).logits.sum().backward()
        with torch.no_grad():
            ours(tokens(), attention_mask=padding(side))
        assert block_sizes == calls, side
        block_sizes.clear()


def test_selection_matters():
    """The tests would see if the lists were ignored."""
    config = minimax.MiniMaxM3VLTextConfig(**MINIMAX | {"layer_types": [FULL, FULL]})
    dense = transformers.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="eager").eval()
    eager, _ = pair("a list per KV head")
    dense.load_state_dict(eager.state_dict(), strict=False)
    assert (dense(tokens()).logits - eager(tokens()).logits).abs().max() > 0.5


@models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens(name, cache):
    options = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    eager, ours = (model.generate(tokens(), **options) for model in pair(name))
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_under_left_padding(cache):
    """generate() counts positions from the first token, so the indexer gives the first tokens blocks of padding only.
    Their rows are 0 as well, and after the last layer nothing depends on them."""
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    options |= {"attention_mask": padding("left"), "return_dict_in_generate": True, "output_logits": True}
    eager, ours = (model.generate(tokens(), **options) for model in pair(ONE))
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), **CLOSE)


@models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_in_parts(name, cache):
    """With a token alone, with more tokens than the decode kernel supports, and with padding in the first part."""
    parts, inputs = (7, 1, 20, 5), tokens(length=33)
    for mask in (None, padding("left", 33))[: 1 + comparable_under_left_padding(name)]:
        found = []
        for model in pair(name):
            config = model.config
            past = DynamicCache(config=config) if cache == "dynamic" else StaticCache(config=config, max_cache_len=40)
            begin, out = 0, []
            for count in parts:
                end = begin + count
                seen = {"position_ids": torch.arange(begin, end)[None]}
                seen |= {} if mask is None else {"attention_mask": mask[:, :end]}
                with torch.no_grad():
                    out.append(model(inputs[:, begin:end], past_key_values=past, **seen).logits)
                begin = end
            out = torch.cat(out, 1)
            found.append(out if mask is None else out[mask.bool()])
        torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize("side", [None, "left"])
def test_static_cache_under_compile(side):
    """Decoding has no graph breaks, and one graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    if side:
        options["attention_mask"] = padding(side)
    eager, ours = pair(ONE)
    compiled = CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True
    expected = eager.generate(tokens(), **options)
    assert torch.equal(ours.generate(tokens(), compile_config=compiled, **options), expected)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("side", [None, "left"])
def test_training_under_compile(side):
    """The only graph break is the one where masks are made. Without a cache transformers assumes packed sequences."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _, ours = pair(ONE)
    inputs = {"input_ids": tokens(length=80), "use_cache": False}
    inputs["attention_mask"] = None if side is None else padding(side, 80)
    found = []
    for run in (ours, torch.compile(ours, backend="aot_eager")):
        ours.zero_grad()
        loss = run(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        found.append((loss.detach(), [p.grad for p in ours.parameters() if p.grad is not None]))
    torch.testing.assert_close(*found)
    assert all("make_mask" in reason for reason in torch._dynamo.utils.counters["graph_break"])
    torch._dynamo.reset()


# ------------------------------------------------------------------ Qwen4-Exp, whose mask has the selected keys

QWEN4 = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.5,
    num_experts=2, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=48,
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, hc_count=2,
    hc_lowrank=16, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
    indexer_compress_ratio=4, layer_types=["indexed_attention", "indexed_attention"],
)  # fmt: skip
RATIOS = {
    4: {},
    8: {"indexer_budget": 16, "indexer_compress_ratio": 8},
    3: {"indexer_budget": 9, "indexer_compress_ratio": 3},
}
RATIOS[3] |= {"layer_types": ["linear_attention", "indexed_attention"]}
SHORT = 22


@functools.cache
def qwen4(ratio):
    """(eager, ours) with blocks of `ratio` keys."""
    qwen4_exp = pytest.importorskip("transformers.models.qwen4_exp")
    config = qwen4_exp.Qwen4ExpTextConfig(**QWEN4 | RATIOS[ratio])
    return pair_of(transformers.Qwen4ExpForCausalLM, config)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_qwen4(ratio, side, block_sizes):
    """Blocks, whose keys after a token's position the mask hides; under left padding single keys."""
    mask = None if side is None else padding(side, SHORT)
    real = torch.ones(2, SHORT, dtype=torch.bool) if mask is None else mask.bool()
    compare(*qwen4(ratio), {"input_ids": tokens(length=SHORT), "attention_mask": mask}, real)
    assert set(block_sizes) == {(1 if side == "left" or ratio == 3 else 4, False)}


def test_qwen4_packed(block_sizes):
    """Positions that restart: blocks are counted from the first key of a sequence."""
    restarts = torch.cat([torch.arange(n) for n in (9, 1, 12)])[None].expand(2, -1)
    inputs = {"input_ids": tokens(length=SHORT), "position_ids": restarts, "use_cache": False}
    compare(*qwen4(4), inputs, torch.ones(2, SHORT, dtype=torch.bool))
    assert set(block_sizes) == {(1, False)}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_of_qwen4(ratio, side, cache, block_sizes):
    options = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": cache}
    options |= {"attention_mask": None if side is None else padding(side, SHORT)}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    eager, ours = (model.generate(tokens(length=SHORT), **options) for model in qwen4(ratio))
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), **CLOSE)
    assert block_sizes[-1] == (1 if side or ratio == 3 else 4, True)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_in_parts_of_qwen4(cache):
    found = []
    for model in qwen4(4):
        config = model.config
        past = DynamicCache(config=config) if cache == "dynamic" else StaticCache(config=config, max_cache_len=40)
        with torch.no_grad():
            parts = tokens(length=26).split([7, 1, 18], 1)
            found.append(torch.cat([model(part, past_key_values=past).logits for part in parts], 1))
    torch.testing.assert_close(*found, **CLOSE)


def test_qwen4_with_masks_of_the_user():
    """4-D masks, bool and added."""
    eager, ours = qwen4(3)
    seen = torch.ones(SHORT, SHORT, dtype=torch.bool).tril() & (torch.rand(2, 1, SHORT, SHORT) < 0.7)
    seen |= torch.eye(SHORT, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    expected = eager(tokens(length=SHORT), attention_mask=added).logits
    for mask in (seen, added):
        torch.testing.assert_close(ours(tokens(length=SHORT), attention_mask=mask).logits, expected, **CLOSE)


def test_block_masks_of_qwen4_are_refused():
    ours = copy.deepcopy(qwen4(3)[1])
    set_block_mask(ours, lambda lengths, device: patterns.sliding_window(lengths, (5, 0), device=device))
    with pytest.raises(ValueError, match=r"set_block_mask\) is not supported in layers that select KV blocks"):
        ours(tokens(length=SHORT))


@pytest.mark.parametrize("most", [1, 3, 5, 40])
def test_true_columns(most, monkeypatch):
    """Also in parts of the rows. Tensors have no more than `most` columns that are True."""
    monkeypatch.setattr(selected, "CHUNK", 2 * 8 * 2 * 29)
    seen = torch.rand(2, 1, 7, 29).argsort(-1) < min(most, 29)
    seen[0, 0, 3, 5:] = False
    found = selected.true_columns(seen, most)
    assert found.shape == (2, 7, 1, most) and found.dtype == torch.int32
    for row, columns in zip(found.flatten(0, 2), seen.flatten(0, 2), strict=True):
        expected = columns.nonzero().flatten().tolist()
        assert row.tolist() == expected + [-1] * (most - len(expected))


# ------------------------------------------------------------------ DeepSeek-V3.2, which passes indices of keys


@functools.cache
def deepseek():
    """(eager, ours)"""
    cls = pytest.importorskip("transformers.models.deepseek_v32").DeepseekV32ForCausalLM
    config = zoo.tiny_config(cls.config_class)
    config.eos_token_id = None
    return zoo.build(cls, config, "eager"), zoo.build(cls, config, "cute_kernels")


@pytest.mark.parametrize("form", [None, "left", "right", "packed"])
@pytest.mark.parametrize("length", [LENGTH, 80])
def test_deepseek(form, length):
    inputs, real = {"input_ids": tokens(length=length)}, torch.ones(2, length, dtype=torch.bool)
    if form == "packed":
        restarts = torch.cat([torch.arange(n) for n in (9, 1, length - 10)])[None].expand(2, -1)
        inputs |= {"position_ids": restarts, "use_cache": False}
    elif form is not None:
        inputs["attention_mask"] = padding(form, length)
        real = inputs["attention_mask"].bool()
    compare(*deepseek(), inputs, real)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_of_deepseek(side, cache, block_sizes):
    options = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": cache}
    options |= {"attention_mask": None if side is None else padding(side)}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    eager, ours = (model.generate(tokens(), **options) for model in deepseek())
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), **CLOSE)
    assert block_sizes[-1] == (1, True)


# ------------------------------------------------------------------ the attention function


def layer(block_size=4):
    return SimpleNamespace(is_causal=True, training=False, indexer=SimpleNamespace(block_size=block_size))


def operands(rows, columns, **options):
    shapes = ((4, rows), (2, columns), (2, columns))
    return tuple(torch.randn(2, heads, length, 16, dtype=torch.float64, **options) for heads, length in shapes)


def expected_of(q, k, v, indices, block_size, seen):
    """`seen` (B or 1, H or 1, Sq, Sk); rows without a key are 0."""
    seen = seen & seen_of(indices.transpose(1, 2), block_size, q.shape[1], k.shape[2], False)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return out.nan_to_num(0).transpose(1, 2)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_masks_that_the_user_made(groups, gradients):
    q, k, v = operands(9, 30, requires_grad=gradients)
    indices = lists(2, groups, 9, top=3, blocks=8)
    for shape in ((2, 1, 9, 30), (1, 4, 9, 35), (2, 4, 1, 30)):
        seen = torch.rand(shape) < 0.7
        found, _ = attend(layer(), q, k, v, seen, block_indices=indices)
        torch.testing.assert_close(found, expected_of(q, k, v, indices, 4, seen[..., :30]))
    with pytest.raises(ValueError, match=r"must broadcast to .* = \(2, 4, 9, 30\), got shape \(2, 1, 9, 29\)"):
        attend(layer(), q, k, v, torch.ones(2, 1, 9, 29, dtype=torch.bool), block_indices=indices)


@pytest.mark.parametrize("block_size", [1, 4, 6, 32, 64, 128, 192, 256])
def test_block_sizes(block_size):
    """Blocks of other sizes become several blocks."""
    q, k, v = operands(3, 300)
    indices = lists(2, 2, 3, top=2, blocks=-(-300 // block_size))
    causal = torch.ones(3, 300, dtype=torch.bool).tril(297)[None, None]
    for rows_need_gradients in (False, True):
        q.requires_grad_(rows_need_gradients)
        found, _ = attend(layer(block_size), q, k, v, make_mask(2, 3, 300, 297), block_indices=indices)
        torch.testing.assert_close(found, expected_of(q, k, v, indices, block_size, causal))


def test_lists_of_a_number_that_is_none_of_the_heads():
    q = torch.randn(2, 8, 5, 16, dtype=torch.float64)
    k, v = (torch.randn(2, 4, 20, 16, dtype=torch.float64) for _ in range(2))
    indices = lists(2, 2, 5, top=2, blocks=5)
    causal = torch.ones(5, 20, dtype=torch.bool).tril(15)[None, None]
    found, _ = attend(layer(), q, k, v, make_mask(2, 5, 20, 15), block_indices=indices)
    torch.testing.assert_close(found, expected_of(q, k, v, indices, 4, causal))


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
def test_on_gpus(gradients):
    """MiniMax-M3's calls in training and prefill, decoding, a static cache, and all of them under left padding."""
    for rows, columns, shift in ((300, 300, 0), (1, 300, 299), (20, 512, torch.tensor(280, device="cuda"))):
        padding = torch.ones(2, columns, dtype=torch.bool, device="cuda")
        padding[0, :140] = False
        heads = ((8, rows), (2, columns), (2, columns))
        q, k, v = (torch.randn(2, h, n, 128, device="cuda", dtype=torch.bfloat16) for h, n in heads)
        indices = lists(2, 2, rows, top=3, blocks=3, device="cuda")
        for tokens_of in (None, padding):
            mask = make_mask(2, rows, columns, shift, attention_mask=tokens_of, device="cuda")
            inputs = [t.clone().requires_grad_(gradients) for t in (q, k, v)]
            exact = [t.detach().double().requires_grad_(gradients) for t in (q, k, v)]
            found, _ = attend(layer(128), *inputs, mask, block_indices=indices)
            expected = expected_of(*exact, indices, 128, mask.dense())
            torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)
            if gradients:
                weight = torch.randn_like(found)
                grads = torch.autograd.grad(found, inputs, weight)
                for ours, other in zip(grads, torch.autograd.grad(expected, exact, weight.double()), strict=True):
                    torch.testing.assert_close(ours.double(), other, rtol=0.05, atol=0.05)


def test_without_a_mask():
    q, k, v = operands(20, 20)
    indices = lists(2, 2, 20, top=2, blocks=5)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    found, _ = attend(layer(), q, k, v, None, block_indices=indices)
    torch.testing.assert_close(found, expected_of(q, k, v, indices, 4, causal))
    with pytest.raises(ValueError, match="requires a mask if queries and keys differ in length, got 19 and 20"):
        attend(layer(), q[:, :, 1:], k, v, None, block_indices=indices[:, :, 1:])


def test_packed_sequences_are_refused():
    """The indexer counts blocks from the first key of the batch index."""
    _, ours = pair("a list per KV head")
    restarts = torch.cat([torch.arange(n) for n in (12, 18)])[None].expand(2, -1)
    cu = torch.tensor([0, 30, 60])
    for inputs in (
        {"position_ids": restarts, "use_cache": False},
        {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 30, "max_length_k": 30},
    ):
        with pytest.raises(ValueError, match="packed sequences .* are not supported.*one sequence per batch index"):
            ours(tokens(), **inputs)


def test_errors():
    q, k, v = operands(12, 12)
    mask, indices = make_mask(2, 12, 12), lists(2, 2, 12, top=2, blocks=3)
    options = {"block_indices": indices}
    for block_size in (None, 0, 4.0):
        with pytest.raises(ValueError, match=f"require indexer.block_size of the layer, .* got {block_size}"):
            attend(layer(block_size), q, k, v, mask, **options)
    with pytest.raises(ValueError, match="indexer.block_size of the layer"):
        attend(SimpleNamespace(is_causal=True), q, k, v, mask, **options)
    with pytest.raises(ValueError, match=r"a number of lists that divides the 4 heads, got \(2, 3, 12, 2\)"):
        attend(layer(), q, k, v, mask, block_indices=lists(2, 3, 12, top=2, blocks=3))
    with pytest.raises(ValueError, match=r"a number of lists that divides the 4 heads, got \(2, 0, 12, 2\)"):
        attend(layer(), q, k, v, mask, block_indices=indices[:, :0])
    with pytest.raises(TypeError, match="block_indices must be int32 or int64, got torch.float32"):
        attend(layer(), q, k, v, mask, block_indices=indices.float())
    with pytest.raises(ValueError, match=r"lengths \(12, 12\) of the layer.* got 2, \(12, 13\) and 0 dropped keys"):
        attend(layer(), q, k, v, make_mask(2, 12, 13), **options)
    with pytest.raises(ValueError, match="and 3 dropped keys"):
        attend(layer(), q, k, v, make_mask(2, 12, 12, 3, 3), **options)
    with pytest.raises(TypeError, match="attention_mask must be bool, .* got torch.int64"):
        attend(layer(), q, k, v, torch.ones(2, 1, 12, 12, dtype=torch.long), **options)
    with pytest.raises(TypeError, match="attention_mask must be bool, .* got BlockMask"):
        flex = patterns.sliding_window((12, 12), (5, 0)).to_flex()
        attend(layer(), q, k, v, flex, **options)
    for added in ({"attention_mask": torch.zeros(2, 1, 12, 12)}, {"position_bias": torch.zeros(1, 4, 12, 12)}):
        with pytest.raises(ValueError, match="a score_mod, position_bias or float attention_mask is not supported"):
            attend(layer(), q, k, v, **{"attention_mask": mask} | added, **options)


def test_indices_of_keys_that_are_refused():
    q, k, v = operands(12, 12)
    indices, cu = torch.zeros(2, 12, 3, dtype=torch.int64), torch.tensor([0, 12, 24])
    with pytest.raises(ValueError, match="cu_seq_lens are not supported in layers that select keys"):
        attend(layer(), q, k, v, None, indices=indices, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    with pytest.raises(ValueError, match=r"indices must have shape \(batch, queries, top\), got \(2, 11, 3\)"):
        attend(layer(), q, k, v, None, indices=indices[:, 1:])
    with pytest.raises(TypeError, match="indices must be int32 or int64, got torch.float64"):
        attend(layer(), q, k, v, None, indices=indices.double())


def test_context_parallelism_is_refused():
    q, k, v = operands(12, 12)
    planned = PlannedMask(plans(patterns.causal((12, 12)), 1)[0], 2, {}, causal=True)
    with pytest.raises(ValueError, match="context_parallel is not supported in layers that select KV blocks"):
        attend(layer(), q, k, v, planned, block_indices=lists(2, 2, 12, top=2, blocks=3))


def test_block_masks_are_refused():
    ours = copy.deepcopy(pair("a list per KV head")[1])
    set_block_mask(ours, lambda lengths, device: patterns.sliding_window(lengths, (5, 0), device=device))
    with pytest.raises(
        ValueError, match=r"is not supported in layers that select.* call set_block_mask\(model, None\)"
    ):
        ours(tokens())
    set_block_mask(ours, None, layers=[0])
    ours(tokens())
