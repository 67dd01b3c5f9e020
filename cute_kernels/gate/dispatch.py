"""The gate of a layer in training, and its gradient: by kernels, or by torch in calls that these do not support.

A kernel takes plain, contiguous BF16 and FP16 tensors of a GPU, at addresses that are multiples of 16 bytes. For these
torch.compile traces a registered op, and dispatch modes see it. Transforms of torch.func, forward-mode AD, subclasses
and second derivatives have torch's operations. The kernels compute in FP32 and round once; torch rounds each
operation's result.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import reference
from ..checks import check_no_grad
from ..dtypes import NAMES, OPERANDS, accumulator
from ..epilogue_gradient.dispatch import derivative_of
from ..reference import GATE, halves
from ..runtime import front, library
from ..runtime.device import assumed, collected, device_arch
from ..runtime.families import function_for, unsupported
from ..runtime.torch_compat import dispatch_modes, forward_ad, functorch_active, increment_version, is_tracing
from ..runtime.transforms import differentiable_once
from ..traced.derivative import followed_by
from ..traced.evaluate import evaluate
from . import family  # noqa: F401 (importing it registers the family)
from .config import GateFacts


def gate(z: Tensor, activation: str | None) -> Tensor:
    """activation(g) * u (..., H) of z (..., 2 H), whose columns alternate, 64 of g and 64 of u. Differentiable.

    Autograd saves z alone.
    """
    function = _function(activation, False, z)
    if function is None:
        compute = torch.ops.cute_kernels.gate if _takes_op(z) else reference.gate
        return compute(z, activation)
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
    if function is None:
        out.copy_(reference.gate(z, activation))
    else:
        increment_version((out,))
        function(_matrix(z), _matrix(out), None)


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
        create_graph = torch.is_grad_enabled()
        if torch.compiler.is_compiling() and not create_graph:  # by compiled autograd
            return torch.ops.cute_kernels.gate_gradient(z, dh, ctx.activation), None, None
        if not create_graph and (front.readable(dh) or collected() is not None):
            return _gradient(z, dh, ctx.activation), None, None
        with torch.enable_grad():  # by torch's operations, which are differentiable again and have batching rules
            z = z.view_as(z) if create_graph else z.detach().requires_grad_()  # a view has no hooks of z
            h = reference.gate(z, ctx.activation)
            return torch.autograd.grad(h, z, dh, create_graph=create_graph)[0], None, None


_apply = super(torch.autograd.Function, _Gate).apply  # without torch.func's part, some 3 us a call


def _forward(z: Tensor, function: Callable) -> Tensor:
    h = z.new_empty(*z.shape[:-1], z.shape[-1] // 2)
    function(_matrix(z), _matrix(h), None)
    return h


def _gradient(z: Tensor, dh: Tensor, activation: str | None) -> Tensor:
    if front.readable(dh) and (not dh.is_contiguous() or dh.data_ptr() & 15):
        dh = dh.clone(memory_format=torch.contiguous_format)
    function = _function(activation, True, z, dh)
    if function is None:
        return _gradient_by_torch(z, dh, activation)
    dz = torch.empty_like(z)
    function(_matrix(z), _matrix(dh), _matrix(dz))
    return dz


def _matrix(t: Tensor) -> Tensor:
    """(rows, columns); a contiguous tensor may have any stride along a dimension of one row, hence the first view."""
    return t if t.dim() == 2 and t.shape[0] > 1 else t.view(-1).view(-1, t.shape[-1])


def _gradient_by_torch(z: Tensor, dh: Tensor, activation: str | None) -> Tensor:
    """The gradient of z, computed as the kernels do; without autograd, which is off in a registered op."""
    wide = accumulator(z.dtype)
    g, u = halves(z.to(wide))
    dh = dh.to(wide).unflatten(-1, (-1, GATE))
    slope, value = (
        evaluate(program, [g]) for program in (derivative_of(activation, None), followed_by(activation, None))
    )
    return torch.stack([slope * (dh * u), value * dh], -2).flatten(-3).to(z.dtype)


def _check(op: str, z: Tensor, h: Tensor, dz: Tensor | None = None) -> None:
    """Raise the errors of gate_into and gate_gradient_into; h is also dh."""
    _check_shapes(op, z, h, dz)
    check_no_grad(op, z, h, dz)


def _check_shapes(op: str, z: Tensor, h: Tensor, dz: Tensor | None = None) -> None:
    if z.dim() == 0 or z.shape[-1] % (2 * GATE):
        raise ValueError(f"{op}: z is {tuple(z.shape)}; it must be (..., 2 H) with H a multiple of {GATE}")
    shape = torch.Size((*z.shape[:-1], z.shape[-1] // 2))
    for t, expected in ((h, shape), (dz, z.shape)):
        if t is not None and (t.shape != expected or t.dtype is not z.dtype or t.device != z.device):
            raise (TypeError if t.dtype is not z.dtype else ValueError)(
                f"{op}: a tensor of shape {tuple(t.shape)}, {t.dtype} on {t.device}; with z {tuple(z.shape)} it must "
                f"be {tuple(expected)}, {z.dtype} on {z.device}"
            )


def _takes_op(z: Tensor) -> bool:
    """True if the registered op computes the gate: under torch.compile, and for dispatch modes."""
    if functorch_active() or forward_ad._current_level >= 0 or not _on_gpu(z):
        return False
    return torch.compiler.is_compiling() or (dispatch_modes() > 0 and not is_tracing() and front.readable(z))


def _on_gpu(z: Tensor) -> bool:
    """True for a plain tensor on a GPU with a dtype and columns that kernels take."""
    return type(z) in (Tensor, Parameter) and z.is_cuda and z.dtype in OPERANDS and z.shape[-1] % (2 * GATE) == 0


def _function(activation: str | None, gradient: bool, *tensors: Tensor) -> Callable | None:
    """The kernel's function for z and other tensors; None if torch must compute them."""
    if torch.compiler.is_compiling():  # before anything that Dynamo cannot trace
        return None
    z, assumes_gpu = tensors[0], assumed() is not None
    if not (z.is_cuda or assumes_gpu):
        return None
    # Where kernels are only collected, tensors are fake.
    if collected() is None and (front.hidden() or not all(map(_readable, tensors))):
        return None
    if z.dtype not in OPERANDS or z.dim() == 0 or z.shape[-1] % (2 * GATE):
        return None
    find = _kernel.__wrapped__ if assumes_gpu else _kernel
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


