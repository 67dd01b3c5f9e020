"""Who is fastest: heats of growing length in which all who are left take turns with the incumbent.

A card's clock drifts, so a candidate's score is never its time but its ratio to the incumbent's, taken round by round
in the same heat. Whoever falls behind the best ratio so far by more than a heat allows is not timed any further.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

INCUMBENT = "incumbent"


@dataclass(frozen=True)
class Heat:
    """`rounds` of everybody; those within `within` times the best ratio go on."""

    rounds: int
    within: float


HEATS = (Heat(4, 1.15), Heat(12, 1.04), Heat(40, 1.0))

Timer = Callable[[Sequence[str], int], Mapping[str, Sequence[float]]]  # names, rounds -> times of each, by round


def ratios(times: Mapping[str, Sequence[float]], incumbent: str = INCUMBENT) -> dict[str, float]:
    """The median over the rounds of a candidate's time over the incumbent's in the same round."""
    base = times[incumbent]
    return {
        name: median(mine / theirs for mine, theirs in zip(own, base, strict=True))
        for name, own in times.items()
        if name != incumbent
    }


def race(timer: Timer, names: Sequence[str], best: float = 1.0, heats: Sequence[Heat] = HEATS) -> dict[str, float]:
    """The ratio of each name to the incumbent, from the last heat that it ran in.

    `best` is the least ratio known from earlier races; the incumbent's own is 1.
    """
    found: dict[str, float] = {}
    left = list(names)
    for heat in heats:
        if not left:
            break
        now = ratios(timer([INCUMBENT, *left], heat.rounds))
        found |= now
        limit = min(best, *now.values()) * heat.within
        left = [name for name in left if now[name] <= limit]
    return found
