"""Private torch APIs, for torch 2.11 to 2.14. No module outside of this folder names one (tests/test_house.py).

dynamo.py has what runs inside a trace, distributed.py what torch.distributed lacks; both are imported from here.

A name used on the hot path is bound here to the C function itself, so that a caller pays no attribute chain. Names of
torch._dynamo are looked up inside functions: importing it takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad  # ._current_level is -1 outside of a dual level
from torch.nn.modules.module import _has_any_global_hook as has_global_module_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

from .distributed import (
    all_gather_single,
    has_mapped_memory,
    has_unreduced_gradient,
    is_dtensor,
    may_share_a_device,
    process_group_of,
    reduce_scatter_single,
    resize_fully_sharded,
    root_mesh,
    symmetric_buffer,
    tensor_at,
    timeout_ms,
)
from .dynamo import (
    constant_variable,
    entry_variable,
    forward_operator,
    guard_attribute,
    load_cell,
    local_variable,
    order_of_matmul,
    pending_writes,
    run_in_trace,
    uncompiled,
    value_of,
)

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
    "assert_on_gpu",
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
    "process_group_of",
    "raw_stream",
    "reduce_scatter_single",
    "resize_fully_sharded",
    "root_mesh",
    "run_in_trace",
    "schema_arguments",
    "schema_of",
    "has_mapped_memory",
    "has_unreduced_gradient",
    "may_share_a_device",
    "symmetric_buffer",
    "tensor_at",
    "timeout_ms",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
    "uncompiled",
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
    """A context, or a function's decorator, without TorchDispatchModes."""
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
    """True if the tensor carries, or under torch.func.jvp may carry, a tangent of forward-mode AD.

    Raises:
        RuntimeError: Dynamo traces the call, with tensors that have none; then it runs the call without tracing.
    """
    if forward_ad._current_level < 0:
        return False
    if torch.compiler.is_compiling():
        raise RuntimeError("tangents of forward-mode AD are not known while torch.compile traces a function")
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


def assert_on_gpu(true: Tensor, text: str) -> None:
    """Assert on the GPU that a bool tensor of one element is True, without waiting for it."""
    torch._assert_async(true, text)


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


def lower_to_function(op: OpOverload, collective: bool = False) -> None:
    """Make inductor's code call torch.ops.namespace.name.function, set by library.py, instead of the operator, and keep
    inductor from reusing the memory of integer and bool arguments for later results of a graph.

    Such a reuse would change the contents of the same Python tensor without changing its version. Ops that cache
    tensors derived from it (a pattern's tables) would then use stale ones. Does nothing until inductor is imported. An
    op's fake implementation calls it; inductor runs that before it lowers a graph.

    collective: True for an op in which processes wait for each other. Inductor keeps it, and runs it and other
        collectives in the order of the graph, which must be that of all processes; others it orders by the memory of
        their results.
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
                if collective:
                    made.__class__ = ir._CollectiveKernel  # a FallbackKernel that torch._inductor.comms orders
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
