"""Checks of transformers' models whose sequence several processes share, in several processes at once
(tests/ranks.py)."""

import warnings

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from attention import create_block_mask, score_mods
from attention.distributed import plan_context_parallel
from attention.integrations.transformers import context_parallel, register, set_block_mask
from attention.integrations.transformers.attention_function import attend

LENGTH, WINDOW = 600, 150  # 5 tiles, the last one ragged
TEXT = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
    eos_token_id=None, initializer_range=0.2, tie_word_embeddings=False, attn_implementation="cute_kernels",
)  # fmt: skip
BOTH = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def model_of(device, name="Llama", **more):
    register()
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}{'Text' * (name == 'Gemma3')}Config")(**TEXT | more)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.to(device, dtype_of(device))


def dtype_of(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def mesh_of(device):
    return init_device_mesh(device.type, (dist.get_world_size(),))


def batch(device):
    """(ids, labels), the labels shifted."""
    torch.manual_seed(2)
    ids = torch.randint(3, 97, (2, LENGTH), device="cpu").to(device)
    return ids, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)


def loss_of(logits, labels):
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / (2 * (LENGTH - 1))


def alone(model, device, **inputs):
    """The loss of one process; gradients are in the parameters."""
    ids, labels = batch(device)
    loss = loss_of(model(input_ids=ids, use_cache=False, **inputs).logits, labels)
    model.zero_grad()
    loss.backward()
    return loss.detach()


def shared(model, plans, device, run=None, **inputs):
    """The same of all processes."""
    plan = plans if not isinstance(plans, dict) else plans[None]
    ids, labels = batch(device)
    model.zero_grad()
    with context_parallel(plans):
        inputs = {"position_ids": plan.positions[None]} | inputs
        logits = (model if run is None else run)(input_ids=plan.shard(ids, 1), use_cache=False, **inputs).logits
    loss = loss_of(logits, plan.shard(labels, 1, value=-100))
    loss.backward()
    found = loss.detach()
    for t in (found, *(p.grad for p in model.parameters())):
        dist.all_reduce(t)
    return found


def compare(model, plans, device, run=None, **inputs):
    """Loss and gradients are those of one process. inputs: those of the whole sequence."""
    wanted = alone(model, device, **inputs)
    gradients = [p.grad.double() for p in model.parameters()]
    plan = plans if not isinstance(plans, dict) else plans[None]
    found = shared(model, plans, device, run, **{name: plan.shard(t, 1) for name, t in inputs.items()})
    bound = 0.1 if device.type == "cuda" else 1e-4  # gradients of two BF16 models differ by up to 0.06
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
        error = (p.grad.double() - gradient).norm() / gradient.norm()
        assert error < bound, f"{name}: {error:.2e}"


def llama(device):
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    compare(model_of(device), plan, device)


def later_tokens(device):
    """A causal model warns, once, if its plan lets tokens see later ones."""
    mesh, (ids, _), model = mesh_of(device), batch(device), model_of(device)
    cu = torch.tensor([0, 300, LENGTH], dtype=torch.int32, device=device)
    prefix = create_block_mask(lambda b, h, q, kv: (q >= kv) | (kv < 100), 1, 1, LENGTH, LENGTH, device=device)
    length = {"length": LENGTH}
    for terms, times in (
        (length, 1), (length | {"window_size": (200, 200)}, 1), ({"mask": prefix}, 1),
        (length | {"causal": True, "cu_seqlens": cu}, 0), (length | {"causal": True}, 0),
    ):  # fmt: skip
        plan = plan_context_parallel(mesh=mesh, **terms)
        with warnings.catch_warnings(record=True) as caught, context_parallel(plan):
            warnings.simplefilter("always")
            for _ in range(2):
                model(input_ids=plan.shard(ids, 1), position_ids=plan.positions[None], use_cache=False)
        found = sum("the model is causal" in str(warning.message) for warning in caught)
        assert found == times or (found == 0 and (plan.size == 1 or plan.rank > 0))  # the last tokens see no later ones


def packed(device):
    """Packed sequences, whose positions restart."""
    cu = torch.tensor([0, 70, 300, 301, LENGTH], dtype=torch.int32, device=device)
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True, cu_seqlens=cu)
    position_ids = torch.cat([torch.arange(n, device=device) for n in cu.diff().tolist()])[None]
    compare(model_of(device), plan, device, position_ids=position_ids)


def windows(device):
    """Layers of two kinds, of one kind, and with sinks."""
    mesh = mesh_of(device)
    plan = plan_context_parallel(mesh=mesh, length=LENGTH, causal=True, deal="balanced")
    window = plan_context_parallel(mesh=mesh, length=LENGTH, causal=True, window_size=(WINDOW - 1, 0), deal=plan)
    compare(model_of(device, "Gemma3", **BOTH), {None: plan, WINDOW: window}, device)
    compare(model_of(device, "Mistral", sliding_window=WINDOW), {None: plan, WINDOW: window}, device)
    compare(model_of(device, "Mistral", sliding_window=LENGTH), plan, device)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4}  # all: none is another one in BF16
    model = model_of(device, "GptOss", **BOTH, **experts)
    compare(model, {None: plan, WINDOW: window}, device)
    calls = []

    def plan_of(size):
        calls.append(size)
        return plan if size is None else window

    with context_parallel(plan_of):
        for _ in range(2):
            model(input_ids=plan.shard(batch(device)[0], 1), position_ids=plan.positions[None])
    assert sorted(calls, key=str) == [WINDOW, None]


