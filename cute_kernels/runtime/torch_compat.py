"""Private torch APIs, for torch 2.11 to 2.14. No other module of the packages names one (tests/test_house.py).

A name used on the hot path is bound here to the C function itself, so that a caller pays no attribute chain. Names of
torch._dynamo are looked up inside functions: importing it takes seconds.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad  # ._current_level is -1 outside of a dual level
from torch.nn.modules.module import _has_any_global_hook as has_global_module_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

# Compares the metadata of tensors in one C++ call. Without it call_plan.py compares in Python; calls take 2 us longer.
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

__all__ = [
    "DisableFuncTorch",
    "DisableTorchFunctionSubclass",
    "OpOverload",
    "OpOverloadPacket",
    "TensorGuards",
    "TorchDispatchMode",
    "all_gather_single",
    "any_autocast",
    "compiled_with_cuda_graphs",
    "constant_variable",
    "count_flops",
    "current_device",
    "decomposition_of",
    "dispatch_modes",
    "empty_on_cuda",
    "entry_variable",
    "forward_ad",
    "forward_operator",
    "functorch_active",
    "gather_and_consume",
    "guard_attribute",
    "has_global_module_hook",
    "has_memory",
    "has_tangent",
    "in_graph_trace",
    "increment_version",
    "is_composite",
    "is_dtensor",
    "is_grads_batched",
    "is_transformed",
    "is_tracing",
    "load_cell",
    "local_variable",
    "lower_to_function",
    "order_of_matmul",
    "overrides_dispatch",
    "pending_writes",
    "produce_and_exchange",
    "pull_rows",
    "raw_stream",
    "reduce_scatter_single",
    "resize_fully_sharded",
    "run_in_trace",
    "schema_arguments",
    "schema_of",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
    "value_of",
    "with_batch",
    "without_batch",
    "without_modes",
    "writes_an_argument",
]

# ---------------------------------------------------------------------- modes and transforms

functorch_active = torch._C._are_functorch_transforms_active  # () -> bool: inside grad, vmap, jvp, ... of torch.func
DisableFuncTorch = torch._C._DisableFuncTorch  # a context manager: no transform of torch.func inside of it
# A context manager: operations ignore the `__torch_function__` of tensor subclasses; TorchFunctionModes still see them
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

dispatch_modes = torch._C._len_torch_dispatch_stack  # () -> number of TorchDispatchModes that are active
_INFRA_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())  # fake, proxy, functional
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # (tensor) -> bool: of a transform of torch.func
is_tracing = torch._C._is_tracing  # () -> bool: inside torch.jit.trace
_DISABLED = torch._C._disabled_torch_dispatch_impl

# () -> bool: autocast is enabled for some device. 0.1 us; torch.is_autocast_enabled(t.device.type) takes 0.8
any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def in_graph_trace() -> bool:
    """True under FakeTensorMode, make_fx or functionalization: new tensors have no memory or belong to a graph."""
    return dispatch_modes() > 0 and any([torch._C._get_dispatch_mode(key) is not None for key in _INFRA_MODES])


def without_modes():
    """A context without TorchDispatchModes."""
    return _disable_current_modes()


def fake_tensor_mode():
    """A FakeTensorMode that also accepts tensors with memory. Importing it takes a second."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(mode, tensor: Tensor) -> Tensor:
    """The fake tensor of a FakeTensorMode with the metadata of `tensor`, always the same; a fake tensor itself."""
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def overrides_dispatch(tensor: Tensor) -> bool:
    """True if a subclass handles ops itself, so that it may have no memory."""
    return type(tensor).__torch_dispatch__ is not _DISABLED or not has_memory(tensor)


def has_memory(tensor: Tensor) -> bool:
    """True if the tensor has memory on its device that a kernel may read."""
    if tensor.is_meta or tensor.is_nested or type(tensor).__torch_dispatch__ is not _DISABLED:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return False
    return torch._C._has_storage(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """True if the tensor carries, or under torch.func.jvp may carry, a tangent of forward-mode AD."""
    if forward_ad._current_level < 0:
        return False
    functorch = torch._C._functorch
    levels = _jvp_levels()
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor) and functorch.maybe_get_level(tensor) in levels:
            return True
        tensor = functorch.get_unwrapped(tensor)
    return not levels and forward_ad.unpack_dual(tensor).tangent is not None


def _jvp_levels() -> set[int]:
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return {i.level() for i in stack if i.key() == torch._C._functorch.TransformType.Jvp}


