"""Which tiles the sm_90 kernels of backward have."""

from .config import BackwardConfig, BackwardFacts

# By the larger of the two head dimensions: (tile_m, tile_n, stages, consumer warpgroups). Not measured yet.
TILES = {64: (64, 128, 2, 2), 96: (64, 128, 2, 2), 128: (64, 128, 2, 2)}

# Of blocks that are 64 wide: one consumer warpgroup a CTA, two CTAs an SM. At head dimension 128 it would spill.
NARROW = {64: (64, 64, 2, 1, 2), 96: (64, 64, 1, 1, 2)}


def config_of(facts: BackwardFacts) -> BackwardConfig | None:
    """The configuration for such facts, which have none yet; None where only the sm_80 path has a kernel."""
    dim = max(facts.head_dim, facts.head_dim_v)
    narrow = facts.blocks is not None and facts.blocks.block_k == 64
    tiles = (NARROW if narrow else TILES).get(dim)
    return None if tiles is None else BackwardConfig(*tiles)
