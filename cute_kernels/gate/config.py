"""Traits of the gate kernels."""

from dataclasses import dataclass
from typing import ClassVar

THREADS = 256  # of a CTA
UNROLL = 2  # vectors of h of a thread, whose loads are in flight together: 4 forward, 6 backward


@dataclass(frozen=True)
class GateFacts:
    """`gradient`: dz of z and dh instead of h of z."""

    family: ClassVar[str] = "gate"
    arch: str
    dtype: str  # of all tensors
    activation: str | None
    gradient: bool
