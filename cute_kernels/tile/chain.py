"""Kernels launched one after the other, of which the next may begin before the one before has ended.

A kernel that `leads` lets the next one of its stream be launched as soon as all of its own CTAs run. A kernel that
`follows` is launched with the attribute that makes use of it (CUDA's programmatic dependent launch, sm_90): it reads
weights beforehand, and waits until the kernel before has ended, and all of its writes are seen, before it touches
anything else. So two rules hold for who sets these:

- The first kernel of a chain does not follow. Whatever wrote the weights has ended before it begins.
- Nothing that writes weights is launched between two kernels of a chain.

What is launched after a chain without the attribute waits for its last kernel, which has waited for all others.
"""

import cutlass.cute as cute


def chained(facts) -> None:
    """The beginning of a kernel that has nothing to read before it waits. facts: with `leads` and `follows`."""
    if facts.leads:
        cute.arch.griddepcontrol_launch_dependents()
    if facts.follows:
        cute.arch.griddepcontrol_wait()
