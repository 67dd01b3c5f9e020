"""Legality of GEMM kernels: rules of all families, then of each path's kernel.

Each function returns the reason why a kernel is not supported, or "". A family's `unsupported` calls those that apply
to it.
"""

from ..arch import MMA_M
from ..runtime.families import family_of
from ..tile.element import element_of
from .config import BARRIER_BYTES, OVERLAP_STORE, GemmFacts

# Registers of an sm_80 kernel besides accumulators and fragments. Compiled with 16 warps, 64 of accumulators and
# fragments take 98 registers in all, and 112 spill out of 128; with 4 warps, 208 of them fit into 255.
SM80_OTHER_REGISTERS = 40
OPERANDS = ("bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def general(facts: GemmFacts) -> str:
    """Rules of all families."""
    cfg, block, features = facts.config, facts.block, family_of(facts).features
    supported = OPERANDS + (FLOAT8 if "float8" in features else ())
    supported += ("float32",) if "float32" in features else ()
    if facts.dtype not in supported:
        elsewhere = facts.dtype in FLOAT8 or facts.dtype == "float32"
        also = f"; dense and BSR kernels support {facts.dtype}" if elsewhere else ""
        return f"operands of {facts.dtype}: the {facts.family} kernels support {', '.join(supported)}{also}"
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
    if any(n < 1 for n in vars(cfg).values() if isinstance(n, int)):
        return f"{cfg}: every count must be at least 1"
    if reason := _gated(facts):
        return reason
    if block and block.operand == "a" and block.run and block.run % (cfg.tile_n * cfg.cluster_n):
        return (
            f"{cfg.tile_n * cfg.cluster_n} columns of a tile or cluster multiply one matrix of W; they must divide the "
            f"group size, got {block.run}"
        )
    return ""


def _float8(facts: GemmFacts) -> str:
    """Rules of FP8 operands and their accumulation."""
    scaled = facts.epilogue.scales_operands or facts.block is not None and facts.block.scaled
    if facts.element.width != 1:
        if facts.use_fast_accum or scaled:
            refused = "use_fast_accum" if facts.use_fast_accum else "scales"
            return f"{refused} requires FP8 operands, got {facts.dtype}"
        return ""
    if facts.converts:
        return _float8_blocks(facts)
    if facts.spec.float8 != facts.path:
        return (
            f"operands of {facts.dtype}: {facts.spec.name} has no FP8 MMA on the path {facts.path}: sm_90 supports FP8 "
            "with WGMMA (path sm_90), sm_89 with mma.sync (path sm_80); cast to torch.bfloat16 instead"
        )
    if reason := _float8_blocks(facts):
        return reason
    if facts.epilogue.scales_blocks and (reason := _block_scales(facts)):
        return reason
    return _promoted(facts)


def _promoted(facts: GemmFacts) -> str:
    """Rules of promoted accumulation."""
    cfg = facts.config
    if not facts.promotes:
        return ""
    if facts.path == "sm_80":  # the compiler starts the MMAs of all steps of a period, and spills
        refused = "promoted accumulation with K-tiles of several lengths leaves no registers"
        return refused if len(facts.k_blocks) > 1 else ""
    if cfg.consumer_groups > cfg.rings and not facts.a_in_registers:
        return (
            "promoted accumulation in a ping-pong kernel requires tiles of 64 rows and several WGMMAs a K-tile (128 "
            "bytes): otherwise, while one group adds, none would multiply"
        )
    if cfg.tile_n // cfg.warps_n > 128 and cfg.tile_n // cfg.warps_n % 128:
        return f"{cfg.tile_n // cfg.warps_n} columns a warpgroup: promoted accumulation needs at most 128 or a multiple"
    return ""


def _float32(facts: GemmFacts) -> str:
    """Rules of FP32 operands, which are multiplied as TF32."""
    cfg = facts.config
    if facts.dtype == "float32" and facts.block is not None and facts.block.permuted:
        return (
            f"a transposed view of blocks of {facts.dtype}: tensor cores require them contiguous along K; call "
            "W.transpose(), which stores the transpose"
        )
    if facts.promoted and facts.dtype != "float32":
        return f"promoted=True requires float32 operands (in TF32 parts), got {facts.dtype}"
    if facts.promoted and facts.path == "sm_90" and cfg.tile_n // cfg.warps_n > 128:
        return f"{cfg.tile_n // cfg.warps_n} columns a warpgroup: promoted accumulation of TF32 needs at most 128"
    return _promoted(facts) if facts.promoted else ""


def _narrow(facts: GemmFacts) -> str:
    """Rules of an FP8 output, its scale and its amax."""
    spec = facts.epilogue
    if not facts.narrow:
        refused = "scale_out" if spec.scale_out else "amax" if spec.amax else ""
        return f"{refused} requires an FP8 output, got {facts.out_dtype}" if refused else ""
    if "float8 output" not in family_of(facts).features:
        return f"outputs of {facts.out_dtype}: only dense and BSR GEMMs support them"
    if facts.spec.capability < (8, 9):
        return (
            f"outputs of {facts.out_dtype}: {facts.spec.name} has no FP8 conversion instruction; sm_89 and sm_90 do. "
            "Use out_dtype=torch.bfloat16 and cute_kernels.quantize instead"
        )
    if spec.residual or spec.stores_z or spec.gated:
        return f"outputs of {facts.out_dtype} support neither a residual nor a gate nor a stored activation input"
    return ""


def _block_scales(facts: GemmFacts) -> str:
    """Rules of block scales, which differ along K."""
    cfg = facts.config
    if not facts.promotes:
        return (
            "use_fast_accum=True with block scales: they apply to promoted partial sums of 128 elements of K; set "
            "use_fast_accum=False"
        )
    if facts.path == "sm_80":
        if cfg.tile_n // cfg.warps_n > 128 or cfg.tile_k > 128:
            return f"tile {cfg}: a warp's part of a K-tile would span two scales along N or K"
        return ""
    if cfg.tile_k != 128 or not facts.takes_turns:
        return f"tile {cfg}: block scales need K-tiles of 128, 64 rows a warpgroup, and registers for two WGMMAs"
    if 128 % min(128, cfg.tile_n // cfg.warps_n):
        return f"{cfg.tile_n // cfg.warps_n} columns a warpgroup: a WGMMA would span two blocks of 128 columns of B"
    return ""


def _float8_blocks(facts: GemmFacts) -> str:
    """Rules of FP8 stored blocks."""
    block = facts.block
    if block is None:
        return ""
    if block.permuted:
        return (
            f"a transposed view of blocks of {facts.dtype}: tensor cores require them contiguous along K; call "
            "W.transpose(), which stores the transpose"
        )
    if block.scaled and facts.use_fast_accum:
        return (
            "use_fast_accum=True with one scale per stored block: these scales apply to promoted partial sums; use one "
            "scale for all of W, or set use_fast_accum=False"
        )
    return ""


def _fp16_sums(facts: GemmFacts) -> str:
    """Rules of FP16 accumulation."""
    if facts.acc_dtype == "float32":
        return ""
    if facts.acc_dtype != "float16" or facts.dtype != "float16":
        return f"an accumulator of {facts.acc_dtype} with {facts.dtype} operands; it must be float32, or both float16"
    if facts.epilogue.gated:
        return "a float16 accumulator is not supported with a gate in the epilogue; use float32"
    if "float16 accumulator" not in family_of(facts).features:
        return f"a float16 accumulator: only dense and BSR kernels support it, not {facts.family}"
    return ""


def majors(facts: GemmFacts) -> str:
    """Rules of the operands' contiguous modes."""
    if facts.element.transposes or facts.majors[0] != "m" and facts.majors[1] != "n":
        return ""
    return f"operands of {facts.dtype} must be contiguous along K; tensor cores transpose only 16-bit elements"


def _gated(facts: GemmFacts) -> str:
    """Rules of a gate: one warpgroup has the 64 rows of the gate and the 64 rows that they multiply. With FP8, whose
    accumulation is promoted, one of two warpgroups has the gate's rows."""
    cfg, spec = facts.config, facts.epilogue
    if not spec.gated:
        return ""
    if facts.path != "sm_90" or "gate" not in family_of(facts).features:
        return "a gate in the epilogue: only the sm_90 BSR kernel with one block row per tile supports it"
    if spec.bias or spec.residual or spec.function or spec.scale or spec.stores_z:
        return "a gate in the epilogue supports only an activation and FP8 scales besides"
    if facts.element.width == 1:
        if cfg.warps_m != 2 or cfg.tile_m != 128 or cfg.split > 1:
            return f"tile {cfg}: an FP8 gate needs tiles of 128 rows, 64 for each of two warpgroups"
        return ""
    if cfg.warps_m > 1 or cfg.tile_m % 128 or cfg.split > 1 or facts.block and facts.block.bm % cfg.tile_m:
        return f"tile {cfg}: a gate needs whole tiles of 128 rows of a block in one warpgroup"
    return ""


def _gated_float8(facts: GemmFacts) -> str:
    """Rules that an FP8 gate adds for a call."""
    if facts.block is None:
        return "an FP8 gate in the epilogue: only block-sparse GEMMs support it"
    if facts.use_fast_accum:
        return "use_fast_accum=True is not supported with an FP8 gate; set use_fast_accum=False"
    if facts.block.bm % 128:
        return f"an FP8 gate needs blocks of a multiple of 128 rows, 64 for each half; got {facts.block.bm}"
    if facts.path == "sm_90" and not facts.tma_store:
        return (
            "an FP8 gate is stored by TMA: the result's address, strides and contiguous extent must be multiples of 16 "
            "bytes"
        )
    return ""


def gemm(facts: GemmFacts) -> str:
    """Rules of the GEMM kernel of the facts' path."""
    if reason := general(facts):
        return reason
    if facts.source is not None and (reason := facts.source.unsupported(facts)):
        return reason
    return sm80(facts) if facts.path == "sm_80" else tma_operands(facts) or sm90(facts)


def sm80(facts: GemmFacts) -> str:
    """Rules of the sm_80 kernel."""
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
        return f"an operand's rows of {longest} elements; {threads} threads copy {element.vector * threads} at once"
    n_major, vector = facts.majors[2] == "n", element_of(facts.out_dtype).vector
    line = span_n if n_major else span_m
    if line > 32 * vector:
        return f"a warp stores rows of {line} elements; its 32 lanes store {32 * vector} at once"
    count = span_m * span_n // 32  # accumulators per thread
    if facts.promotes and count > 64:  # 128 spill
        return f"{count} accumulators a thread; promoted accumulation leaves registers for 64"
    accumulators = facts.acc_registers(count)
    fragments = 2 * (span_m // 16 * 4 + span_n // 8 * 2)  # of A and B, double-buffered
    registers = min(255, 65_536 // threads)
    if accumulators + fragments + SM80_OTHER_REGISTERS > registers:
        return f"{accumulators} registers of accumulators and {fragments} of operands a thread, of {registers}"
    block, steps = facts.block, facts.k_blocks
    if (
        block
        and count > 64
        and block.bm > cfg.tile_m
        and len(steps) > 2
        and sum(steps) % 2
        and (facts.ranks[1] > 2 or facts.acc_dtype == "float16")
    ):
        # Compiled: 8 and 24 bytes of stack; 8 with FP16 accumulators, since operands take all registers.
        what = "a batch" if facts.acc_dtype == "float32" else "a float16 accumulator"
        return f"a loop over {2 * len(steps)} K-tiles of a block {block.bk} wide leaves no registers for {what}"
    if facts.narrow and line < 32:
        return f"a warp stores rows of {line} elements; an FP8 output needs at least 32"
    pitch = line * facts.out_bytes + (8 * max(2, facts.out_bytes) if n_major else 16)
    store = 2 * 16 * pitch * cfg.warps_m * cfg.warps_n * (1 + facts.epilogue.stores_z)
    needed = max(facts.operand_bytes, store)
    if needed > spec.smem:
        return f"{needed} bytes of shared memory; {spec.name} has {spec.smem} a block"
    return ""


def tma_operands(facts: GemmFacts) -> str:
    """Rules of the sm_90 path for the architecture and the operands."""
    if facts.spec.path != "sm_90":
        return f"{facts.spec.name} has neither TMA nor WGMMA; it uses the kernels of the sm_80 path"
    for name, align in zip("AB", facts.aligns, strict=False):
        if align < facts.element.vector:
            return f"{name}'s address or strides are not multiples of 16 bytes, which TMA requires"
    if "any" in facts.majors[:2]:
        return "an operand has no contiguous mode, which TMA requires"
    return ""


def sm90(facts: GemmFacts) -> str:
    """Rules of the sm_90 kernel, without those of its operands."""
    return store_buffers(facts) or _tile_sm90(facts) or _registers_sm90(facts) or _schedule_sm90(facts)


def store_buffers(facts: GemmFacts) -> str:
    """Rules of the sm_90 store buffers."""
    if facts.config.store_row not in (32, 64, 128) or facts.config.store_row < 16 * facts.out_bytes:
        return f"store_row must be 32, 64 or 128 bytes and hold 16 elements, got {facts.config.store_row}"
    return ""


def smem_sm90(facts: GemmFacts) -> str:
    """Rule of shared memory, which must hold the rings, the store buffers and the barriers."""
    needed = facts.operand_bytes + facts.store_bytes + facts.config.split_k_bytes + 2 * BARRIER_BYTES
    spec = facts.spec
    return f"{needed} bytes of shared memory; {spec.name} has {spec.smem} a block" if needed > spec.smem else ""


def _tile_sm90(facts: GemmFacts) -> str:
    """Rules of WGMMA, the swizzles and the store for a tile."""
    cfg = facts.config
    if facts.block and cfg.tile_m >= facts.block.bm + 64:
        return f"{cfg.tile_m} rows for blocks {facts.block.bm} high: some slabs of 64 rows would lie outside the block"
    if cfg.tile_m % (64 * cfg.warps_m):
        return f"{cfg.tile_m} rows among {cfg.warps_m} warpgroups: each needs a multiple of WGMMA's 64"
    group_n, rest = divmod(cfg.tile_n, cfg.warps_n)
    if rest or group_n % 16:
        return f"{cfg.tile_n} columns among {cfg.warps_n} warpgroups: each needs a multiple of stmatrix's 16"
    if max(cfg.tile_m, cfg.tile_n, cfg.tile_k) > 256:
        return f"tile {cfg}: the sides of a TMA box and of a WGMMA are at most 256"
    widest, half, quarter = facts.element.rows
    if cfg.tile_k not in (quarter, half) and cfg.tile_k % widest:
        return f"a K-tile must fill a swizzle row: {quarter}, {half} or a multiple of {widest}, got {cfg.tile_k}"
    atom = next((columns for columns in facts.element.rows if cfg.tile_n % columns == 0), cfg.tile_n)
    if facts.majors[1] == "n" and group_n % atom:
        return f"{group_n} columns a warpgroup would split B's swizzle atom of {atom}"
    chunk = facts.chunk_columns(group_n)
    if facts.narrow and chunk < 32:
        return f"{chunk} columns a warpgroup: an FP8 output needs at least 32 to fill a swizzle row"
    if group_n % chunk:
        return f"{group_n} columns a warpgroup: they must be a multiple of the store's chunk of {chunk}"
    return ""


def _registers_sm90(facts: GemmFacts) -> str:
    """Rules of registers: a thread's 240 must hold its accumulators and the operands of its epilogue."""
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
    """Rules of the consumer groups, the pipeline, the cluster and shared memory."""
    cfg = facts.config
    if cfg.consumer_groups > 2:
        return f"{cfg.consumer_groups} consumer groups: ping-pong has two"
    if cfg.warps_m * cfg.warps_n * cfg.consumer_groups != 2:
        return (
            f"{cfg.warps_m * cfg.warps_n * cfg.consumer_groups} consumer warpgroups: the register budgets, and the "
            "barriers that order two consumer groups, require exactly two"
        )
    if cfg.schedule and (cfg.schedule != OVERLAP_STORE or not facts.may_overlap_store):
        return (
            f'schedule={cfg.schedule!r}: it must be "", or "{OVERLAP_STORE}" for FP8 blocks with a scale each and one '
            "K-tile, in a cooperative kernel with A in registers and a 16-bit output"
        )
    if cfg.stages < 2:
        return "one stage: a K-tile is released after the next one has been issued"
    if reason := _split(facts):
        return reason
    if cfg.rings > 1 and not ((facts.promotes or cfg.waits) and cfg.rings == cfg.consumer_groups):
        return f"{cfg}: {cfg.rings} rings need as many consumer groups, and promoted accumulation or waits"
    if 16 * cfg.stages * cfg.rings + 8 > BARRIER_BYTES:
        return f"{cfg.stages} stages: their barriers take more than {BARRIER_BYTES} bytes"
    if cfg.cluster_m * cfg.cluster_n > 2:
        return f"a cluster of {cfg.cluster_m}x{cfg.cluster_n}: at most two CTAs are supported; more ran half as fast"
    if (cfg.cluster_m > 1 and cfg.tile_n < 64) or (cfg.cluster_n > 1 and cfg.tile_m < 64):
        return f"tile {cfg}: a multicast operand needs at least 64 rows, of which each CTA loads its share"
    if reason := smem_sm90(facts):
        return reason
    if facts.block and cfg.cluster_m > 1 and -(-facts.block.bm // cfg.tile_m) % cfg.cluster_m:
        return f"a cluster of {cfg.cluster_m} row tiles would span two block rows of {facts.block.bm}"
    return ""


def _split(facts: GemmFacts) -> str:
    """Rules of split-K among the CTAs of a cluster."""
    cfg = facts.config
    if cfg.split == 1:
        return ""
    if cfg.split not in (2, 4):
        return f"split must be 1, 2 or 4, got {cfg.split}"
    if cfg.cluster_m * cfg.cluster_n > 1 or cfg.consumer_groups > 1:
        return f"{cfg}: split-K requires a cooperative kernel without a multicast cluster"
    group_n = cfg.tile_n // cfg.warps_n
    chunks = cfg.tile_m // (64 * cfg.warps_m) * (group_n // facts.chunk_columns(group_n))
    if chunks % cfg.split:
        return f"{chunks} chunks of a warpgroup's store must divide evenly among {cfg.split} CTAs (see store_row)"
    return ""
