"""torch.library registration of the ops, for torch.compile and opcheck; eager calls bypass it.

An op's schema cannot hold a Python function. A user's function is registered here under the hash of its program, and
the graph contains that name.
"""

import functools
import hashlib
import math
from typing import Any

import torch

from . import dispatch
from .arguments import OP_TERMS, TERMS, GemmArgs
from .checks import check_no_grad, narrow, scaled, watched
from .dtypes import default_out_dtype
from .epilogue_gradient import dispatch as epilogue_gradients
from .gradients import gemm_backward, operands_to_save, saved_of
from .matmul.epilogue.terms import traced_epilogue
from .runtime import library
from .runtime.arguments import with_keywords
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
    names: list[str | None] = []
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


def _fake(a, b, *, out_dtype, **terms):
    torch._check(a.dim() >= 2 and b.dim() >= 2, lambda: "gemm: a and b need at least 2 dimensions")
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"gemm: {a.shape[-1]} columns meet {b.shape[-2]} rows")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=out_dtype or default_out_dtype(a.dtype))


def _flops(a, b, *_, **__) -> int:
    """2 M N K, from the operands only; further arguments of the schema are ignored."""
    return 2 * math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])) * a.shape[-2] * a.shape[-1] * b.shape[-1]


def result_to_save(output, activation: str | None, epilogue) -> torch.Tensor | None:
    """The part of an op's output, y or (y, z), that its backward pass reads; None if nothing, or if z is missing."""
    y, z = output if isinstance(output, tuple) else (output, None)
    return {"y": y, "z": z, "": None}[saved_of(activation, epilogue)]


def _setup_context(ctx, inputs, output):
    args = _args(inputs)
    kept = result_to_save(output, args.activation, args.epilogue)
    recompute = kept is None and saved_of(args.activation, args.epilogue)  # backward recomputes z from all inputs
    operands = args[:2] if recompute else operands_to_save(args.a, args.b, ctx.needs_input_grad)
    ctx.save_for_backward(*operands, args.bias, args.residual if recompute else None, kept)
    ctx.like = args.a.shape, args.a.dtype, args.b.shape, args.b.dtype
    without: dict[str, Any] = dict.fromkeys(("a", "b", *TENSORS))
    ctx.args = args._replace(**without)


def _backward(ctx, dy, *_):
    args, gemm = ctx.args, torch.ops.cute_kernels.gemm
    a, b, bias, residual, kept = ctx.saved_tensors
    if kept is None and saved_of(args.activation, args.epilogue):
        plain = {"activation": None, "epilogue": None, "out_dtype": dy.dtype}
        kept = gemm(*_inputs(args._replace(a=a, b=b, bias=bias, residual=residual, **plain)))

    def product(a, b, alpha):
        return gemm(*_inputs(GemmArgs(a, b, alpha=alpha, precision=args.precision)))

    needs = dict(zip(INPUTS, ctx.needs_input_grad, strict=False))  # trailing defaults are not counted
    names = "a", "b", "bias", "residual"
    gradients = gemm_backward(
        product, epilogue_gradient, (a, b, bias, kept), ctx.like, args.activation, args.alpha, args.beta, args.epilogue,
        tuple(needs.get(name, False) for name in names), dy,
    )  # fmt: skip
    found = dict(zip(names, gradients, strict=True))
    return tuple(found.get(name) for name in needs)


def _args(inputs: tuple) -> GemmArgs:
    """The arguments of a call of the op."""
    return GemmArgs(**dict(zip(INPUTS, inputs, strict=False)))


def _inputs(args: GemmArgs) -> tuple:
    """The arguments of the op's schema."""
    return tuple([getattr(args, name) for name in INPUTS])


def _with_amax(values: tuple):
    """(y, amax) of gemm."""
    args = GemmArgs._make(values)
    amax = args.a.new_empty(1, dtype=torch.float32)
    return dispatch.gemm(args._replace(amax=amax)), amax


def _fake_with_z(a, b, **terms):
    return _fake(a, b, **terms), _fake(a, b, **terms)


def _fake_with_amax(a, b, **terms):
    return _fake(a, b, **terms), a.new_empty(1, dtype=torch.float32)


def _register(name: str, run, fake, **options) -> None:
    """Register an op with the arguments of gemm. run: a function of a tuple of GemmArgs' fields."""
    run = with_keywords(GemmArgs, run, "a, b", function_named)
    library.register(name, "Tensor a, Tensor b", TERMS, run, fake, flops=_flops, **options)


INPUTS = "a", "b", *OP_TERMS
TENSORS = tuple(name for name in GemmArgs._fields[3:9] if name in INPUTS)
GRADIENT = _setup_context, _backward
_register("cute_kernels::gemm", dispatch.gemm, _fake, gradient=GRADIENT)
_register("cute_kernels::gemm_and_amax", _with_amax, _fake_with_amax, more="Tensor")
library.register_pair(
    "cute_kernels::gemm_and_z", "Tensor a, Tensor b", TERMS,
    with_keywords(GemmArgs, functools.partial(dispatch.gemm, with_z=True), "a, b", function_named),
    _fake_with_z, GRADIENT, _flops,
)  # fmt: skip


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


def traced_gemm(args: GemmArgs):
    """gemm inside a torch.compile trace, and for calls through the dispatcher."""
    check_traced("gemm", *args.tensors)
    if args.source is not None:
        raise RuntimeError(
            "gemm: source is not supported under torch.compile, torch.func and dispatch modes; call gemm outside of "
            "them, or in a function decorated with @torch.compiler.disable"
        )
    out, amax = args.out, args.amax
    if narrow(out, args.out_dtype, args.scale_out, amax):
        check_no_grad("gemm with an FP8 output", *args.inputs, amax)
    elif scaled(args.a, args.scale_a, args.scale_b, args.use_fast_accum):
        check_no_grad("gemm with FP8 operands", *args.inputs)
    saves_z = out is None and wants_z(args.activation, args.epilogue, *args.inputs)
    args = args._replace(alpha=float(args.alpha), beta=float(args.beta), epilogue=named_function(args.epilogue))
    name = "gemm_and_z" if saves_z else "gemm" if amax is None else "gemm_and_amax"
    return called(f"cute_kernels::{name}", _inputs(args)[:2], out, _inputs(args)[2:], amax)


def called(name: str, inputs: tuple, out, terms: tuple, amax):
    """Call an op with one or two results; returns the first. A second one is copied to amax, if that is not None."""
    result = library.call(name, inputs, out, terms)
    if amax is not None:
        amax.copy_(result[1])
    return result[0] if isinstance(result, tuple) else result
