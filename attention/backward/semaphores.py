"""Semaphores that order the CTAs' accumulation into dQ, for deterministic results.

Each query tile, and each part of it that is added separately, has a semaphore in global memory. It counts the CTAs that
have added their part. A CTA's turn at a query tile is the number of KV tiles that add to it before its own. Those were
started earlier, so a CTA only waits for CTAs that are running. A semaphore is incremented once the part is in memory.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.tile.ptx import load_acquire, release_add

TURN = 4  # bytes of a semaphore


@cute.jit
def wait_for_turn(at: Int64, turn: Int32):
    """Spin until the semaphore at address `at` equals `turn`; called by one thread."""
    seen = load_acquire(at)
    while seen != turn:
        seen = load_acquire(at)


def end_turn(at: Int64, bulk: bool):
    """Increment the semaphore at address `at`. The calling thread's accumulation is in memory.

    bulk: it was added by a bulk copy, which the thread has waited for.
    """
    release_add(at, 1, bulk)
