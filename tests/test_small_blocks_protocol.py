"""The sweep kernel's pipeline, played on the host: no order of events may hang it or overwrite what is still read.

Every role is a Python generator with the waits and arrivals of its namesake in sweep_sm90.py; a scheduler runs any that
may go on, at random. It is the protocol that is tested here, stages, slots and arrive counts, and not the code.
"""

import random
from collections import deque

import pytest

from .mbarrier import Barrier

CONSUMERS = 3


class Cta:
    def __init__(self, cluster: int, stages: int, slots: int):
        self.full = [Barrier(1 + CONSUMERS) for _ in range(stages)]
        self.empty = [Barrier(4 * CONSUMERS * cluster) for _ in range(stages)]
        self.b = [None] * stages  # which chunk lies in a stage; parts of it that have landed
        self.a = [[None] * slots for _ in range(CONSUMERS)]  # which block lies in a slot


def advance(stage, phase, stages):
    return (0, phase ^ 1) if stage + 1 == stages else (stage + 1, phase)


def load_b(ctas, rank, chunks, stages, flights):
    stage, phase = 0, 1
    for i in range(len(chunks)):
        while not ctas[rank].empty[stage].done(phase):
            yield
        ctas[rank].full[stage].arrive(announced=len(ctas))
        for cta in ctas:  # multicast: this CTA's share lands in every CTA
            flights.append(("b", cta, stage, (i, rank)))
        stage, phase = advance(stage, phase, stages)
        yield


def load_a(ctas, rank, w, chunks, stages, slots, flights):
    cta, stage, oldest, phase, flying, used, head = ctas[rank], 0, 0, 0, 0, 0, 0
    taken = [0] * stages
    for i, chunk in enumerate(chunks):
        count = chunk[rank][w]
        while flying == stages or used + count > slots:
            while not cta.empty[oldest].done(phase):
                yield
            used -= taken[oldest]
            flying -= 1
            oldest, phase = advance(oldest, phase, stages)
        used += count
        flying += 1
        taken[stage] = count
        cta.full[stage].arrive(announced=count)
        for j in range(count):
            flights.append(("a", cta, stage, (w, (head + j) % slots, (i, j))))
        head = (head + count) % slots
        stage, _ = advance(stage, 0, stages)
        yield


def consume(ctas, rank, w, chunks, stages, slots, products):
    """Products run on after they are issued; those of chunk i are over once chunk i + 1's have been issued."""
    cta, stage, phase, head, before = ctas[rank], 0, 0, 0, None
    for i, chunk in enumerate(chunks):
        while not cta.full[stage].done(phase):
            yield
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


def play(chunks, cluster, stages, slots, seed):
    """Run all roles of a cluster over the chunks of one work tile after another; the products that were made."""
    draw, flights, products = random.Random(seed), deque(), []
    ctas = [Cta(cluster, stages, slots) for _ in range(cluster)]
    roles = []
    for rank in range(cluster):
        roles.append(load_b(ctas, rank, chunks, stages, flights))
        for w in range(CONSUMERS):
            roles.append(load_a(ctas, rank, w, chunks, stages, slots, flights))
            roles.append(consume(ctas, rank, w, chunks, stages, slots, products))
    hurried = draw.sample(range(len(roles)), draw.randint(0, len(roles)))  # some roles run ahead of the others
    stuck = 0
    while roles:
        before = state(ctas, flights, roles)
        if flights and draw.random() < 0.5:
            land(flights, draw)
        else:
            at = draw.choice([i for i in hurried if i < len(roles)] or range(len(roles)))
            if draw.random() < 0.3:
                at = draw.randrange(len(roles))
            try:
                next(roles[at])
            except StopIteration:
                roles.pop(at)
        stuck = stuck + 1 if state(ctas, flights, roles) == before else 0
        assert stuck < 5000, f"hung with {len(roles)} roles waiting, {len(products)} products made"
    return products


def state(ctas, flights, roles):
    barriers = tuple((b.phase, b.pending, b.bytes) for cta in ctas for b in (*cta.full, *cta.empty))
    return barriers, len(flights), len(roles)


def land(flights, draw):
    """A copy arrives: TMA keeps no order among copies."""
    at = draw.randrange(len(flights))
    flights.rotate(-at)
    kind, cta, stage, what = flights.popleft()
    flights.rotate(at)
    if kind == "b":
        i, rank = what
        if cta.b[stage] is None or all(chunk != i for chunk, _ in cta.b[stage]):
            cta.b[stage] = set()
        cta.b[stage].add((i, rank))
    else:
        w, slot, block = what
        cta.a[w][slot] = block
    cta.full[stage].receive(1)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("most", [1, 4, 16])
@pytest.mark.parametrize("kind", ["dense", "mixed", "sparse", "uneven"])
def test_the_pipeline(cluster, stages, most, kind):
    """A ring holds two full chunks, `most` blocks each: every mixture of chunks gets through, whoever hurries."""
    for seed in range(6):
        draw = random.Random(seed)
        share = {"dense": 1.0, "mixed": 0.5, "sparse": 0.1, "uneven": None}[kind]

        def count(w):
            if share is None:
                return most if w == 0 else 0
            return sum(draw.random() < share for _ in range(most))

        chunks = [[[count(w) for w in range(CONSUMERS)] for _ in range(cluster)] for _ in range(24)]
        products = play(chunks, cluster, stages, 2 * most, seed)
        assert sorted(products) == [(r, w, i) for r in range(cluster) for w in range(CONSUMERS) for i in range(24)]


def test_a_ring_of_less_than_two_chunks_hangs():
    """Why it is two: a chunk is given back only when the next one has been issued."""
    chunks = [[[4] * CONSUMERS] for _ in range(8)]
    with pytest.raises(AssertionError, match="hung"):
        play(chunks, 1, 4, 7, seed=0)
