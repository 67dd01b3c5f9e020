"""Heuristics for forward tiles: the candidates of a kernel and the selection for a call."""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from cute_kernels.arch import ArchSpec

from .config import SCALE_TOKENS, FlashConfig, FlashFacts, Float8Facts, GatherFacts

Facts = TypeVar("Facts", bound=FlashFacts)
HEAD_DIMS = (64, 96, 128, 192, 256)
WIDE = 512  # head dimension of q, k and v with a forward kernel but no backward
L2_BYTES = 2**25  # K and V that CTAs work on at a time, so that they stay in L2

# By the larger of the two head dimensions: (tile_m, tile_n, stages, consumer warpgroups) and the microseconds that a
# CTA takes per KV tile on an H200 (docs/notes). All compile without spills and without serialized WGMMAs; those in
# NO_SOFTCAP would spill with a softcap. Those in UNMASKED_ONLY are faster only if no element is masked.
SM_90 = {
    64: (((192, 112, 3, 3), 1.19), ((192, 128, 2, 3), 1.45), ((128, 128, 3, 2), 1.02), ((64, 128, 2, 1), 0.76)),
    96: (((192, 80, 4, 3), 1.02), ((128, 128, 2, 2), 1.24), ((64, 128, 2, 1), 0.95)),
    128: (((192, 80, 4, 3), 1.245), ((128, 128, 3, 2), 1.40), ((64, 128, 2, 1), 1.06)),
    192: (((128, 112, 2, 2), 1.74), ((64, 112, 2, 1), 1.23)),
    256: (((128, 80, 2, 2), 1.72), ((64, 80, 2, 1), 1.34)),
    WIDE: (((64, 64, 1, 2), 2.2),),  # by calculation
}
NO_SOFTCAP = {(64, (192, 128, 2, 3)), (256, (128, 128, 2, 2))}
UNMASKED_ONLY = {(96, (192, 80, 4, 3)), (128, (192, 80, 4, 3))}
# Additional cost of a query tile per warpgroup: its first S and its last P V overlap with little.
TILE_US = 1.0

# By the larger of the two head dimensions; the first that fits is selected: (tile_m, tile_n, stages, warps). A warp of
# 32 rows reads K and V from shared memory half as often as one of 16, but has twice the accumulators: 128x64 by four
# warps spills a few addresses at head dimension 128, 128x32 nothing.
SM_80 = {
    64: ((128, 64, 2, 4), (64, 64, 2, 4)),
    96: ((128, 64, 2, 4), (64, 64, 2, 4)),
    128: ((128, 32, 3, 4), (128, 32, 2, 4), (64, 64, 2, 4), (64, 64, 1, 4), (128, 64, 1, 8)),
    192: ((64, 64, 1, 4), (128, 64, 1, 8)),
    256: ((64, 64, 1, 4), (128, 64, 1, 8)),
    # Two warps split the head dimension of the same rows, four in the last entry (FlashFacts.sharers). These also serve
    # packed sequences and block masks, whose blocks they divide.
    WIDE: ((64, 32, 2, 8), (64, 32, 1, 8), (32, 16, 1, 8)),
}

# The same for kernels that write LSE and for packed sequences: both need registers that these tiles leave free.
SM_80_LSE = {
    64: ((64, 64, 2, 4),),
    96: ((128, 64, 2, 4), (64, 64, 2, 4)),
    128: ((64, 64, 2, 4), (64, 64, 1, 4)),
    192: ((64, 64, 1, 4),),
    256: ((64, 32, 2, 4), (64, 32, 1, 4)),
    WIDE: SM_80[WIDE],
}
# Packed sequences with a score_mod
SM_80_TIGHT = SM_80_LSE | {128: ((64, 32, 4, 4), (64, 32, 2, 4))}

# Block masks on sm_90, by block_q and the larger head dimension: (tile_n, stages) for 128-wide and for 64-wide blocks.
# A 64-row block is computed by one consumer warpgroup per CTA, with two CTAs per SM and half of its shared memory each.
BLOCKS_SM_90 = {
    128: {
        64: ((128, 3), (64, 4)),
        96: ((128, 3), (64, 4)),
        128: ((128, 3), (64, 4)),
        192: ((64, 3), (64, 3)),
        256: ((64, 2), (64, 2)),
    },
    64: {
        64: ((128, 2), (64, 4)),
        96: ((128, 2), (64, 4)),
        128: ((64, 3), (64, 3)),
        192: ((64, 1), (64, 1)),
        256: ((64, 1), (64, 1)),
    },
}

