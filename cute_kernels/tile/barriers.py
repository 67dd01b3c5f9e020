"""Allocation of barriers, checked on the host, since a wrong count only shows as a hang.

Named barriers: the uses of a CTA's sixteen barriers per kernel. Barrier 0 is __syncthreads.

    kernel          barriers   threads                        signals
    product         1, 2       a consumer warpgroup           its store buffers are written, or free again
    product         8, 9       both consumer warpgroups       the order of ping-pong consumer groups' mainloops
    product         10 to 13   both consumer warpgroups       half of a gated tile is written, or its buffer free
    forward         1, 2, 3    two consumer warpgroups        the order in which they issue WGMMAs
    forward         4          both consumer warpgroups       a part of S is written, or read by the other warpgroup
    forward         8, 9, 10   a consumer warpgroup           rows past the end of V are zeros
    decode          1          the consumer warpgroup         Q is loaded, or rows past the end of V are zeros
    backward        1          all consumer warpgroups        dS is in shared memory, or rows past the end are zeros
    backward        2 to 5     a consumer warpgroup and the   its part of dQ is in shared memory
    backward        6 to 9     warp that stores               its buffer there is free again
    backward with   2, 3       a consumer warpgroup           its part of dQ is written, or its buffer free again
    one dS          10, 11     both consumer warpgroups       one has read the other's dS
    shared columns  4, 5       both consumer warpgroups       one has read the other's P and dS; also gathered backward

"product" is the GEMM kernel. The small-block kernel has the same store and three consumers, so it uses 1 to 3.

Mbarriers: a kernel declares in `arrivals` which warps arrive at those of each of its pipelines, and creates them from
it.
"""

from dataclasses import dataclass

PRODUCT_STORE, PRODUCT_ORDER, PRODUCT_GATE = 1, 8, 10  # the first barrier of each use
FORWARD_ORDER, FORWARD_SCORES, FORWARD_OOB = 1, 4, 8
DECODE_CONSUMERS = 1
BACKWARD_ALL, BACKWARD_FULL, BACKWARD_FREE, BACKWARD_DS = 1, 2, 6, 10
BACKWARD_DQ, BACKWARD_READ = 2, 4  # with shared columns

MOST = 16
WARP, WARPGROUP = 32, 128
# Warps per CTA that are not consumers, including idle ones.
PRODUCER_WARPS = {
    "product": 4, "forward": 4, "decode": 1, "backward": 4, "backward of one": 4, "backward, shared columns": 4,
}  # fmt: skip
USES = {  # kernel -> (first barrier, maximal count, threads per barrier) of each use
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
    """Raise ValueError unless a CTA of cta_threads threads can use these barriers of a kernel (first number -> count).

    A kernel's host code calls this before it compiles.
    """
    if unknown := counts.keys() - {first for first, *_ in USES[kernel]}:
        raise ValueError(f"{kernel}: barriers from {min(unknown)} on are not in the table")
    numbers = [0]  # __syncthreads
    for first, most, threads in USES[kernel]:
        count = counts.get(first, 0)
        if count > most:
            raise ValueError(f"{kernel}: {count} barriers from {first} on; the table has {most}")
        if count and (threads % WARP or not 0 < threads <= cta_threads):
            raise ValueError(
                f"{kernel}: {threads} threads arrive at barrier {first}; it must be whole warps, at most the CTA's "
                f"{cta_threads} threads"
            )
        numbers += range(first, first + count)
    if len(set(numbers)) < len(numbers) or max(numbers) >= MOST:
        raise ValueError(f"{kernel}: barriers {numbers[1:]}; each is one of 1 to {MOST - 1}, for one use")


@dataclass(frozen=True)
class Arrivals:
    """Arrival counts of a stage's two mbarriers: producers at `full`, in addition to TMA's bytes, consumers at `empty`.

    With several consumer groups, each stage is read by one of them.
    """

    producers: int  # warps
    consumers: int  # warps of a CTA that read a stage; 0 if only `others` do
    threads: int = 1  # threads per warp that arrive
    groups: int = 1  # consumer groups
    sharers: int = 1  # CTAs whose consumers release the stage
    others: int = 0  # warps of the producers' warpgroup that also read a stage
    filling: int | None = None  # threads per producer warp that arrive; None: as many as of the consumers

    @property
    def full(self) -> int:
        """Arrivals that fill a stage."""
        return self.producers * (self.filling or self.threads)

    @property
    def empty(self) -> int:
        """Arrivals that release a stage."""
        return (self.consumers + self.others) * self.threads * self.sharers


def check_arrivals(kernel: str, cta_threads: int, cluster: int, arrivals: dict[str, Arrivals]) -> None:
    """Raise ValueError unless the warps of a CTA with cta_threads threads, in a cluster, make these arrivals.

    Either each consumer warp reads every stage of its group, or none does. With fewer arrivals a stage would be
    overwritten while warps still read it; with more it would never be released.
    """
    producers = PRODUCER_WARPS[kernel]
    consumers = cta_threads // WARP - producers
    for name, each in arrivals.items():
        where = f"{kernel}: pipeline {name}"
        if not (each.others and each.consumers == 0) and each.consumers * each.groups != consumers:
            raise ValueError(
                f"{where}: {each.consumers} warps release a stage, in {each.groups} consumer groups; the CTA has "
                f"{consumers} consumer warps"
            )
        if not 0 < each.producers <= producers:
            raise ValueError(f"{where}: {each.producers} warps fill a stage; the CTA has {producers} producer warps")
        if not 0 <= each.others <= producers - each.producers:
            raise ValueError(
                f"{where}: {each.others} other warps read a stage; {producers - each.producers} of {producers} "
                "producer warps do not fill it"
            )
        for threads in (each.threads, each.filling or 1):
            if threads not in (1, WARP):
                raise ValueError(f"{where}: {threads} threads of a warp arrive; it must be 1 or {WARP}")
        if not 0 < each.sharers <= cluster:
            raise ValueError(f"{where}: {each.sharers} CTAs release a stage; the cluster has {cluster}")
