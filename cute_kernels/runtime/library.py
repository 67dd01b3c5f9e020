"""Ops registered with torch.library, for torch.compile, export, opcheck and autograd; eager calls bypass them.

Inductor's code calls an op's function directly. The dispatcher, and the Python functions that torch.library.custom_op
registers for autograd's dispatch keys, would add 13 us of host overhead to each call. AOTAutograd has handled gradients
by then.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import transforms
from .torch_compat import count_flops, functorch_active, lower_to_function, schema_arguments

IMPLEMENTATIONS: dict[Any, Callable] = {}  # registered op -> the function of its arguments that runs it eagerly


def by_name(run: Callable, inputs: str, terms: str, out: str) -> Callable:
    """A function of the arguments of an op's schema, (inputs, terms), that calls run(*inputs, **terms).

    out: "none" passes out=None to run; "last" makes it an argument after the inputs, passed to run by keyword; ""
    passes none. The dispatcher leaves out trailing terms that equal their defaults. The function is generated as text:
    keywords in its code take a tenth of the time of a dict's.
    """
    at = len(inputs.split(","))
    arguments = schema_arguments(f"op({inputs}, {terms}) -> ()")
    names = [a.name for a in arguments]
    defaults = {f"default_{i}": a.default_value for i, a in enumerate(arguments[at:])}
    heads = names[:at] + ["out"] * (out == "last")
    heads += [f"{name}={default}" for name, default in zip(names[at:], defaults, strict=True)]
    given = names[:at] + [f"{name}={name}" for name in names[at:]]
    given += {"none": ["out=None"], "last": ["out=out"], "": []}[out]
    scope = {"run": run, **defaults}
    exec(f"def call({', '.join(heads)}): return run({', '.join(given)})", scope)
    return scope["call"]


def register(
    name: str, inputs: str, terms: str, run: Callable, fake: Callable, *, more: str = "",
    gradient: tuple | None = None, flops: Callable | None = None,
) -> None:  # fmt: skip
    """Register the op "namespace::name", (inputs, terms) -> outputs, and its variant `.._out`, (inputs, out, terms) ->
    outputs after the first, which is written to `out`.

    Args:
        inputs, terms: arguments in schema syntax; terms have defaults.
        run: function of the inputs and, by keyword, of the terms and of out, a tensor or None; returns the outputs.
        fake: the fake implementation, like run without out.
        more: the second output in schema syntax, such as "Tensor"; "" for a single output.
        gradient: (setup_context, backward) of torch.library.register_autograd, for the op that allocates its output.
        flops: a function of the op's arguments that returns the count for FlopCounterMode.
    """

    def write(*given, **named):
        result = run(*given, **named)
        return result[1] if more else None

    def fake_write(*given, out, **named):
        result = fake(*given, **named)
        return result[1] if more else None

    allocate, fake_allocate = by_name(run, inputs, terms, "none"), by_name(fake, inputs, terms, "")
    write = by_name(write, inputs, terms, "last")
    fake_write = by_name(fake_write, inputs, terms, "last")
    outputs, rest = (f"(Tensor, {more})", more) if more else ("Tensor", "()")
    define(name, f"({inputs}, {terms}) -> {outputs}", allocate, fake_allocate, gradient, flops)
    at = len(inputs.split(","))
    schema = f"({inputs}, Tensor(a{at}!) out, {terms}) -> {rest}"
    op = torch.library.custom_op(f"{name}_out", write, mutates_args=("out",), schema=schema)
    IMPLEMENTATIONS[_packet(f"{name}_out").default] = write
    op.register_fake(_before_lowering(f"{name}_out", write, fake_write))


def register_pair(
    name: str, inputs: str, terms: str, run: Callable, fake: Callable, gradient: tuple, flops: Callable
) -> None:
    """Register the op (inputs, terms) -> (Tensor, Tensor), like `register`, without a variant for out."""
    run, fake = by_name(run, inputs, terms, "none"), by_name(fake, inputs, terms, "")
    define(name, f"({inputs}, {terms}) -> (Tensor, Tensor)", run, fake, gradient, flops)


def _before_lowering(name: str, run: Callable, fake: Callable, collective: bool = False) -> Callable:
    """A fake implementation of the op "namespace::name", which inductor's code calls as a Python function."""
    op = _packet(name)
    op.function = run

    def fake_of_op(*given):
        lower_to_function(op.default, collective)
        return fake(*given)

    return fake_of_op


def _packet(name: str):
    """The OpOverloadPacket of the op "namespace::name"."""
    namespace, short = name.split("::")
    return getattr(getattr(torch.ops, namespace), short)


def define(
    name: str, schema: str, run: Callable, fake: Callable, gradient: tuple | None = None,
    flops: Callable | None = None, *, collective: bool = False,
) -> None:  # fmt: skip
    """Register an op with positional arguments that allocates its outputs; vmap runs it once per batch item.

    collective: see lower_to_function.
    """
    op = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
    IMPLEMENTATIONS[_packet(name).default] = run
    op.register_fake(_before_lowering(name, run, fake, collective))
    op.register_vmap(transforms.loop(op))
    if gradient is not None:
        setup_context, backward = gradient
        op.register_autograd(backward, setup_context=setup_context)
        transforms.register(name, gradient)
    if flops is not None:
        count_flops(_packet(name), flops)


def call(name: str, inputs: tuple, out, terms: tuple):
    """Call the op "namespace::name" or, with out, its variant; returns all outputs. Used under torch.compile, and for
    calls that torch's dispatcher must see (front.py).

    Raises:
        RuntimeError: out is passed under a torch.func transform.
    """
    namespace, short = name.split("::")
    ops = getattr(torch.ops, namespace)
    if not torch.compiler.is_compiling() and functorch_active():
        if out is not None:
            what = inputs[0] if isinstance(inputs[0], str) else short
            raise RuntimeError(f"{what}: out= is not supported under a torch.func transform; leave it out")
        return transforms.apply(name, getattr(ops, short), (*inputs, *terms))
    if out is None:
        return getattr(ops, short)(*inputs, *terms)
    rest = getattr(ops, f"{short}_out")(*inputs, out, *terms)
    return out if rest is None else (out, rest)
