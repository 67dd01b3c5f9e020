"""The ops as torch.library knows them, for torch.compile and opcheck; eager calls go around it.

A Python function cannot cross an op's schema: a user's is registered here by what it computes, and the graph carries
that name.
"""

import hashlib
import types

import torch

from . import eager
from .matmul.terms import epilogue_program
from .runtime import library

_FUNCTIONS: dict[str, object] = {}


@torch.compiler.assume_constant_result
def register_function(fn) -> str | None:
    """The name under which a graph refers to an epilogue function: that of its program."""
    if fn is None:
        return None
    program = epilogue_program("torch.compile", fn)
    return register(hashlib.sha256(program.text.encode()).hexdigest(), program)


def register(name: str, function) -> str:
    """Keep what a graph will ask for by this name."""
    _FUNCTIONS[name] = function
    return name


def named_function(fn) -> str | None:
    """register_function inside a trace, which must not serve another function of the same code by the same graph."""
    if fn is None:
        return None
    depend_on(fn)
    return register_function(fn)


def depend_on(fn) -> None:
    """Make the graph that is being traced serve this function alone.

    By itself a graph depends on a function's code, not on what it captures. A function made inside the trace has
    nothing to guard: the numbers that it captures are constants of the graph, with guards of their own.

    Raises:
        ValueError: fn was made inside the trace and captures a function from outside that captures values itself.
    """
    if ID_IS_GUARDED:
        id(fn)
    else:
        torch._dynamo.comptime.comptime(_guard_identity)
    _refuse_unguarded(fn, fn)


ID_IS_GUARDED = torch.__version__ >= "2.13"  # before, id() of a function was a constant that nothing guarded


def _guard_identity(context) -> None:
    """What a traced id(fn) does from torch 2.13 on, for depend_on's fn."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    source = context.get_local("fn")._i_will_not_complain_if_bc_breaks_VariableTracker().realize().source
    if source is not None:  # None: made inside the trace
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


@torch.compiler.assume_constant_result
def _refuse_unguarded(fn, again) -> None:
    """Twice the same argument: Dynamo builds one made inside the trace anew each time, one from outside is itself."""
    if fn is again:
        return
    for value, value_again in zip(_captured(fn), _captured(again), strict=True):
        if not isinstance(value, types.FunctionType):
            continue
        defaults = "<locals>" in value.__qualname__ and (value.__defaults__ or value.__kwdefaults__)
        if value is value_again and (value.__closure__ or defaults):
            raise ValueError(
                f"under torch.compile {fn.__name__!r}, made inside the compiled function, captures the function "
                f"{value.__name__!r} from outside, which captures values itself: the graph would serve another such "
                "function too. Make both outside of the compiled function, or both inside, or refer to "
                f"{value.__name__!r} as a global or by its module"
            )
        _refuse_unguarded(value, value_again)


def _captured(fn):
    """What a function's closure and defaults hold, one by one, those of lists and tuples too."""
    pending = [cell.cell_contents for cell in fn.__closure__ or ()]
    pending += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending.extend(value)
        else:
            yield value


def function_named(name: str | None):
    """What was registered under a name."""
    if name is None:
        return None
    if name not in _FUNCTIONS:
        raise RuntimeError(f"no function {name[:12]} in this process; trace the model here first")
    return _FUNCTIONS[name]


def _run(a, b, *, out, epilogue, **terms):
    return eager.gemm(a, b, out=out, epilogue=function_named(epilogue), **terms)


def _fake(a, b, *, out_dtype, **terms):
    torch._check(a.dim() >= 2 and b.dim() >= 2, lambda: "gemm: a and b need at least 2 dimensions")
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"gemm: {a.shape[-1]} columns meet {b.shape[-2]} rows")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)


TERMS = (
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, float alpha=1.0, float beta=1.0, "
    "ScalarType? out_dtype=None, str? epilogue=None"
)
library.register("cute_kernels::gemm", "Tensor a, Tensor b", TERMS, _run, _fake)


def traced_gemm(a, b, bias, activation, residual, alpha, beta, out, out_dtype, epilogue):
    """gemm inside a torch.compile trace."""
    terms = bias, activation, residual, float(alpha), float(beta), out_dtype, named_function(epilogue)
    return library.call("cute_kernels::gemm", (a, b), out, terms)
