"""An evolutionary search, and the races that score its candidates. Neither knows what a candidate is.

A score is a cost: a candidate's time over the incumbent's, or infinity where the candidate cannot be used.
"""

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

INCUMBENT = "incumbent"
NEW_ATTEMPTS = 50  # to find a child that has not been scored yet
POPULATION, CHILDREN = 16, 16  # how many best ones have so many children in each generation
TOURNAMENT = 3  # that a parent wins
STRANGERS = 0.15  # share of the children that descend from a seed instead
GAIN = 0.002  # relative; less is noise
HEATS = ((4, 1.15), (12, 1.04), (40, 1.0))  # rounds of everybody; who is within so many times the best ratio goes on


@dataclass
class Result:
    """`ranking` has all usable candidates with their scores, best first; `stopped` says why the search ended."""

    ranking: list[tuple[Hashable, float]] = field(default_factory=list)
    scored: int = 0
    stopped: str = ""


def evolve(
    seeds: Sequence[Hashable], evaluate: Callable[[Sequence], Sequence[float]], vary: Callable[[Any, Any, Random], Any],
    *, seed: int = 0, budget_s: float = math.inf, patience: int = 5, children: int = CHILDREN,
    clock: Callable[[], float] = time.monotonic, progress: Callable[[Result], object] = lambda result: None,
) -> Result:  # fmt: skip
    """Search for the candidate of least score, deterministically under `seed`.

    `evaluate` scores a batch of at most `children`; the budget is checked before each batch, so it is exceeded by one
    batch at most. `vary(one, other, rng)` makes a new candidate of one parent, or of two; other may be None. The search
    ends after `patience` generations without a gain.
    """
    rng, end = Random(seed), clock() + budget_s
    scores: dict[Hashable, float] = {}
    result, best, idle = Result(), math.inf, 0

    def parent():
        return min(rng.choices(result.ranking[:POPULATION], k=TOURNAMENT), key=lambda entry: entry[1])[0]

    def offspring() -> list:
        """New candidates for a generation; fewer, or none, where the space is nearly used up."""
        found = {}
        for _ in range(children * NEW_ATTEMPTS):
            if not result.ranking or rng.random() < STRANGERS:
                child = vary(rng.choice(seeds), None, rng)
            else:
                child = vary(parent(), parent() if rng.random() < 0.5 else None, rng)
            if child not in scores:
                found[child] = True
            if len(found) == children:
                break
        return list(found)

    batch = list(dict.fromkeys(seeds))
    while batch:
        for at in range(0, len(batch), children):
            if clock() >= end:
                result.stopped = "budget spent"
                return result
            part = batch[at : at + children]
            scores.update(zip(part, evaluate(part), strict=True))
            usable = ((candidate, score) for candidate, score in scores.items() if score < math.inf)
            result.ranking, result.scored = sorted(usable, key=lambda entry: entry[1]), len(scores)
            progress(result)
        now = result.ranking[0][1] if result.ranking else math.inf
        idle, best = (0, now) if now < best * (1 - GAIN) else (idle + 1, best)
        if idle >= patience:
            result.stopped = f"{idle} generations without gain"
            return result
        batch = offspring()
    result.stopped = "nothing new to try"
    return result


Timer = Callable[[Sequence[str], int], Mapping[str, Sequence[float]]]  # names, rounds -> times of each, by round


def race(timer: Timer, names: Sequence[str], best: float = 1.0, heats: Sequence = HEATS) -> dict[str, float]:
    """The median ratio of each name's time to the incumbent's in the same round, from the last heat that it ran in.

    A card's clock drifts, so only times of the same round are compared. `best` is the least ratio of earlier races;
    the incumbent's own is 1. A name that falls behind by more than a heat allows is not timed any further.
    """
    found: dict[str, float] = {}
    left = list(names)
    for rounds, within in heats:
        if not left:
            break
        times = timer([INCUMBENT, *left], rounds)
        base = times[INCUMBENT]
        now = {name: median(t / b for t, b in zip(times[name], base, strict=True)) for name in left}
        found |= now
        limit = min(best, *now.values()) * within
        left = [name for name in left if now[name] <= limit]
    return found
