"""Masks by two bounds: causal masks and windows, of rows and columns or of the positions of shards' tiles."""

import functools
from collections.abc import Callable

import torch

from cute_kernels.traced.program import PLAIN, Program
from cute_kernels.traced.record import trace

from .element_mask import INPUTS
from .mask_mods import AtPositions, Band


def is_band(program: Program) -> bool:
    """True if a program is that of a Band with one bound, of q >= kv, or of AtPositions of any Band, whatever their
    numbers."""
    return _without_numbers(program) in _bands()


def _without_numbers(program: Program) -> tuple:
    """The operations of a program, and what they take. Numbers are alike, constants or arguments."""
    nodes = tuple([("number",) if node.op in PLAIN else (node.op, node.args) for node in program.nodes])
    return nodes, program.output


@functools.cache
def _bands() -> frozenset[tuple]:
    cpu = torch.device("cpu")
    q_tiles, k_tiles = (torch.zeros(1, dtype=torch.int32, device=cpu) for _ in range(2))
    bands = Band(None, 1), Band(2, None), Band(2, 1), Band(None, None)
    masks: list[Callable] = [lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv <= q]  # as FlexAttention's users do
    masks += bands[:2]
    masks += (AtPositions(band, q_tiles, k_tiles, 64, length) for band in bands for length in (None, 100))
    # Not by trace_mask, which would remember these numbers: those of later masks would become arguments.
    return frozenset(_without_numbers(trace(mask, "mask_mod", INPUTS, (), cpu).program) for mask in masks)
