"""The gate of a layer in training, and its gradient: by kernels, or by torch in calls that these do not support.

A kernel takes plain, contiguous BF16 and FP16 tensors of a GPU in an eager call, at addresses that are multiples of 16
bytes. torch.compile, transforms of torch.func, dispatch modes, subclasses and second derivatives have torch's
operations. The kernels compute in FP32 and round once; torch rounds each operation's result.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import reference
from ..checks import check_no_grad
from ..dtypes import NAMES, OPERANDS
from ..functions import ACTIVATIONS
from ..reference import GATE
from ..runtime import front
from ..runtime.device import assumed, collected, device_arch
from ..runtime.families import function_for, unsupported
from ..runtime.torch_compat import increment_version
from . import family  # noqa: F401 (importing it registers the family)
from .config import GateFacts


def gate(z: Tensor, activation: str | None) -> Tensor:
    """activation(g) * u (..., H) of z (..., 2 H), whose columns alternate, 64 of g and 64 of u. Differentiable.

    Autograd saves z alone.
    """
    function = _function(activation, False, z)
    if function is None:
        return reference.gate(z, activation)
    if z.requires_grad and torch.is_grad_enabled():
        return _apply(z, activation, function)
    return _forward(z, function)


def gate_into(z: Tensor, activation: str | None, out: Tensor) -> None:
    """Write gate(z, activation) to out (..., H), without gradients.

    Raises:
        ValueError, TypeError: out has another shape, dtype or device than the result.
        RuntimeError: an argument requires a gradient.
    """
    _check("gate_into", z, out)
    function = _function(activation, False, z, out)
    if function is not None:
        increment_version((out,))
        function(_matrix(z), _matrix(out), None)
        return
    g, u = z.unflatten(-1, (-1, 2, GATE)).unbind(-2)
    torch.mul(g if activation is None else ACTIVATIONS[activation](g), u, out=out.unflatten(-1, (-1, GATE)))


def gate_gradient_into(z: Tensor, dh: Tensor, activation: str | None, dz: Tensor) -> None:
    """Write the gradient of z to dz (..., 2 H), where dh (..., H) is that of gate(z, activation).

    Raises the errors of gate_into, of dh and dz.
    """
    _check("gate_gradient_into", z, dh, dz)
    function = _function(activation, True, z, dh, dz)
    if function is None:
        dz.copy_(_gradient_by_torch(z, dh, activation))
    else:
        increment_version((dz,))
        function(_matrix(z), _matrix(dh), _matrix(dz))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, activation, function):
        ctx.save_for_backward(z)
        ctx.activation = activation
        return _forward(z, function)

    @staticmethod
    def backward(ctx, dh):
        (z,) = ctx.saved_tensors
        function, again = None, torch.is_grad_enabled()
        if not again:
            if front.readable(dh) and (not dh.is_contiguous() or dh.data_ptr() & 15):
                dh = dh.clone(memory_format=torch.contiguous_format)
            function = _function(ctx.activation, True, z, dh)
        if function is None:
            return _gradient_by_torch(z, dh, ctx.activation, again), None, None
        dz = torch.empty_like(z)
        function(_matrix(z), _matrix(dh), _matrix(dz))
        return dz, None, None


_apply = super(torch.autograd.Function, _Gate).apply  # without torch.func's part, some 3 us a call


def _forward(z: Tensor, function: Callable) -> Tensor:
    h = z.new_empty(*z.shape[:-1], z.shape[-1] // 2)
    function(_matrix(z), _matrix(h), None)
    return h


def _matrix(t: Tensor) -> Tensor:
    """(rows, columns); a contiguous tensor may have any stride along a dimension of one row, hence the first view."""
    return t if t.dim() == 2 and t.shape[0] > 1 else t.view(-1).view(-1, t.shape[-1])


def _gradient_by_torch(z: Tensor, dh: Tensor, activation: str | None, again: bool = False) -> Tensor:
    """The gradient of z. again: it is differentiable itself."""
    with torch.enable_grad():
        z = z if again else z.detach().requires_grad_()
        return torch.autograd.grad(reference.gate(z, activation), z, dh, create_graph=again)[0]


def _check(op: str, z: Tensor, h: Tensor, dz: Tensor | None = None) -> None:
    if z.dim() == 0 or z.shape[-1] % (2 * GATE):
        raise ValueError(f"{op}: z is {tuple(z.shape)}; it must be (..., 2 H) with H a multiple of {GATE}")
    shape = torch.Size((*z.shape[:-1], z.shape[-1] // 2))
    for t, expected in ((h, shape), (dz, z.shape)):
        if t is not None and (t.shape != expected or t.dtype is not z.dtype or t.device != z.device):
            raise (TypeError if t.dtype is not z.dtype else ValueError)(
                f"{op}: a tensor of shape {tuple(t.shape)}, {t.dtype} on {t.device}; with z {tuple(z.shape)} it must "
                f"be {tuple(expected)}, {z.dtype} on {z.device}"
            )
    check_no_grad(op, z, h, dz)


def _function(activation: str | None, gradient: bool, *tensors: Tensor) -> Callable | None:
    """The kernel's function for z and other tensors; None if torch must compute them."""
    if torch.compiler.is_compiling():  # before anything that Dynamo cannot trace
        return None
    z, planned = tensors[0], assumed() is not None
    if not (z.is_cuda or planned):
        return None
    # Where kernels are only collected, tensors are fake.
    if collected() is None and (front.hidden() or not all(map(_readable, tensors))):
        return None
    if z.dtype not in OPERANDS or z.dim() == 0 or z.shape[-1] % (2 * GATE):
        return None
    find = _kernel.__wrapped__ if planned else _kernel
    return find(activation, gradient, z.dtype, z.get_device())


def _readable(t: Tensor) -> bool:
    """True if a kernel may read the tensor's memory, and it is contiguous, aligned and not empty."""
    if type(t) not in (Tensor, Parameter) or not front.readable(t) or t.is_neg():
        return False
    return t.is_contiguous() and t.numel() > 0 and not t.data_ptr() & 15


@functools.lru_cache(256)
def _kernel(activation: str | None, gradient: bool, dtype: torch.dtype, index: int) -> Callable | None:
    """The kernel's function of a device; None for a GPU without kernels."""
    try:
        arch, _ = device_arch(index)
    except RuntimeError:  # torch has more GPUs
        return None
    facts = GateFacts(arch.target, NAMES[dtype], activation, gradient)
    return None if unsupported(facts) else function_for(facts)
