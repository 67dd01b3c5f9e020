"""Kernel parameters of an indexer's scores of KV blocks by WGMMA, and what they support."""

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.arch import arch_named

TILE = 128  # rows of a query tile, and keys of a KV tile
GROUPS = 2  # consumer warpgroups, 64 rows each
HEAD_DIMS = (64, 128)
MOST_HEADS = 8  # per list
POOLS = (1, 4, 16, 64, 128)  # keys of which a score is the maximum
MOST_STAGES = 4


@dataclass(frozen=True)
class ScoreFacts:
    """Kernel parameters.

    heads: of a list. relu: apply it to each head's product before they are added. pool: keys of a block, of which the
    largest score counts; 1: each key has a score. causal: later keys do not count in a block (pool > 1).
    """

    family: ClassVar[str] = "block scores"
    arch: str
    dtype: str
    head_dim: int
    heads: int
    relu: bool
    pool: int
    causal: bool

    @property
    def tile_bytes(self) -> int:
        return TILE * self.head_dim * 2

    @property
    def tiles(self) -> int:
        """Query and KV tiles that fit into shared memory."""
        return (arch_named(self.arch).smem - 2048) // self.tile_bytes

    @property
    def stages(self) -> int:
        """KV tiles that fit beside the query tiles of all heads."""
        return min(MOST_STAGES, self.tiles - self.heads)


def facts_for(
    arch: str, dtype: str, head_dim: int, heads: int, relu: bool, pool: int, causal: bool
) -> ScoreFacts | None:
    """Select the kernel; None if there is none for these scores."""
    facts = ScoreFacts(arch, dtype, head_dim, heads, relu, pool, causal and pool > 1)
    return None if reason_against(facts) else facts


def reason_against(facts: ScoreFacts) -> str:
    """The reason why facts are not supported, or ""."""
    spec = arch_named(facts.arch)
    if spec.path != "sm_90":
        return f"the kernel of block scores requires WGMMA (sm_90), got {spec.name}"
    for name, value, known in (
        ("dtype", facts.dtype, ("bfloat16", "float16")),
        ("head_dim", facts.head_dim, HEAD_DIMS),
        ("heads", facts.heads, range(1, MOST_HEADS + 1)),
        ("pool", facts.pool, POOLS),
    ):
        if value not in known:
            return f"{name} must be one of {', '.join(map(str, known))}, got {value}"
    if facts.stages < 2:
        return f"{facts.heads} heads of {facts.head_dim} need too much shared memory; use at most {facts.tiles - 2}"
    return ""
