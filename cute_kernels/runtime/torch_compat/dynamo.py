"""Inside a trace of Dynamo: variables of user functions, and guards of what these capture.

Names of torch._dynamo are looked up inside functions: importing it takes seconds.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable)


def uncompiled(function: Function) -> Function:
    """Keep Dynamo from compiling frames of a function, and of what it calls; a decorator.

    It is for functions that traces do not reach. Where Dynamo gives up a frame, it tries those that the frame calls.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # of its frames, and of those below
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def run_in_trace(function) -> None:
    """Call function(context) while Dynamo traces the call of run_in_trace; do nothing outside of such a trace.

    `function` is a module-level function. It reads its caller's variables with local_variable(context, name).
    """
    torch._dynamo.comptime.comptime(function)


def order_of_matmul(context) -> None:
    """For run_in_trace: let Dynamo distinguish W @ b from b @ W if W is no tensor and has a __torch_function__.

    Dynamo turns the reversed operator x - t into Tensor.__rsub__(t, x), by a table without an entry for W @ b, which
    becomes Tensor.matmul(b, W) like b @ W. With Tensor.__rmatmul__ in the table, Dynamo traces the function again.
    """
    from torch._dynamo import exc
    from torch._dynamo.variables.builtin import BUILTIN_TO_TENSOR_RFN_MAP, populate_builtin_to_tensor_fn_map

    if operator.matmul not in BUILTIN_TO_TENSOR_RFN_MAP:
        populate_builtin_to_tensor_fn_map()
        BUILTIN_TO_TENSOR_RFN_MAP[operator.matmul] = Tensor.__rmatmul__
        raise exc.UnspecializeRestartAnalysis(restart_reason="W @ b of an object that is no tensor")


def forward_operator(func, args: tuple) -> tuple:
    """(torch.matmul, (W, b)) for Tensor.__rmatmul__(b, W), which Dynamo finds in no dict; else (func, args)."""
    return (torch.matmul, args[::-1]) if getattr(func, "__name__", None) == "__rmatmul__" else (func, args)


def local_variable(context, name: str):
    """Dynamo's VariableTracker of a local variable of the function that called run_in_trace."""
    return _variable(context.get_local(name, stacklevel=1))  # 0 is run_in_trace


def _variable(found):
    return found._i_will_not_complain_if_bc_breaks_VariableTracker().realize()


def constant_variable(value):
    """Dynamo's VariableTracker of a Python constant."""
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)


