"""Element masks in compiled kernels: the traced program of a mask_mod, and the tensors that it reads.

mask_mod(b, h, q, kv) is any function that torch can trace on integer scalars, such as FlexAttention's: a plain Python
function or a frozen dataclass of mask_mods.py. Captured numbers are constants of the kernel, or arguments if they
change (traced/numbers.py). Captured tensors are arguments, so a kernel reads their contents when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.traced.builder import Builder
from cute_kernels.traced.evaluate import evaluate
from cute_kernels.traced.memo import MOST, traced
from cute_kernels.traced.numbers import as_arguments
from cute_kernels.traced.program import Program
from cute_kernels.traced.record import Traced, trace

from .mask_mods import And, Band, ValidKeys

INDICES = ("b", "h", "q", "kv")
INPUTS = ("int32",) * 4
MOST_PROGRAMS = 1024
B_INPUT, H_INPUT, Q_INPUT, KV_INPUT = range(4)  # numbers of values


@dataclass(frozen=True)
class MemberKind:
    """Facts of the mask of selected KV blocks without packed sequences (selected/blocks.py). Its only tensor are the
    words of Member. Kernels may use these facts in the place of the program.

    block_size: 64 or 128.
    packed: rows of a token; a divisor or a multiple of 64.
    share: number of heads that have the same list.
    causal: True if a token attends to keys up to its position; the last token's is the last key.
    """

    block_size: int
    packed: int
    share: int
    causal: bool


@dataclass(frozen=True)
class ElementMask:
    """The program of a mask; two masks are equal if they compute the same."""

    program: Program
    contiguous: tuple[bool, ...]  # per tensor that is read: True if its last dimension has stride 1
    members: MemberKind | None = field(default=None, kw_only=True)

    @property
    def tensors(self) -> list[tuple[str, int, int | None]]:
        """(dtype, rank, mode of stride 1) of each tensor argument of the kernel, see `element_mask`."""
        pairs = zip(self.program.tensors, self.contiguous, strict=True)
        return [(dtype, max(rank, 1), max(rank, 1) - 1 if last else None) for (dtype, rank), last in pairs]

    def indexes(self, value: int) -> bool:
        """True if an input is used directly as an index, and so must not exceed a tensor's extent."""
        return any(index == value for _, _, index in self.program.direct)


@dataclass(frozen=True, eq=False)
class BoundMask:
    """A snapshot of a mask_mod when it was traced, with the tensors that it read; itself a mask_mod."""

    traced: Traced

    def __call__(self, b, h, q, kv):
        return evaluate(self.traced.program, (b, h, q, kv), self.traced.operands)


def trace_mask(mask_mod: Callable, device: torch.device) -> Traced:
    """The traced mask_mod, cached for each state of its captured values.

    Raises:
        TypeError: it uses an operation that kernels do not support, which the message names with the line, or does not
            return a bool tensor; or a captured tensor has an unsupported dtype, or is on another device.
    """
    if type(mask_mod) is BoundMask:
        return mask_mod.traced
    if type(mask_mod) is And and type(mask_mod.first) is BoundMask:
        return _joined(mask_mod.first.traced, trace_mask(mask_mod.second, device))
    if type(mask_mod) is ValidKeys:
        return bound(mask_mod, (ValidKeys, mask_mod.side, device), (mask_mod.sizes,)).traced
    return _traced(mask_mod, device)


def _traced(mask_mod: Callable, device: torch.device) -> Traced:
    """trace_mask of any function."""
    pair = type(mask_mod) is And and type(mask_mod.second) is Band
    result = traced(mask_mod, "mask_mod", INPUTS, (), device, _of_pair if pair else None)
    if result.program.dtype != "bool":
        raise TypeError(
            f"mask_mod must return a bool tensor, got a tensor of torch.{result.program.dtype}; write it with "
            "comparisons, &, | and ~"
        )
    return result


def _of_pair(mask_mod: And, device: torch.device) -> Traced:
    """The trace of each part by itself, as in compiled calls: so both have the same numbers as arguments."""
    return _joined(trace_mask(mask_mod.first, device), trace_mask(mask_mod.second, device))


