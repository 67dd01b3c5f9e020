"""Traces a user's function with torch: what it does to tensors is written down as a Program.

The function is called once with tensors that have a dtype and no data (torch's "meta" device). Every operation on them
passes through `Recorder` as an ATen operation, after torch has done its part: type promotion, methods, torch.* and
torch.nn.functional, composite functions. So what the function means is what torch says it means. What torch cannot
trace raises where it stands: a branch on a value, `and`, `or` and `not`, a chained comparison, `.item()`.
"""

from __future__ import annotations

import linecache
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..runtime.torch_compat import (
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    decomposition_of,
    has_tangent,
    is_composite,
    is_dtensor,
    is_transformed,
    schema_of,
    tree_leaves,
    tree_structure,
    tree_unflatten,
    writes_an_argument,
)
from .aten import CONSTANTS, RULES, aten, names
from .builder import Builder, Element, Value
from .program import DTYPES, TORCH_DTYPES, Program

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Where no line of the user's is
OTHERS = PACKAGE, TORCH, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "functions.py")
MOST_ONES = 4096  # elements
LINE = 100  # characters of a source line in a message
INSTEAD = (
    "its value is not known while the function is compiled. Write torch.where(condition, x, y) for a branch or a "
    "conditional expression, &, | and ~ (with parentheses) for and, or and not, and (a < x) & (x < b) for a < x < b"
)
INDICES = (torch.int32, torch.int64, torch.int16, torch.int8)
FACTORY = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")  # said by the result's dtype
READS_VALUE = ("__bool__", "__int__", "__float__", "__index__", "__array__", "item", "tolist", "numpy")
VALUES = {getattr(Tensor, name) for name in READS_VALUE}
SHAPES = {getattr(Tensor, n) for n in ("size", "numel", "nelement", "dim", "stride", "__len__", "data_ptr")}
SHAPES |= {getattr(Tensor, n).__get__ for n in ("shape", "ndim")}


class TraceError(TypeError):
    """The function does what a kernel cannot; the message says where, and what to write instead."""


class Refused(Exception):
    """The same inside of the trace, where torch would take a TypeError of x * y for a hint to try y * x."""


@dataclass(frozen=True)
class Traced:
    """A function as a Program, and the tensors that it reads, in the order of `program.tensors`.

    `read`: captured tensors whose contents the program depends on, with what was computed of them when it was traced:
    it holds as long as they are not written to.
    `made`: those of `tensors` that the function computed itself.
    `used`: those of them that it did not only detach(), whose gradients would be lost.
    `kind`: hashable facts of the function that a kernel may use in the place of the program.
    """

    program: Program
    tensors: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    used: tuple[Tensor, ...] = ()
    numbers: tuple[int | float, ...] = ()  # of program.arguments
    made: tuple[Tensor, ...] = ()
    kind: Any = None

    @property
    def operands(self) -> tuple:
        """Tensors, and then numbers, that evaluate() takes beside the inputs."""
        return *self.tensors, *self.numbers


def trace(function: Callable, what: str, inputs: Sequence[str], shape: tuple[int, ...], device) -> Traced:
    """Call `function` with tensors of the dtypes `inputs`, and write down what it does.

    Args:
        what: how messages call the function, such as "mask_mod".
        shape: of the inputs and of the result. It has no meaning, and the function may not ask for it.
        device: where the tensors are that the function will be called with.

    Raises:
        TraceError: it does what a kernel cannot, captures a tensor of another device, or returns something other than
            one tensor of the inputs' shape.
    """
    Recorder.__torch_dispatch__ = UNSEEN_BY_DYNAMO if "torch._dynamo" in sys.modules else Recorder.record
    recorder = Recorder(what, inputs, shape, torch.empty(0, device=device).device)  # "cuda" with its number
    # Recorder knows its results by id; a subclass's __torch_function__ would return other objects in their place.
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunctionSubclass(), recorder, _Values(recorder):
        try:
            result = function(*recorder.inputs)
        except Refused as refused:
            raise TraceError(str(refused)) from refused.__cause__
        except Exception as error:
            raise TraceError(f"{what} failed while torch traced it{_line(error)}: {_first(error)}") from error
    try:
        return recorder.finish(result)
    except TypeError as error:
        raise TraceError(f"{what}: {error}") from error


