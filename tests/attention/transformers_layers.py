"""Attention modules of transformers called on their own, with inputs made from the signature of their forward()."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools

import torch
from torch import nn

from .transformers_zoo import HEAD_DIM, HEADS, HIDDEN, LENGTH, OURS, build, configs, models_of, randomize, tiny_config

OTHER = 9  # keys of cross-attention


def instances(name: str, wanted: str) -> list[nn.Module]:
    """Attention modules of the class `wanted`, for "eager" and for "cute_kernels", of equal weights: [eager, ours]."""
    errors = []
    for cross in (False, True):
        for model in models_of(name):
            pair = _pair(name, model, cross)
            if isinstance(pair, Exception):
                errors.append(f"{model.__name__}: {type(pair).__name__}: {' '.join(str(pair).split())[:200]}")
                continue
            found = [next((m for m in whole.modules() if type(m).__name__ == wanted), None) for whole in pair]
            if found[0] is not None:
                return found
        if errors:
            break
    return _constructed(name, wanted, errors)


@functools.lru_cache(maxsize=16)
def _pair(name: str, model, cross: bool) -> list[nn.Module] | Exception:
    """A model with "eager" and with ours, of equal weights; or why there is none."""
    problem = None
    for config in configs(model, name, **({"is_decoder": True, "add_cross_attention": True} if cross else {})):
        try:
            if isinstance(config, Exception):
                raise config
            return [build(model, config, kind) for kind in ("eager", OURS)]
        except Exception as error:
            problem = error.with_traceback(None)
    return problem


def _constructed(name: str, wanted: str, errors: list[str]) -> list[nn.Module]:
    """The same of a class alone, from the configs of its module's models."""
    cls = getattr(importlib.import_module(f"transformers.models.{name}"), wanted)
    takes = inspect.signature(cls.__init__).parameters
    for config_class in dict.fromkeys(m.config_class for m in models_of(name)):
        try:
            whole = tiny_config(config_class)
            parts = [getattr(whole, sub) for sub in getattr(whole, "sub_configs", ()) if getattr(whole, sub, None)]
        except Exception:
            continue
        for config in (whole, *parts):
            options = {"config": config, "layer_idx": 0, "embed_dim": HIDDEN, "hidden_size": HIDDEN, "num_heads": HEADS}
            options |= {"num_attention_heads": HEADS, "dim": HIDDEN}
            options = {key: value for key, value in options.items() if key in takes}
            try:
                pair = []
                for kind in ("eager", OURS):
                    options["config"] = own = copy.deepcopy(config)
                    own._attn_implementation = kind
                    pair.append(cls(**options).eval())
                    randomize(pair[-1])
                return pair
            except Exception as error:
                errors.append(f"{wanted}: {type(error).__name__}: {str(error)[:100]}")
    raise LookupError("; ".join(errors) or f"no model has a {wanted}")


def _linears(module: nn.Module) -> dict[str, int]:
    """{name: in_features} of its linear layers."""
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            found[name] = part.in_features
        elif type(part).__name__ == "Conv1D":
            found[name] = part.weight.shape[0]
    return found


def inputs(module: nn.Module):
    """Candidates for the inputs of its forward(), the likelier ones first. Masks are bool, True where seen."""
    generator = torch.Generator().manual_seed(4)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    parameters = {
        n: p for n, p in inspect.signature(module.forward).parameters.items() if p.kind not in (p.VAR_KEYWORD,)
    }
    linears = _linears(module)
    first = next(iter(linears.values()), HIDDEN)
    key_width = next((n for name, n in linears.items() if "k_proj" in name or "key" in name), first)
    packed = "cu_seqlens" in parameters
    shape = (LENGTH,) if packed else (2, LENGTH)
    causal = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    causal[0, :, :, :3] = False
    causal[0, :, :3] = True  # no row without a key: eager gives it the mean of all
    cross = {"key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "context_hidden_states"}
    crossed = cross & parameters.keys()
    need_cross = any(parameters[n].default is inspect.Parameter.empty for n in crossed)
    rotary = [HEAD_DIM, HEAD_DIM // 2, 2 * HEAD_DIM, HEAD_DIM // 4]
    crosses = (True, False) if crossed and not need_cross else (need_cross,)
    leads = ((), (), (1,)) if packed else ((2,), (1,), (), (2, 1), "relative")
    for angle, (form, lead), use_cross in itertools.product(rotary, enumerate(leads), crosses):
        if packed and form == 2:
            shape = (1, LENGTH)
        given = {}
        for name, p in parameters.items():
            required = p.default is p.empty
            if name in ("hidden_states", "x", "latents", "query_tensor", "queries") or (name == "query" and required):
                given[name] = noise(*shape, first)
            elif name in cross:
                given[name] = noise(2, OTHER, key_width) if use_cross else None
            elif name in ("key", "value", "keys", "values", "key_tensor", "value_tensor") and required:
                given[name] = noise(*shape, key_width)
            elif name in ("position_embeddings", "rotary_pos_emb", "rope"):
                if lead == "relative":  # a table of distances, of conformers
                    given[name] = noise(2, 2 * LENGTH - 1, first)
                elif required or angle == HEAD_DIM or name == "rope":
                    parts = torch.rand(*lead, LENGTH, angle, generator=generator) * 6
                    given[name] = parts.cos(), parts.sin()
            elif name == "cu_seqlens":
                given[name] = torch.tensor([0, 7, LENGTH], dtype=torch.int32)
            elif name == "shared_kv_states":
                given[name] = {}
            elif name == "max_seqlen":
                given[name] = LENGTH - 7
            elif name == "position_ids" and required:
                given[name] = torch.arange(LENGTH)[None].expand(2, -1)
            elif name == "attention_mask" and not packed:
                mask = torch.ones(2, 1, LENGTH, OTHER, dtype=torch.bool) if use_cross else causal
                mask = mask.clone()
                if use_cross:
                    mask[0, ..., -2:] = False
                given[name] = mask
        yield given


def additive(given: dict) -> dict:
    """The same with the masks that "eager" adds to the scores."""
    lowest = torch.finfo(torch.float32).min
    return {n: torch.where(t, 0.0, lowest) if _is_mask(t) else t for n, t in given.items()}


def _is_mask(t) -> bool:
    return isinstance(t, torch.Tensor) and t.dtype == torch.bool and t.dim() == 4


assert HEADS * HEAD_DIM == HIDDEN
