"""An mbarrier, for protocols that tests play on the host."""


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

    def done(self, parity: int) -> bool:
        """Whether the phase of this parity is over: true for the one before the current, as in hardware."""
        return self.phase % 2 != parity
