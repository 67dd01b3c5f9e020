"""Masks by two bounds: causal masks and windows, of rows and columns or of the positions of shards' tiles."""

import functools
from collections.abc import Callable

import torch

from cute_kernels.traced.numbers import DIVISIONS
from cute_kernels.traced.program import PLAIN, Program, operands
from cute_kernels.traced.record import trace

from .element_mask import INPUTS
from .mask_mods import AtPositions, Band


def bounds_of(program: Program) -> int | None:
    """Number of bounds of a program that is one of those in _bands, whatever its numbers; None for others."""
    return _bands().get(_without_numbers(program))


def _without_numbers(program: Program) -> tuple:
    """The operations of a program, each with the places of what it takes, among the inputs and earlier operations.

    Numbers are left out, since equal ones are one node of a program. Of divisors it is kept whether they are constants:
    kernels whose divisors are arguments need more registers.
    """
    places: dict[int, int | str] = {value: value for value in range(len(program.inputs))}
    found: list[tuple] = []
    for value, node in enumerate(program.nodes, len(program.inputs)):
        if node.op in PLAIN:
            places[value] = node.op
            continue
        taken = [places[operand] for operand in operands(node)]
        if node.op not in DIVISIONS:
            taken = ["number" if place in PLAIN else place for place in taken]
        found.append((node.op, node.args[0] if node.op == "load" else None, *taken))
        places[value] = len(program.inputs) + len(found) - 1
    return (*found, places[program.output])


@functools.cache
def _bands() -> dict[tuple, int]:
    """Bands with one bound, of rows and columns, and bands with one or two at the positions of shards' tiles: number of
    bounds by program."""
    cpu = torch.device("cpu")
    q_tiles, k_tiles = (torch.zeros(1, dtype=torch.int32, device=cpu) for _ in range(2))
    # As FlexAttention's users write it, and as patterns do.
    one_bound: list[Callable] = [lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv <= q, Band(None, 1), Band(2, None)]
    of_shards = [(mask, 1) for mask in one_bound] + [(Band(2, 1), 2), (Band(None, None), 0)]
    masks: list[tuple[Callable, int]] = [(mask, 1) for mask in one_bound]
    for mask, bounds in of_shards:
        masks += [(AtPositions(mask, q_tiles, k_tiles, 64, length), bounds) for length in (None, 100)]
    # Not by trace_mask, which would remember these numbers: those of later masks would become arguments.
    return {_without_numbers(trace(mask, "mask_mod", INPUTS, (), cpu).program): bounds for mask, bounds in masks}
