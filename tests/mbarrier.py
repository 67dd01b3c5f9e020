"""Protocols of kernels, played on the host: mbarriers, and roles that run in any order."""

import random
from collections.abc import Callable, Iterator


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are there; waiting looks at a parity."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def settle(self):
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def arrive(self, announced: int = 0):
        self.pending -= 1
        self.bytes += announced
        self.settle()

    def receive(self, size: int):
        self.bytes -= size
        self.settle()

    def wait(self, parity: int) -> Iterator[None]:
        """Until the phase of this parity is over: the one before the current is, as in hardware."""
        while self.phase % 2 == parity:
            yield


def play(roles: list[Iterator[None]], flights: list, land: Callable, seed: int, most: int = 100_000) -> None:
    """Run the roles, generators, until all have ended, some much faster than others; copies in flight land in any
    order. AssertionError where they hang."""
    draw = random.Random(seed)
    pace = [draw.choice((1, 1, 10)) for _ in roles]
    for _ in range(most):
        if not roles and not flights:
            return
        if flights and draw.random() < 0.4:
            land(*flights.pop(draw.randrange(len(flights))))
        elif roles:
            at = draw.choices(range(len(roles)), pace)[0]
            try:
                next(roles[at])
            except StopIteration:
                del roles[at], pace[at]
    raise AssertionError(f"hung with {len(roles)} roles waiting")
