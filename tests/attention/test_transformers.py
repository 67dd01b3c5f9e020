"""transformers' models with attn_implementation="cute_kernels" beside "eager": random tiny ones, on the CPU."""

import copy
import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache  # noqa: E402
from transformers.generation.configuration_utils import CompileConfig  # noqa: E402

from attention import patterns  # noqa: E402
from attention.integrations.transformers import register, set_block_mask  # noqa: E402

register()
transformers.logging.set_verbosity_error()

CLOSE = {"rtol": 1e-3, "atol": 2e-4}  # of logits with a deviation of about 3, in float32
LENGTH, PADDING, WINDOW = 30, 11, 9
TEXT = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    initializer_range=0.5, tie_word_embeddings=False,
)  # fmt: skip
BOTH = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**TEXT, **BOTH, "query_pre_attn_scalar": 4}
GPT_OSS = {**TEXT, **BOTH, "num_local_experts": 2, "num_experts_per_tok": 1}
LLAMA4 = TEXT | {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW}
LLAMA4 |= {
    "no_rope_layers": [1, 0],
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 2,
}
DECODERS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, **BOTH, "use_sliding_window": True}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**TEXT, "sliding_window": WINDOW}),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "GptOss": ("GptOssForCausalLM", "GptOssConfig", GPT_OSS),  # its sinks
    "Llama4": ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),  # its chunks are traced
}
ENCODER = {key: TEXT[key] for key in TEXT if key not in ("num_key_value_heads", "head_dim")}
ENCODERS = {
    "Bert": ("BertModel", "BertConfig", {**ENCODER, "num_hidden_layers": 2}),
    "ModernBert": (
        "ModernBertModel",
        "ModernBertConfig",
        {**ENCODER, "local_attention": 8, "layer_types": BOTH["layer_types"], "initializer_cutoff_factor": 4.0}
        | dict.fromkeys(("cls_token_id", "sep_token_id"), 1),
    ),
}
MODELS = DECODERS | ENCODERS
decoders = pytest.mark.parametrize("name", DECODERS)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster, for tensors this small
    yield
    torch.set_num_threads(threads)


@functools.cache
def pair(name):
    """(eager, ours), of the same weights."""
    kind, config, terms = MODELS[name]
    cls, config = getattr(transformers, kind), getattr(transformers, config)(**terms)
    torch.manual_seed(1)
    eager = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = cls._from_config(copy.deepcopy(config), attn_implementation="cute_kernels").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def tokens(batch=2, length=LENGTH, seed=2):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side):
    """(2, LENGTH); the first item has PADDING tokens of it."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, slice(0, PADDING) if side == "left" else slice(LENGTH - PADDING, LENGTH)] = 0
    return mask


def result(model, **inputs):
    out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


FORMS = {
    "plain": {},
    "all tokens": {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
    "left": {"attention_mask": padding("left")},
    "right": {"attention_mask": padding("right")},
}
RESTARTS = torch.cat([torch.arange(n) for n in (12, 1, LENGTH - 13)])[None].expand(2, -1)
PACKED = {"packed": {"position_ids": RESTARTS, "use_cache": False}}


@pytest.mark.parametrize(
    ("name", "form"), [(n, f) for n in MODELS for f in (FORMS if n in ENCODERS else FORMS | PACKED)]
)
def test_results_and_gradients(name, form):
    inputs = {"input_ids": tokens(), **(FORMS | PACKED)[form]}
    real = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    found = []
    for model in pair(name):
        out = result(model, **inputs)[real]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        model.zero_grad()
        (out * weight).sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((out, gradients))
        with torch.no_grad():
            torch.testing.assert_close(result(model, **inputs)[real], out, **CLOSE)
    (eager, expected), (ours, gradients) = found
    assert eager.std() > 0.3
    torch.testing.assert_close(ours, eager, **CLOSE)
    assert gradients.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for key, gradient in expected.items():
        scale = max(gradient.abs().max().item(), largest / 1000)  # that of a key's bias is 0 but for rounding
        torch.testing.assert_close(gradients[key] / scale, gradient / scale, rtol=0, atol=2e-3, msg=key)


@decoders
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_64_greedy_tokens(name, side, cache):
    options = {"max_new_tokens": 64, "do_sample": False, "cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if side:
        options["attention_mask"] = padding(side)
    eager, ours = (model.generate(tokens(), **options) for model in pair(name))
    assert torch.equal(ours.sequences, eager.sequences)
    assert len(set(eager.sequences[:, LENGTH:].flatten().tolist())) > 8
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), **CLOSE)


@decoders
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_in_parts(name, cache):
    """And a token alone, and with padding in the first part."""
    parts, inputs = (7, 1, 5, 16, 1), tokens()
    for mask in (None, padding("left")):
        found = []
        for model in pair(name):
            config = model.config
            past = DynamicCache(config=config) if cache == "dynamic" else StaticCache(config=config, max_cache_len=40)
            begin, out = 0, []
            for count in parts:
                end = begin + count
                seen = {} if mask is None else {"attention_mask": mask[:, :end]}
                with torch.no_grad():
                    out.append(model(inputs[:, begin:end], past_key_values=past, **seen).logits)
                begin = end
            out = torch.cat(out, 1)
            found.append(out if mask is None else out[mask.bool()])
        torch.testing.assert_close(*found, **CLOSE)


@decoders
def test_sequences_packed_by_lengths(name):
    """As flash attention's arguments: cu_seq_lens of the flattened batch. Not with masks that are traced."""
    cu = torch.tensor([0, 12, 13, LENGTH, LENGTH + 12, LENGTH + 13, 2 * LENGTH])
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 17, "max_length_k": 17}
    eager, ours = pair(name)
    expected = result(eager, input_ids=tokens(), **PACKED["packed"])
    inputs = {"input_ids": tokens(), **PACKED["packed"], **lengths}
    if name not in ("Llama4", "GptOss"):  # gpt-oss's own mask takes no note of positions that begin again
        torch.testing.assert_close(result(ours, **inputs), expected, **CLOSE)
    with pytest.raises(ValueError, match="attention_mask must be a causal mask or a window without padding, or None"):
        ours(tokens(), attention_mask=padding("left"), **lengths)


