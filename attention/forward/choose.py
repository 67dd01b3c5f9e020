"""Which tiles a forward kernel may have, and which of them a call gets."""

from dataclasses import dataclass, replace

from cute_kernels.arch import ArchSpec

from .config import SCALE_TOKENS, FlashConfig, FlashFacts, Float8Facts

HEAD_DIMS = (64, 96, 128, 192, 256)
WIDE = 512  # the head dimension of q, k and v that has a forward kernel, and no backward
L2_BYTES = 2**25  # of K and V that CTAs work on at a time, so that they stay in L2

# By the larger of the two head dimensions: (tile_m, tile_n, stages, consumer warpgroups) and the microseconds that a
# CTA takes for one tile of K and V on an H200 (docs/notes). All compile without spills, and without serialised
# WGMMAs; those of NO_SOFTCAP would spill with a cap. Those of UNMASKED_ONLY are faster only if no element is masked.
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
# What a query tile costs in addition, for each warpgroup: little overlaps with its first scores and its last product.
TILE_US = 1.0

# By the larger of the two head dimensions, the first that fits being taken: (tile_m, tile_n, stages, warps). A warp of
# 32 rows reads K and V from shared memory half as often as one of 16, but has twice the accumulators: 128x64 by four
# warps spills a few addresses at head dimension 128, 128x32 nothing.
SM_80 = {
    64: ((128, 64, 2, 4), (64, 64, 2, 4)),
    96: ((128, 64, 2, 4), (64, 64, 2, 4)),
    128: ((128, 32, 3, 4), (128, 32, 2, 4), (64, 64, 2, 4), (64, 64, 1, 4), (128, 64, 1, 8)),
    192: ((64, 64, 1, 4), (128, 64, 1, 8)),
    256: ((64, 64, 1, 4), (128, 64, 1, 8)),
    # Two warps share their rows, and in the last four (FlashFacts.sharers). These serve packed sequences and block
    # masks, too, whose blocks they divide.
    WIDE: ((64, 32, 2, 8), (64, 32, 1, 8), (32, 16, 1, 8)),
}

# The same for kernels that write LSE and for packed sequences: both need registers, which these tiles leave free.
SM_80_LSE = {
    64: ((64, 64, 2, 4),),
    96: ((128, 64, 2, 4), (64, 64, 2, 4)),
    128: ((64, 64, 2, 4), (64, 64, 1, 4)),
    192: ((64, 64, 1, 4),),
    256: ((64, 32, 2, 4), (64, 32, 1, 4)),
    WIDE: SM_80[WIDE],
}
# Of packed sequences with a score_mod
SM_80_TIGHT = SM_80_LSE | {128: ((64, 32, 4, 4), (64, 32, 2, 4))}

# Of block masks on sm_90, by block_q and the larger head dimension: (tile_n, stages) for blocks 128 wide, and 64 wide.
# Blocks 64 high are done by one consumer warpgroup a CTA, two CTAs an SM, with half of its shared memory each.
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

# Of Q and K alone of 8 bits, with scales of blocks of tokens: where no tile of SM_90 divides a block. By calculation:
# the time of SM_90's for as many scores. 64x128 would spill at head dimension 192.
TOKENS = {
    192: (((128, 128, 2, 2), 1.99), ((64, 64, 4, 1), 0.80)),
    256: (((128, 64, 3, 2), 1.40), ((64, 64, 3, 1), 1.10)),
}

# Of Q and K alone of 8 bits. 192x112 would spill at head dimension 64; the microseconds of 192x96 are by calculation.
FLOAT8_SCORES = {64: (((192, 96, 4, 3), 1.05), *SM_90[64][1:])}
# With a mask that reads tensors: (tile_n, stages) by block_q, head dimension and whether scales are those of tokens,
# where tiles 64 wide would spill, too.
FLOAT8_MASKED = {(64, 256, True): (32, 3), (64, 256, False): (32, 3), (128, 256, False): (32, 4)}

# Of P and V of 8 bits, as SM_90 and BLOCKS_SM_90. A tile's columns are whole MMA steps of P V, 32. The microseconds of
# head dimension 128 are an H100's, with V's transposition: `estimate` gives 1105, 1111 and 1149 us for 2 x 16 heads,
# 8192 queries and keys without a mask. Those of 64x128 and of other head dimensions are by calculation: those of 16
# bits over 1.45, for as many scores. Tiles of FLOAT8_PLAIN_SCORES would spill with a cap or a score_mod.
FLOAT8 = {
    64: (((192, 128, 3, 3), 1.15), ((128, 128, 4, 2), 0.85), ((64, 128, 3, 1), 0.65)),
    96: (((192, 96, 4, 3), 0.90), ((128, 128, 4, 2), 0.90), ((64, 128, 3, 1), 0.70)),
    128: (((192, 96, 4, 3), 1.13), ((128, 192, 2, 2), 1.57), ((128, 128, 4, 2), 1.09), ((64, 128, 3, 1), 0.75)),
    192: (((128, 128, 2, 2), 1.35), ((64, 128, 2, 1), 0.95)),
    256: (((128, 128, 2, 2), 1.80), ((64, 64, 3, 1), 0.75)),
}
FLOAT8_UNMASKED_ONLY = {(96, (192, 96, 4, 3)), (128, (192, 96, 4, 3))}
FLOAT8_PLAIN_SCORES = {(128, (128, 192, 2, 2))}
FLOAT8_APART = {(128, (64, 128, 3, 1))}  # that would spill with a cap or a score_mod and packed sequences
FLOAT8_HEADS = {(192, (64, 128, 2, 1))}  # that would spill with scales of blocks of tokens
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

