"""Which tiles a call of backward has."""

from dataclasses import replace

from . import choose_sm90
from .config import BackwardFacts


def config_of(facts: BackwardFacts) -> BackwardFacts:
    """The facts with a configuration: of the sm_90 path where it has one, else of the sm_80 path."""
    if facts.path == "sm_90":
        config = choose_sm90.config_of(facts)
        if config is not None:
            return replace(facts, config=config)
    raise NotImplementedError("the sm_80 path's kernel of backward")