# FP8 Q and K with FP16 P and V and one scale per block of tokens, where no tile of SM_90 divides a block. Estimated:
# SM_90's time for as many scores. 64x128 would spill at head dimension 192.
TOKENS = {
    192: (((128, 128, 2, 2), 1.99), ((64, 64, 4, 1), 0.80)),
    256: (((128, 64, 3, 2), 1.40), ((64, 64, 3, 1), 1.10)),
}

# FP8 Q and K with FP16 P and V. 192x112 would spill at head dimension 64; the microseconds of 192x96 are estimated.
FLOAT8_SCORES = {64: (((192, 96, 4, 3), 1.05), *SM_90[64][1:])}
# With a mask that reads tensors: (tile_n, stages) by block_q, head dimension and True for scales per block of tokens,
# where 64-wide tiles would spill, too.
FLOAT8_MASKED = {(64, 256, True): (32, 3), (64, 256, False): (32, 3), (128, 256, False): (32, 4)}

# FP8 P and V, as SM_90 and BLOCKS_SM_90. A tile's columns are whole MMA steps of P V, 32. The microseconds of head
# dimension 128 are measured on an H100, with V's transposition: `estimate` gives 1105, 1111 and 1149 us for 2 x 16
# heads, 8192 queries and keys without a mask. Those of 64x128 and of other head dimensions are estimated: the 16-bit
# times over 1.45, for as many scores. Tiles of FLOAT8_PLAIN_SCORES would spill with a softcap or a score_mod.
FLOAT8 = {
    64: (((192, 128, 3, 3), 1.15), ((128, 128, 4, 2), 0.85), ((64, 128, 3, 1), 0.65)),
    96: (((192, 96, 4, 3), 0.90), ((128, 128, 4, 2), 0.90), ((64, 128, 3, 1), 0.70)),
    128: (((192, 96, 4, 3), 1.13), ((128, 192, 2, 2), 1.57), ((128, 128, 4, 2), 1.09), ((64, 128, 3, 1), 0.75)),
    192: (((128, 128, 2, 2), 1.35), ((64, 128, 2, 1), 0.95)),
    256: (((128, 128, 2, 2), 1.80), ((64, 64, 3, 1), 0.75)),
}
FLOAT8_UNMASKED_ONLY = {(96, (192, 96, 4, 3)), (128, (192, 96, 4, 3))}
FLOAT8_PLAIN_SCORES = {(128, (128, 192, 2, 2))}
FLOAT8_NO_PACKED_SCORES = {(128, (64, 128, 3, 1))}  # would spill with a softcap or a score_mod and packed sequences
FLOAT8_HEAD_SCALES_ONLY = {(192, (64, 128, 2, 1))}  # would spill with scales per block of tokens
FLOAT8_BLOCKS = {
    128: {
        64: ((128, 4), (64, 6)),
        96: ((128, 4), (64, 6)),
        128: ((128, 4), (64, 6)),
        192: ((128, 2), (64, 4)),
        256: ((64, 4), (64, 4)),
    },
    64: {
        64: ((128, 4), (64, 6)),
        96: ((128, 3), (64, 5)),
        128: ((128, 2), (64, 4)),
        192: ((64, 2), (64, 2)),
        256: ((64, 2), (64, 2)),
    },
}

# Gathered KV tiles, by head dimension: (tile_n, stages). Bits of membership are in words of 128 keys.
GATHER = {64: (128, 3), 128: (128, 3), 192: (64, 3), 256: (64, 2)}
GATHERED = (1, 4, 16, 64, 128)  # tokens of a block, at most tile_n

# E4M3 V is converted to FP16 by a kernel before the forward kernel, or in the forward kernel (fp8/values_inside), where
# each query tile converts it again. Measured on an H200: the launch of the kernel before and its time per byte read or
# written, and the forward kernel's additional time per converted value on one SM: 0.1 us for a tile of 128x128.
BEFORE_US, BEFORE_US_A_BYTE = 3.0, 1 / 3.3e6
INSIDE_US_A_VALUE = 0.1 / 128**2
BLOCKS_VISITED = 0.25  # assumed density of a block mask, whose lists the host does not read

# On sm_80: (tile_m, tile_n, stages, warps), which fit the shared memory of every architecture. A block mask leaves no
# registers for warps of 32 rows. Compiled for sm_90a, those with a softcap and tensors in the mask spill a few.
BLOCKS_SM_80 = {
    128: {
        64: (128, 64, 2, 8),
        96: (128, 64, 2, 8),
        128: (128, 64, 2, 8),
        192: (64, 64, 1, 4),
        256: (64, 32, 1, 4),
    },
    64: {
        64: (64, 64, 2, 4),
        96: (64, 64, 2, 4),
        128: (64, 32, 2, 4),
        192: (64, 64, 1, 4),
        256: (64, 32, 1, 4),
    },
}


