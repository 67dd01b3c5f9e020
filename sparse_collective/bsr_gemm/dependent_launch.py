"""GEMMs that may be secondary kernels of the quantization of their operand (cute_kernels/tile/dependent_launch.py)."""

from cute_kernels.matmul.config import GemmFacts

MOST_COLUMNS = 64  # per tile; with more, the loads that can be prefetched are a small part of the time


def may_follow(facts: GemmFacts) -> bool:
    """True if these facts support programmatic dependent launch as the secondary kernel: small-N FP8 on sm_90."""
    if facts.arch != "sm_90a" or facts.element.width != 1 or facts.block.batch or facts.ordered:
        return False
    if facts.family == "skinny":
        return True
    cfg = facts.config
    plain = facts.path == "sm_90" and facts.family == "bsr" and cfg.tile_n <= MOST_COLUMNS
    return plain and cfg.cluster_m == cfg.cluster_n == cfg.boxes_b == cfg.rings == 1
