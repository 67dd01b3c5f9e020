"""Tiny random models of every module of the installed transformers that calls the attention function of a config."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pathlib
import re
import typing

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

VOCABULARY, LENGTH, IMAGE, PATCH, FRAMES, MELS = 97, 20, 32, 8, 64, 16
HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
OURS = "walk"  # the attn_implementation of the walk
ROOT = pathlib.Path(transformers.__file__).parent / "models"


@functools.cache
def modules() -> dict[str, tuple[str, ...]]:
    """{module under transformers.models: its classes that call the attention function}."""
    found = {}
    for path in sorted(ROOT.glob("*/modeling_*.py")):
        name = f"{path.parent.name}.{path.stem}"
        if "ALL_ATTENTION_FUNCTIONS" in _text(name) and (callers := classes_of(name)):
            found[name] = tuple(callers)
    return found


def classes_of(name: str) -> dict[str, str]:
    """{class that calls the attention function: its source}."""
    parts = re.split(r"^class (\w+)", _text(name), flags=re.MULTILINE)[1:]
    texts = {c: re.split(r"\n[^\s#)]", body, maxsplit=1)[0] for c, body in zip(parts[::2], parts[1::2], strict=True)}
    return {c: body for c, body in texts.items() if "ALL_ATTENTION_FUNCTIONS" in body}


@functools.cache
def _text(name: str) -> str:
    return (ROOT / f"{name.replace('.', '/')}.py").read_text()


@functools.cache
def models_of(name: str) -> list[type[PreTrainedModel]]:
    """The model classes of a module, headless ones first."""
    module = importlib.import_module(f"transformers.models.{name}")
    classes = [
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, PreTrainedModel)
        and c.__module__ == module.__name__
        and not c.__name__.endswith("PreTrainedModel")
        and "forward" in dir(c)
    ]
    order = re.findall(r"^class (\w+)", _text(name), flags=re.MULTILINE)
    return sorted(classes, key=lambda c: ("For" in c.__name__, order.index(c.__name__)))


# ------------------------------------------------------------------ configs

EXACT = {
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 128,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_mel_bins": MELS,
    "sliding_window": 6,
    "attention_chunk_size": 6,
    "local_attention": 6,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_groups": 2,
    "index_n_heads": 2,
    "index_topk": 5,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": HEAD_DIM,
    "mamba_head_dim": HEAD_DIM,
    "encoder_hash_byte_group_vocab": 50,
    "num_feat_extract_layers": None,
    "num_kv_shared_layers": 0,
    "mamba_d_ssm": 128,
}
EXACT |= dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), HEAD_DIM)
KINDS = ("attention", "minimax_m3_sparse")
SPECIAL = {  # numbers without which a model has no attention of its kind
    "Qwen4ExpTextConfig": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
    | {"indexer_compress_ratio": 2, "ngram_vocab_size_base": 50},
    "Glm5NextTextConfig": {"index_topk": 4, "index_kpool": 2, "qk_rope_head_dim": 0},
}
ABSENT = {"num_experts_per_tok": 2, "n_routed_experts": 4, "head_dim": HEAD_DIM}  # where they are None
PARTS = ("size", "dim", "hidden", "channel", "rank", "width", "features", "n_embd", "d_model", "d_ff", "n_inner")
DROPPED = {"transformers_version", "architectures", "id2label", "label2id", "dtype", "_name_or_path", "problem_type"}
DROPPED |= {"return_dict", "output_hidden_states", "chunk_size_feed_forward", "out_features", "out_indices"}
DROPPED |= {"stage_names", "per_layer_config"}


def _small(key: str, value, ratio: int):
    """The number that stands for `value` in a tiny config."""
    if value is None and key in ABSENT:
        return ABSENT[key]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if key in EXACT:
        return value if EXACT[key] is None else EXACT[key]
    if "token_id" in key or "token_index" in key or key == "image_token":
        return value % 80 + 10 if value > 90 else value
    if key.endswith("vocab_size") or key == "vocab":
        return VOCABULARY
    if "key_value_heads" in key or "kv_heads" in key:
        return max(1, HEADS // ratio)
    if key.endswith("heads") or key in ("n_head", "num_heads"):
        return HEADS
    if key.endswith("layers") or key in ("depth", "n_layer", "num_blocks"):
        return min(value, 2)
    if "per_tok" in key or key.endswith("top_k") or key == "moe_topk":
        return min(value, 2)
    if "expert" in key and value > 4 and "size" not in key:
        return 4
    if "head_dim" in key or key == "kv_channels":
        return HEAD_DIM
    if value > HIDDEN and any(part in key for part in PARTS):
        return HIDDEN
    return value


def shrunk(config: dict, kinds: tuple[str, ...] = (), top: bool = True) -> dict:
    """A config's dictionary with small numbers, and the dictionaries in it. With `kinds` it has a layer of each of
    these types, and windows if it can have any."""
    heads = next((config[k] for k in ("num_attention_heads", "num_heads", "n_head") if config.get(k)), 1)
    groups = config.get("num_key_value_heads") or heads
    ratio = 2 if isinstance(heads, int) and isinstance(groups, int) and heads > groups else 1
    layers = config.get("num_hidden_layers")
    types = config.get("layer_types") or ()
    types = list(dict.fromkeys((*types, *kinds) if types else ()))
    count = max(2, len(types))
    out = {}
    for key, value in config.items():
        if key in DROPPED or key == "model_type" and top:
            continue
        if isinstance(value, dict):
            out[key] = shrunk(value, kinds, False)
        elif isinstance(value, (list, tuple)) and len(value) == layers:
            out[key] = list(value)[:count]
        elif isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            out[key] = [_small(key, v, ratio) for v in value]
        else:
            out[key] = _small(key, value, ratio)
    if types:
        out["layer_types"] = (types * 2)[:count]
    if kinds and "sliding_window" in out:
        out["sliding_window"] = EXACT["sliding_window"]
        if "use_sliding_window" in out:
            out["use_sliding_window"] = True
    if layers:
        out["num_hidden_layers"] = count
    if "mrope_section" in out:
        out["mrope_section"] = [2, 3, 3]
    if "qk_head_dim" in out:
        out["qk_head_dim"] = 2 * HEAD_DIM
    return out


def tiny_config(cls: type[PreTrainedConfig], kinds: tuple[str, ...] = (), **options) -> PreTrainedConfig:
    """A small config of a class, from its defaults; see `shrunk`."""
    return cls(**shrunk(cls().to_dict(), kinds) | SPECIAL.get(cls.__name__, {}) | options)


def kinds_of(name: str) -> tuple[str, ...]:
    """The layer types of which a module's source speaks."""
    text = _text(name)
    return tuple(kind for kind in ALLOWED_LAYER_TYPES if f'"{kind}"' in text and kind.endswith(KINDS))