def is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def resize_fully_sharded(parameter: Tensor, room: Tensor) -> None:
    """Let FSDP2 know that a sharded parameter has another size in dimension 0; nothing if FSDP2 does not manage it.

    Args:
        parameter: a DTensor whose local tensor is the beginning of `room`.
        room: as many entries as the largest shard has.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    for reference in list(getattr(states, "_module_state_mapping", {}).values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for managed in getattr(group, "fsdp_params", ()):
                if managed.sharded_param is parameter:
                    _resize_managed(managed, parameter, room)
                    return


def _resize_managed(managed: Any, parameter: Any, room: Tensor) -> None:
    """Set all that an FSDPParam derives from the size of its parameter, which is sharded at present."""
    local = parameter._local_tensor
    managed._orig_size, managed.sharded_size = parameter.size(), local.size()
    managed._contiguous_orig_stride, managed.contiguous_sharded_stride = parameter.stride(), local.stride()
    managed.padded_sharded_param_size, managed._sharded_param_data = room.size(), room.view(-1)
    managed._sharding_spec = parameter._spec
    if managed.post_forward_mesh_info is not None:
        managed._init_sharded_post_forward_param_metadata(torch.empty(parameter.shape, device="meta"))
    managed.all_gather_outputs = []
    if hasattr(managed, "_unsharded_param"):
        del managed._unsharded_param


# ---------------------------------------------------------------------- collectives beside GEMMs


def all_gather_single(out: Tensor, x: Tensor, group: Any) -> None:
    """torch.distributed.all_gather_single, which is all_gather_into_tensor in torch before 2.13."""
    import torch.distributed as dist

    found: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found(out, x, group=group)


def reduce_scatter_single(out: Tensor, x: Tensor, group: Any, async_op: bool = False) -> Any:
    """torch.distributed.reduce_scatter_single, which is reduce_scatter_tensor in torch before 2.13."""
    import torch.distributed as dist

    found: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return found(out, x, group=group, async_op=async_op)


def gather_and_consume(x: Tensor, consume: Callable[[Tensor, int], Any], gathered: Tensor, group: Any) -> None:
    """All-gather x (t, ...) into `gathered` (ranks * t, ...); call consume(part, rank) for each rank's part of it.

    On CUDA parts are copied through symmetric memory, and each is consumed on one of two streams as it arrives.
    """
    import torch.distributed as dist

    if x.is_cuda:
        from torch.distributed._symmetric_memory import _pipelined_multi_all_gather_and_consume as pipelined

        pipelined([x], lambda parts, rank: consume(parts[0], rank), [gathered], group.group_name)
        return
    all_gather_single(gathered, x, group)
    for rank, part in enumerate(gathered.chunk(dist.get_world_size(group))):
        consume(part, rank)


def produce_and_exchange(produce: Callable[[int, Tensor], Any], summands: Tensor, group: Any) -> Tensor:
    """Sum over ranks of their summands of this rank's rows; produce(rank, out) computes those for another rank.

    Args:
        summands: (ranks * t, ...), overwritten.

    Returns:
        (t, ...). On CUDA each rank's summand is sent through symmetric memory while the next one is computed.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    if summands.is_cuda:
        from torch.distributed._symmetric_memory import _pipelined_produce_and_all2all as pipelined

        pipelined(produce, summands, group.group_name)
        return summands.unflatten(0, (ranks, -1)).sum(0)
    for rank, part in enumerate(summands.chunk(ranks)):
        produce(rank, part)
    total = torch.empty_like(summands[: len(summands) // ranks])
    reduce_scatter_single(total, summands, group)
    return total


BARRIER_MS = 600_000  # after which a rank that waits for one that has died ends with an error, as NCCL does


def pull_rows(x: Tensor, parts: list[Tensor], begins: list[int], room: int, group: Any) -> Callable[[], None]:
    """Start to copy rows of other ranks' x through symmetric memory of CUDA GPUs, by copy engines on a second stream.

    Args:
        x: (n, N) contiguous, the rows that this rank offers.
        parts: for each rank, the rows (m, N) to fill with that rank's rows begins[rank] and on; its own: empty.
        room: the largest n of all ranks, the same on each.

    Returns:
        A function after which the current stream has all parts. Call it before the next pull of the group.
    """
    from torch.distributed._symmetric_memory import _get_backend_stream, get_symm_mem_workspace

    width, current = x.shape[1], torch.cuda.current_stream()
    size = room * width * x.element_size()
    memory = get_symm_mem_workspace(group.group_name, min_size=1 << size.bit_length())  # grows rarely
    memory.barrier(0, BARRIER_MS)  # all ranks have read what was in it
    if len(x):
        memory.get_buffer(memory.rank, x.shape, x.dtype).copy_(x)
    memory.barrier(1, BARRIER_MS)
    stream = _get_backend_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for step in range(1, memory.world_size):
            rank = (memory.rank + step) % memory.world_size
            if len(part := parts[rank]):
                part.copy_(memory.get_buffer(rank, part.shape, x.dtype, begins[rank] * width))
    return lambda: torch.cuda.current_stream().wait_stream(stream)


# ---------------------------------------------------------------------- batched gradients

MOST_LEVELS = 8  # of nested is_grads_batched


def is_grads_batched(tensor: Tensor | None) -> bool:
    """True of a gradient that autograd.grad(is_grads_batched=True) or jacobian(vectorize=True) batches: these have a
    vmap of their own, unlike torch.func's."""
    return tensor is not None and tensor.layout is torch.strided and not torch._C._has_storage(tensor)


def without_batch(tensor: Tensor) -> tuple[Tensor, int]:
    """(the plain tensor with the batch in front, the level of its vmap) of such a gradient."""
    for level in range(1, MOST_LEVELS):
        found = torch._remove_batch_dim(tensor, level, 1, 0)
        if not is_grads_batched(found):
            return found, level
    raise RuntimeError("gradients batched more than once (nested is_grads_batched=True) are not supported")


def with_batch(tensor: Tensor, level: int) -> Tensor:
    """The inverse of without_batch."""
    return torch._add_batch_dim(tensor, 0, level)


# ---------------------------------------------------------------------- streams and tensors


def _raw_stream(index: int) -> int:
    """Return the handle of a device's current stream, on a torch without the C function."""
    return torch.cuda.current_stream(index).cuda_stream


raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)  # (device index) -> handle of its stream
current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # () -> index of the current CUDA device


# (shape, strides, dtype) -> tensor on the current CUDA device; inductor's, which takes 0.6 us less than torch's
empty_on_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
# (tuple of tensors): counts a write to each, but for those of inference mode. 0.1 us; torch.autograd.graph's takes 0.3
increment_version = torch._C._increment_version


def compiled_with_cuda_graphs() -> bool:
    """True if torch.compile has made code that runs as CUDA graphs: it imports this module then."""
    return "torch._inductor.cudagraph_trees" in sys.modules


# ---------------------------------------------------------------------- operators


def count_flops(packet: OpOverloadPacket, flops: Callable) -> None:
    """Let FlopCounterMode count flops(*args, **kwargs) for an operator, also a mode that is active already."""
    from torch.utils import flop_counter

    def formula(*args, out_val=None, **kwargs):
        return flops(*args, **kwargs)

    flop_counter.register_flop_formula(packet, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry.setdefault(packet, formula)


_LOWERED: set[OpOverload] = set()  # ops that lower_to_function has changed


def lower_to_function(op: OpOverload) -> None:
    """Make inductor's code call torch.ops.namespace.name.function, set by library.py, instead of the operator, and keep
    inductor from reusing the memory of integer and bool arguments for later results of a graph.

    Such a reuse would change the contents of the same Python tensor without changing its version. Ops that cache
    tensors derived from it (a pattern's tables) would then use stale ones. Does nothing until inductor is imported. An
    op's fake implementation calls it; inductor runs that before it lowers a graph.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if op in _LOWERED or not hasattr(lowering, "make_fallback"):
        return
    from torch._inductor import ir
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag

    def kept(x):
        if not isinstance(x, ir.TensorBox) or x.get_dtype().is_floating_point:
            return x
        found = ir.ExternKernel.realize_input(x)
        V.graph.never_reuse_buffers.add(found.get_name())
        return found if isinstance(found, ir.TensorBox) else ir.TensorBox(found)

    def lower(*args, **kwargs):
        args, kwargs = tree_map(kept, (args, kwargs))
        count = len(V.graph.operations)
        result = fallback(*args, **kwargs)
        for made in V.graph.operations[count:]:
            if isinstance(made, ir.FallbackKernel) and made.op_overload is op:
                made.set_python_kernel_name(f"torch.ops.{str(op).rpartition('.')[0]}.function")
        return result

    if op not in lowering.lowerings:  # as inductor does for an unknown op
        tag = get_layout_constraint_tag(op, with_default=True)
        lowering.make_fallback(op, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
    fallback, lowering.lowerings[op] = lowering.lowerings[op], lower
    _LOWERED.add(op)


def schema_arguments(schema: str) -> list:
    """The arguments of an operator's schema; each has `name` and `default_value`."""
    return torch._C.parse_schema(schema).arguments


def schema_of(op: OpOverload):
    """The schema of an operator; its `arguments` have `name` and `alias_info`."""
    return op._schema


def writes_an_argument(op: OpOverload) -> bool:
    """True if the operator writes to one of its arguments in place."""
    return op._schema.is_mutable


def is_composite(op: OpOverload) -> bool:
    """True if the operator is composite, so that op.decompose() runs others."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def decomposition_of(op: OpOverload):
    """torch's registered decomposition of the operator, or None."""
    return torch._decomp.decomposition_table.get(op)


# ---------------------------------------------------------------------- inside a trace of Dynamo


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
