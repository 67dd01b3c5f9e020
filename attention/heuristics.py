"""Which tiles an attention kernel may have, and which one it gets."""

from dataclasses import replace

from cute_kernels.arch import ArchSpec

from .config import FlashConfig, FlashFacts

HEAD_DIMS = (64, 96, 128, 192, 256)

# By the larger of the two head dimensions: (tile_m, tile_n, stages, consumer warpgroups) without a right bound, and
# with one, where narrow tiles leave less of the diagonal's band to be masked. All compile without spills, and without
# serialised WGMMAs; which are the fastest is not measured.
SM_90 = {
    64: ((192, 128, 2, 3), (192, 128, 2, 3)),
    96: ((128, 128, 2, 2), (128, 128, 2, 2)),
    128: ((128, 176, 2, 2), (128, 128, 2, 2)),
    192: ((128, 112, 2, 2), (128, 112, 2, 2)),
    256: ((128, 80, 2, 2), (128, 80, 2, 2)),
}

# By the larger of the two head dimensions, the first that fits being taken: (tile_m, tile_n, stages, warps). A warp of
# 32 rows reads K and V from shared memory half as often as one of 16, but has twice the accumulators: 128x64 by four
# warps spills a few addresses at head dimension 128, 128x32 nothing.
SM_80 = {
    64: ((128, 64, 2, 4), (128, 64, 1, 4), (64, 64, 2, 4)),
    96: ((128, 64, 2, 4), (64, 64, 2, 4)),
    128: ((128, 32, 2, 4), (64, 64, 2, 4), (64, 64, 1, 4), (128, 64, 1, 8)),
    192: ((64, 64, 1, 4), (128, 64, 1, 8)),
    256: ((64, 64, 1, 4), (128, 64, 1, 8)),
}


def candidates_sm80(spec: ArchSpec, head_dim: int, head_dim_v: int) -> list[FlashConfig]:
    """Configurations of the sm_80 path that fit the architecture's shared memory, the most promising first.

    Raises ValueError for head dimensions that no kernel has.
    """
    for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if dim not in HEAD_DIMS:
            raise ValueError(f"{name} {dim} has no kernel; there are {', '.join(map(str, HEAD_DIMS))}: pad to the next")
    configs = [FlashConfig(*c) for c in SM_80[max(head_dim, head_dim_v)]]
    facts = (FlashFacts(spec.target, "sm_80", c, head_dim=head_dim, head_dim_v=head_dim_v) for c in configs)
    return [f.config for f in facts if f.smem_bytes <= spec.smem]


def pick(facts: FlashFacts) -> FlashFacts:
    """The facts with the configuration that their path takes by itself."""
    if facts.path == "sm_90":
        config = FlashConfig(*SM_90[max(facts.head_dim, facts.head_dim_v)][facts.band.right])
    else:
        config = candidates_sm80(facts.spec, facts.head_dim, facts.head_dim_v)[0]
    return replace(facts, config=config)
