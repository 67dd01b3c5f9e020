"""Tile configurations of the attention backward kernels."""

from collections.abc import Iterator
from dataclasses import replace

from ..forward.heuristics import HEAD_DIMS
from ..masks.bands import bounds_of
from .config import AheadConfig, BackwardConfig, BackwardFacts, SharedColumnsConfig, Sm80Config, StepConfig

# By the larger of the two head dimensions: prefetched scores, see has_registers_ahead.
SM_90_AHEAD = {
    64: AheadConfig(128, 128, 2, 2, stages_q=3),
    96: AheadConfig(64, 128, 2, 2, stages_q=3),
    128: AheadConfig(64, 128, 2, 2, stages_q=3),
}

# By the larger of the two head dimensions.
SM_90: dict[int, StepConfig | SharedColumnsConfig] = {dim: StepConfig(64, 128, 2, 2) for dim in (64, 96, 128)}

# Two warpgroups split the columns of dK and dV. PAIR: each processes its own query tile.
PAIR = SharedColumnsConfig(64, 64, 2, 2, query_tiles=2, dq_parts=2)
SM_90 |= {
    192: SharedColumnsConfig(64, 64, 2, 2, direct=True),
    256: SharedColumnsConfig(64, 64, 2, 2, dq_parts=2, direct=True),
}

# For blocks 64 wide: one consumer warpgroup per CTA, two CTAs per SM. At head dimension 128 that would spill.
SM_90_NARROW: dict[int, StepConfig | SharedColumnsConfig]
SM_90_NARROW = SM_90 | {64: StepConfig(64, 64, 2, 1, ctas=2), 96: StepConfig(64, 64, 1, 1, ctas=2), 128: PAIR}

# By the larger of the two head dimensions: (tile_m, tile_n, stages, warps); the first that fits is selected. These
# kernels are bound by shared memory reads, and each KV tile adds to dq_accum once. So a warp's part of each matmul is
# as square as registers allow, and tile_n is as large as shared memory allows. None has been measured.
SM_80 = {
    64: ((32, 128, 2, 4), (64, 64, 2, 4)),
    96: ((64, 128, 2, 8), (64, 128, 1, 8), (64, 64, 2, 8)),
    128: ((64, 128, 2, 8), (32, 128, 2, 8), (64, 64, 2, 8), (64, 64, 1, 8)),
    192: ((64, 64, 2, 8), (32, 64, 1, 8), (32, 64, 1, 4)),
    256: ((64, 64, 2, 8), (64, 64, 1, 8), (32, 32, 1, 4)),
}
# With a softcap or an element mask: both need registers, which these tiles leave free.
SM_80_MASKED = SM_80 | {
    64: ((64, 64, 2, 8),),
    96: ((64, 64, 2, 8),),
    128: ((64, 64, 2, 8), (64, 64, 1, 8)),
}

# Configurations that spill when compiled for sm_90a: the first of head dimension 128, and of 256 with block masks.
SPILLS_ON_SM_90 = {128: (64, 128, 2, 8)}
BLOCKS_SPILL_ON_SM_90 = SPILLS_ON_SM_90 | {256: (64, 64, 2, 8)}


def unsupported(facts: BackwardFacts) -> str | None:
    """The reason why no kernel supports these facts and their configuration; None if one does."""
    cfg, blocks = facts.config, facts.blocks
    if blocks is not None and (blocks.block_q % cfg.tile_m or blocks.block_k % cfg.tile_n):
        return f"tiles of {cfg.tile_m}x{cfg.tile_n} do not divide blocks of {blocks.block_q}x{blocks.block_k}"
    if facts.path == "sm_80":
        if facts.packed_heads > 1:
            return "rows of several heads have no kernel on the sm_80 path"
        if facts.shared_kv:
            return "work items that share a KV tile have no kernel on the sm_80 path"
        try:
            cfg.warps(facts.head_dim, facts.head_dim_v)
        except ValueError as error:
            return str(error)
    if facts.smem_bytes > facts.spec.smem:
        return f"it needs {facts.smem_bytes} bytes of shared memory; {facts.spec.name} has {facts.spec.smem}"
    return None


