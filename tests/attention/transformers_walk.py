"""Runs every attention class of the installed transformers with "eager" and with "cute_kernels"."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import re
import textwrap
import traceback
import warnings
from types import SimpleNamespace

import torch
import transformers

from attention.integrations.transformers import masks
from attention.integrations.transformers.attention_function import HARMLESS, REFUSED, attend

from . import transformers_layers as layers
from . import transformers_zoo as zoo

TOLERANCE = 2e-3  # of an output's standard deviation
PACKAGES = ("/attention/", "/cute_kernels/", "/sparse_collective/")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`verdict`: "equal", "refused", "differs", "crashes" or "not run"; `how`: by which model or module."""

    verdict: str
    how: str
    detail: str = ""


class Calls:
    """The attention function, with a record of the classes that called it and of their keywords."""

    def __init__(self):
        self.classes, self.keywords, self.last = set(), {}, None

    def __call__(self, module, *args, **kwargs):
        name = type(module).__name__
        self.classes.add(name)
        self.last = name
        for key, value in kwargs.items():
            if value is not None:
                self.keywords.setdefault(key, set()).add(name)
        return attend(module, *args, **kwargs)


CALLS, NAME = Calls(), zoo.OURS


def register() -> None:
    transformers.AttentionInterface.register(NAME, CALLS)
    transformers.AttentionMaskInterface.register(NAME, masks.make_mask)


