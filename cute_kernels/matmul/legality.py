"""From which facts a GEMM kernel can be built: what holds for all families, then for each path's kernel.

Each function says why not, "" if a kernel can be built. A family's `unsupported` asks those that apply to it.
"""

from ..arch import MMA_M
from ..runtime.families import family_of
from ..tile.element import element_of
from .config import BARRIER_BYTES, GemmFacts

# What an sm_80 kernel needs besides accumulators and fragments. Compiled with 16 warps: 64 of those take 98 registers,
# and 112 spill out of 128; with 4 warps, 208 of them fit into 255.
SM80_OTHER_REGISTERS = 40
OPERANDS = ("bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def general(facts: GemmFacts) -> str:
    """What all families ask."""
    cfg, block, features = facts.config, facts.block, family_of(facts).features
    more = FLOAT8 if "float8" in features else ()
    more += ("float32",) if "float32" in features else ()
    if facts.dtype not in OPERANDS + more:
        by_others = facts.dtype in FLOAT8 or facts.dtype == "float32"
        also = f"; {facts.dtype} is multiplied by those of dense and BSR products" if by_others else ""
        return f"operands of {facts.dtype}: the kernels multiply {' and '.join(OPERANDS)}{also}"
    mma_k = MMA_M if facts.converts else facts.element.mma_k
    if block and (block.bm % MMA_M or block.bk % MMA_M or block.operand == "a" and block.bk % mma_k):
        if mma_k == MMA_M:
            return f"blocks of {block.bm}x{block.bk}: both sides must be multiples of {MMA_M}"
        sides = f"bm must be a multiple of {MMA_M}, bk of {mma_k}, an MMA step of {facts.dtype}"
        return f"blocks of {block.bm}x{block.bk}: {sides}"
    if facts.epilogue.gated and facts.element.width == 1 and (reason := _gated_float8(facts)):
        return reason
    if reason := _narrow(facts) or _float8(facts) or _float32(facts) or _fp16_sums(facts):
        return reason
    if reason := majors(facts):
        return reason
    if any(n < 1 for n in vars(cfg).values()):
        return f"{cfg}: every count must be at least 1"
    if reason := _gated(facts):
        return reason
    if block and block.operand == "a" and block.run and block.run % (cfg.tile_n * cfg.cluster_n):
        return (
            f"{cfg.tile_n * cfg.cluster_n} columns of a tile or cluster multiply one item of W, but runs are "
            f"{block.run} long: the columns must divide it"
        )
    return ""


def _float8(facts: GemmFacts) -> str:
    """What operands of 8-bit floats, and their sums, ask."""
    scaled = facts.epilogue.scales_operands or facts.block is not None and facts.block.scaled
    if facts.element.width != 1:
        if facts.use_fast_accum or scaled:
            return f"{'fast accumulation' if facts.use_fast_accum else 'scales'} of {facts.dtype}: float8 has them"
        return ""
    if facts.converts:
        return _float8_blocks(facts)
    if facts.spec.float8 != facts.path:
        return (
            f"operands of {facts.dtype}: {facts.spec.name} has no such products on the path {facts.path}: sm_90 has "
            "them in WGMMA (the path sm_90), sm_89 in mma.sync (the path sm_80); cast to torch.bfloat16 instead"
        )
    if reason := _float8_blocks(facts):
        return reason
    if facts.epilogue.scales_blocks and (reason := _block_scales(facts)):
        return reason
    return _promoted(facts)


def _promoted(facts: GemmFacts) -> str:
    """What sums that are promoted to fp32 ask."""
    cfg = facts.config
    if not facts.promotes:
        return ""
    if facts.path == "sm_80":  # the compiler starts the products of all steps of a period, and spills
        refused = "sums promoted to fp32 of K-tiles of several lengths: they leave no registers"
        return refused if len(facts.k_blocks) > 1 else ""
    if cfg.consumer_groups > cfg.rings:
        return "sums promoted to fp32 in a ping-pong kernel: while one group adds, no other would multiply"
    if cfg.tile_n // cfg.warps_n > 128 and cfg.tile_n // cfg.warps_n % 128:
        return (
            f"{cfg.tile_n // cfg.warps_n} columns a warpgroup: sums are promoted in parts of 128, or of less than that"
        )
    return ""


def _float32(facts: GemmFacts) -> str:
    """What operands of fp32, which are multiplied as TF32, ask."""
    cfg = facts.config
    if facts.dtype == "float32" and facts.block is not None and facts.block.permuted:
        return (
            f"a transposed view of blocks of {facts.dtype}: tensor cores read them contiguous along K alone; "
            "W.transpose() stores the transpose"
        )
    if facts.promoted and facts.dtype != "float32":
        return f"promoted sums of {facts.dtype}: those of float32 operands in TF32 parts are"
    if facts.promoted and facts.path == "sm_90" and cfg.tile_n // cfg.warps_n > 128:
        return f"{cfg.tile_n // cfg.warps_n} columns a warpgroup: promoted sums of fp32 operands are of at most 128"
    return _promoted(facts) if facts.promoted else ""


def _narrow(facts: GemmFacts) -> str:
    """What an output of 8-bit floats, its scale and its amax ask."""
    spec = facts.epilogue
    if not facts.narrow:
        refused = "a scale" if spec.scale_out else "an amax" if spec.amax else ""
        return f"{refused} of an output of {facts.out_dtype}: float8 outputs have it" if refused else ""
    if "float8 output" not in family_of(facts).features:
        return f"outputs of {facts.out_dtype}: dense and BSR products have them"
    if facts.spec.capability < (8, 9):
        return (
            f"outputs of {facts.out_dtype}: {facts.spec.name} has no instruction that rounds to 8 bits, which sm_89 "
            "and sm_90 have; multiply into torch.bfloat16, and use cute_kernels.quantize"
        )
    if spec.residual or spec.stores_z or spec.gated:
        return f"outputs of {facts.out_dtype} with a residual, a gate, or what training needs"
    return ""


def _block_scales(facts: GemmFacts) -> str:
    """What scales that differ along K ask."""
    cfg = facts.config
    if not facts.promotes:
        return "fast accumulation with scales of blocks: sums of every 128 of K are multiplied by scales of their own"
    if facts.path == "sm_80":
        if cfg.tile_n // cfg.warps_n > 128 or cfg.tile_k > 128:
            return f"tile {cfg}: a warp's part of a K-tile would meet two blocks of 128 columns or of 128 of K"
        return ""
    if cfg.tile_k != 128 or not facts.takes_turns:
        return f"tile {cfg}: scales of blocks take K-tiles of 128, 64 rows a warpgroup, and registers for two products"
    if 128 % min(128, cfg.tile_n // cfg.warps_n):
        return f"{cfg.tile_n // cfg.warps_n} columns a warpgroup: a product would meet two blocks of 128 columns of B"
    return ""


def _float8_blocks(facts: GemmFacts) -> str:
    """What stored blocks of 8-bit floats ask."""
    block = facts.block
    if block is None:
        return ""
    if block.permuted:
        return (
            f"a transposed view of blocks of {facts.dtype}: tensor cores read them contiguous along K alone; "
            "W.transpose() stores the transpose"
        )
    if block.scaled and facts.use_fast_accum:
        return (
            "scales of stored blocks with fast accumulation: they multiply sums when those are promoted to fp32, and "
            "these stay in the tensor cores; use one scale for all of W, or leave use_fast_accum out"
        )
    return ""


def _fp16_sums(facts: GemmFacts) -> str:
    """What sums in fp16 ask."""
    if facts.acc_dtype == "float32":
        return ""
    if facts.acc_dtype != "float16" or facts.dtype != "float16":
        return f"sums in {facts.acc_dtype} of {facts.dtype}: tensor cores add up float16 operands alone in float16"
    if facts.epilogue.gated:
        return "sums in float16 of a gated product: it multiplies sums in float32"
    if "float16 accumulator" not in family_of(facts).features:
        return "sums in float16: kernels of dense and bsr products have them"
    return ""


def majors(facts: GemmFacts) -> str:
    """Which contiguous modes tensor cores take."""
    if facts.element.transposes or facts.majors[0] != "m" and facts.majors[1] != "n":
        return ""
    return f"operands of {facts.dtype} that are contiguous along M or N: tensor cores turn elements of 16 bits alone"


def _gated(facts: GemmFacts) -> str:
    """What a gate asks: that a warpgroup has both the 64 rows of the gate and those that it multiplies, or of 8-bit
    floats, whose sums are promoted, that one of two has the gate's."""
    cfg, spec = facts.config, facts.epilogue
    if not spec.gated:
        return ""
    if facts.path != "sm_90" or "gate" not in family_of(facts).features:
        return "a gate in the epilogue: the sm_90 kernel with a block row a tile has it"
    if spec.bias or spec.residual or spec.function or spec.scale or spec.stores_z:
        return "a gate in the epilogue goes with an activation, and with scales of 8-bit floats, alone"
    if facts.element.width == 1:
        if cfg.warps_m != 2 or cfg.tile_m != 128 or cfg.split > 1:
            return f"tile {cfg}: a gate of 8-bit floats needs tiles of 128 rows, 64 of each of two warpgroups"
        return ""
    if cfg.warps_m > 1 or cfg.tile_m % 128 or cfg.split > 1 or facts.block and facts.block.bm % cfg.tile_m:
        return f"tile {cfg}: a gate needs whole tiles of 128 rows of a block in one warpgroup"
    return ""


def _gated_float8(facts: GemmFacts) -> str:
    """What a gate of 8-bit floats asks of a call."""
    if facts.block is None:
        return "a gate of 8-bit floats: block-sparse products have it"
    if facts.use_fast_accum:
        return "a gate with fast accumulation: that of 8-bit floats is of promoted sums"
    if facts.block.bm % 128:
        rows = facts.block.bm
        return f"blocks of {rows} rows: a gate of 8-bit floats needs tiles of 128 rows of a block, 64 of each half"
    if facts.path == "sm_90" and not facts.tma_store:
        return (
            "a gate of 8-bit floats is stored by TMA alone: the result's address, strides and contiguous extent must "
            "be multiples of 16 bytes"
        )
    return ""


def gemm(facts: GemmFacts) -> str:
    """What the kernels of both paths ask."""
    if reason := general(facts):
        return reason
    return sm80(facts) if facts.path == "sm_80" else tma_operands(facts) or sm90(facts)


def sm80(facts: GemmFacts) -> str:
    """What the sm_80 kernel asks."""
    cfg, spec, element = facts.config, facts.spec, facts.element
    if cfg.cluster * cfg.consumer_groups > 1:
        return "clusters, ping-pong and a split K exist on the sm_90 path only"
    if cfg.stages < 3:
        return f"{cfg.stages} stages; the cp.async pipeline needs 3"
    if any(n & (n - 1) for n in (cfg.tile_m, cfg.tile_n, cfg.tile_k, cfg.warps_m, cfg.warps_n)):
        return f"tile {cfg}: its sides and warps must be powers of two, which the swizzle needs"
    span_m, span_n = cfg.tile_m // cfg.warps_m, cfg.tile_n // cfg.warps_n
    if span_m < 16 or span_n < 16 or cfg.tile_k < element.mma_k:
        return f"a warp's part of {span_m}x{span_n}x{cfg.tile_k}: ldmatrix reads 16 rows of {element.mma_k} elements"
    threads = 32 * cfg.warps_m * cfg.warps_n
    line_a = cfg.tile_m if facts.majors[0] == "m" else cfg.tile_k
    line_b = cfg.tile_n if facts.majors[1] == "n" else cfg.tile_k
    longest = max(line_a, line_b)
    if longest > element.vector * threads:
        return f"a line of {longest} elements of an operand; {threads} threads copy {element.vector * threads} at once"
    n_major, vector = facts.majors[2] == "n", element_of(facts.out_dtype).vector
    line = span_n if n_major else span_m
    if line > 32 * vector:
        return f"a warp's store of {line} elements a line; its 32 lanes store {32 * vector} at once"
    sums = span_m * span_n // 32
    if facts.promotes and sums > 64:  # 128 spill
        return f"{sums} accumulators a thread; 64 leave registers for promoted sums"
    accumulators = facts.acc_registers(sums)
    fragments = 2 * (span_m // 16 * 4 + span_n // 8 * 2)  # of A and B, double-buffered
    registers = min(255, 65_536 // threads)
    if accumulators + fragments + SM80_OTHER_REGISTERS > registers:
        return f"{accumulators} registers of accumulators and {fragments} of operands a thread, of {registers}"
    block, steps = facts.block, facts.k_blocks
    if (
        block
        and sums > 64
        and block.bm > cfg.tile_m
        and len(steps) > 2
        and sum(steps) % 2
        and (facts.ranks[1] > 2 or facts.acc_dtype == "float16")
    ):
        # compiled: 8 and 24 bytes of stack; of sums in fp16 8, since the compiler takes all registers for operands
        of = "a batch" if facts.acc_dtype == "float32" else "sums in float16"
        return f"a loop over {2 * len(steps)} K-tiles of a block {block.bk} wide leaves no registers for {of}"
    if facts.narrow and line < 32:
        return f"a warp's store of {line} elements a line: of 8-bit floats its 32 lanes store 16 lines of 32 or more"
    pitch = line * facts.out_bytes + (8 * max(2, facts.out_bytes) if n_major else 16)
    store = 2 * 16 * pitch * cfg.warps_m * cfg.warps_n * (1 + facts.epilogue.stores_z)
    needed = max(facts.operand_bytes, store)
    if needed > spec.smem:
        return f"{needed} bytes of shared memory; {spec.name} has {spec.smem} a block"
    return ""


def tma_operands(facts: GemmFacts) -> str:
    """What the sm_90 path asks of an architecture and of operands."""
    if facts.spec.path != "sm_90":
        return f"{facts.spec.name} has neither TMA nor WGMMA; its kernels are those of the sm_80 path"
    for name, align in zip("AB", facts.aligns, strict=False):
        if align < facts.element.vector:
            return f"{name}'s address or strides are not multiples of 16 bytes, which TMA needs"
    if "any" in facts.majors[:2]:
        return "an operand has no contiguous mode, which TMA needs"
    return ""


def sm90(facts: GemmFacts) -> str:
    """What the sm_90 kernel asks, but for its operands."""
    return store_buffers(facts) or _tile_sm90(facts) or _registers_sm90(facts) or _schedule_sm90(facts)


def store_buffers(facts: GemmFacts) -> str:
    """What the sm_90 store asks of its buffers."""
    if facts.config.store_row not in (32, 64, 128) or facts.config.store_row < 16 * facts.out_bytes:
        return f"store buffers of {facts.config.store_row} bytes a row: 128, 64 and 32, of at least 16 elements"
    return ""


def smem_sm90(facts: GemmFacts) -> str:
    """Whether shared memory holds the rings, the store buffers and the barriers."""
    needed = facts.operand_bytes + facts.store_bytes + facts.config.split_k_bytes + 2 * BARRIER_BYTES
    spec = facts.spec
    return f"{needed} bytes of shared memory; {spec.name} has {spec.smem} a block" if needed > spec.smem else ""


def _tile_sm90(facts: GemmFacts) -> str:
    """What WGMMA, the swizzles and the store ask of a tile."""
    cfg = facts.config
    if facts.block and cfg.tile_m >= facts.block.bm + 64:
        return f"{cfg.tile_m} rows for blocks {facts.block.bm} high: slabs of 64 rows would hold none of the block"
    if cfg.tile_m % (64 * cfg.warps_m):
        return f"{cfg.tile_m} rows among {cfg.warps_m} warpgroups: each takes a multiple of WGMMA's 64"
    group_n, rest = divmod(cfg.tile_n, cfg.warps_n)
    if rest or group_n % 16:
        return f"{cfg.tile_n} columns among {cfg.warps_n} warpgroups: each takes a multiple of stmatrix's 16"
    if max(cfg.tile_m, cfg.tile_n, cfg.tile_k) > 256:
        return f"tile {cfg}: a TMA box, and a WGMMA, has at most 256 a side"
    widest, half, quarter = facts.element.rows
    if cfg.tile_k not in (quarter, half) and cfg.tile_k % widest:
        return f"a K-tile of {cfg.tile_k}: {quarter}, {half} or multiples of {widest} elements fill a swizzle row"
    atom = next((columns for columns in facts.element.rows if cfg.tile_n % columns == 0), cfg.tile_n)
    if facts.majors[1] == "n" and group_n % atom:
        return f"{group_n} columns a warpgroup cut B's swizzle atom of {atom}"
    chunk = facts.chunk_columns(group_n)
    if facts.narrow and chunk < 32:
        return f"{chunk} columns a warpgroup: rows of 8-bit floats fill a swizzled row from 32 on"
    if group_n % chunk:
        return f"{group_n} columns a warpgroup are no whole chunks of the store's {chunk}"
    return ""


def _registers_sm90(facts: GemmFacts) -> str:
    """Return why a thread's 240 registers do not hold its accumulators and what else it keeps."""
    cfg, spec, promoted = facts.config, facts.epilogue, facts.promotes
    columns = cfg.tile_n // cfg.warps_n
    accumulators = cfg.tile_m * columns // (cfg.warps_m * 128)
    registers = facts.acc_registers(accumulators)
    loaded, direct, heavy = spec.residual or spec.function, not facts.tma_store, not spec.is_light
    uneven = len(facts.k_blocks) > 1
    # (count, at most, where, what the other registers hold); beyond it the compiler needs 8 to 1100 bytes of stack
    limits = (
        (registers, 192, True, "the loop"),
        (registers, 128, loaded, "a residual or a user's function"),
        (accumulators, 192, loaded and columns < 256, f"a residual or a user's function of {columns} columns"),
        (accumulators, 128, direct, "a store element by element"),
        (accumulators, 128, spec.amax or facts.narrow and heavy, "an amax, or an epilogue of an FP8 output"),
        (accumulators, 120, cfg.split == 2 and spec.residual, "a residual and the other CTA's accumulators"),
        (accumulators, 128, promoted, "promoted accumulation"),
        (accumulators, 64, facts.promoted and direct and heavy, "an epilogue, promoted and stored element by element"),
        (accumulators, 64, promoted and uneven and spec.scales_each and spec.residual, "uneven K-tiles and a residual"),
    )
    over = ((most, what) for count, most, where, what in limits if where and count > most)
    refused = next((f"at most {most} leave registers for {what}" for most, what in over), "")
    return refused and f"{registers} registers of accumulators a thread ({accumulators}): {refused}"


def _schedule_sm90(facts: GemmFacts) -> str:
    """What the consumer groups, the pipeline and the cluster ask, and whether shared memory holds it all."""
    cfg = facts.config
    if cfg.consumer_groups > 2:
        return f"{cfg.consumer_groups} consumer groups: ping-pong is of two"
    if cfg.warps_m * cfg.warps_n * cfg.consumer_groups != 2:
        return (
            f"{cfg.warps_m * cfg.warps_n * cfg.consumer_groups} consumer warpgroups: the register budgets, and the "
            "barriers that order two consumer groups, are made for exactly two"
        )
    if cfg.stages < 2:
        return "one stage: a K-tile is released when the next one has been issued"
    if reason := _split(facts):
        return reason
    if cfg.rings > 1 and not ((facts.promotes or cfg.waits) and cfg.rings == cfg.consumer_groups):
        return f"{cfg}: {cfg.rings} rings: each of two consumer groups that wait for products has one, others share it"
    if 16 * cfg.stages * cfg.rings + 8 > BARRIER_BYTES:
        return f"{cfg.stages} stages: their barriers take more than {BARRIER_BYTES} bytes"
    if cfg.cluster_m * cfg.cluster_n > 2:
        return f"a cluster of {cfg.cluster_m}x{cfg.cluster_n}: above two CTAs it measured half as fast, and is not kept"
    if (cfg.cluster_m > 1 and cfg.tile_n < 64) or (cfg.cluster_n > 1 and cfg.tile_m < 64):
        return f"tile {cfg}: a multicast operand has at least 64 rows, of which each CTA fetches its share"
    if reason := smem_sm90(facts):
        return reason
    if facts.block and cfg.cluster_m > 1 and -(-facts.block.bm // cfg.tile_m) % cfg.cluster_m:
        return f"a cluster of {cfg.cluster_m} row tiles would span two block rows of {facts.block.bm}"
    return ""


def _split(facts: GemmFacts) -> str:
    """What sharing K among the CTAs of a cluster asks."""
    cfg = facts.config
    if cfg.split == 1:
        return ""
    if cfg.split not in (2, 4):
        return f"K among {cfg.split} CTAs: 1, 2 or 4 of them share it"
    if cfg.cluster_m * cfg.cluster_n > 1 or cfg.consumer_groups > 1:
        return f"{cfg}: K is split in cooperative kernels, without a cluster that shares operands"
    group_n = cfg.tile_n // cfg.warps_n
    chunks = cfg.tile_m // (64 * cfg.warps_m) * (group_n // facts.chunk_columns(group_n))
    if chunks % cfg.split:
        return f"{chunks} chunks of a warpgroup's store among {cfg.split} CTAs: each stores as many (see store_row)"
    return ""