@pytest.mark.parametrize("side", [None, "right"])
def test_cross_attention(side):
    """For an encoder and a decoder: 20 tokens."""
    both = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    sides = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in both.items()}
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, **sides, init_std=0.3, max_position_embeddings=128, forced_eos_token_id=None,
        eos_token_id=2, pad_token_id=0, bos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    kind = transformers.BartForConditionalGeneration
    torch.manual_seed(1)
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind._from_config(config, attn_implementation="cute_kernels").eval()
    ours.load_state_dict(eager.state_dict())
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options["attention_mask"] = None if side is None else padding(side)
    expected, found = (model.generate(tokens(), **options) for model in (eager, ours))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **CLOSE)


def test_autocast():
    """As it is used in training: weights in float32, products in bfloat16."""
    eager, ours = pair("Qwen3")
    expected = eager(tokens(), attention_mask=padding("left")).logits[padding("left").bool()]
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(tokens(), attention_mask=padding("left")).logits[padding("left").bool()]
    out.float().sum().backward()
    assert (out - expected).abs().mean() < 0.1 * expected.std()


def test_inference_mode():
    eager, ours = pair("Gemma2")
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
        options["attention_mask"] = padding("left")
        expected = eager.generate(tokens(), **options)
        with torch.inference_mode():
            assert torch.equal(ours.generate(tokens(), **options), expected)


def test_from_pretrained(tmp_path):
    eager, _ = pair("Llama")
    eager.save_pretrained(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="cute_kernels")
    assert ours.config._attn_implementation == "cute_kernels"
    torch.testing.assert_close(ours(tokens()).logits, eager(tokens()).logits, **CLOSE)
    ours.set_attn_implementation("sdpa")
    ours.set_attn_implementation("cute_kernels")
    register("another_name")
    ours.set_attn_implementation("another_name")
    torch.testing.assert_close(ours(tokens()).logits, eager(tokens()).logits, **CLOSE)


@pytest.mark.parametrize("name", ["my_flash", "sdpa2", "a/b", "paged|x", ""])
def test_names_that_transformers_treats_in_its_own_way(name):
    with pytest.raises(ValueError, match=r"name must not .* got .*; use .cute_kernels"):
        register(name)


