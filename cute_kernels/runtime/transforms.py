"""Derivatives under torch.func's transforms, vmap, and second derivatives.

torch.func requires autograd functions with a setup_context and flat arguments, which register_autograd does not create.
So a differentiable op registers its two functions here as well, and library.call uses `Differentiable` while a
transform is active. vmap runs an op once per batch item.
"""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from .front import check_no_tangent
from .torch_compat import (
    is_grads_batched,
    tree_flatten,
    tree_unflatten,
    with_batch,
    without_batch,
)

TWICE = (
    "this op is differentiable once, and this is a derivative of its gradient; for second derivatives use torch's own "
    "function, or detach() the gradient"
)

_GRADIENTS: dict[str, tuple[Callable, Callable]] = {}  # name of an op -> (setup_context, backward)


class _Context(SimpleNamespace):
    """The ctx passed to a registered op's setup_context and backward."""

    saved_tensors: tuple = ()

    def save_for_backward(self, *tensors) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value


class Differentiable(torch.autograd.Function):
    """A registered op, differentiable once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op, name, spec, *flat):
        return op(*tree_unflatten(flat, spec))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, name, spec, *flat = inputs
        found = _Context(needs_input_grad=tuple(tree_unflatten([True] * len(flat), spec)))
        _GRADIENTS[name][0](found, tuple(tree_unflatten(flat, spec)), output)
        ctx.save_for_backward(*found.saved_tensors)
        if not vars(found).get("materializes", True):
            ctx.set_materialize_grads(False)
        del found.saved_tensors
        ctx.found, ctx.name, ctx.spec = found, name, spec

    @staticmethod
    def backward(ctx, *gradients):
        needed = ctx.needs_input_grad[3:]
        if not any(needed):
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        call = SimpleNamespace(name=ctx.name, needed=tree_unflatten(needed, ctx.spec), saved=len(saved), places=())
        call.attributes = vars(ctx.found)
        found = Gradients.apply(call, *saved, *gradients)  # fills in call.places
        found = dict(zip(call.places, found, strict=True))
        return None, None, None, *(found.get(i) if n else None for i, n in enumerate(needed))


class Gradients(torch.autograd.Function):
    """An op's backward, computed by registered ops that are not differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, *tensors):
        context = _Context(**call.attributes)
        context.saved_tensors, context.needs_input_grad = tensors[: call.saved], tuple(call.needed)
        return _without_none(call, _GRADIENTS[call.name][1](context, *tensors[call.saved :]))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):  # without it, second derivatives would be zeros
        raise RuntimeError(TWICE)


def _without_none(call, gradients) -> tuple[Tensor, ...]:
    """The gradients that are not None; their indices are stored in call.places."""
    flat = tree_flatten(gradients)[0]
    call.places = tuple(i for i, gradient in enumerate(flat) if gradient is not None)
    call.count = len(flat)
    return tuple(flat[i] for i in call.places)


def register(name: str, gradient: tuple[Callable, Callable]) -> None:
    """Make the op "namespace::name" differentiable under torch.func; gradient: (setup_context, backward)."""
    _GRADIENTS[name] = gradient


def apply(name: str, op: Callable, inputs: tuple):
    """Call the op while a transform is active."""
    if name not in _GRADIENTS:
        return op(*inputs)
    flat, spec = tree_flatten(tuple(inputs))
    check_no_tangent(name.partition("::")[2], [t for t in flat if isinstance(t, Tensor)])  # also captured ones
    return Differentiable.apply(op, name, spec, *flat)