def has_registers_ahead(facts: BackwardFacts) -> bool:
    """True if registers suffice to prefetch scores.

    They do not with a score_mod, nor with an element mask that reads tensors or is combined with a softcap, unless it
    is a mask of selected blocks (members.py), or a band without offsets. At head dimension 128 they do not with any
    other element mask, a softcap, or FP32 gradients, which are not packed before the last WGMMAs. FP32 parts (items.py)
    are stored earlier.
    """
    if facts.score is not None:
        return False
    wide = max(facts.head_dim, facts.head_dim_v) == 128
    if wide and (facts.softcap or facts.grad_dtype):
        return False
    mask = facts.element_mask
    if mask is None or facts.members:
        return True
    if bounds_of(mask.program) is not None and not facts.offsets:
        return not facts.softcap
    return not (wide or facts.softcap or mask.tensors)


def candidates(facts: BackwardFacts) -> Iterator[BackwardFacts]:
    """The facts with each configuration that supports them, the most promising first.

    Facts of the sm_90 path also include configurations of the sm_80 path.

    Raises:
        ValueError: no kernel supports the head dimension.
    """
    for name, dim in (("head_dim", facts.head_dim), ("head_dim_v", facts.head_dim_v)):
        if dim not in HEAD_DIMS:
            dims = ", ".join(map(str, HEAD_DIMS))
            raise ValueError(f"{name} must be one of {dims} for the backward pass, got {dim}; pad to the next one")
    dim = max(facts.head_dim, facts.head_dim_v)
    scattered = facts.score is not None and any(not read.of_head for read in facts.score_reads)
    tiles = SM_90 | {128: PAIR} if scattered else SM_90  # per-element atomics into gradients need registers
    if facts.blocks is not None and facts.blocks.block_k != 128:
        tiles = SM_90_NARROW
    configs: list[BackwardConfig] = []
    if facts.path == "sm_90" and tiles == SM_90 and dim in SM_90_AHEAD and has_registers_ahead(facts):
        configs += SM_90_AHEAD[dim].variants(facts.deterministic)
    if facts.path == "sm_90" and dim in tiles:
        configs += tiles[dim].variants(facts.deterministic)
    two_spill = (facts.grad_dtype or facts.members) and dim == 128
    if two_spill or facts.deterministic and not two_buffers_pay(facts):
        configs = [config for config in configs if getattr(config, "sums", 1) == 1]
    masked = facts.softcap or facts.score is not None or facts.element_mask is not None
    table = SM_80_MASKED if masked else SM_80
    spills = SPILLS_ON_SM_90 if facts.blocks is None else BLOCKS_SPILL_ON_SM_90
    spilling = spills.get(dim) if facts.spec.name == "sm_90" else None
    kernels = [replace(facts, config=config) for config in configs]
    kernels += (replace(facts, path="sm_80", config=Sm80Config(*c)) for c in table[dim] if c != spilling)
    return (f for f in kernels if unsupported(f) is None)


def two_buffers_pay(facts: BackwardFacts) -> bool:
    """True if a deterministic kernel is faster with two dQ buffers than with one.

    The rule is simpler than the measurements (docs/notes/attention-backward.md): packed sequences without a mask, and a
    softcap at head dimension 64, lose 1 to 2 % by it.
    """
    if facts.packed or facts.element_mask is not None:
        return False
    if max(facts.head_dim, facts.head_dim_v) == 64:
        return facts.score is not None
    return facts.score is None and not facts.softcap and not facts.window.left


def pick(facts: BackwardFacts) -> BackwardFacts:
    """The facts with the most promising configuration and its path.

    Raises:
        ValueError: no kernel supports the head dimension.
    """
    return next(candidates(facts))
