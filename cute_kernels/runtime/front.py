"""Decides at the front of every op whether a call may read its tensors' memory directly.

An eager call goes around torch's dispatcher, which would cost tens of microseconds, straight to a kernel. That is right
for plain tensors only. Under a dispatch mode (FakeTensorMode, FlopCounterMode, selective checkpointing, make_fx), a
transform of torch.func, or with a tensor subclass that has a `__torch_dispatch__`, the call must become the registered
op, so that the dispatcher sees it. What no op supports raises here, before a kernel reads memory that is not there.

`dispatched` checks all of this, which takes 0.6 us. Most calls, also those with gradients, check only `hidden`, which
takes 0.2 us. A plan is found only for tensors of the types that it was made for, and PlanCache.checked raises
NeedsDispatcher for a tensor that only a registered op can take. Calls with a user's function, under autocast, with a
W that is not yet checked, and sddmm check `dispatched`, since they read tensors before a plan is looked up.
"""

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from . import torch_compat
from .torch_compat import dispatch_modes, functorch_active, is_tracing, uncompiled

NO_TANGENTS = (
    "has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp, jacfwd, hessian); use reverse mode: "
    "backward(), torch.func.vjp or jacrev; or detach() the tensor"
)
_PLAIN = frozenset({Tensor, Parameter, type(None)})


@uncompiled
def dispatched(op: str, *values) -> bool:
    """True if a call with these arguments must go through the registered op.

    Args:
        op: name of the op, for errors.
        values: all tensors of the call, or None, operands first; the op's own checks reject other types.

    Raises:
        TypeError: a DTensor or a nested tensor.
        RuntimeError: a tensor carries a tangent of forward-mode AD.
    """
    for value in values:
        # Nested tensors of strided layout have torch.Tensor's own type, and abort the process when strides are read.
        if type(value) not in _PLAIN or (value is not None and value.is_nested):
            return _dispatched(op, values)
    return (hidden() or values[0] is None or values[0].is_meta) and _dispatched(op, values)


def _dispatched(op: str, values: tuple) -> bool:
    """`dispatched` for calls that need a closer look."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        check_supported(op, tensor)
    check_no_tangent(op, tensors)
    if dispatch_modes() or functorch_active() or is_tracing():
        return True
    tensors = without_mixed_meta(tensors)
    return any(torch_compat.overrides_dispatch(tensor) for tensor in tensors)


def without_mixed_meta(tensors: list[Tensor]) -> list[Tensor]:
    """These tensors, without those on the meta device if others are not: the op's checks name these."""
    plain = [tensor for tensor in tensors if not tensor.is_meta]
    return plain or tensors


def check_supported(op: str, tensor: Tensor) -> None:
    """Reject tensors whose elements are distributed over devices or sequences.

    Raises:
        TypeError: the tensor is a DTensor or a nested tensor.
    """
    if torch_compat.is_dtensor(tensor):
        raise TypeError(
            f"{op} got a DTensor; kernels run on one device's shard: pass x.to_local(), and wrap the result with "
            "DTensor.from_local(y, mesh, placements)"
        )
    if tensor.is_nested:
        jagged = tensor.layout is torch.jagged
        first = (
            "" if jagged else "make it jagged, x = torch.nested.nested_tensor(x.unbind(), layout=torch.jagged), and "
        )
        raise TypeError(
            f"{op} got a nested tensor; {first}pass its packed rows, x.values(), and for attention also "
            "cu_seqlens_q=x.offsets().int() and cu_seqlens_k"
        )


def check_no_tangent(op: str, tensors: Iterable[Tensor]) -> None:
    """Reject tensors with a tangent of forward-mode AD, which a kernel would drop.

    Raises:
        RuntimeError: a tensor has one.
    """
    if any(torch_compat.has_tangent(tensor) for tensor in tensors):
        raise RuntimeError(f"{op} {NO_TANGENTS}")


class NeedsDispatcher(TypeError):
    """Raised for a call that only the registered op supports; the public ops catch it and call theirs."""


@uncompiled
def hidden() -> bool:
    """True where a call may have another meaning that its tensors' types do not show: under dispatch modes, transforms
    of torch.func, in a level of forward-mode AD and under torch.jit.trace."""
    return bool(dispatch_modes() or functorch_active() or torch_compat.forward_ad._current_level >= 0 or is_tracing())


def check_plain(op: str, tensors: tuple) -> None:
    """Reject tensors that a kernel must not read.

    Raises:
        TypeError: a DTensor, a nested tensor, or one with torch's negative bit.
        NeedsDispatcher: a tensor has no memory of its own.
    """
    strided = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.layout is torch.strided]
    for tensor in strided:
        check_supported(op, tensor)
    for tensor in without_mixed_meta(strided):
        if not torch_compat.has_memory(tensor):
            raise NeedsDispatcher(
                f"{op} got a {type(tensor).__name__} without memory of its own (a wrapper, functional or transformed "
                "tensor); pass the plain torch.Tensor inside it"
            )
        if tensor.is_neg():
            raise TypeError(f"{op} got a tensor with torch's negative bit; pass x.resolve_neg()")


def readable(tensor: Tensor) -> bool:
    """True if the tensor's contents can be read: it is not fake, on the meta device, or a wrapper."""
    return torch_compat.has_memory(tensor)


def check_traced(op: str, *values) -> None:
    """check_supported of all tensors, inside a torch.compile trace.

    Raises:
        RuntimeError: forward-mode AD is active, whose tangents the registered op would drop. Dynamo then calls the op
            outside of the graph, where `dispatched` looks at the tensors, or raises under fullgraph=True.
    """
    if torch_compat.forward_ad._current_level >= 0:
        raise RuntimeError(f"{op} {NO_TANGENTS}")
    for value in values:
        if isinstance(value, Tensor) and type(value) is not Tensor:
            check_supported(op, value)


@contextlib.contextmanager
def undisturbed():
    """A context in which torch's functions run on plain tensors: no transform of torch.func, no dispatch mode.

    Users' functions are traced inside it, with separate tensors.
    """
    with torch_compat.DisableFuncTorch(), torch_compat.without_modes():
        yield
