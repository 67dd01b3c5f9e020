"""Which tiles a kernel of attention's backward gets."""

from collections.abc import Iterator
from dataclasses import replace

from ..forward.choose import HEAD_DIMS
from .config import AheadConfig, BackwardFacts, SharedColumnsConfig, Sm80Config, StepConfig

# By the larger of the two head dimensions: scores computed ahead. Registers of a mask that reads tensors are too many.
SM_90_AHEAD = {
    64: AheadConfig(128, 128, 2, 2, stages_q=3),
    96: AheadConfig(64, 128, 2, 2, stages_q=3),
    128: AheadConfig(64, 128, 2, 2, stages_q=3),
}

# By the larger of the two head dimensions.
SM_90 = {dim: StepConfig(64, 128, 2, 2) for dim in (64, 96, 128)}

# Where two warpgroups share the columns of dK and dV; PAIR: each has a query tile of its own.
PAIR = SharedColumnsConfig(64, 64, 2, 2, query_tiles=2, dq_parts=2)
SM_90 |= {
    192: SharedColumnsConfig(64, 64, 2, 2, direct=True),
    256: SharedColumnsConfig(64, 64, 2, 2, dq_parts=2, direct=True),
}

# Of blocks that are 64 wide: one consumer warpgroup a CTA, two CTAs an SM. At head dimension 128 it would spill.
SM_90_NARROW = SM_90 | {64: StepConfig(64, 64, 2, 1, ctas=2), 96: StepConfig(64, 64, 1, 1, ctas=2), 128: PAIR}

# By the larger of the two head dimensions, the first that fits being taken: (tile_m, tile_n, stages, warps). What is
# read from shared memory bounds these kernels, and dQ's sums are added to once for each tile of K: so a warp has as
# square a part of each product as its registers hold, and tile_n is as large as shared memory allows. None has been
# measured.
SM_80 = {
    64: ((32, 128, 2, 4), (64, 64, 2, 4)),
    96: ((64, 128, 2, 8), (64, 128, 1, 8), (64, 64, 2, 8)),
    128: ((64, 128, 2, 8), (32, 128, 2, 8), (64, 64, 2, 8), (64, 64, 1, 8)),
    192: ((64, 64, 2, 8), (32, 64, 1, 8), (32, 64, 1, 4)),
    256: ((64, 64, 2, 8), (64, 64, 1, 8), (32, 32, 1, 4)),
}
# The same with a softcap or an element mask: both need registers, which these tiles leave free.
SM_80_MASKED = SM_80 | {
    64: ((64, 64, 2, 8),),
    96: ((64, 64, 2, 8),),
    128: ((64, 64, 2, 8), (64, 64, 1, 8)),
}

# Compiled for sm_90a some spill: the first of head dimension 128, and of 256 with block masks.
SPILLS_ON_SM_90 = {128: (64, 128, 2, 8)}
BLOCKS_SPILL_ON_SM_90 = SPILLS_ON_SM_90 | {256: (64, 64, 2, 8)}


def unsupported(facts: BackwardFacts) -> str | None:
    """Why no kernel has these facts with their configuration; None if there is one."""
    cfg, blocks = facts.config, facts.blocks
    if blocks is not None and (blocks.block_q % cfg.tile_m or blocks.block_k % cfg.tile_n):
        return f"tiles of {cfg.tile_m}x{cfg.tile_n} do not divide blocks of {blocks.block_q}x{blocks.block_k}"
    if facts.path == "sm_80":
        try:
            cfg.warps(facts.head_dim, facts.head_dim_v)
        except ValueError as error:
            return str(error)
    if facts.smem_bytes > facts.spec.smem:
        return f"it needs {facts.smem_bytes} bytes of shared memory; {facts.spec.name} has {facts.spec.smem}"
    return None


def has_registers_ahead(facts: BackwardFacts) -> bool:
    """True if scores may be computed ahead. Element masks and a cap, at head dimension 128 one of them or FP32
    gradients, which are not packed before the last products, need the registers."""
    if facts.score is not None:
        return False
    wide = max(facts.head_dim, facts.head_dim_v) == 128
    if facts.blocks is None or facts.blocks.mask is None:
        return not (wide and (facts.softcap or facts.grad_dtype))
    return not (wide or facts.softcap or facts.blocks.mask.tensors)


def candidates(facts: BackwardFacts) -> Iterator[BackwardFacts]:
    """The facts with each configuration that there is for them, the most promising first.

    Facts of the sm_90 path also get those of the sm_80 path.

    Raises:
        ValueError: a head dimension that no kernel has.
    """
    for name, dim in (("head_dim", facts.head_dim), ("head_dim_v", facts.head_dim_v)):
        if dim not in HEAD_DIMS:
            raise ValueError(f"{name} {dim} has no kernel; there are {', '.join(map(str, HEAD_DIMS))}: pad to the next")
    dim = max(facts.head_dim, facts.head_dim_v)
    mask = None if facts.blocks is None else facts.blocks.mask
    scattered = facts.score is not None and any(not read.of_head for read in facts.score_reads)
    tiles = SM_90 | {128: PAIR} if scattered else SM_90  # gradients that each element adds to memory need registers
    if facts.blocks is not None and facts.blocks.block_k != 128:
        tiles = SM_90_NARROW
    configs = []
    if facts.path == "sm_90" and tiles == SM_90 and dim in SM_90_AHEAD and has_registers_ahead(facts):
        configs += SM_90_AHEAD[dim].variants(facts.deterministic)
    if facts.path == "sm_90" and dim in tiles:
        configs += tiles[dim].variants(facts.deterministic)
    if facts.grad_dtype and dim == 128:  # with several buffers of sums they spill
        configs = [config for config in configs if getattr(config, "sums", 1) == 1]
    masked = facts.softcap or facts.score is not None or mask is not None
    table = SM_80_MASKED if masked else SM_80
    spills = SPILLS_ON_SM_90 if facts.blocks is None else BLOCKS_SPILL_ON_SM_90
    spilling = spills.get(dim) if facts.spec.name == "sm_90" else None
    found = [replace(facts, config=config) for config in configs]
    found += (replace(facts, path="sm_80", config=Sm80Config(*c)) for c in table[dim] if c != spilling)
    return (f for f in found if unsupported(f) is None)


def pick(facts: BackwardFacts) -> BackwardFacts:
    """The facts with their configuration, and the path of that.

    Raises:
        ValueError: a head dimension that no kernel has.
    """
    return next(candidates(facts))
