"""A name for what a Python function computes, the same in every process: it keys compiled kernels."""

import hashlib
import types

KNOWN_MODULES = ("cute_kernels", "cutlass", "math", "torch", "numpy")  # their versions are part of every kernel's key


def function_key(fn) -> str:
    """Hash of a plain function's code, defaults, closure and the globals it reads, functions among them followed.

    Raises TypeError for callables whose behaviour is not in their code (partials, bound methods, callable objects)
    and for captured values that have no stable text.
    """
    if not isinstance(fn, types.FunctionType):
        raise TypeError(
            f"an epilogue function must be a plain Python function (def or lambda), got {type(fn).__name__}; wrap it "
            "in one"
        )
    return hashlib.sha256(_describe(fn, set()).encode()).hexdigest()


def _describe(value, seen: set) -> str:
    if isinstance(value, types.FunctionType):
        if id(value) in seen:
            return "recursion"
        seen.add(id(value))
        closure = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, closure]
        parts += [value.__globals__[n] for n in sorted(_names(value.__code__)) if n in value.__globals__]
        return "function(" + ",".join(_describe(part, seen) for part in parts) + ")"
    if isinstance(value, types.CodeType):
        names = (value.co_names, value.co_varnames, value.co_freevars)
        constants = ",".join(_describe(constant, seen) for constant in value.co_consts)
        return f"code({value.co_code.hex()},{names},{constants})"
    if isinstance(value, types.ModuleType):
        if value.__name__.split(".")[0] not in KNOWN_MODULES:
            raise TypeError(
                f"an epilogue function may use the modules {', '.join(KNOWN_MODULES)}, not {value.__name__}: what it "
                "reads from another cannot key a kernel; bind the value to a variable first"
            )
        return f"module({value.__name__})"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_describe(item, seen) for item in value)}]"
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, type) and value.__module__.split(".")[0] in (*KNOWN_MODULES, "builtins"):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, frozenset, type(Ellipsis))):
        return repr(value)
    raise TypeError(
        f"an epilogue function may capture numbers, strings, functions and modules, not a {type(value).__name__}"
    )


def _names(code: types.CodeType) -> set[str]:
    """Global and attribute names in a code object and in those nested in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
