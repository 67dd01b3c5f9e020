"""The search space of one problem on one path: configurations near those that the library itself proposes.

Nothing here knows a family of kernels or a field of its configuration. Fields and their values come from the library's
candidates, and `unsupported` decides which combinations can be built. A candidate keeps its configuration's type,
which is its family's. Its whole numbers vary.
"""

import math
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from random import Random

from cute_kernels.arch import ArchSpec
from cute_kernels.matmul.choose import candidates_for, facts_for
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.matmul.problem import Problem
from cute_kernels.runtime.families import family_of, unsupported

ATTEMPTS = 200  # to find a legal neighbour
GROUPS = (1, 2, 4, 8, 16, 32)
LAUNCH, MUTATION = 0.2, 0.6  # how often only the launch changes; how often a mixture of two parents is changed too


@dataclass(frozen=True)
class Candidate:
    """A kernel, the width of its raster panels in cluster tiles, and the most CTAs."""

    facts: GemmFacts
    group: int
    ctas: int

    def __str__(self) -> str:
        values = ((f.name, getattr(self.facts.config, f.name), f.default) for f in fields(self.facts.config))
        settings = " ".join(f"{name}={value}" for name, value, default in values if value != default)
        return f"{self.facts.path} {settings} group={self.group} ctas={self.ctas}"


class Space:
    """The candidates for a problem on a path of an architecture with `sms` multiprocessors."""

    def __init__(self, problem: Problem, path: str, spec: ArchSpec, sms: int):
        self.problem, self.path, self.spec, self.sms = problem, path, spec, sms
        found = (self.candidate(config) for _, config in candidates_for(path, problem, spec))
        self.known = [candidate for candidate in found if candidate and self.clocks(candidate) < math.inf]
        self._values: dict[tuple, list[int]] = {}  # by kind and field

    def candidate(self, config) -> Candidate | None:
        """A configuration, launched as the heuristics do; None if no kernel can be built from it."""
        facts = facts_for(self.problem, self.path, self.spec, config)
        if unsupported(facts):
            return None
        return Candidate(facts, *family_of(facts).grid(config, self.problem, self.sms))

    def clocks(self, candidate: Candidate) -> float:
        """What the cost model says of a candidate; infinity where it does not serve the problem."""
        return family_of(candidate.facts).cost(candidate.facts.config, self.problem, self.sms)

    def seeds(self, count: int, rng: Random) -> list[Candidate]:
        """Where a search begins: the library's candidates, then their neighbours, best first by the cost model.

        Of neighbours that cost the same, such as two depths of one pipeline, one stands for all.
        """
        near = (self.vary(rng.choice(self.known), None, rng) for _ in range(20 * count))
        by_cost = {self.clocks(candidate): candidate for candidate in near}
        return list(dict.fromkeys([*self.known, *(by_cost[cost] for cost in sorted(by_cost))]))[:count]

    def values(self, field: Field, config) -> Sequence[int]:
        """Whole numbers to try for a field: the known candidates', those between two of them, and near this one's.

        None for an optional field in which all known candidates of this kind agree: their kernel may not even read it.
        """
        now, key = getattr(config, field.name), (type(config), field.name)
        if key not in self._values:
            alike = (c.facts.config for c in self.known if type(c.facts.config) is type(config))
            self._values[key] = sorted({getattr(each, field.name) for each in alike})
        known = self._values[key]
        if type(now) is not int or (len(known) < 2 and field.default is not MISSING):
            return []
        between = ((a + b) // 2 for a, b in zip(known, known[1:], strict=False))
        found = {*known, *between, now // 2, now - 1, now + 1, 2 * now} - {now}
        return sorted(value for value in found if value >= min(1, *known))

    def vary(self, one: Candidate, other: Candidate | None, rng: Random) -> Candidate:
        """A legal candidate near `one`, with fields of `other` if it is of the same kind; `one` if none was found."""
        for _ in range(ATTEMPTS):
            found = self._launch(one, rng) if rng.random() < LAUNCH else self._config(one, other, rng)
            if found is not None and found != one and self.clocks(found) < math.inf:
                return found
        return one

    def _launch(self, one: Candidate, rng: Random) -> Candidate:
        _, ctas = family_of(one.facts).grid(one.facts.config, self.problem, self.sms)
        return replace(one, group=rng.choice(GROUPS), ctas=rng.choice((self.sms, ctas)))

    def _config(self, one: Candidate, other: Candidate | None, rng: Random) -> Candidate | None:
        config = one.facts.config
        mixed = other is not None and type(other.facts.config) is type(config)
        if mixed:
            parents = config, other.facts.config
            config = replace(config, **{f.name: getattr(rng.choice(parents), f.name) for f in fields(config)})
        if not mixed or rng.random() < MUTATION:
            values = {field.name: found for field in fields(config) if (found := self.values(field, config))}
            names = rng.sample(list(values), min(len(values), rng.choice((1, 1, 2, 2, 3))))
            for name in names:
                near = sorted(values[name], key=lambda value: abs(value - getattr(config, name)))[:2]
                config = replace(config, **{name: rng.choice(near if rng.random() < 0.5 else values[name])})
        return self.candidate(config)