def _joined(first: Traced, second: Traced) -> Traced:
    """The conjunction of both masks."""
    if second.tensors or second.read:
        raise AssertionError("the second mask of a pair must be a Band")
    program, numbers = _conjunction(first.program, second.program), (*first.numbers, *second.numbers)
    return Traced(program, first.tensors, first.read, first.used, numbers, made=first.made)


@lru_cache(maxsize=MOST)
def _conjunction(first: Program, second: Program) -> Program:
    """`first & second`; `second` reads no tensors."""
    t = Builder(first.inputs)
    t.tensors = list(first.tensors)
    seen = [t.append(program) for program in (first, second)]
    return t.program(t.op("and", "bool", *seen))


_PROGRAMS: dict[tuple, tuple] = {}  # key -> (Program, places of what it reads among the tensors)
NUMBER = 2**29 - 1  # in the mask_mod of `bound`: stands for a number that is an argument of the program


def bound(
    mask_mod: Callable,
    key: tuple,
    tensors: tuple[Tensor, ...],
    kind: MemberKind | None = None,
    number: int | None = None,
) -> BoundMask:
    """The traced mask_mod of these tensors, which are new in each call. Tracing takes 2 ms, so it is done once for each
    key: all else that mask_mod depends on. Its constants remain constants, whatever their values in other traces.

    kind: the facts of a mask of selected blocks. number: the value of NUMBER in this call; None: mask_mod has none.
    """
    known = _PROGRAMS.get(key)
    if known is None:
        found = trace(mask_mod, "mask_mod", INPUTS, (), tensors[0].device)
        places = [next(i for i, t in enumerate(tensors) if t is read) for read in found.tensors]
        chosen = [i for i, node in enumerate(found.program.nodes) if node.op == "const" and node.args[0] == NUMBER]
        if len(chosen) != (number is not None):
            raise AssertionError("a mask_mod has NUMBER once, as it is, if the call has a number")
        if len(_PROGRAMS) >= MOST_PROGRAMS:
            _PROGRAMS.clear()
        known = _PROGRAMS[key] = as_arguments(found.program, chosen) if chosen else found.program, places
    program, places = known
    numbers = () if number is None else (number,)
    return BoundMask(Traced(program, tuple(tensors[i] for i in places), (), numbers=numbers, kind=kind))


def element_mask(mask_mod: Callable | None, device: torch.device) -> tuple[ElementMask | None, tuple]:
    """The compile-time mask of a kernel, and its call arguments: views of the captured tensors, then numbers.

    Raises:
        TypeError: see trace_mask.
    """
    return (None, ()) if mask_mod is None else for_kernel(trace_mask(mask_mod, device))


def for_kernel(mask: Traced) -> tuple[ElementMask, tuple]:
    """The same for a traced mask."""
    views = views_of(mask.tensors)
    element = ElementMask(mask.program, tuple(t.stride(-1) == 1 for t in views), members=mask.kind)
    return element, (*views, *mask.numbers)


def views_of(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Captured tensors as kernel arguments: TVM-FFI does not support bool, and a kernel's tensor has at least one
    dimension."""
    views = (t.view(torch.uint8) if t.dtype is torch.bool else t for t in tensors)
    return tuple(t.detach().view(1) if t.dim() == 0 else t.detach() for t in views)


def check_extents(
    mask: ElementMask, tensors: Sequence[Tensor], batch: int, heads: int, lengths: tuple, what: str = "mask_mod"
) -> None:
    """Check that every tensor indexed directly by b, h, q or kv, the last four inputs, has an element for each index.

    Raises:
        IndexError: one has fewer.
    """
    extents = batch, heads, *lengths
    for slot, dim, value in mask.program.direct:
        extent, index = tensors[slot].shape[dim], value - len(mask.program.inputs) + len(INDICES)
        if extent < extents[index]:
            raise IndexError(
                f"{what} indexes dimension {dim} of a tensor of shape {tuple(tensors[slot].shape)} with "
                f"{INDICES[index]}, which goes up to {extents[index] - 1}"
            )


def call(mask_mod: Callable, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Evaluate the element mask on int32 tensors that broadcast: bool, with a shape that broadcasts to their common
    one.

    Raises:
        TypeError: see trace_mask.
        IndexError: an index is outside a captured tensor.
    """
    mask = trace_mask(mask_mod, q.device)
    return evaluate(mask.program, (b, h, q, kv), mask.operands)
