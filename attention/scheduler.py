"""Which query tile a CTA works on."""

from dataclasses import dataclass

from cutlass import Int32


@dataclass(frozen=True)
class QueryTile:
    """One tile of queries: number m of head h of item b; that head's keys and values are head h_kv of K and V."""

    m: Int32
    h: Int32
    b: Int32
    h_kv: Int32


@dataclass(frozen=True)
class QueryScheduler:
    """Query tiles of one head after the other, the last ones first: where rows see what is before them those are the
    longest, and the heads' keys and values stay in L2."""

    tiles_m: Int32
    heads: Int32
    batch: Int32
    shared: Int32  # heads of Q that share a head of K and V

    @property
    def count(self) -> Int32:
        return self.tiles_m * self.heads * self.batch

    def decode(self, index) -> QueryTile:
        m = self.tiles_m - 1 - index % self.tiles_m
        rest = index // self.tiles_m
        h, b = rest % self.heads, rest // self.heads
        return QueryTile(m, h, b, h // self.shared)