@pytest.mark.parametrize("side", [None, "left"])
def test_static_cache_under_compile(side):
    """generate() compiles decoding: no graph breaks, and no graph but transformers' own two of a sliding cache."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    if side:
        options["attention_mask"] = padding(side)
    eager, ours = pair("Gemma2")
    compiled = CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True
    expected = eager.generate(tokens(), **options)
    assert torch.equal(ours.generate(tokens(), compile_config=compiled, **options), expected)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


# ------------------------------------------------------------------ a block mask of the user's


def window(lengths, device):
    return patterns.sliding_window(lengths, (5, 0), global_columns=3, device=device)


def four_dimensional(model, blocks, mask=None):
    """The additive mask of "eager" that is causal and says what the block mask says."""
    seen = blocks.to_dense() & torch.ones(blocks.lengths, dtype=torch.bool).tril(blocks.lengths[1] - blocks.lengths[0])
    seen = seen.expand(2, -1, -1, -1)
    if mask is not None:
        seen = seen & mask[:, None, None].bool()
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


@pytest.fixture
def masked():
    """Our Llama, with the window on all layers."""
    _, ours = pair("Llama")
    ours = copy.deepcopy(ours)
    set_block_mask(ours, window)
    return ours


@pytest.mark.parametrize("length", [LENGTH, 150])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_block_mask(masked, side, length):
    eager, ours = pair("Llama")
    inputs, mask = tokens(length=length), None
    if side:
        mask = torch.nn.functional.pad(padding(side), (length - LENGTH, 0), value=0 if side == "left" else 1)
        mask[1] = 1
    blocks = window((length, length), "cpu")
    real = torch.ones(2, length, dtype=torch.bool) if mask is None else mask.bool()
    positions = torch.arange(length)[None]
    expected = eager(inputs, attention_mask=four_dimensional(eager, blocks, mask), position_ids=positions).logits[real]
    found = masked(inputs, attention_mask=mask, position_ids=positions).logits[real]
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (ours(inputs, attention_mask=mask, position_ids=positions).logits[real] - expected).abs().max() > 0.1


@pytest.mark.parametrize("side", [None, "left"])
def test_block_mask_in_generation(masked, side):
    eager, _ = pair("Llama")
    mask = None if side is None else padding(side)
    found = masked.generate(tokens(), max_new_tokens=10, do_sample=False, attention_mask=mask)
    ids = tokens()
    seen = torch.ones_like(ids) if mask is None else mask
    for _ in range(10):  # without a cache
        blocks = window((ids.shape[1],) * 2, "cpu")
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        logits = eager(ids, attention_mask=four_dimensional(eager, blocks, seen), position_ids=positions).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
    assert torch.equal(found, ids)


def test_block_mask_of_some_layers(masked):
    _, ours = pair("Llama")
    every, none = masked(tokens()).logits, ours(tokens()).logits
    model = copy.deepcopy(ours)
    set_block_mask(model, window, layers=[1])
    some = model(tokens()).logits
    assert (some - every).abs().max() > 0.1 and (some - none).abs().max() > 0.1
    set_block_mask(model, window, layers=[0])
    torch.testing.assert_close(model(tokens()).logits, every)
    set_block_mask(model, None)
    torch.testing.assert_close(model(tokens()).logits, none)
    set_block_mask(model, window((LENGTH, LENGTH), "cpu"))
    torch.testing.assert_close(model(tokens()).logits, every)
    set_block_mask(model, window((LENGTH, LENGTH), "cpu").to_flex())
    torch.testing.assert_close(model(tokens()).logits, every)
    set_block_mask(model, lambda lengths, device: window(lengths, device).to_flex())
    torch.testing.assert_close(model(tokens()).logits, every)


def test_block_mask_in_a_static_cache(masked):
    """In prefill, where the host knows how full it is."""
    past = StaticCache(config=masked.config, max_cache_len=40)
    out = masked(tokens(), past_key_values=past).logits
    torch.testing.assert_close(out, masked(tokens()).logits, **CLOSE)
    with pytest.raises(ValueError, match="a static cache keeps it on the device; generate with a dynamic cache"):
        masked(tokens(length=1), past_key_values=past)


def test_block_mask_errors(masked):
    with pytest.raises(TypeError, match="mask must be a BlockMask, a function"):
        set_block_mask(masked, torch.ones(1, 1).bool())
    with pytest.raises(ValueError, match=r"layers must be layer_idx of the model.s layers, got \[7\]"):
        set_block_mask(masked, window, layers=[1, 7])
    set_block_mask(masked, window((64, 64), "cpu"))
    with pytest.raises(ValueError, match=r"lengths of this call, \(30, 30\), got \(64, 64\); for calls of several"):
        masked(tokens())
    set_block_mask(masked, lambda lengths, device: None)
    with pytest.raises(TypeError, match="must return a BlockMask, got NoneType"):
        masked(tokens())
    set_block_mask(masked, window)
    with pytest.raises(ValueError, match="is not supported with cu_seq_lens"):
        masked(tokens(), cu_seq_lens_q=torch.tensor([0, 60]), cu_seq_lens_k=torch.tensor([0, 60]))
    with pytest.raises(ValueError, match="requires the model's own mask"):
        masked(tokens(), attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    sliding = copy.deepcopy(pair("Mistral")[1])
    set_block_mask(sliding, window)
    with pytest.raises(ValueError, match="requires a cache of the whole sequence, got one of a sliding window"):
        sliding.generate(tokens(), max_new_tokens=3)


# ------------------------------------------------------------------ masks as tensors, and what is refused


def test_masks_that_the_user_made():
    eager, ours = pair("Llama")
    blocks = window((LENGTH, LENGTH), "cpu")
    seen = blocks.to_dense() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = eager(tokens(), attention_mask=four_dimensional(eager, blocks)).logits
    torch.testing.assert_close(ours(tokens(), attention_mask=seen.expand(2, 1, -1, -1)).logits, expected, **CLOSE)
    flex = blocks.with_causal().to_flex()
    torch.testing.assert_close(ours(tokens(), attention_mask=flex).logits, expected, **CLOSE)
    added = four_dimensional(eager, blocks)
    torch.testing.assert_close(ours(tokens(), attention_mask=added).logits, expected, **CLOSE)
    with pytest.raises(TypeError, match="attention_mask must be bool, .* got torch.int64"):
        ours(tokens(), attention_mask=seen.long())


def small(kind, config, **terms):
    config = getattr(transformers, config)(**terms)
    return getattr(transformers, kind)._from_config(config, attn_implementation="cute_kernels").eval()


def test_position_biases():
    """T5's, with the gradients of their tables: in encoder, decoder and cross-attention, under padding."""
    terms = dict(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=1)
    ours = small("T5ForConditionalGeneration", "T5Config", **terms, dropout_rate=0.0)
    eager = copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    inputs = {"input_ids": tokens(), "labels": tokens(length=12), "attention_mask": padding("right")}
    results = []
    for model in (ours, eager):
        found = model(**inputs)
        found.loss.backward()
        tables = [p.grad for name, p in model.named_parameters() if "relative_attention_bias" in name]
        results.append((found.logits, *tables))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    for terms in ({}, {"cache_implementation": "static"}):
        options = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False, **terms}
        assert torch.equal(*(model.generate(tokens(), **options) for model in (ours, eager)))


def test_dropout_is_refused_in_training():
    terms = {**TEXT, "attention_dropout": 0.1}
    model = small("LlamaForCausalLM", "LlamaConfig", **terms)
    model(tokens())
    with pytest.raises(ValueError, match="dropout of attention weights must be 0, got 0.1. .*model.eval()"):
        model.train()(tokens())


def test_attention_weights_are_refused():
    with pytest.raises(ValueError, match="no attention weights are stored"):
        pair("Llama")[1](tokens(), output_attentions=True)
    with pytest.raises(ValueError, match="no attention weights are stored"):
        pair("Bert")[1](tokens(), output_attentions=True)
    model = small("LlamaForCausalLM", "LlamaConfig", **TEXT)
    model.config._output_attentions = True  # the setter of transformers asks for "eager"
    with pytest.raises(ValueError, match="no attention weights are stored"):
        model(tokens())
