"""Who adds to the sums of dQ, and when: for each query tile, and each part of it that is added by itself, a number in
memory says what has been done.

In one order the number tells whose turn it is. A CTA's turn at a query tile is how many tiles of K add to it before its
own. Those were begun before, so whoever waits waits for one that runs. A number is moved on when the sums are in
memory.

In any order it tells whether there are sums at all: NONE, STORING, THERE. Who finds NONE stores its part in the place
of adding it, so that memory need not hold zeros before, and whoever finds STORING waits. It waits for a CTA that waits
for nobody, since a warp asks for a tile's number when it has added what came before.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.tile.ptx import load_acquire, release_add, replace_acquire

TURN = 4  # bytes of a number
NONE, STORING, THERE = 0, 1, 2


@cute.jit
def wait_for_turn(at: Int64, turn: Int32):
    """Until the number at an address is `turn`; by one thread."""
    seen = load_acquire(at)
    while seen != turn:
        seen = load_acquire(at)


def end_turn(at: Int64, bulk: bool):
    """By a thread whose sums are in memory; `bulk`: it added them by a bulk operation, and has waited for that."""
    release_add(at, 1, bulk)


def claim(at: Int64) -> Int32:
    """The number at an address; if it was NONE it is STORING now, and the caller has to store and to call end_turn."""
    return replace_acquire(at, NONE, STORING)
