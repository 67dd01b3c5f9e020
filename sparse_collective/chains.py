"""Which products may begin before the kernel that quantises their operand has ended (cute_kernels/tile/chain.py)."""

from cute_kernels.matmul.config import GemmFacts

MOST_COLUMNS = 64  # of a tile: with more of them what can be loaded ahead is a small part of the time


def may_follow(facts: GemmFacts) -> bool:
    """Whether there is a kernel of these facts that follows another: of 8-bit floats and few columns, on sm_90."""
    if facts.arch != "sm_90a" or facts.element.width != 1 or facts.block.batch or facts.ordered:
        return False
    if facts.family == "skinny":
        return True
    cfg = facts.config
    plain = facts.path == "sm_90" and facts.family == "bsr" and cfg.tile_n <= MOST_COLUMNS
    return plain and cfg.cluster_m == cfg.cluster_n == cfg.boxes_b == cfg.rings == 1
