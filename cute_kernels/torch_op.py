"""torch.library registration of the ops, for torch.compile and opcheck; eager calls bypass it.

An op's schema cannot hold a Python function. A user's function is registered here under the hash of its program, and
the graph contains that name.
"""

import hashlib
import math

import torch

from . import dispatch
from .checks import check_no_grad, narrow, scaled, watched
from .dtypes import default_out_dtype
from .epilogue_gradient import dispatch as epilogue_gradients
from .gradients import gemm_backward, operands_to_save, saved_of
from .matmul.epilogue.terms import traced_epilogue
from .runtime import library
from .runtime.front import check_traced, undisturbed
from .runtime.torch_compat import (
    constant_variable,
    guard_attribute,
    local_variable,
    pending_writes,
    run_in_trace,
    value_of,
)
from .traced import global_state
from .traced.program import Program

_FUNCTIONS: dict[str, object] = {}
ADVICE = (
    "capture the number itself, as in factor = config.factor before lambda z: z * factor, or apply a tensor to the "
    "result, as in gemm(a, b) * scale"
)


def register_function(fn, compiled: bool = False) -> str | None:
    """Register an epilogue function and return its name in a graph, the hash of its program.

    compiled: the graph is reused by later calls, so the function must not depend on a tensor's value.
    """
    if fn is None:
        return None
    if isinstance(fn, Program):
        program = fn
    else:
        traced = traced_epilogue("torch.compile", fn)
        if traced.read and compiled:
            raise RuntimeError(
                "torch.compile: the epilogue function reads the value of a captured tensor, and the compiled graph "
                "would miss its changes; capture a Python number, or apply the tensor to the result, as in "
                "gemm(a, b) * scale"
            )
        program = traced.program
    return register(hashlib.sha256(program.text.encode()).hexdigest(), program)


def register(name: str, function) -> str:
    """Register a function under a name that graphs refer to."""
    _FUNCTIONS[name] = function
    return name


def named_function(fn) -> str | None:
    """Name of an epilogue function in a graph that is being traced, or in a call through the dispatcher.

    The graph is reused for this function as long as the state that the function reads besides its argument is the same.
    """
    if fn is None:
        return None
    names: list[str] = []
    compiled = torch.compiler.is_compiling()
    if compiled:
        run_in_trace(_name_in_trace)
    if len(names) == 0:  # not a trace of Dynamo
        with undisturbed():
            names.append(register_function(fn, compiled))
    return names[0]


def _name_in_trace(context) -> None:
    fn, names = (local_variable(context, name) for name in ("fn", "names"))
    outside: list = []
    try:
        function = value_of(fn, outside)
    except NotImplementedError as error:
        raise TypeError(f"torch.compile: the epilogue function is or captures a {error}; {ADVICE}") from None
    state = None if isinstance(function, Program) else global_state.of_values(outside)
    if state is not None:
        if state.changes:
            raise TypeError(
                f"torch.compile: the epilogue function reads a value whose changes cannot be seen; {ADVICE}"
            )
        if state.reads(*pending_writes()):
            raise RuntimeError(
                "torch.compile: the compiled function writes to a variable, or to an object, that an epilogue function "
                "reads, which happens after the graph has run; write it outside of the compiled function"
            )
        guard_attribute(state.name, state, "version")
    names.items.append(constant_variable(register_function(function, True)))


def function_named(name: str | None):
    """The function registered under a name."""
    if name is None:
        return None
    if name not in _FUNCTIONS:
        raise RuntimeError(f"no epilogue function {name[:12]} in this process; trace the model here first")
    return _FUNCTIONS[name]


def _run(
    a, b, *, out, bias, activation, residual, alpha, beta, out_dtype, epilogue, accumulation_dtype, precision,
    scale_a=None, scale_b=None, use_fast_accum=False,
):  # fmt: skip
    if epilogue is not None:
        epilogue = function_named(epilogue)
    return dispatch.gemm(
        a, b, bias, activation, residual, alpha, beta, out, out_dtype, epilogue, False, scale_a, scale_b,
        use_fast_accum, accumulation_dtype, None, None, precision,
    )  # fmt: skip