def head_dims_text() -> str:
    """The supported head dimensions, for messages."""
    return f"{', '.join(map(str, HEAD_DIMS))}, or {WIDE} for q, k and v alike"


def is_fast(facts: FlashFacts) -> bool:
    """True if P and V are FP8, which have their own tiles."""
    return isinstance(facts, Float8Facts) and facts.fast


def config_of_blocks(facts: Any) -> FlashConfig:
    """Tiles for a block mask: block_q is tile_m or a multiple, block_k is tile_n or a multiple."""
    blocks, dim = facts.blocks, max(facts.head_dim, facts.head_dim_v)
    if facts.path == "sm_90" and dim == WIDE:
        return FlashConfig(*SM_90[WIDE][0][0], dynamic=True)
    if facts.path == "sm_90":
        fast = is_fast(facts)
        table = FLOAT8_BLOCKS if fast else BLOCKS_SM_90
        # With FP8 Q and K, a mask that reads tensors has no registers for 128 columns next to scores to be converted to
        # FP16.
        masked = isinstance(facts, Float8Facts) and not fast and bool(blocks.mask and blocks.mask.tensors)
        tile_n, stages = table[blocks.block_q][dim][blocks.block_k == 64 or masked]
        if masked:
            tile_n, stages = FLOAT8_MASKED.get((blocks.block_q, dim, facts.tokens), (tile_n, stages))
        groups = blocks.block_q // 64
        return FlashConfig(blocks.block_q, tile_n, stages, groups, dynamic=True, ctas=3 - groups)
    if dim == WIDE:
        return candidates_sm80(facts.spec, dim, dim)[0]
    return FlashConfig(*BLOCKS_SM_80[blocks.block_q][dim])


def gather_facts(facts: FlashFacts, block_size: int, causal: bool) -> GatherFacts:
    """The kernel of these facts that gathers KV tiles from listed blocks."""
    tile_n, stages = GATHER[facts.head_dim]
    values = {f.name: getattr(facts, f.name) for f in fields(facts)}
    values["config"] = FlashConfig(128, tile_n, stages, 2, dynamic=True)
    return GatherFacts(**values, block_size=block_size, causal=causal)


def candidates_sm80(
    spec: ArchSpec, head_dim: int, head_dim_v: int, lse: bool = False, tight: bool = False
) -> list[FlashConfig]:
    """Configurations of the sm_80 path that fit the architecture's shared memory, best first.

    lse, tight: select one of the tables above.

    Raises ValueError for unsupported head dimensions.
    """
    for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if dim not in HEAD_DIMS and not head_dim == head_dim_v == WIDE:
            raise ValueError(f"{name} must be {head_dims_text()}, got {dim}; pad to the next one")
    table = SM_80_TIGHT if tight else SM_80_LSE if lse else SM_80
    configs = [FlashConfig(*c) for c in table[max(head_dim, head_dim_v)]]
    facts = (FlashFacts(spec.target, "sm_80", c, head_dim=head_dim, head_dim_v=head_dim_v) for c in configs)
    # A third stage only where two CTAs still share an SM.
    return [f.config for f in facts if f.smem_bytes * (1 + (f.config.stages > 2)) <= spec.smem]


