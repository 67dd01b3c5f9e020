"""Turns: the sums of dQ in one order, whatever CTAs come first.

For each query tile, and each part of it that is added by itself, a number in memory tells whose turn it is. A CTA's
turn at a query tile is how many tiles of K before its own are seen by it. CTAs of lower tiles are begun first, so
whoever waits waits for one that runs. A number is moved on when the sums are in memory.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.tile.ptx import load_acquire, release_add

TURN = 4  # bytes of a number


@cute.jit
def wait_for_turn(at: Int64, turn: Int32):
    """Until the number at an address is `turn`; by one thread."""
    seen = load_acquire(at)
    while seen != turn:
        seen = load_acquire(at)


def end_turn(at: Int64, bulk: bool):
    """By a thread whose sums are in memory; `bulk`: it added them by a bulk operation, and has waited for that."""
    release_add(at, 1, bulk)