def score_functions(device):
    """A score_mod that layers pass on gets positions in the whole sequence."""
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    model, (ids, _) = model_of(device), batch(device)
    options = {"score_mod": score_mods.Alibi(score_mods.alibi_slopes(4, device)), "use_cache": False}
    with torch.no_grad():
        wanted = plan.shard(model(input_ids=ids, **options).logits, 1)
        with context_parallel(plan):
            found = model(input_ids=plan.shard(ids, 1), position_ids=plan.positions[None], **options).logits
    tokens, bound = plan.positions < LENGTH, 0.1 if device.type == "cuda" else 1e-4
    torch.testing.assert_close(found[:, tokens], wanted[:, tokens], rtol=bound, atol=bound)


def checkpointing(device):
    """Layers are called again in backward, after the `with` block."""
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    model = model_of(device).train()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        compare(model, plan, device)


def compiled(device):
    """A model, and layers without a mask, which raise."""
    plan = plan_context_parallel(mesh=mesh_of(device), length=LENGTH, causal=True)
    model = model_of(device)
    compare(model, plan, device, torch.compile(model, backend="aot_eager"))

    def layer(q):
        return attend(model.model.layers[0].self_attn, q, q, q, None)[0]

    q, run = torch.ones(1, 4, 8, 64, device=device, dtype=dtype_of(device)), torch.compile(layer, backend="aot_eager")
    for call in (layer, run):
        call(q)
        with context_parallel(plan), pytest.raises(ValueError, match="a layer got another mask, or none"):
            call(q)
        call(q)


def refused(device):
    mesh = mesh_of(device)
    plan = plan_context_parallel(mesh=mesh, length=LENGTH, causal=True)
    other = plan_context_parallel(mesh=mesh, length=2 * LENGTH, causal=True, deal="contiguous")
    with pytest.raises(ValueError, match="must deal the same tokens"):
        context_parallel({None: plan, 5: other}).__enter__()
    with pytest.raises(TypeError, match="plans must be a ContextParallelPlan"):
        context_parallel(mesh).__enter__()
    with pytest.raises(TypeError, match="the plan of window 5 must be"):
        context_parallel({5: mesh}).__enter__()
    with pytest.raises(ValueError, match=f"deal must be a plan of {2 * LENGTH} tokens"):
        plan_context_parallel(mesh=mesh, length=2 * LENGTH, causal=True, deal=plan)
    ids, model = plan.shard(batch(device)[0], 1), model_of(device)
    whole = {"input_ids": batch(device)[0]}
    four = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=device)
    cases = [
        ({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "attention_mask must be None"),
        ({"input_ids": ids, "attention_mask": four}, "a layer got another mask, or none"),
    ]
    if dist.get_world_size() > 1:
        cases.append((whole, r"must get the \d+ tokens of this process"))
    with context_parallel(plan):
        for inputs, message in cases:
            with pytest.raises(ValueError, match=message):
                model(**inputs)
        with pytest.raises(ValueError, match=f"sliding_window={WINDOW}, and there are plans of the windows None"):
            model_of(device, "Mistral", sliding_window=WINDOW)(input_ids=ids)
        set_block_mask(model, lambda lengths, device: None)
        with pytest.raises(ValueError, match="set_block_mask"):
            model(input_ids=ids)
        set_block_mask(model, None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(input_ids=ids)
            model(input_ids=ids)  # not compared any more
        times = sum("plan.positions[None]" in str(warning.message) for warning in caught)
        counted = torch.equal(plan.positions.cpu(), torch.arange(plan.local_length))
        assert times == (0 if counted or dist.get_world_size() == 1 else 1)
    t5 = dict(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    nllb = dict(vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4)
    nllb |= dict(decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48)
    both = {"input_ids": ids, "decoder_input_ids": ids}
    for kind, config, terms, inputs, message in (
        ("T5EncoderModel", "T5Config", t5, {"input_ids": ids}, "T5Attention: a position_bias, .* on one GPU, or pass"),
        ("NllbMoeModel", "NllbMoeConfig", nllb, both, "the model has causal and bidirectional masks"),
    ):
        config = getattr(transformers, config)(**terms, attn_implementation="cute_kernels")
        refusing = getattr(transformers, kind)(config).to(device, dtype_of(device)).eval()
        with context_parallel(plan), pytest.raises(ValueError, match=message):
            refusing(**inputs)
    with context_parallel(other), warnings.catch_warnings():
        warnings.filterwarnings("error", message="context_parallel: the model numbers")
        model(input_ids=other.shard(torch.cat([batch(device)[0]] * 2, 1), 1), position_ids=other.positions[None])
    model(**whole)


CHECKS = [llama, later_tokens, packed, windows, score_functions, checkpointing, compiled, refused]