# V of e4m3 becomes FP16 in a kernel before, or in the forward kernel (fp8/values_inside), for each query tile anew.
# Measured on an H200: what the kernel before takes for a launch and for each byte that it reads and writes, and by what
# the forward kernel is longer for each value that it converts, on one multiprocessor: 0.1 us for a tile of 128x128.
BEFORE_US, BEFORE_US_A_BYTE = 3.0, 1 / 3.3e6
INSIDE_US_A_VALUE = 0.1 / 128**2
BLOCKS_VISITED = 0.25  # of a block mask, whose lists the host does not read

# On sm_80: (tile_m, tile_n, stages, warps), which every architecture has the shared memory for. What a block mask needs
# of registers leaves none for warps of 32 rows. Compiled for sm_90a, those with a cap and tensors in the mask spill a
# few.
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
    """The head dimensions that there are, for messages."""
    return f"{', '.join(map(str, HEAD_DIMS))}, and {WIDE} of q, k and v alike"


def is_fast(facts: FlashFacts) -> bool:
    """Whether P and V are of 8 bits: then there are other tiles."""
    return isinstance(facts, Float8Facts) and facts.fast


def config_of_blocks(facts: FlashFacts) -> FlashConfig:
    """The tiles of a block mask: block_q is tile_m or a multiple, block_k is tile_n or a multiple."""
    blocks, dim = facts.blocks, max(facts.head_dim, facts.head_dim_v)
    if facts.path == "sm_90" and dim == WIDE:
        return FlashConfig(*SM_90[WIDE][0][0], dynamic=True)
    if facts.path == "sm_90":
        fast = is_fast(facts)
        table = FLOAT8_BLOCKS if fast else BLOCKS_SM_90
        # Of 8 bits, a mask that reads tensors has no registers for 128 columns beside scores to be made fp16.
        masked = isinstance(facts, Float8Facts) and not fast and bool(blocks.mask and blocks.mask.tensors)
        tile_n, stages = table[blocks.block_q][dim][blocks.block_k == 64 or masked]
        if masked:
            tile_n, stages = FLOAT8_MASKED.get((blocks.block_q, dim, facts.tokens), (tile_n, stages))
        groups = blocks.block_q // 64
        return FlashConfig(blocks.block_q, tile_n, stages, groups, dynamic=True, ctas=3 - groups)
    if dim == WIDE:
        return candidates_sm80(facts.spec, dim, dim)[0]
    return FlashConfig(*BLOCKS_SM_80[blocks.block_q][dim])


def candidates_sm80(
    spec: ArchSpec, head_dim: int, head_dim_v: int, lse: bool = False, tight: bool = False
) -> list[FlashConfig]:
    """Configurations of the sm_80 path that fit the architecture's shared memory, the most promising first.

    lse, tight: which of the tables above.

    Raises ValueError for head dimensions that no kernel has.
    """
    for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if dim not in HEAD_DIMS and not head_dim == head_dim_v == WIDE:
            raise ValueError(f"{name} {dim} has no kernel; there are {head_dims_text()}: pad to the next")
    table = SM_80_TIGHT if tight else SM_80_LSE if lse else SM_80
    configs = [FlashConfig(*c) for c in table[max(head_dim, head_dim_v)]]
    facts = (FlashFacts(spec.target, "sm_80", c, head_dim=head_dim, head_dim_v=head_dim_v) for c in configs)
    # A third stage only where two CTAs still share an SM.
    return [f.config for f in facts if f.smem_bytes * (1 + (f.config.stages > 2)) <= spec.smem]


