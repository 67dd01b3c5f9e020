"""Selection of the parts of a kernel: its mainloop and its schedule, as objects."""

from typing import Any

from .config import GemmFacts
from .kernel_sm80 import GemmSm80
from .kernel_sm90 import GemmSm90
from .mainloops.factors_sm90 import BlockFactors, NoFactors, One, ScaleFactors
from .mainloops.first_in_place_sm90 import BothBanks, FirstInPlaceSm90
from .mainloops.in_place_sm90 import InPlaceSm90
from .mainloops.issue_rs_sm90 import IssueRS
from .mainloops.issue_sm90 import IssueSS
from .mainloops.promoted_sm90 import DoubleBufferedSm90, PromotedSm90
from .schedules.cooperative import Cooperative
from .schedules.overlap_store import OverlapStore
from .schedules.ping_pong import PingPong
from .schedules.split_k import SplitK
from .schedules.two_pipelines import TwoPipelines


def kernel_for(facts: GemmFacts):
    """The kernel of the facts' path for a dense A or dense blocks."""
    if facts.path != "sm_90":
        return GemmSm80(facts)
    return kernel_sm90(facts, IssueRS(facts) if facts.a_in_registers else IssueSS(facts))


def kernel_sm90(facts: GemmFacts, issue: IssueSS) -> GemmSm90:
    """The sm_90 kernel with an issuer of WGMMAs."""
    return GemmSm90(facts, mainloop_for(facts, issue), schedule_for(facts))


def mainloop_for(facts: GemmFacts, issue: IssueSS) -> InPlaceSm90:
    """The accumulator of a kernel's partial sums."""
    if not facts.promotes:
        return InPlaceSm90(issue)
    if facts.overlaps_store:
        return FirstInPlaceSm90(issue, BothBanks(), facts.grouped)
    if not facts.takes_turns:
        return PromotedSm90(issue, BlockFactors() if facts.block_factors else NoFactors())
    factors: Any = One()
    if facts.epilogue.scales_blocks:
        factors = ScaleFactors(facts)
    elif facts.block_factors:
        factors = BlockFactors()
    return DoubleBufferedSm90(issue, factors, facts.grouped)


def schedule_for(facts: GemmFacts) -> type[Cooperative]:
    """The schedule of a kernel's work tiles."""
    cfg = facts.config
    if cfg.split > 1:
        return SplitK
    if cfg.rings > 1:
        return TwoPipelines
    if cfg.consumer_groups > 1:
        return PingPong
    return OverlapStore if facts.overlaps_store else Cooperative
