"""Programmatic dependent launch (sm_90): a secondary kernel may start before its primary has finished.

A primary kernel (`leads`) allows the next kernel of its stream to launch as soon as all of its own CTAs run. A
secondary kernel (`follows`) is launched with the attribute for it. It may read weights at once, and waits until the
primary has finished and its writes are visible before it accesses other memory. Callers that set these flags must
follow two rules:

- The first kernel of a chain is not a secondary kernel, so that earlier writes to the weights have finished.
- No kernel that writes weights is launched between two kernels of a chain.

A kernel that is launched after a chain without the attribute waits for the chain's last kernel, which has waited for
all others.
"""

import cutlass.cute as cute


def chained(facts) -> None:
    """Prologue of a kernel that reads no memory before it waits. facts: parameters with `leads` and `follows`."""
    if facts.leads:
        cute.arch.griddepcontrol_launch_dependents()
    if facts.follows:
        cute.arch.griddepcontrol_wait()