def _fake(a, b, *, out_dtype, **terms):
    torch._check(a.dim() >= 2 and b.dim() >= 2, lambda: "gemm: a and b need at least 2 dimensions")
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"gemm: {a.shape[-1]} columns meet {b.shape[-2]} rows")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=out_dtype or default_out_dtype(a.dtype))


def _flops(a, b, *_, **__) -> int:
    """2 M N K, from the operands only; further arguments of the schema are ignored."""
    return 2 * math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])) * a.shape[-2] * a.shape[-1] * b.shape[-1]


TERMS = (
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, float alpha=1.0, float beta=1.0, "
    "ScalarType? out_dtype=None, str? epilogue=None, ScalarType? accumulation_dtype=None, "
    "str? precision=None"
)


def result_to_save(output, activation: str | None, epilogue) -> torch.Tensor | None:
    """The part of an op's output, y or (y, z), that its backward pass reads; None if nothing, or if z is missing."""
    y, z = output if isinstance(output, tuple) else (output, None)
    return {"y": y, "z": z, "": None}[saved_of(activation, epilogue)]


def _setup_context(ctx, inputs, output):
    a, b, bias, activation, residual, alpha, beta, _, epilogue, accumulation_dtype, precision = inputs
    kept = result_to_save(output, activation, epilogue)
    recompute = kept is None and saved_of(activation, epilogue)  # backward recomputes z from all inputs
    saved = (a, b, bias, residual) if recompute else (*operands_to_save(a, b, ctx.needs_input_grad), bias, None)
    ctx.save_for_backward(*saved, kept)
    ctx.like = a.shape, a.dtype, b.shape, b.dtype
    ctx.terms, ctx.sums = (activation, alpha, beta, epilogue), (accumulation_dtype, precision)


def _backward(ctx, dy, *_):
    activation, alpha, beta, epilogue = ctx.terms
    count, gemm = len(ctx.needs_input_grad), torch.ops.cute_kernels.gemm  # trailing defaults are not counted
    (needs_a, needs_b, needs_bias, _, needs_residual, *_), (_, precision) = (
        (*ctx.needs_input_grad, *(False,) * 11),
        ctx.sums,
    )
    a, b, bias, residual, kept = ctx.saved_tensors
    if kept is None and saved_of(activation, epilogue):
        kept = gemm(a, b, bias, None, residual, alpha, beta, dy.dtype, None, *ctx.sums)

    def product(a, b, alpha):
        return gemm(a, b, None, None, None, alpha, precision=precision)

    saved, needed = (a, b, bias, kept), (needs_a, needs_b, needs_bias, needs_residual)
    terms = saved, ctx.like, activation, alpha, beta, epilogue, needed
    da, db, dbias, dresidual = gemm_backward(product, epilogue_gradient, *terms, dy)
    return (da, db, dbias, None, dresidual, *(None,) * 6)[:count]


def _run_with_z(a, b, *, out, epilogue, **terms):
    return dispatch.gemm(a, b, out=out, epilogue=function_named(epilogue), **terms, with_z=True)


def _fake_with_z(a, b, **terms):
    return _fake(a, b, **terms), _fake(a, b, **terms)


GRADIENT = _setup_context, _backward
library.register("cute_kernels::gemm", "Tensor a, Tensor b", TERMS, _run, _fake, gradient=GRADIENT, flops=_flops)
library.register_pair(
    "cute_kernels::gemm_and_z", "Tensor a, Tensor b", TERMS, _run_with_z, _fake_with_z, GRADIENT, _flops
)


def _run_epilogue_gradient(dy, saved, activation, epilogue, sums):
    dz, total = epilogue_gradients.epilogue_gradient(dy, saved, activation, function_named(epilogue), sums)
    return dz, dy.new_empty(0) if total is None else total


