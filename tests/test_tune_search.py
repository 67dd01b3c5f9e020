"""The tuner's search and its races, on landscapes whose optimum is known: no torch, no GPU."""

import itertools
import math
import random

import pytest

from bench.tune.race import HEATS, INCUMBENT, Heat, race, ratios
from bench.tune.search import Settings, evolve

SIDES = (8, 8, 6, 4, 4)
BEST = (5, 2, 3, 1, 0)


class Grid:
    """Genomes are points of a grid; a third of them is illegal, in stripes."""

    def legal(self, genome):
        return (genome[0] + genome[1]) % 3 != 2 or genome == BEST

    def key(self, genome):
        return genome

    def random(self, rng):
        while True:
            genome = tuple(rng.randrange(n) for n in SIDES)
            if self.legal(genome):
                return genome

    def mutate(self, genome, rng):
        while True:
            i = rng.randrange(len(SIDES))
            changed = (*genome[:i], rng.randrange(SIDES[i]), *genome[i + 1 :])
            if self.legal(changed):
                return changed

    def crossover(self, one, other, rng):
        mixed = tuple(rng.choice(pair) for pair in zip(one, other, strict=True))
        return mixed if self.legal(mixed) else self.mutate(one, rng)


def cost(genome):
    """1 at the optimum; genes 0 and 2 depend on each other; a quarter of the space cannot be used."""
    if genome[3] == 3:
        return math.inf
    d = [abs(a - b) for a, b in zip(genome, BEST, strict=True)]
    return 1 + 0.1 * abs(d[0] - d[2]) + 0.05 * sum(d)


class Evaluator:
    def __init__(self, seconds=0.0):
        self.batches, self.now, self.seconds = [], 0.0, seconds

    def __call__(self, batch):
        self.batches.append(list(batch))
        self.now += self.seconds * len(batch)
        return [cost(genome) for genome in batch]

    @property
    def scored(self):
        return [genome for batch in self.batches for genome in batch]


def search(seed=0, seeds=((0, 0, 0, 0, 3),), seconds=0.0, **more):
    evaluator = Evaluator(seconds)
    result = evolve(Grid(), evaluator, seeds, seed=seed, clock=lambda: evaluator.now, **more)
    return result, evaluator


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_found_in_a_fraction_of_the_space(seed):
    result, evaluator = search(seed, settings=Settings(patience=12))
    assert result.best == (BEST, 1.0)
    assert len(evaluator.scored) < math.prod(SIDES) / 8
    assert "without gain" in result.stopped


def test_the_same_seed_takes_the_same_way():
    assert search(3)[1].batches == search(3)[1].batches
    assert search(3)[1].batches != search(4)[1].batches


def test_nothing_is_scored_twice_and_the_ranking_is_in_order():
    result, evaluator = search(1)
    assert len(set(evaluator.scored)) == len(evaluator.scored) == result.scored
    scores = [score for _, score in result.ranking]
    assert scores == sorted(scores) and math.inf not in scores
    assert all(cost(genome) == score for genome, score in result.ranking)


@pytest.mark.parametrize("budget", [0.0, 10.0, 100.0])
def test_the_budget_is_exceeded_by_one_batch_at_most(budget):
    settings = Settings(children=8, patience=10**6)
    result, evaluator = search(seconds=1.0, budget_s=budget, settings=settings)
    assert result.stopped == "budget spent"
    assert budget <= evaluator.now < budget + settings.children + 1
    assert all(len(batch) <= settings.children for batch in evaluator.batches)


def test_many_seeds_are_scored_in_batches_and_in_order():
    seeds = [genome for genome in itertools.product(*map(range, SIDES)) if Grid().legal(genome)][:50]
    _, evaluator = search(seeds=seeds + seeds, settings=Settings(children=16, patience=1))
    assert evaluator.scored[:50] == seeds
    assert [len(batch) for batch in evaluator.batches[:4]] == [16, 16, 16, 2]


def test_a_search_goes_on_where_no_seed_can_be_used():
    result, _ = search(seeds=[(0, 0, 0, 3, 0)], settings=Settings(patience=12))
    assert result.best == (BEST, 1.0)


def test_a_space_without_anything_usable_has_no_best():
    result = evolve(Grid(), lambda batch: [math.inf] * len(batch), [BEST], settings=Settings(patience=3))
    assert result.best is None and result.ranking == [] and result.generations == 3


def test_a_small_space_is_used_up():
    class Two(Grid):
        def random(self, rng):
            return rng.choice([BEST, (0,) * 5])

        mutate = crossover = lambda self, *args: self.random(args[-1])

    result = evolve(Two(), lambda batch: [cost(genome) for genome in batch], [BEST])
    assert result.stopped == "nothing new to try" and result.scored == 2


def test_progress_sees_every_batch():
    seen = []
    search(progress=lambda result: seen.append(result.scored))
    assert seen == sorted(seen) and len(seen) > 1


# -- races ------------------------------------------------------------------------------------------------------


class Card:
    """A timer whose clock drifts by a fifth from round to round, alike for all."""

    def __init__(self, speeds, noise=0.0):
        self.speeds = {INCUMBENT: 100.0} | speeds
        self.rng, self.noise = random.Random(0), noise
        self.heats = []

    def __call__(self, names, rounds):
        self.heats.append((list(names), rounds))
        times = {name: [] for name in names}
        for _ in range(rounds):
            drift = self.rng.uniform(1.0, 1.2)
            for name in names:
                times[name].append(self.speeds[name] * drift * self.rng.uniform(1, 1 + self.noise))
        return times

    @property
    def rounds(self):
        return {name: sum(rounds for names, rounds in self.heats if name in names) for name in self.speeds}


def test_drift_does_not_enter_a_ratio():
    card = Card({"a": 90.0, "b": 150.0})
    found = ratios(card([INCUMBENT, "a", "b"], 5))
    assert found == pytest.approx({"a": 0.9, "b": 1.5})


def test_who_falls_behind_is_abandoned_early():
    card = Card({"fast": 80.0, "near": 82.0, "slow": 95.0, "worst": 300.0})
    found = race(card, ["worst", "slow", "near", "fast"])
    assert found == pytest.approx({"fast": 0.8, "near": 0.82, "slow": 0.95, "worst": 3.0})
    first, second, third = (heat.rounds for heat in HEATS)
    assert card.rounds["worst"] == card.rounds["slow"] == first  # 0.95 / 0.8 is above 1.15
    assert card.rounds["near"] == card.rounds["fast"] == first + second + third
    assert all(INCUMBENT in names for names, _ in card.heats)


def test_the_best_of_earlier_races_is_the_mark():
    card = Card({"a": 90.0})
    assert race(card, ["a"], best=0.7) == pytest.approx({"a": 0.9})
    assert len(card.heats) == 1


def test_the_incumbent_itself_is_a_mark():
    card = Card({"a": 120.0})
    race(card, ["a"])
    assert len(card.heats) == 1


def test_no_names_take_no_heat():
    card = Card({})
    assert race(card, []) == {} and card.heats == []


def test_noise_does_not_change_the_winner():
    card = Card({str(n): 80.0 + 4 * n for n in range(8)}, noise=0.03)
    found = race(card, [str(n) for n in range(8)], heats=(Heat(4, 1.15), Heat(40, 1.0)))
    assert min(found, key=found.get) == "0"