def walk(name: str) -> dict[str, Outcome]:
    """{attention class: outcome} of a module."""
    missing, found, why = set(zoo.modules()[name]), {}, {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for cls in zoo.models_of(name):
            if not missing:
                break
            for key, outcome in _model(name, cls, missing, why).items():
                found[key] = outcome
                missing.discard(key)
        for key in sorted(missing):
            found[key] = _layer(name, key, why)
            if found[key].verdict == "not run":
                found[key] = _source(name, key, found[key])
    return found


def _model(name: str, cls, wanted: set, why: dict) -> dict[str, Outcome]:
    """Outcomes of the wanted classes that a model calls."""
    here, problem, have = cls.__name__, None, wanted
    for config in zoo.configs(cls, name):
        try:
            if isinstance(config, Exception):
                raise config
            eager = zoo.build(cls, config, "eager")
            have = wanted & {type(m).__name__ for m in eager.modules()}
            if not have:
                return {}
            inputs = zoo.inputs_of(eager)
            forms = [(inputs, expected := eager(**inputs), None)]
            if distance(expected, expected):
                raise ValueError("the output holds no numbers")
            ours = zoo.build(cls, config, NAME)  # some models know the implementations by name
            break
        except Exception as error:
            problem = error
    else:
        why.update(dict.fromkeys(have, f"{here}: {_line(problem)}"))
        return {}
    if "input_ids" in inputs and inputs["input_ids"].shape[1] == zoo.LENGTH:
        with contextlib.suppress(Exception):
            padded = inputs | {"attention_mask": zoo.padding()}
            forms.append((padded, eager(**padded), zoo.padding().bool()))
    CALLS.classes.clear()
    try:
        for inputs, expected, real in forms:
            error = distance(expected, found := ours(**inputs), real)
            if not error < TOLERANCE:
                # A causal layer that is called without a mask is causal by "sdpa", and not by "eager".
                other = expected
                if real is None and cls._supports_sdpa:
                    other = zoo.build(cls, config, "sdpa")(**inputs)
                if distance(other, found, real) < TOLERANCE:
                    return dict.fromkeys(have & CALLS.classes, Outcome("equal", here, 'to "sdpa", not to "eager"'))
                form = "" if real is None else " under padding"
                outcome = Outcome("differs", here, f"by {error:.2g} of the standard deviation{form}")
                return dict.fromkeys(have & CALLS.classes, outcome)
    except Exception as error:
        outcome = failure(error, here)
        return dict.fromkeys(have & {CALLS.last} if CALLS.classes else have, outcome)
    return dict.fromkeys(have & CALLS.classes, Outcome("equal", here))


def _layer(name: str, key: str, why: dict) -> Outcome:
    """The outcome of an attention class on its own."""
    try:
        eager, ours = layers.instances(name, key)
    except Exception as error:
        return Outcome("not run", "", why.get(key) or _line(error))
    problems = []
    for given in layers.inputs(eager):
        try:
            expected = eager(**layers.additive(given))
        except Exception as error:
            problems.append(_line(error))
            continue
        CALLS.classes.clear()
        try:
            error = distance(expected, ours(**given))
        except Exception as error:
            return failure(error, "alone")
        if not CALLS.classes:
            problems.append("it did not call the attention function")
            continue
        if not error < TOLERANCE:
            with contextlib.suppress(Exception):  # some classes want bool masks, whatever the implementation
                error = distance(eager(**given), ours(**given))
        if not error < TOLERANCE:
            return Outcome("differs", "alone", f"by {error:.2g} of the standard deviation")
        return Outcome("equal", "alone")
    return Outcome("not run", "alone", f"{problems[0]}; {why.get(key, '')}")


KNOWN = set(inspect.signature(attend).parameters) | HARMLESS | REFUSED.keys()


def _source(name: str, key: str, outcome: Outcome) -> Outcome:
    """The outcome of a class that was not run, by its module's source: the keywords that it passes on, and its eager
    function beside ours. What its model does to the mask stays unknown."""
    text = textwrap.dedent(f"class {key}{zoo.classes_of(name)[key]}")
    eagers = set(re.findall(r"get_interface\([^()]*?(\w+)\s*\)", text))
    calls = [
        call
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and len(call.args) + len(call.keywords) > 4
        if ast.unparse(call).find("self") >= 0 and "attention" in call.func.id
    ]
    if len(eagers) != 1 or not calls:
        return outcome
    unknown = {k.arg for call in calls for k in call.keywords if k.arg} - KNOWN
    if unknown:
        return Outcome("not run", "by source", f"it passes {sorted(unknown)}; {outcome.detail}")
    module = importlib.import_module(f"transformers.models.{name}")
    error = eager_distance(getattr(module, eagers.pop()))
    if not error < TOLERANCE:
        return Outcome("not run", "by source", f"its eager function differs by {error:.2g}; {outcome.detail}")
    return Outcome("equal", "by source", outcome.detail)


def eager_distance(function) -> float:
    """The distance of transformers' eager function from ours, of grouped heads if it repeats them, under a mask."""
    groups = 2 if "repeat_kv" in function.__code__.co_names else 1
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, 9, 16, generator=generator) for n in (4, 4 // groups, 4 // groups))
    mask = torch.rand(2, 1, 9, 9, generator=generator) < 0.6
    mask |= torch.eye(9, dtype=torch.bool)
    sinks = torch.randn(4, generator=generator) if "sinks" in function.__code__.co_names else None
    module = SimpleNamespace(num_key_value_groups=groups, training=False, head_dim=16, sinks=sinks, is_causal=False)
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = function(module, q, k, v, added, scaling=0.25)[0]
    return distance(expected, attend(module, q, k, v, mask, scaling=0.25, s_aux=sinks)[0])


def distance(expected, found, real=None) -> float:
    """The largest error of an output, over its standard deviation; of rows that are `real`.

    Infinite if nothing can be compared.
    """
    expected, found = zoo.tensors(expected), zoo.tensors(found)
    errors = [] if real is None else [0.0]
    for key, a in expected.items():
        b = found.get(key)
        if b is None or a.shape != b.shape or (real is not None and a.shape[:2] != real.shape):
            continue
        if real is not None:
            a, b = a[real], b[real]
        if a.numel() > 1 and not a.isnan().all():
            error = ((a - b).abs().max() / a.std().clamp(min=1e-6)).item()
            errors.append(error if error == error else float("inf"))
    return max(errors, default=float("inf"))


def failure(error: Exception, how: str) -> Outcome:
    """A refusal, if the library raised an error that says what to do."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = any(part in last for part in PACKAGES) and "site-packages" not in last
    clear = ours and isinstance(error, (TypeError, ValueError, AttributeError)) and "attn_implementation" in str(error)
    return Outcome("refused" if clear else "crashes", how, _line(error))


def _line(error: Exception) -> str:
    tb = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:180]} ({tb.filename.split('/')[-1]}:{tb.lineno})"


def main() -> None:
    """Print the outcome of each class: python -m tests.attention.transformers_walk [module ...]."""
    import sys
    import time

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    register()
    totals = {}
    for name in zoo.modules():
        if sys.argv[1:] and name.split(".")[0] not in sys.argv[1:]:
            continue
        begin = time.process_time()
        for key, outcome in walk(name).items():
            totals[outcome.verdict] = totals.get(outcome.verdict, 0) + 1
            print(f"{outcome.verdict:8} {name.split('.')[0]}.{key} ({outcome.how}) {outcome.detail}", flush=True)
        seconds = time.process_time() - begin
        if seconds > 2:
            print(f"         {name} took {seconds:.1f} s")
    print(totals, f"{time.process_time():.0f} s")
    for key, classes in sorted(CALLS.keywords.items()):
        print(key, len(classes), *sorted(classes)[:6])


if __name__ == "__main__":
    main()