def heads_in_l2(cols: int, row_bytes: int) -> int:
    """Number of heads whose K and V (`cols` rows, `row_bytes` per row in all) stay in L2, at least one."""
    return max(L2_BYTES // row_bytes // max(cols, 1), 1)


@dataclass(frozen=True)
class Extents:
    """Problem sizes that tile selection depends on, besides the facts."""

    heads: int  # in the whole batch
    rows: int
    cols: int
    left: int | None  # bounds of the window
    right: int | None
    sms: int  # of the GPU

    @property
    def uneven(self) -> bool:
        """True if query tiles visit different numbers of KV tiles."""
        return self.left is not None or self.right is not None


def visits(extents: Extents, tile_m: int, tile_n: int) -> list[int]:
    """Number of KV tiles that each query tile of a head visits: kv_tiles.WindowSource on the host."""
    e, counts = extents, []
    for first in range(0, e.rows, tile_m):
        offset, after = e.cols - e.rows, min(first + tile_m, e.rows)
        end = e.cols if e.right is None else max(min(e.cols, after + offset + e.right), 0)
        begin = 0 if e.left is None else min(max(first + offset - e.left, 0), end)
        counts.append(max(-(-end // tile_n) - begin // tile_n, 0))
    return counts


def estimate(extents: Extents, config: FlashConfig, tile_us: float) -> float:
    """Estimated microseconds: the work of all tiles over all SMs if CTAs fetch their tiles, else the end of the last
    wave."""
    costs = [n * tile_us + TILE_US * config.groups for n in visits(extents, config.tile_m, config.tile_n)]
    if extents.uneven:
        return max(sum(costs) * extents.heads / extents.sms, max(costs))
    return -(-len(costs) * extents.heads // extents.sms) * max(costs)


def candidates_sm90(facts: FlashFacts, extents: Extents) -> list[tuple[FlashConfig, float]]:
    """Configurations of the sm_90 path and their microseconds per tile.

    With one scale per block of tokens, a KV tile lies in one block. The schedule is dynamic if query tiles differ in
    length and are more than run at once.
    """
    configs, dim, tokens = [], max(facts.head_dim, facts.head_dim_v), getattr(facts, "tokens", False)
    table, unmasked_only, plain_scores = SM_90, UNMASKED_ONLY, set()
    if isinstance(facts, Float8Facts):
        table = SM_90 | FLOAT8_SCORES | (TOKENS if tokens else {})
    if is_fast(facts):
        table, unmasked_only, plain_scores = FLOAT8, FLOAT8_UNMASKED_ONLY, FLOAT8_PLAIN_SCORES
    changes_scores = facts.softcap or facts.score is not None
    for tiles, tile_us in table[dim]:
        if (
            facts.softcap
            and (dim, tiles) in NO_SOFTCAP
            or (extents.uneven or facts.score is not None)
            and ((dim, tiles) in unmasked_only)
            or changes_scores
            and ((dim, tiles) in plain_scores or facts.packed and (dim, tiles) in FLOAT8_NO_PACKED_SCORES)
            or tokens
            and (SCALE_TOKENS % tiles[1] or is_fast(facts) and (dim, tiles) in FLOAT8_HEAD_SCALES_ONLY)
        ):
            continue
        waves = -(-extents.rows // tiles[0]) * extents.heads > extents.sms
        configs.append((FlashConfig(*tiles, dynamic=facts.packed or extents.uneven and waves), tile_us))
    return configs


def cannot_convert(facts: Float8Facts) -> str:
    """Reason why no forward kernel of these facts converts V; "" if one does.

    Masks that read tensors leave no registers for it with 128 columns, nor do any element masks at head dimension 256
    with 64-row blocks.
    """
    if facts.fast or facts.given_v != facts.dtype:
        return f"{facts.given_v} V{' with fast accumulation' * facts.fast} is not converted to float16"
    if facts.packed:
        return "a packed V is not converted: consumer warps zero its rows past a sequence's end"
    blocks, cfg = facts.blocks, facts.config
    if cfg and blocks and blocks.mask:
        dim, tile = max(facts.head_dim, facts.head_dim_v), f"{cfg.tile_m}x{cfg.tile_n}"
        if blocks.mask.tensors and cfg.tile_n == 128 or dim == 256 and cfg.groups == 1:
            return f"element masks spill with tiles of {tile} at head dimension {dim} if the kernel also converts V"
    return ""


def converts_inside(facts: Float8Facts, extents: Extents, group: int) -> bool:
    """True if converting E4M3 V to FP16 in the forward kernel is estimated to be faster than in a kernel before it.

    group: query heads per KV head.
    """
    cfg = facts.config
    values = extents.heads // group * extents.cols * facts.head_dim_v
    before = BEFORE_US + values * 3 * BEFORE_US_A_BYTE  # a byte is read, and two are written
    tiles = sum(visits(extents, cfg.tile_m, cfg.tile_n)) * (1.0 if facts.blocks is None else BLOCKS_VISITED)
    visited = tiles * extents.heads * cfg.tile_n * facts.head_dim_v
    return visited / extents.sms * INSIDE_US_A_VALUE < before


def pick(facts: Facts, extents: Extents) -> Facts:
    """The facts with the configuration of the lowest estimate, or the sm_80 path's first that fits."""
    if facts.blocks is not None:
        config = config_of_blocks(facts)
    elif facts.path == "sm_90":
        config, _ = min(candidates_sm90(facts, extents), key=lambda c: estimate(extents, *c))
    else:
        # A packed sequence's bounds and a score_mod take registers too, which leaves none for warps of 32 rows.
        needs_registers = facts.lse or facts.packed or facts.score is not None
        tight = facts.packed and facts.score is not None
        configs = candidates_sm80(facts.spec, facts.head_dim, facts.head_dim_v, needs_registers, tight)
        config = next(c for c in configs if not facts.packed or c.tile_m <= 16 * c.groups)
    return replace(facts, config=config)