def load_cell(cell):
    """Dynamo's VariableTracker of the contents of a closure cell in the running trace."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.side_effects.load_cell(cell)


def value_of(variable, outside: list, made: dict | None = None):
    """The Python value of a VariableTracker, which the graph is specialized to.

    Functions and containers that were created inside the trace are created again. The functions, objects, classes and
    modules that the value references are appended to `outside`, and (globals, code) of a function created inside: the
    graph depends on their identity, not on their contents.

    Raises:
        NotImplementedError: it has no value before the graph runs, like a tensor; the message names its type.
    """
    from torch._dynamo import variables
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.functions import NestedUserFunctionVariable

    variable, made = variable.realize(), {} if made is None else made

    def value(part):
        return value_of(part, outside, made)

    if isinstance(variable, variables.SymNodeVariable):
        return variable.evaluate_expr()
    if isinstance(variable, NestedUserFunctionVariable):
        if id(variable) not in made:  # otherwise a function that references itself
            captured: Any = variable.closure
            cells = captured.items if captured else ()
            code, scope, closure = variable.get_code(), variable.get_globals(), tuple(types.CellType() for _ in cells)
            made[id(variable)] = function = types.FunctionType(code, scope, code.co_name, closure=closure)
            for cell, content in zip(closure, cells, strict=True):
                cell.cell_contents = value(load_cell(content))
            function.__defaults__ = value(variable.defaults) if variable.defaults else None
            function.__kwdefaults__ = value(variable.kwdefaults) if variable.kwdefaults else None
            outside.append((scope, code))
        return made[id(variable)]
    if isinstance(variable, variables.UserMethodVariable):
        outside.append(variable.fn)
        return types.MethodType(variable.fn, value(variable.obj))
    if isinstance(variable, variables.FunctoolsPartialVariable):
        keywords = {name: value(part) for name, part in variable.keywords.items()}
        return functools.partial(value(variable.func), *map(value, variable.args), **keywords)
    if type(variable) is variables.ConstDictVariable:
        return {key: value(part) for key, part in variable.keys_as_python_constant().items()}
    if type(variable) in (variables.ListVariable, variables.TupleVariable):
        return variable.python_type()(map(value, variable.items))
    is_object = isinstance(variable, variables.UserDefinedObjectVariable)
    if is_object and variable.source is None:
        raise NotImplementedError(f"{variable.python_type().__name__} created inside the compiled function")
    try:
        found = variable.value if is_object else variable.as_python_constant()
    except NotImplementedError:
        raise NotImplementedError(variable.python_type().__name__) from None
    if variable.source is not None and (is_object or callable(found)):
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        if not made and isinstance(found, types.FunctionType) and _guard_captured(found, variable.source):
            outside.append((found.__globals__, found.__code__))
            return found
    outside.append(found)
    return found


def _guard_captured(function: types.FunctionType, source) -> bool:
    """Guard the numbers and strings that a function captures or has as defaults.

    Returns False if it also has other values, or the traced function writes to them.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, GetItemSource

    cells, defaults, written = function.__closure__ or (), function.__defaults__ or (), pending_writes()[0]
    if function.__kwdefaults__ or any(id(cell) in written for cell in cells):
        return False
    try:
        values = [*(cell.cell_contents for cell in cells), *defaults]
    except ValueError:  # an empty cell
        return False
    if not all(type(value) in (bool, int, float, str, type(None)) for value in values):
        return False
    closure = AttrSource(source, "__closure__")
    sources: list = [AttrSource(GetItemSource(closure, i), "cell_contents") for i in range(len(cells))]
    sources += [GetItemSource(AttrSource(source, "__defaults__"), i) for i in range(len(defaults))]
    for part in sources:
        install_guard(part.make_guard(GuardBuilder.EQUALS_MATCH))
    return True


def guard_attribute(name: str, owner, attribute: str) -> None:
    """Guard the graph that is being traced on the current value of an attribute of the owner.

    The graph holds a reference to the owner, one per name.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, GlobalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    name = f"{name}_c{output.compile_id}"
    if name not in output.installed_globals:
        output.install_global_unsafe(name, owner)
        install_guard(AttrSource(GlobalSource(name), attribute).make_guard(GuardBuilder.EQUALS_MATCH))


def entry_variable(module: str, table: str, key: str, attribute: str, changes: bool = False):
    """Dynamo's VariableTracker of getattr(module.table[key], attribute), read at each call of the graph.

    An int is a constant of the graph until its value changes; Dynamo treats other global ints as constants forever.
    With `changes` it is an input of the graph at once. In torch.export an int is a constant.
    """
    from torch._dynamo.source import AttrSource, DictGetItemSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.builder import VariableBuilder
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    tx = InstructionTranslator.current_tx()
    source = AttrSource(DictGetItemSource(AttrSource(tx.import_source(module), table), key), attribute)
    value, builder = getattr(getattr(sys.modules[module], table)[key], attribute), VariableBuilder(tx, source)
    if type(value) is not int:
        return builder(value)
    if torch.compiler.is_exporting():
        return constant_variable(value)
    return builder.wrap_symint(value, dynamism=DimDynamic.DYNAMIC if changes else None)


def pending_writes() -> tuple[set[int], set[tuple[int, str]], set[str]]:
    """(ids of containers and cells, (id, attribute) of objects, names of globals) that the traced function writes to.

    Dynamo performs these writes after the graph has run.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import CellVariable, NewGlobalVariable, PythonModuleVariable
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    containers: set = set()
    attributes: set = set()
    names: set = set()
    for key, variable in effects.id_to_variable.items():
        kind = variable.mutation_type
        if isinstance(kind, ValueMutationExisting) and kind.is_modified:
            containers.add(key)
        elif isinstance(variable, CellVariable):
            if effects.has_pending_mutation(variable):
                containers.add(key)
        elif isinstance(kind, AttributeMutationExisting):
            fields = effects.store_attr_mutations.get(variable, ())
            attributes.update((key, name) for name in fields)
            if isinstance(variable, (NewGlobalVariable, PythonModuleVariable)):
                names.update(fields)
    return containers, attributes, names
