"""The block-sparse ops under the transforms of torch.func: grad, vjp, jacrev, and vmap of them.

Autograd functions in the form that transforms take, of tensors alone: a BsrMatrix would hold those of another level.
torch binds the arguments of this form anew in each call, which takes long; so other calls have gradients.Bsr.
"""

from types import SimpleNamespace

import torch

from cute_kernels.runtime.torch_compat import DisableFuncTorch

from . import torch_op


class Transformed(torch.autograd.Function):
    """The registered op, differentiable once."""

    generate_vmap_rule = True  # the registered ops run once for each item

    @staticmethod
    def forward(*inputs):
        return torch.ops.sparse_collective.bsr(*inputs)

    setup_context = staticmethod(torch_op._setup_context)

    @staticmethod
    def backward(ctx, dy):
        found = iter(Backward.apply(ctx.call, ctx.needs_input_grad, *ctx.saved_tensors, dy))
        return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


class Backward(torch.autograd.Function):
    """The gradients that are needed, from the registered ops of them, which are not differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, needed, *tensors):
        *saved, dy = tensors
        ctx = SimpleNamespace(call=call, needs_input_grad=needed, saved_tensors=saved)
        return tuple(gradient for gradient in torch_op._backward(ctx, dy) if gradient is not None)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):  # without it, second derivatives would be zeros
        raise RuntimeError("the block-sparse ops are differentiable once; this is a derivative of their gradients")


def transformed_bsr(op, W, b, bias, activation, residual, out, epilogue, groups=None, *, accumulation_dtype=None):
    """bsr_matmul, bsr_linear or bsr_grouped_linear while a transform of torch.func is active."""
    if out is not None:
        raise RuntimeError(f"{op}: under a transform of torch.func it has no out=; leave it out")
    with DisableFuncTorch():  # an epilogue function is traced with tensors of its own
        inputs, terms = torch_op.flat(op, W, b, bias, activation, residual, epilogue, groups, accumulation_dtype)
    return Transformed.apply(*inputs, *terms)
