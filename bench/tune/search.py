"""An evolutionary search over genomes: deterministic under a seed, and without any knowledge of what they mean.

    seeds -> scores -> [ tournament -> crossover, mutation -> scores -> the best `population` survive ] ...

A score is a cost, the smaller the better; infinity is a genome that cannot be used. It stops when the budget is spent,
when `patience` generations have found nothing better, or when there is nothing new to try.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

Genome = tuple
NEW_ATTEMPTS = 50  # at a child that has not been scored yet


class Landscape(Protocol):
    """What a search needs of a space; each of the three makes a legal genome."""

    def random(self, rng: Random) -> Genome: ...
    def mutate(self, genome: Genome, rng: Random) -> Genome: ...
    def crossover(self, one: Genome, other: Genome, rng: Random) -> Genome: ...
    def key(self, genome: Genome) -> Hashable:
        """Equal for genomes that would score the same."""


@dataclass(frozen=True)
class Settings:
    """`children` are scored in each generation; a share of `strangers` of them are random, the others descend."""

    population: int = 16
    children: int = 16
    tournament: int = 3
    strangers: float = 0.15
    mutation: float = 0.6  # of descendants that have two parents, how many are mutated too
    patience: int = 5  # generations
    gain: float = 0.002  # what counts as better, relatively: below that it is noise


@dataclass
class Result:
    """`ranking` are all usable genomes with their scores, best first; `stopped` says why the search ended."""

    ranking: list[tuple[Genome, float]] = field(default_factory=list)
    scored: int = 0
    generations: int = 0
    stopped: str = ""

    @property
    def best(self) -> tuple[Genome, float] | None:
        return self.ranking[0] if self.ranking else None


def evolve(
    space: Landscape,
    evaluate: Callable[[Sequence[Genome]], Sequence[float]],
    seeds: Sequence[Genome],
    *,
    seed: int = 0,
    budget_s: float = math.inf,
    settings: Settings | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[Result], Any] = lambda result: None,
) -> Result:
    """Search for the genome of least score, beginning with `seeds`.

    `evaluate` scores a batch, at most `settings.children` at once; the budget is looked at between two batches, so
    it is exceeded by at most one. `progress` is called after each batch.
    """
    settings, rng, end = settings or Settings(), Random(seed), clock() + budget_s
    scores: dict[Hashable, float] = {}
    pool: list[tuple[float, int, Genome]] = []  # the number breaks ties, for genomes need not compare
    result = Result()

    def run(genomes: Sequence[Genome]) -> bool:
        """Score those not scored yet; False when the budget is spent."""
        fresh = {space.key(genome): genome for genome in reversed(genomes)}
        batch = [genome for genome in fresh.values() if space.key(genome) not in scores][::-1]
        for at in range(0, len(batch), settings.children):
            if clock() >= end:
                return False
            part = batch[at : at + settings.children]
            for genome, score in zip(part, evaluate(part), strict=True):
                scores[space.key(genome)] = score
                if score < math.inf:
                    pool.append((score, len(scores), genome))
            pool.sort(key=lambda entry: entry[:2])
            result.ranking = [(genome, score) for score, _, genome in pool]
            result.scored = len(scores)
            progress(result)
        return clock() < end

    def parent() -> Genome:
        alive = pool[: settings.population]
        return min(rng.choices(alive, k=settings.tournament), key=lambda entry: entry[:2])[2]

    def child() -> Genome:
        if not pool or rng.random() < settings.strangers:
            return space.random(rng)
        if rng.random() < 0.5:
            return space.mutate(parent(), rng)
        mixed = space.crossover(parent(), parent(), rng)
        return space.mutate(mixed, rng) if rng.random() < settings.mutation else mixed

    def offspring() -> list[Genome]:
        """New genomes for a generation; fewer, or none, where the space is nearly used up."""
        found: dict[Hashable, Genome] = {}
        for _ in range(settings.children * NEW_ATTEMPTS):
            genome = child()
            key = space.key(genome)
            if key not in scores:
                found.setdefault(key, genome)
            if len(found) == settings.children:
                break
        return list(found.values())

    going = run(list(seeds))
    idle, best = 0, pool[0][0] if pool else math.inf
    while going:
        children = offspring()
        if not children:
            result.stopped = "nothing new to try"
            return result
        going = run(children)
        result.generations += 1
        now = pool[0][0] if pool else math.inf
        better = now < best * (1 - settings.gain) if best < math.inf else now < best
        idle, best = (0, now) if better else (idle + 1, best)
        if idle >= settings.patience:
            result.stopped = f"{idle} generations without gain"
            return result
    result.stopped = "budget spent"
    return result
