"""Bits that the lanes of a warp set in the same words of shared memory, combined before the atomics."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


@cute.jit
def combine(sWords: cute.Tensor, at: Int32, bit: Int32) -> Int32:
    """Set the bits of all lanes with the same `at` as the first lane that has one; returns -1 for these lanes, and `at`
    for others."""
    waiting = Uint32(cute.arch.vote_ballot_sync(at >= 0))
    leader = Int32(cute.arch.popc((waiting - 1) & ~waiting)) & 31
    same = at == cute.arch.shuffle_sync(at, leader)
    own = Int32(0)
    if same:
        own = bit
    every = cute.arch.warp_redux_sync(own, "or")
    if (at >= 0) & (cute.arch.lane_idx() == leader):
        cute.arch.atomic_or(sWords.iterator + at, every)
    if same:
        at = Int32(-1)
    return at