def _fake_epilogue_gradient(dy, saved, activation, epilogue, sums):
    wide = torch.promote_types(dy.dtype, torch.float32)
    total = dy.new_empty(dy.shape[-1], dtype=wide) if sums else dy.new_empty(0)
    return torch.empty_like(dy, memory_format=torch.contiguous_format), total


library.define(
    "cute_kernels::epilogue_gradient",
    "(Tensor dy, Tensor saved, str? activation, str? epilogue, bool sums) -> (Tensor, Tensor)",
    _run_epilogue_gradient,
    _fake_epilogue_gradient,
)


def epilogue_gradient(dy, saved, activation, epilogue: str | None, sums: bool):
    """epilogue_gradient.dispatch.epilogue_gradient as an op; `epilogue` is a registered name."""
    dz, total = torch.ops.cute_kernels.epilogue_gradient(dy, saved, activation, epilogue, sums)
    return dz, total if sums else None


def wants_z(activation, epilogue, *tensors) -> bool:
    """True if a call that is being traced must store z for the backward pass."""
    return saved_of(activation, epilogue) == "z" and watched(*tensors)


SCALED_TERMS = f"Tensor? scale_a=None, Tensor? scale_b=None, bool use_fast_accum=False, {TERMS}"
library.register("cute_kernels::scaled_gemm", "Tensor a, Tensor b", SCALED_TERMS, _run, _fake, flops=_flops)


def _run_narrow(a, b, *, amax, out, epilogue, **terms):
    largest = a.new_empty(int(amax), dtype=torch.float32)
    y = dispatch.gemm(a, b, out=out, epilogue=function_named(epilogue), amax=largest if amax else None, **terms)
    return y, largest


def _fake_narrow(a, b, *, amax, **terms):
    return _fake(a, b, **terms), a.new_empty(int(amax), dtype=torch.float32)


# amax is a separate result, (1,) or, if not requested, (0,).
NARROW, NARROW_TERMS = "cute_kernels::narrow_gemm", f"Tensor? scale_out=None, bool amax=False, {SCALED_TERMS}"
library.register(NARROW, "Tensor a, Tensor b", NARROW_TERMS, _run_narrow, _fake_narrow, more="Tensor", flops=_flops)


def called_narrow(name: str, inputs: tuple, out, terms: tuple, scale_out, amax):
    """Call an op with NARROW_TERMS; stores the largest magnitude of the result to amax."""
    y, largest = library.call(name, inputs, out, (scale_out, amax is not None, *terms))
    if amax is not None:
        amax.copy_(largest)
    return y


def traced_gemm(
    a, b, bias, activation, residual, alpha, beta, out, out_dtype, epilogue, scale_a=None, scale_b=None,
    use_fast_accum=False, accumulation_dtype=None, scale_out=None, amax=None, precision=None,
):  # fmt: skip
    """gemm inside a torch.compile trace, and for calls through the dispatcher."""
    check_traced("gemm", a, b, bias, residual, out)
    named = named_function(epilogue)
    terms = bias, activation, residual, float(alpha), float(beta), out_dtype, named, accumulation_dtype, precision
    if narrow(out, out_dtype, scale_out, amax):
        check_no_grad("gemm with an FP8 output", a, b, bias, residual, scale_a, scale_b, scale_out, amax)
        scaled_terms = scale_a, scale_b, use_fast_accum, *terms
        return called_narrow(NARROW, (a, b), out, scaled_terms, scale_out, amax)
    if scaled(a, scale_a, scale_b, use_fast_accum):
        check_no_grad("gemm with FP8 operands", a, b, bias, residual, scale_a, scale_b)
        terms = scale_a, scale_b, use_fast_accum, *terms
        return library.call("cute_kernels::scaled_gemm", (a, b), out, terms)
    if out is None and wants_z(activation, epilogue, a, b, bias, residual):
        return library.call("cute_kernels::gemm_and_z", (a, b), None, terms)[0]
    return library.call("cute_kernels::gemm", (a, b), out, terms)