def _run(z: Tensor, activation: str | None) -> Tensor:
    function = _function(activation, False, z)
    return reference.gate(z, activation).contiguous() if function is None else _forward(z, function)


def _run_gradient(z: Tensor, dh: Tensor, activation: str | None) -> Tensor:
    _check_shapes("gate_gradient", z, dh)
    return _gradient(z, dh, activation).contiguous()


def _fake(z: Tensor, activation: str | None) -> Tensor:
    return z.new_empty(*z.shape[:-1], z.shape[-1] // 2)


def _fake_gradient(z: Tensor, dh: Tensor, activation: str | None) -> Tensor:
    _check_shapes("gate_gradient", z, dh)
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    z, ctx.activation = inputs
    ctx.save_for_backward(z)


def _backward(ctx, dh: Tensor) -> tuple:
    return torch.ops.cute_kernels.gate_gradient(ctx.saved_tensors[0], dh, ctx.activation), None


def _setup_gradient(ctx, inputs, output) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


@differentiable_once
def _second_derivative(ctx, ddz: Tensor) -> tuple:
    with torch.enable_grad():
        z, dh = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        (dz,) = torch.autograd.grad(reference.gate(z, ctx.activation), z, dh, create_graph=True)
    return *torch.autograd.grad(dz, (z, dh), ddz, allow_unused=True), None


library.define("cute_kernels::gate", "(Tensor z, str? activation) -> Tensor", _run, _fake, (_setup_context, _backward))
library.define(
    "cute_kernels::gate_gradient", "(Tensor z, Tensor dh, str? activation) -> Tensor", _run_gradient, _fake_gradient,
    (_setup_gradient, _second_derivative),
)  # fmt: skip