def loop(op: Callable) -> Callable:
    """A rule for torch.library.register_vmap that calls the op once per batch item and stacks the results."""

    def rule(info, in_dims, *inputs):
        flat, spec = tree_flatten(inputs)
        dims = tree_flatten(in_dims)[0]
        batched = [(i, t.movedim(d, 0)) for i, (t, d) in enumerate(zip(flat, dims, strict=True)) if d is not None]
        items = []
        for number in range(max(info.batch_size, 1)):  # an empty batch gets its shapes from an item of zeros
            item = list(flat)
            for i, tensor in batched:
                item[i] = tensor[number] if info.batch_size else tensor.new_zeros(tensor.shape[1:])
            leaves, structure = tree_flatten(op(*tree_unflatten(item, spec)))
            items.append(leaves)
        stacked = [torch.stack(leaves)[: info.batch_size] for leaves in zip(*items, strict=True)]
        return tree_unflatten(stacked, structure), tree_unflatten([0] * len(stacked), structure)

    return rule


class Raising(torch.autograd.Function):
    """Copies of gradients whose own derivatives raise.

    `sources` are the tensors that the gradients were computed from. With them as inputs, autograd reaches this function
    even if only some derivatives are requested, as in torch.autograd.grad(loss, [w]).
    """

    @staticmethod
    def forward(ctx, count, *gradients_and_sources):
        return tuple(t.detach() for t in gradients_and_sources[:count])  # not views, which reject in-place operations

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(TWICE)


class _Unpacked:
    """An autograd context that holds its saved tensors; unpacking twice raises inside torch.utils.checkpoint."""

    def __init__(self, ctx):
        self.ctx = ctx

    @functools.cached_property
    def saved_tensors(self) -> tuple:
        return self.ctx.saved_tensors

    def __getattr__(self, name: str):
        return getattr(self.ctx, name)


def differentiable_once(backward: Callable) -> Callable:
    """An autograd function's backward whose results raise when they are differentiated.

    torch's once_differentiable looks at the incoming gradient alone, so it drops the second derivative where that is a
    constant, as in `grad(gemm(silu(x), W).sum(), x, create_graph=True)`. Here each gradient that is computed under
    create_graph=True has a grad_fn that raises. If no tensor that it was computed from requires a gradient, it is a
    constant, as in torch. Batched gradients (is_grads_batched=True, jacobian(vectorize=True)) are computed one by one.
    """

    @functools.wraps(backward)
    def run(ctx, *gradients):
        plain = not torch.is_grad_enabled()
        for gradient in gradients:
            if gradient is not None and (gradient.is_neg() or is_grads_batched(gradient)):
                plain = False
        if plain:
            return backward(ctx, *gradients)
        gradients = tuple(None if g is None else g.resolve_neg() for g in gradients)  # of torch.complex, Tensor.conj
        ctx = _Unpacked(ctx)
        with torch.no_grad():
            if any(is_grads_batched(g) for g in gradients):
                found = _one_by_one(backward, ctx, gradients)
            else:
                found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        sources = [t for t in (*ctx.saved_tensors, *gradients) if isinstance(t, Tensor) and t.requires_grad]
        if not sources:
            return found
        found = found if isinstance(found, tuple) else (found,)
        tensors = [t.detach().requires_grad_() for t in found if isinstance(t, Tensor)]
        raising = iter(Raising.apply(len(tensors), *tensors, *sources) if tensors else ())
        return tuple(next(raising) if isinstance(t, Tensor) else t for t in found)

    return run


def _one_by_one(backward: Callable, ctx, gradients: tuple) -> tuple:
    """Run a backward of batched gradients once per batch item."""
    level = 0
    items: list = []
    for gradient in gradients:
        if is_grads_batched(gradient):
            gradient, level = without_batch(gradient)
            items.append(gradient.unbind())
        else:
            items.append(None if gradient is None else itertools.repeat(gradient))
    count = next(len(item) for item in items if isinstance(item, tuple))
    items = [itertools.repeat(None) if item is None else item for item in items]
    found = [backward(ctx, *item) for _, *item in zip(range(count), *items, strict=False)]
    found = [each if isinstance(each, tuple) else (each,) for each in found]
    return tuple(None if each[0] is None else with_batch(torch.stack(each), level) for each in zip(*found, strict=True))