def heads_in_l2(cols: int, row_bytes: int) -> int:
    """How many heads' K and V, of `cols` rows and together `row_bytes` wide, stay in L2, but one at the least."""
    return max(L2_BYTES // row_bytes // max(cols, 1), 1)


@dataclass(frozen=True)
class Extents:
    """What the choice of a tile depends on, besides the facts."""

    heads: int  # of all items of the batch
    rows: int
    cols: int
    left: int | None  # bounds of the window
    right: int | None
    sms: int  # multiprocessors of the card

    @property
    def uneven(self) -> bool:
        """Whether query tiles visit different numbers of tiles of K and V."""
        return self.left is not None or self.right is not None


def visits(extents: Extents, tile_m: int, tile_n: int) -> list[int]:
    """How many tiles of K and V each query tile of a head visits: kv_tiles.WindowSource on the host."""
    e, counts = extents, []
    for first in range(0, e.rows, tile_m):
        offset, after = e.cols - e.rows, min(first + tile_m, e.rows)
        end = e.cols if e.right is None else max(min(e.cols, after + offset + e.right), 0)
        begin = 0 if e.left is None else min(max(first + offset - e.left, 0), end)
        counts.append(max(-(-end // tile_n) - begin // tile_n, 0))
    return counts


def estimate(extents: Extents, config: FlashConfig, tile_us: float) -> float:
    """Microseconds: the work of all tiles over all SMs where CTAs fetch their tiles, else the end of the last wave."""
    costs = [n * tile_us + TILE_US * config.groups for n in visits(extents, config.tile_m, config.tile_n)]
    if extents.uneven:
        return max(sum(costs) * extents.heads / extents.sms, max(costs))
    return -(-len(costs) * extents.heads // extents.sms) * max(costs)


def candidates_sm90(facts: FlashFacts, extents: Extents) -> list[tuple[FlashConfig, float]]:
    """Configurations of the sm_90 path and their microseconds a tile.

    With scales of blocks of tokens a tile of K lies in one block. CTAs fetch their query tiles where these differ and
    are more than run at once.
    """
    found, dim, tokens = [], max(facts.head_dim, facts.head_dim_v), getattr(facts, "tokens", False)
    table, unmasked_only, plain_scores = SM_90, UNMASKED_ONLY, set()
    if isinstance(facts, Float8Facts):
        table = SM_90 | FLOAT8_SCORES | (TOKENS if tokens else {})
    if is_fast(facts):
        table, unmasked_only, plain_scores = FLOAT8, FLOAT8_UNMASKED_ONLY, FLOAT8_PLAIN_SCORES
    changed = facts.softcap or facts.score is not None
    for tiles, tile_us in table[dim]:
        if (
            facts.softcap
            and (dim, tiles) in NO_SOFTCAP
            or (extents.uneven or facts.score is not None)
            and ((dim, tiles) in unmasked_only)
            or changed
            and ((dim, tiles) in plain_scores or facts.packed and (dim, tiles) in FLOAT8_APART)
            or tokens
            and (SCALE_TOKENS % tiles[1] or is_fast(facts) and (dim, tiles) in FLOAT8_HEADS)
        ):
            continue
        more = -(-extents.rows // tiles[0]) * extents.heads > extents.sms
        found.append((FlashConfig(*tiles, dynamic=facts.packed or extents.uneven and more), tile_us))
    return found


def cannot_convert(facts: Float8Facts) -> str:
    """Why no forward kernel of these facts converts V; "" where one does.

    Masks that read tensors leave no registers for it with 128 columns, nor do any element masks at head dimension 256
    with blocks 64 high.
    """
    if facts.fast or facts.given_v != facts.dtype:
        return f"V of {facts.given_v}{', with fast sums,' * facts.fast} is not converted to float16"
    if facts.packed:
        return "a packed V's rows past a sequence's end become zeros in shared memory, by those that multiply"
    blocks, cfg = facts.blocks, facts.config
    if cfg and blocks and blocks.mask:
        dim, tile = max(facts.head_dim, facts.head_dim_v), f"{cfg.tile_m}x{cfg.tile_n}"
        if blocks.mask.tensors and cfg.tile_n == 128 or dim == 256 and cfg.groups == 1:
            return f"element masks spill with tiles of {tile} at head dimension {dim} where V is converted, too"
    return ""


def converts_inside(facts: Float8Facts, extents: Extents, group: int) -> bool:
    """Whether V of e4m3 is made fp16 in less time inside of the forward kernel than by one before it.

    group: heads of Q that share a head of V.
    """
    cfg = facts.config
    values = extents.heads // group * extents.cols * facts.head_dim_v
    before = BEFORE_US + values * 3 * BEFORE_US_A_BYTE  # a byte is read, and two are written
    tiles = sum(visits(extents, cfg.tile_m, cfg.tile_n)) * (1.0 if facts.blocks is None else BLOCKS_VISITED)
    visited = tiles * extents.heads * cfg.tile_n * facts.head_dim_v
    return visited / extents.sms * INSIDE_US_A_VALUE < before


def pick(facts: FlashFacts, extents: Extents) -> FlashFacts:
    """The facts with the configuration that is estimated to be the fastest, or the sm_80 path's first that fits."""
    if facts.blocks is not None:
        config = config_of_blocks(facts)
    elif facts.path == "sm_90":
        config, _ = min(candidates_sm90(facts, extents), key=lambda c: estimate(extents, *c))
    else:
        # A packed sequence's bounds and a score_mod take registers too, and none are left for warps of 32 rows.
        few = facts.lse or facts.packed or facts.score is not None
        tight = facts.packed and facts.score is not None
        configs = candidates_sm80(facts.spec, facts.head_dim, facts.head_dim_v, few, tight)
        config = next(c for c in configs if not facts.packed or c.tile_m <= 16 * c.groups)
    return replace(facts, config=config)
