"""Barriers, checked on the host: a wrong count is a hang, and nothing else tells.

Named barriers: which kernel uses which of the sixteen that a CTA has. Number 0 is __syncthreads.

    kernel          barriers   threads                        for
    product         1, 2       a consumer warpgroup           its store buffers are written, or free again
    product         8, 9       both consumer warpgroups       the order in which ping-pong consumer groups multiply
    product         10 to 13   both consumer warpgroups       one's half of a gated tile is written, or its place free
    forward         1, 2, 3    two consumer warpgroups        the order in which they issue products
    forward         4          both consumer warpgroups       one's part of the scores is written, or read by the other
    forward         8, 9, 10   a consumer warpgroup           rows past the end of V are zeros
    decode          1          the consumer warpgroup         Q is loaded, or rows past the end of V are zeros
    backward        1          all consumer warpgroups        dS is in shared memory, or rows past the end are zeros
    backward        2 to 5     a consumer warpgroup and a     its part of dQ is in shared memory
    backward        6 to 9     warp that stores               its place there is free again
    the same with   2, 3       a consumer warpgroup           its part of dQ is written, or its place free again
    one dS          10, 11     both consumer warpgroups       one has read the other's dS
    shared columns  4, 5       both consumer warpgroups       one has read the other's P and dS

The small-block kernel's store is a product's; it has three consumers, and so barriers 1 to 3.

Mbarriers: a kernel says in `arrivals` who arrives at those of each of its pipelines, and makes them from that.
"""

from dataclasses import dataclass

PRODUCT_STORE, PRODUCT_ORDER, PRODUCT_GATE = 1, 8, 10  # the first ones
FORWARD_ORDER, FORWARD_SCORES, FORWARD_OOB = 1, 4, 8
DECODE_CONSUMERS = 1
BACKWARD_ALL, BACKWARD_FULL, BACKWARD_FREE, BACKWARD_DS = 1, 2, 6, 10
BACKWARD_DQ, BACKWARD_READ = 2, 4  # with shared columns

MOST = 16
WARP, WARPGROUP = 32, 128
# Of a CTA, also idle ones; all others are consumers.
PRODUCER_WARPS = {
    "product": 4, "forward": 4, "decode": 1, "backward": 4, "backward of one": 4, "backward, shared columns": 4,
}  # fmt: skip
USES = {  # kernel -> (first barrier, how many at most, threads that meet at each) of each use
    "product": (
        (PRODUCT_STORE, 3, WARPGROUP),
        (PRODUCT_ORDER, 2, 2 * WARPGROUP),
        (PRODUCT_GATE, 4, 2 * WARPGROUP),
    ),
    "forward": ((FORWARD_ORDER, 3, 2 * WARPGROUP), (FORWARD_SCORES, 1, 2 * WARPGROUP), (FORWARD_OOB, 3, WARPGROUP)),
    "decode": ((DECODE_CONSUMERS, 1, WARPGROUP),),
    "backward, shared columns": (
        (BACKWARD_ALL, 1, 2 * WARPGROUP),
        (BACKWARD_DQ, 2, WARPGROUP),
        (BACKWARD_READ, 2, 2 * WARPGROUP),
    ),
    "backward": (
        (BACKWARD_ALL, 1, 2 * WARPGROUP),
        (BACKWARD_FULL, 4, WARPGROUP + WARP),
        (BACKWARD_FREE, 4, WARPGROUP + WARP),
        (BACKWARD_DS, 2, 2 * WARPGROUP),
    ),
    "backward of one": (  # consumer warpgroup
        (BACKWARD_ALL, 1, WARPGROUP),
        (BACKWARD_FULL, 1, WARPGROUP + WARP),
        (BACKWARD_FREE, 1, WARPGROUP + WARP),
    ),
}


def check(kernel: str, cta_threads: int, counts: dict[int, int]) -> None:
    """ValueError unless a CTA of so many threads can meet at these barriers of a kernel: first number -> how many.

    A kernel's host side asks this before it compiles.
    """
    if unknown := counts.keys() - {first for first, *_ in USES[kernel]}:
        raise ValueError(f"{kernel}: barriers from {min(unknown)} on are not in the table")
    numbers = [0]  # __syncthreads
    for first, most, threads in USES[kernel]:
        count = counts.get(first, 0)
        if count > most:
            raise ValueError(f"{kernel}: {count} barriers from {first} on, of {most} in the table")
        if count and (threads % WARP or not 0 < threads <= cta_threads):
            raise ValueError(
                f"{kernel}: {threads} threads meet at barrier {first}; it takes whole warps, of a CTA's {cta_threads} "
                "threads"
            )
        numbers += range(first, first + count)
    if len(set(numbers)) < len(numbers) or max(numbers) >= MOST:
        raise ValueError(f"{kernel}: barriers {numbers[1:]}; each is one of 1 to {MOST - 1}, for one use")


@dataclass(frozen=True)
class Arrivals:
    """Who arrives at the two mbarriers of a stage: producers at `full`, besides the bytes of TMA, consumers at `empty`.

    With several consumer groups each stage is read by one of them.
    """

    producers: int  # warps
    consumers: int  # warps of a CTA that read a stage; 0 where `others` alone do
    threads: int = 1  # of a warp, that arrive
    groups: int = 1  # of consumers
    sharers: int = 1  # CTAs whose consumers give the stage back
    others: int = 0  # warps of the producers' warpgroup that read a stage, too

    @property
    def full(self) -> int:
        """Arrivals that fill a stage."""
        return self.producers * self.threads

    @property
    def empty(self) -> int:
        """Arrivals that give a stage back."""
        return (self.consumers + self.others) * self.threads * self.sharers


def check_arrivals(kernel: str, cta_threads: int, cluster: int, arrivals: dict[str, Arrivals]) -> None:
    """ValueError unless the warps of a CTA of so many threads, in a cluster of so many CTAs, make these arrivals.

    Every consumer warp reads every stage of its group, unless none does: with fewer arrivals a stage would be loaded
    while some still read it, with more it would never be free.
    """
    producers = PRODUCER_WARPS[kernel]
    consumers = cta_threads // WARP - producers
    for name, each in arrivals.items():
        where = f"{kernel}: pipeline {name}"
        if not (each.others and each.consumers == 0) and each.consumers * each.groups != consumers:
            raise ValueError(
                f"{where}: {each.consumers} warps give a stage back, in {each.groups} groups of consumers; the "
                f"CTA has {consumers} consumer warps"
            )
        if not 0 < each.producers <= producers:
            raise ValueError(f"{where}: {each.producers} warps fill a stage, of {producers} producer warps")
        if not 0 <= each.others <= producers - each.producers:
            raise ValueError(f"{where}: {each.others} other warps read a stage, beside {each.producers} of {producers}")
        if each.threads not in (1, WARP):
            raise ValueError(f"{where}: {each.threads} threads of a warp arrive; one does, or all {WARP}")
        if not 0 < each.sharers <= cluster:
            raise ValueError(f"{where}: {each.sharers} CTAs give a stage back, of a cluster of {cluster}")