class Recorder(TorchDispatchMode):
    """Writes down every operation on the function's inputs; those on captured tensors alone are done at once."""

    def __init__(self, what: str, inputs: Sequence[str], shape: tuple[int, ...], device: torch.device):
        super().__init__()
        self.what, self.shape, self.device = what, shape, device
        self.builder = Builder(inputs)
        self.inputs = [torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta") for dtype in inputs]
        # By id, with the tensor itself, so that no other gets its id
        self.known: dict[int, tuple[Tensor, Value | Element]] = {}
        for tensor, value in zip(self.inputs, self.builder.inputs, strict=True):
            self.known[id(tensor)] = tensor, value
        self.slots: dict[int, tuple[Tensor, int]] = {}
        self.made: dict[int, Tensor] = {}  # computed of captured tensors, or of none
        self.read: dict[int, Tensor] = {}  # captured tensors that were
        self.used: dict[int, Tensor] = {}  # those of them that were not only detached
        self.composite: str | None = None  # the operation that is being decomposed

    def traced(self, tensor) -> bool:
        return isinstance(tensor, Tensor) and id(tensor) in self.known

    def record(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = tree_leaves((args, kwargs))
        if not any(self.traced(x) for x in flat):
            return self.at_once(func, args, kwargs, flat)
        rule = RULES.get(func)
        if rule is None:
            return self.decomposed(func, args, kwargs)
        spec = tree_structure((args, kwargs))
        elements = func in (aten.index.Tensor, aten.select.int)
        whole = args[0] if elements else None
        try:
            parts = [self.operand(x, x is whole) if isinstance(x, Tensor) else x for x in flat]
            ones = None if elements else _called_with_ones(func, spec, flat)
            out = _called_on(func, spec, flat, "meta") if ones is None else ones
            if out.dtype not in DTYPES:
                raise TypeError(f"its result is {out.dtype}; kernels have {', '.join(TORCH_DTYPES)}")
            if not elements and func not in CONSTANTS and tuple(out.shape) not in (self.shape, ()):
                raise TypeError("its result has another shape; the function is called on one element at a time")
            parts, named = tree_unflatten(parts, spec)
            named = {k: v for k, v in named.items() if k not in FACTORY}
            value = rule(self.builder, DTYPES[out.dtype], *parts, **named)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            self.fail(f"{_called(func)}: {_first(error)}", error)
        out = torch.empty(out.shape, dtype=out.dtype, device="meta")
        self.known[id(out)] = out, value
        return out

    __torch_dispatch__ = record

    def at_once(self, func, args, kwargs, flat):
        """An operation on captured tensors, or on none: its result is a tensor of the program."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.fail(f"{_called(func)} draws random numbers, which would be the same ones in every call")
        if writes_an_argument(func) and not all(id(x) in self.made for x in _written(func, args, kwargs)):
            self.fail(f"{_called(func)} writes to a captured tensor, which happens once, while the function is traced")
        if str(kwargs.get("device")) == "meta":  # asked for on the device of an input
            kwargs = {**kwargs, "device": self.device}
        fresh = func is aten.lift_fresh.default  # made by torch.tensor, so no other reference exists
        captured = [] if fresh else [x for x in flat if isinstance(x, Tensor) and id(x) not in self.made]
        self.read.update((id(x), x) for x in captured)
        if func is not aten.detach.default:
            self.used.update((id(x), x) for x in captured)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Refused(
                f"{self.what} computes {_called(func)} of captured tensors, which a CUDA graph that is being captured "
                "would do again in every replay; compute it outside of the function, or, if the function reads plain "
                "values and tensors alone, call it once before the capture"
            )
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.made[id(x)] = x
        return out

    def decomposed(self, func, args, kwargs):
        """An operation without a rule, by what torch says that it is made of."""
        mutable, composite, table = writes_an_argument(func), is_composite(func), decomposition_of(func)
        if func.namespace == "aten" and (composite or table and not func.is_view and not mutable):
            outer, self.composite = self.composite, self.composite or _called(func)
            with self:
                result = func.decompose(*args, **kwargs) if composite else table(*args, **kwargs)
            self.composite = outer
            return result
        if mutable and self.composite is None:
            self.fail(f"{_called(func)} writes to its argument; write x = f(x) in place of it")
        self.fail(f"{self.composite or _called(func)} has no form in a kernel; there are {', '.join(names())}")

    def operand(self, tensor: Tensor, whole: bool) -> Value | Element | int | float | bool:
        """The operand that represents a tensor in the program; `whole`: the tensor is about to be indexed."""
        if id(tensor) in self.known:
            value = self.known[id(tensor)][1]
            if isinstance(value, Element) and not whole:
                raise TypeError("a captured tensor that is not fully indexed; index it by b, h, q or kv first")
            return value
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            # A number that was made a tensor; or a captured one, whose value counts, unless kernels can read it
            if id(tensor) in self.made or self.device.type != "cpu" or self.shape:
                if id(tensor) not in self.made:
                    self.read[id(tensor)] = self.used[id(tensor)] = tensor
                if self.shape:
                    return tensor.item()  # beside tensors of a dimension torch takes it for a number
                dtype = DTYPES.get(tensor.dtype) or ("float32" if tensor.dtype.is_floating_point else "int64")
                return self.builder.const(tensor.item(), dtype)
        return self.element(tensor, whole)

    def element(self, tensor: Tensor, whole: bool) -> Value | Element:
        if self.shape:
            raise TypeError(
                f"a captured tensor of shape {tuple(tensor.shape)}: an epilogue sees one element at a time. Pass a "
                "bias or a residual to the op, or capture a number, such as float(tensor)"
            )
        if tensor.device != self.device:
            raise TypeError(f"a captured tensor is on {tensor.device}, but the call's are on {self.device}; move it")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"a captured tensor is {tensor.dtype}; kernels read {', '.join(TORCH_DTYPES)}")
        if tensor.dim() and not whole:
            raise TypeError(
                f"a captured tensor of shape {tuple(tensor.shape)} as a whole; index it by b, h, q or kv, as table[q]"
            )
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = tensor, self.builder.tensor(DTYPES[tensor.dtype], tensor.dim())
        slot = self.slots[id(tensor)][1]
        return Element(slot, ()) if tensor.dim() else self.builder.load(slot, ())

    def finish(self, result) -> Traced:
        """The trace, once the function has returned."""
        if isinstance(result, Tensor) and not self.traced(result) and not result.dim() and not self.shape:
            value = self.operand(result, False)
            if not isinstance(value, Value):
                value = self.builder.const(value, DTYPES.get(result.dtype, "float32"))
        elif not self.traced(result) or isinstance(value := self.known[id(result)][1], Element):
            got = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(f"it must return one tensor, computed element by element from its arguments, not {got}")
        elif tuple(result.shape) not in (self.shape, ()):
            raise TypeError("it must return as many elements as it is given")
        tensors = tuple(tensor for tensor, _ in self.slots.values())
        made = tuple(t for t in tensors if id(t) in self.made)
        program, read, used = self.builder.program(value), tuple(self.read.values()), tuple(self.used.values())
        return Traced(program, tensors, read, used, made=made)

    def fail(self, reason: str, cause: Exception | None = None):
        raise Refused(f"{self.what}{_user_line()}: {reason}") from cause


# Torch wraps the method of a mode, so that Dynamo does not trace it, and imports Dynamo for that, which takes seconds.
UNSEEN_BY_DYNAMO = Recorder.__torch_dispatch__


class _Values(TorchFunctionMode):
    """Refuses what asks for a tensor's value or shape, and makes an index of each index tensor.

    Tensors that the function makes on the device of an input are made where the call's tensors are.
    """

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        recorder = self.recorder
        if args and recorder.traced(args[0]):
            if func in VALUES:
                recorder.fail(f"it asks for the value of a tensor ({func.__name__}), but {INSTEAD}")
            if func in SHAPES:
                recorder.fail("it asks for the shape of its argument, which is one element of many at a time")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func not in VALUES and any(map(has_tangent, tensors)):
            recorder.fail("a captured tensor has a tangent, but the call has no forward-mode derivative; detach() it")
        if any(is_dtensor(x) or x.is_nested for x in tensors):
            recorder.fail("a captured tensor is a DTensor or a nested tensor; capture x.to_local() or x.values()")
        if any(map(is_transformed, tensors)):
            recorder.fail(
                "a captured tensor belongs to a transform of torch.func, which would lose its derivative or its batch; "
                "apply it to the result of the call instead"
            )
        if func is Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(recorder.traced(i) for i in indices):
                return self.element(args[0], indices)
        kwargs = kwargs or {}
        if func is Tensor.new_tensor and recorder.traced(args[0]):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": recorder.device})
        if str(kwargs.get("device")) == "meta":
            kwargs = {**kwargs, "device": recorder.device}
        return func(*args, **kwargs)

    def element(self, tensor: Tensor, indices: tuple) -> Tensor:
        """tensor[indices], one index for each of the first dimensions. Torch asks index tensors of no dimension for
        their value."""
        for i in indices:
            if isinstance(i, bool) or not isinstance(i, (int, Tensor)):
                self.recorder.fail(f"an index is {i!r}; index with numbers and integer tensors, one for each dimension")
            if isinstance(i, Tensor) and i.dtype not in INDICES:
                self.recorder.fail(f"an index must be an integer, not {i.dtype}; write torch.where(condition, x, y)")
        if self.recorder.traced(tensor) and not isinstance(self.recorder.known[id(tensor)][1], Element):
            self.recorder.fail("only captured tensors can be indexed")
        for i, extent in zip(indices, tensor.shape, strict=False):
            if isinstance(i, int) and not -extent <= i < extent:
                raise IndexError(f"index {i} is out of bounds for a dimension of {extent} elements")
        return aten.index(tensor, [i if isinstance(i, Tensor) else torch.tensor(i, device="cpu") for i in indices])


def _written(func, args, kwargs) -> list:
    """The arguments that an operation writes to."""
    arguments = schema_of(func).arguments
    named = {a.name: x for a, x in zip(arguments, args, strict=False)} | kwargs
    written = [named.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_leaves(written) if isinstance(x, Tensor)]


def _called_on(func, spec, flat: list, device: str) -> Tensor:
    """An operation on tensors of these shapes and dtypes; on the CPU all elements are 1."""
    make = torch.empty if device == "meta" else torch.ones
    tensors = [make(x.shape, dtype=x.dtype, device=device) if isinstance(x, Tensor) else x for x in flat]
    args, kwargs = tree_unflatten(tensors, spec)
    return func(*args, **kwargs | {"device": device} if "device" in kwargs else kwargs)


def _called_with_ones(func, spec, flat: list) -> Tensor | None:
    """_called_on of the CPU, None if that fails. (Many of torch's meta functions import Dynamo: seconds.)"""
    if sum(x.numel() for x in flat if isinstance(x, Tensor)) > MOST_ONES:
        return None
    try:
        return _called_on(func, spec, flat, "cpu")
    except Exception:
        return None


def _called(func) -> str:
    return f"torch.{str(func).partition('.')[2].partition('.')[0]}"


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _user_line() -> str:
    """The current line of the user's function."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(OTHERS):
            return _where(name, frame.f_lineno)
        frame = frame.f_back
    return ""


def _line(error: Exception) -> str:
    """The line of the user's function that raised an error."""
    found, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(OTHERS):
            found = _where(name, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _where(name: str, number: int) -> str:
    text = linecache.getline(name, number).strip()
    text = text if len(text) <= LINE else text[:LINE] + "..."
    return f", {name}:{number}{f', {text!r}' if text else ''}"
