"""The small-block kernel's pipeline, played on the host: no order of events may hang it or overwrite what is read.

Every role is a Python generator with the waits and arrivals of its namesake in the kernel. It is the protocol that is
tested here, stages, slots and arrive counts, and not the code.
"""

import random

import pytest

from sparse_collective.small_blocks.tile import CONSUMERS, chunk_arrivals

from ..mbarrier import Barrier, play


class Cta:
    def __init__(self, cluster: int, stages: int, slots: int):
        arrivals = chunk_arrivals(cluster)
        self.full = [Barrier(arrivals.full) for _ in range(stages)]
        self.empty = [Barrier(arrivals.empty) for _ in range(stages)]
        self.b = [None] * stages  # which chunk lies in a stage; parts of it that have landed
        self.a = [[None] * slots for _ in range(CONSUMERS)]  # which block lies in a slot


def advance(stage, phase, stages):
    return (0, phase ^ 1) if stage + 1 == stages else (stage + 1, phase)


def load_b(ctas, rank, chunks, stages, flights):
    stage, phase = 0, 1
    for i in range(len(chunks)):
        yield from ctas[rank].empty[stage].wait(phase)
        ctas[rank].full[stage].arrive(announced=len(ctas))
        flights += [(cta, stage, None, 0, (i, rank)) for cta in ctas]  # multicast: a share for every CTA
        stage, phase = advance(stage, phase, stages)
        yield


def load_a(ctas, rank, w, chunks, stages, slots, flights):
    cta, stage, oldest, phase, flying, used, head = ctas[rank], 0, 0, 0, 0, 0, 0
    taken = [0] * stages
    for i, chunk in enumerate(chunks):
        count = chunk[rank][w]
        while flying == stages or used + count > slots:
            yield from cta.empty[oldest].wait(phase)
            used -= taken[oldest]
            flying -= 1
            oldest, phase = advance(oldest, phase, stages)
        used += count
        flying += 1
        taken[stage] = count
        cta.full[stage].arrive(announced=count)
        flights += [(cta, stage, w, (head + j) % slots, (i, j)) for j in range(count)]
        head = (head + count) % slots
        stage, _ = advance(stage, 0, stages)
        yield


def land(cta, stage, w, slot, what):
    """A copy arrives: TMA keeps no order among copies. `w`: of a block the warpgroup, of a chunk's share None."""
    if w is not None:
        cta.a[w][slot] = what
    elif cta.b[stage] is None or all(chunk != what[0] for chunk, _ in cta.b[stage]):
        cta.b[stage] = {what}
    else:
        cta.b[stage].add(what)
    cta.full[stage].receive(1)


def consume(ctas, rank, w, chunks, stages, slots, products):
    """Products run on after they are issued; those of chunk i are over once chunk i + 1's have been issued."""
    cta, stage, phase, head, before = ctas[rank], 0, 0, 0, None
    for i, chunk in enumerate(chunks):
        yield from cta.full[stage].wait(phase)
        assert cta.b[stage] == {(i, r) for r in range(len(ctas))}, "a stage holds another chunk"
        for j in range(chunk[rank][w]):
            assert cta.a[w][(head + j) % slots] == (i, j), "a slot holds another block"
        head = (head + chunk[rank][w]) % slots
        yield
        if before is not None:
            yield from give_back(ctas, before)
        before = stage
        products.append((rank, w, i))
        stage, phase = advance(stage, phase, stages)
    if before is not None:
        yield from give_back(ctas, before)


def give_back(ctas, stage):
    for _ in range(4):  # warps
        for cta in ctas:
            cta.empty[stage].arrive()
        yield


def products_of(chunks, cluster, stages, slots, seed):
    """All roles of a cluster over the chunks of one work tile after another; the products that were made."""
    flights, products, roles = [], [], []
    ctas = [Cta(cluster, stages, slots) for _ in range(cluster)]
    for rank in range(cluster):
        roles.append(load_b(ctas, rank, chunks, stages, flights))
        for w in range(CONSUMERS):
            roles.append(load_a(ctas, rank, w, chunks, stages, slots, flights))
            roles.append(consume(ctas, rank, w, chunks, stages, slots, products))
    play(roles, flights, land, seed)
    return products


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("most", [1, 4, 16])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, None])
def test_the_pipeline(cluster, stages, most, share):
    """A ring holds two full chunks, `most` blocks each: every mixture of chunks gets through, whoever hurries. Without
    a share the first warpgroup has all blocks."""
    for seed in range(6):
        draw = random.Random(seed)

        def count(w):
            return most * (w == 0) if share is None else sum(draw.random() < share for _ in range(most))

        chunks = [[[count(w) for w in range(CONSUMERS)] for _ in range(cluster)] for _ in range(24)]
        products = products_of(chunks, cluster, stages, 2 * most, seed)
        assert sorted(products) == [(r, w, i) for r in range(cluster) for w in range(CONSUMERS) for i in range(24)]


def test_a_ring_of_less_than_two_chunks_hangs():
    """The minimum is two: a chunk is given back only when the next one has been issued."""
    with pytest.raises(AssertionError, match="hung"):
        products_of([[[4] * CONSUMERS] for _ in range(8)], 1, 4, 7, seed=0)
