"""Ops registered with torch.library, for torch.compile, export, opcheck and autograd; eager calls go around them."""

from collections.abc import Callable

import torch

from . import transforms
from .torch_compat import count_flops, functorch_active, keep_index_buffers, schema_arguments


def named_terms(inputs: str, terms: str) -> tuple[int, Callable]:
    """How many inputs a schema has, and a function that names the terms which come after them.

    The dispatcher leaves out the last terms if they are their defaults.
    """
    arguments = schema_arguments(f"op({inputs}, {terms}) -> ()")
    at = len(inputs.split(","))
    names, defaults = [a.name for a in arguments[at:]], [a.default_value for a in arguments[at:]]
    return at, lambda given: dict(zip(names, (*given, *defaults[len(given) :]), strict=True))


def register(
    name: str, inputs: str, terms: str, run: Callable, fake: Callable, *, more: str = "",
    gradient: tuple | None = None, flops: Callable | None = None,
) -> None:  # fmt: skip
    """The op "namespace::name", (inputs, terms) -> its outputs, and its variant `.._out`, (inputs, out, terms) -> the
    outputs after the first, which it writes to `out`.

    Args:
        inputs, terms: arguments as a schema has them; terms have defaults.
        run: a function of the inputs and, by keyword, of the terms and of out, a tensor or None: the outputs.
        fake: the same without out, of tensors without contents.
        more: the output after the first as a schema has it, such as "Tensor"; "" for a single output.
        gradient: (setup_context, backward) of torch.library.register_autograd, for the op that allocates its output.
        flops: a function of the op's arguments that returns the count for FlopCounterMode.
    """
    at, named = named_terms(inputs, terms)

    def after_first(result):
        return result[1] if more else None

    def allocate(*given):
        return run(*given[:at], out=None, **named(given[at:]))

    def write(*given):
        return after_first(run(*given[:at], out=given[at], **named(given[at + 1 :])))

    def fake_allocate(*given):
        return fake(*given[:at], **named(given[at:]))

    def fake_write(*given):
        return after_first(fake(*given[:at], **named(given[at + 1 :])))

    outputs, rest = (f"(Tensor, {more})", more) if more else ("Tensor", "()")
    define(name, f"({inputs}, {terms}) -> {outputs}", allocate, fake_allocate, gradient, flops)
    schema = f"({inputs}, Tensor(a{at}!) out, {terms}) -> {rest}"
    op = torch.library.custom_op(f"{name}_out", write, mutates_args=("out",), schema=schema)
    op.register_fake(_keeping_index_buffers(f"{name}_out", fake_write))


def register_pair(
    name: str, inputs: str, terms: str, run: Callable, fake: Callable, gradient: tuple, flops: Callable
) -> None:
    """The op (inputs, terms) -> (Tensor, Tensor) of such functions as `register` takes, without a variant for out."""
    at, named = named_terms(inputs, terms)
    define(
        name,
        f"({inputs}, {terms}) -> (Tensor, Tensor)",
        lambda *given: run(*given[:at], out=None, **named(given[at:])),
        lambda *given: fake(*given[:at], **named(given[at:])),
        gradient,
        flops,
    )


def _keeping_index_buffers(name: str, fake: Callable) -> Callable:
    """A fake implementation of the op "namespace::name" that first calls keep_index_buffers."""
    namespace, short = name.split("::")

    def run(*given):
        keep_index_buffers(getattr(getattr(torch.ops, namespace), short).default)
        return fake(*given)

    return run


def define(
    name: str, schema: str, run: Callable, fake: Callable, gradient: tuple | None = None, flops: Callable | None = None
) -> None:
    """An op that allocates its outputs, of positional arguments; vmap runs it once for each item."""
    op = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
    op.register_fake(_keeping_index_buffers(name, fake))
    op.register_vmap(transforms.loop(op))
    if gradient is not None:
        setup_context, backward = gradient
        op.register_autograd(backward, setup_context=setup_context)
        transforms.register(name, gradient)
    if flops is not None:
        namespace, _, short = name.partition("::")
        count_flops(getattr(getattr(torch.ops, namespace), short), flops)


def call(name: str, inputs: tuple, out, terms: tuple):
    """All outputs of the op "namespace::name" or, with out, of its variant: under torch.compile, and of calls that
    torch's dispatcher must see (front.py).

    Raises:
        RuntimeError: out is given under a transform of torch.func.
    """
    namespace, short = name.split("::")
    ops = getattr(torch.ops, namespace)
    if not torch.compiler.is_compiling() and functorch_active():
        if out is not None:
            what = inputs[0] if isinstance(inputs[0], str) else short
            raise RuntimeError(f"{what}: under a transform of torch.func it has no out=; leave it out")
        return transforms.apply(name, getattr(ops, short), (*inputs, *terms))
    if out is None:
        return getattr(ops, short)(*inputs, *terms)
    rest = getattr(ops, f"{short}_out")(*inputs, out, *terms)
    return out if rest is None else (out, rest)