# ------------------------------------------------------------------ models


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Weights that keep activations near unit variance, so that attention is far from uniform."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.is_floating_point():
                continue
            if p.dim() >= 2:
                fan = p[0].numel() if not isinstance(module, nn.Embedding) else 1
                if p.dim() == 3 and not isinstance(module, nn.Conv1d):
                    fan = p.shape[-1]
                p.copy_(torch.randn(p.shape, generator=generator) * (1.3 / fan**0.5))
            elif name == "bias" or float(p.abs().max() if p.numel() else 1) == 0:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)


def build(cls, config, implementation: str) -> PreTrainedModel:
    torch.manual_seed(1)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    randomize(model)
    return model


def configs(cls, name: str, **options):
    """Tiny configs of a model of a module: with all layer types of which the module speaks, and the default ones.

    A config that is not valid is an exception instead.
    """
    for kinds in dict.fromkeys((kinds_of(name), ())):
        try:
            yield tiny_config(cls.config_class, kinds, **options)
        except Exception as error:
            yield error


# ------------------------------------------------------------------ inputs


def _ids(length=LENGTH, seed=2):
    return torch.randint(12, 88, (2, length), generator=torch.Generator().manual_seed(seed))


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def inputs_of(model) -> dict:
    """A guess of what the model's forward() takes."""
    parameters = inspect.signature(model.forward).parameters
    main = model.main_input_name if model.main_input_name in parameters else next(iter(parameters))
    config = model.config
    channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", IMAGE)
    size = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    made = {
        "input_ids": lambda: _ids(),
        "decoder_input_ids": lambda: _ids(12, 5),
        "pixel_values": lambda: _noise(2, channels, *size),
        "pixel_values_videos": lambda: _noise(2, getattr(config, "frames_per_clip", 4), channels, *size),
        "input_features": lambda: _noise(2, getattr(config, "num_mel_bins", MELS), FRAMES),
        "input_values": lambda: _noise(2, 3200),
        "hidden_states": lambda: _noise(2, LENGTH, HIDDEN),
        "inputs_embeds": lambda: _noise(2, LENGTH, HIDDEN),
        "encoder_hidden_states": lambda: _noise(2, 9, HIDDEN),
    }
    inputs = {main: made.get(main, made["hidden_states"])()}
    for name, p in parameters.items():
        if name in made and name not in inputs and (name == "decoder_input_ids" or p.default is p.empty):
            inputs[name] = made[name]()
    return inputs


def padding() -> torch.Tensor:
    """(2, LENGTH); the first item has padding on both sides."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :4] = mask[0, -3:] = 0
    return mask


def tensors(out, prefix="") -> dict:
    """{path: tensor} of all floating tensors of an output."""
    found = {}
    if isinstance(out, torch.Tensor):
        if out.is_floating_point():
            found[prefix] = out
    elif isinstance(out, typing.Mapping):
        for key, value in out.items():
            if "past_key_values" not in key and "attentions" not in key:
                found |= tensors(value, f"{prefix}.{key}")
    elif isinstance(out, (tuple, list)):
        for i, value in enumerate(out):
            found |= tensors(value, f"{prefix}.{i}")
    return found
