"""The tuner's search and its races, on landscapes whose optimum is known: no torch, no GPU."""

import itertools
import math
import random

import pytest

from bench.tune.search import HEATS, INCUMBENT, evolve, race

SIDES = (8, 8, 6, 4, 4)
BEST = (5, 2, 3, 1, 0)


def legal(point):
    """A third of the grid is illegal, in stripes."""
    return (point[0] + point[1]) % 3 != 2 or point == BEST


def vary(one, other, rng):
    """A mixture, or one or two coordinates changed."""
    while True:
        found = [rng.choice(pair) for pair in zip(one, other or one, strict=True)]
        for i in rng.sample(range(len(SIDES)), rng.choice((0, 1, 2) if other else (1, 2))):
            near = min(max(found[i] + rng.choice((-1, 1)), 0), SIDES[i] - 1)
            found[i] = rng.choice((near, rng.randrange(SIDES[i])))
        if legal(tuple(found)):
            return tuple(found)


def cost(point):
    """1 at the optimum; dimensions 0 and 2 depend on each other; a quarter of the space cannot be used."""
    if point[3] == 3:
        return math.inf
    d = [abs(a - b) for a, b in zip(point, BEST, strict=True)]
    return 1 + 0.1 * abs(d[0] - d[2]) + 0.05 * sum(d)


def search(seed=0, seeds=((0, 0, 0, 0, 3),), seconds=0.0, **more):
    """(result, batches that were scored, clock at the end)"""
    batches, now = [], [0.0]

    def evaluate(batch):
        batches.append(list(batch))
        now[0] += seconds * len(batch)
        return [cost(point) for point in batch]

    result = evolve(list(seeds), evaluate, vary, seed=seed, clock=lambda: now[0], **more)
    return result, batches, now[0]


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_found_in_a_fraction_of_the_space(seed):
    seen = []
    result, batches, _ = search(seed, patience=12, progress=lambda result: seen.append(result.scored))
    scored = list(itertools.chain(*batches))
    assert result.ranking[0] == (BEST, 1.0) and "without gain" in result.stopped
    assert len(scored) < math.prod(SIDES) / 8 and len(set(scored)) == len(scored) == result.scored
    assert [score for _, score in result.ranking] == sorted(cost(point) for point in scored if cost(point) < math.inf)
    assert seen == list(itertools.accumulate(map(len, batches)))
    again = search(seed, patience=12)[1]
    assert again == batches != search(seed + 1, patience=12)[1], "the same seed takes the same way"


@pytest.mark.parametrize("budget", [0.0, 10.0, 100.0])
def test_the_budget_is_exceeded_by_one_batch_at_most(budget):
    result, batches, now = search(seconds=1.0, budget_s=budget, children=8, patience=10**6)
    assert result.stopped == "budget spent" and budget <= now < budget + 9
    assert all(len(batch) <= 8 for batch in batches)


def test_many_seeds_are_scored_in_batches_and_in_order():
    seeds = [point for point in itertools.product(*map(range, SIDES)) if legal(point)][:50]
    _, batches, _ = search(seeds=seeds + seeds, patience=1)
    assert list(itertools.chain(*batches))[:50] == seeds
    assert [len(batch) for batch in batches[:4]] == [16, 16, 16, 2]


def test_a_search_goes_on_where_no_seed_can_be_used_and_ends_where_nothing_can():
    assert search(seeds=[(0, 0, 0, 3, 0)], patience=12)[0].ranking[0] == (BEST, 1.0)
    result = evolve([BEST], lambda batch: [math.inf] * len(batch), vary, patience=3)
    assert result.ranking == [] and result.stopped == "3 generations without gain"
    two = [BEST, (0,) * 5]
    result = evolve(two[:1], lambda batch: list(map(cost, batch)), lambda one, other, rng: rng.choice(two))
    assert result.stopped == "nothing new to try" and result.scored == 2


# -- races ------------------------------------------------------------------------------------------------------


class Card:
    """A timer whose clock drifts by a fifth from round to round, alike for all."""

    def __init__(self, speeds, noise=0.0):
        self.speeds = {INCUMBENT: 100.0} | speeds
        self.rng, self.noise, self.heats = random.Random(0), noise, []

    def __call__(self, names, rounds):
        self.heats.append((list(names), rounds))
        times = {name: [] for name in names}
        for _ in range(rounds):
            drift = self.rng.uniform(1.0, 1.2)
            for name in names:
                times[name].append(self.speeds[name] * drift * self.rng.uniform(1, 1 + self.noise))
        return times


def test_who_falls_behind_is_abandoned_early_and_drift_does_not_enter_a_ratio():
    card = Card({"fast": 80.0, "near": 82.0, "slow": 95.0, "worst": 300.0})
    found = race(card, ["worst", "slow", "near", "fast"])
    assert found == pytest.approx({"fast": 0.8, "near": 0.82, "slow": 0.95, "worst": 3.0})
    first, second, third = (rounds for rounds, _ in HEATS)
    rounds = {name: sum(n for names, n in card.heats if name in names) for name in card.speeds}
    assert rounds["worst"] == rounds["slow"] == first  # 0.95 / 0.8 is above 1.15
    assert rounds["near"] == rounds["fast"] == rounds[INCUMBENT] == first + second + third


@pytest.mark.parametrize(("us", "best", "heats"), [(90.0, 0.7, 1), (120.0, 1.0, 1), (90.0, 1.0, 3)])
def test_earlier_races_and_the_incumbent_are_marks(us, best, heats):
    card = Card({"a": us})
    assert race(card, ["a"], best) == pytest.approx({"a": us / 100}) and len(card.heats) == heats
    assert race(card, []) == {} and len(card.heats) == heats


def test_noise_does_not_change_the_winner():
    card = Card({str(n): 80.0 + 4 * n for n in range(8)}, noise=0.03)
    found = race(card, [str(n) for n in range(8)], heats=((4, 1.15), (40, 1.0)))
    assert min(found, key=found.get) == "0"
