"""The sm_80 mainloop of attention's backward: the steps of all warps for each query tile.

    smem     | K | V | Q 0 | Q 1 | .. | dO 0 | .. | P | dS | rows 0 | rows 1 | ..     rows: LSE and delta

Scores are computed transposed, as on sm_90: the accumulators of P' and dS' become A operands of dV and dK. A step over
query tile i, with dK and dV in registers (FlashAttention-2, Dao 2023), if warps have all columns of their scores
(warps.py):

    wait Q[i] and dO[i], __syncthreads -> copy Q[i + 1] -> S' = K Q[i]' -> dP' = V dO[i]' -> P', dS'
    dS' to shared memory -> dV += P' dO[i] -> __syncthreads -> copy dO[i + 1] -> dK += dS' Q[i] -> dq_accum += dS K

dO then needs one stage. If warps exchange P' as well, dV waits for the second barrier, and dO has a ring like Q. A ring
of one stage is refilled after a third barrier, once dV and dK have been computed, so that the copy overlaps with dQ.

dS and P have one buffer each: the first barrier of a step comes after all reads of the previous step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.dtypes import cutlass_dtype
from cute_kernels.tile.ampere import CHUNK, WARP, OperandTile, TileSteps
from cute_kernels.tile.ptx import add_to_memory, read_special_register, zero_of

from ..forward.softmax import rows_and_columns
from .config import FP32, BackwardFacts
from .dq_accum import sums_of
from .scores import Work, changed_p_to_ds, changed_scores_to_p, mask_scores, p_to_ds, scores_to_p
from .semaphores import TURN, end_turn, wait_for_turn
from .warps import MMA_ROWS

ALIGN = 1024  # bytes, of shared memory
COLUMNS = 32  # columns of a matmul computed from one set of B fragments


@dataclass(frozen=True)
class Part:
    """A warp's rows of an operand in shared memory.

    lanes: addresses of this lane's eight elements in the first fragments, for a tile at the start of shared memory;
    later fragments are at fixed offsets from these. begin: byte offset of the tile from there.
    """

    op: OperandTile
    lanes: tuple
    begin: int

    def moved(self, by) -> "Part":
        """The same operand in another stage, `by` bytes further."""
        return Part(self.op, tuple(lane + by for lane in self.lanes), self.begin)


@dataclass(frozen=True)
class Consumer:
    """State of a warp across all query tiles: addresses of operands in shared memory, and accumulators."""

    smem: Int32  # address of the first operand
    parts: dict  # Part of each use of an operand, see MainloopSm80.operands
    scores: Int32  # address of this thread's first scores, for a dS at the start of shared memory
    column: Int32  # the warp's first column of S'
    acc_dK: cute.Tensor  # (MMA, MMA_M, MMA_N)
    acc_dV: cute.Tensor


@dataclass(frozen=True)
class Loads:
    """Callbacks that copy the next query tile: `q(stage)` its Q and rows, `do(stage)` its dO."""

    q: Callable
    do: Callable


class MainloopSm80:
    """Steps over the query tiles of one KV tile, with their storage and registers."""

    def __init__(self, facts: BackwardFacts):
        self.facts, self.cfg = facts, facts.config
        self.dtype = cutlass_dtype(facts.dtype)
        self.warps = facts.config.warps(facts.head_dim, facts.head_dim_v)
        self.ops = self.operands()
        self.begin = self.begins()
        self.sums = sums_of(facts.path, facts.config, facts.head_dim)
        self.tile_steps = TileSteps(self.dtype)
        self.tiles_n = facts.config.tile_n // self.warps.scores.rows // MMA_ROWS  # MMA tiles of a warp's scores
        self.width = facts.config.tile_m // self.warps.scores.columns  # columns of a warp's scores

    def operands(self) -> dict:
        """The OperandTile of each use of an operand: its layout in shared memory, and the split of its rows across
        warps.

        An operand may have two uses, with rows and columns exchanged, on the same memory.
        """
        cfg, facts, warps = self.cfg, self.facts, self.warps
        threads, dim, dim_v, element = WARP * cfg.groups, facts.head_dim, facts.head_dim_v, facts.element

        def a(rows: int, columns: int, along: bool, count: int) -> OperandTile:
            return OperandTile(rows, columns, along, element.vector, threads, count, False, element)

        def b(rows: int, columns: int, along: bool, count: int) -> OperandTile:
            return OperandTile(rows, columns, along, element.vector, threads, count, True, element)

        return {
            "K of S": a(cfg.tile_n, dim, True, warps.scores.rows),
            "Q of S": b(cfg.tile_m, dim, True, warps.scores.columns),
            "V of dP": a(cfg.tile_n, dim_v, True, warps.scores.rows),
            "dO of dP": b(cfg.tile_m, dim_v, True, warps.scores.columns),
            "P of dV": a(cfg.tile_n, cfg.tile_m, True, warps.kv.rows),
            "dO of dV": b(dim_v, cfg.tile_m, False, warps.kv.columns),
            "dS of dK": a(cfg.tile_n, cfg.tile_m, True, warps.kv.rows),
            "Q of dK": b(dim, cfg.tile_m, False, warps.kv.columns),
            "dS of dQ": a(cfg.tile_m, cfg.tile_n, False, warps.dq.rows),
            "K of dQ": b(dim, cfg.tile_n, False, warps.dq.columns),
        }

    def first_row(self, warp: Int32) -> Int32:
        """A warp's first row of S'."""
        return self.warps.scores.of(warp)[0] * (MMA_ROWS * self.tiles_n)

    def begins(self) -> dict:
        """Byte offset of each operand from the first one in shared memory."""
        cfg, ops = self.cfg, self.ops
        sizes = {
            "K": ops["K of S"].bytes,
            "V": ops["V of dP"].bytes,
            "Q": cfg.stages * ops["Q of S"].bytes,
            "dO": self.facts.stages_do * ops["dO of dP"].bytes,
            "P": 0 if self.warps.in_registers else ops["P of dV"].bytes,
            "dS": ops["dS of dK"].bytes,
            "rows": 0,
        }
        return {name: sum(list(sizes.values())[:i]) for i, name in enumerate(sizes)}

    def consumer(self, warp: Int32, lane: Int32) -> Consumer:
        """Allocate the shared memory and registers of a warp."""
        cfg, facts, ops, warps = self.cfg, self.facts, self.ops, self.warps
        smem = cutlass.memory.SmemAllocator().allocate(facts.smem_bytes, byte_alignment=ALIGN).toint()
        shares = {"S": warps.scores, "dP": warps.scores, "dV": warps.kv, "dK": warps.kv, "dQ": warps.dq}
        parts = {}
        for name, op in ops.items():
            operand, product = name.split(" of ")
            parts[name] = Part(op, lanes_of(op, smem, lane, shares[product].of(warp)[op.is_b]), self.begin[operand])
        column = warps.scores.of(warp)[1] * self.width
        size = facts.element.width
        row, byte = self.first_row(warp) + lane // 4, column * size + lane % 4 * (2 * size)
        tiles = cfg.tile_n // warps.kv.rows // MMA_ROWS
        acc_dK, acc_dV = (
            cute.make_rmem_tensor((4, tiles, width // warps.kv.columns // 8), Float32)
            for width in (facts.head_dim, facts.head_dim_v)
        )
        return Consumer(smem, parts, smem + ops["dS of dK"].offset(row, byte), column, acc_dK, acc_dV)

    # ------------------------------------------------------------------ steps

    @cute.jit
    def step(self, c: Consumer, work: Work, i: Int32, number: Int32, stage: Int32, loads: cutlass.Constexpr):
        """Compute dK, dV and dQ of query tile i of a head, which has index `number` among all. stage: of Q's ring."""
        cfg, ops, facts = self.cfg, self.ops, self.facts
        stage_do = stage if const_expr(facts.stages_do > 1) else Int32(0)
        # `zero` keeps the compiler from hoisting swizzled addresses of `parts` and the bounds of a window out of the
        # loop: registers do not suffice for them.
        zero = zero_of(number)
        by = {"Q": zero + stage * ops["Q of S"].bytes, "dO": zero + stage_do * ops["dO of dP"].bytes}
        parts = {name: part.moved(by.get(name.split()[0], zero)) for name, part in c.parts.items()}
        after = (stage + 1) % cfg.stages
        rows = (
            c.smem
            + self.begin["rows"]
            + (stage * 2 * cfg.tile_m + c.column + read_special_register("laneid") % 4 * 2) * FP32
        )
        in_registers = const_expr(self.warps.in_registers)

        self.wait()
        if const_expr(cfg.stages > 1):
            loads.q(after)
            if const_expr(facts.stages_do > 1):
                loads.do(after)
        acc_S = cute.make_rmem_tensor((4, self.tiles_n, self.width // 8), Float32)
        acc_dP = cute.make_rmem_tensor((4, self.tiles_n, self.width // 8), Float32)
        acc_S.fill(0.0)
        acc_dP.fill(0.0)
        self.multiply(acc_S, self.fragments(parts["K of S"]), parts["Q of S"])
        row0 = number * cfg.tile_m + c.column
        if const_expr(facts.score is not None):
            mask_scores(facts, rows_and_columns(acc_S, self.tiles_n), work, i, work.col + zero, row0)
            first_col = work.col + zero - cute.arch.lane_idx() // 4
            shared = facts, acc_S, self.tiles_n, self.dtype, work, first_col, row0, rows
            rP = self.convert(changed_scores_to_p(*shared))
        else:
            slopes = scores_to_p(facts, acc_S, self.tiles_n, self.dtype, work, i, work.col + zero, row0, rows)
            rP = self.convert(acc_S)
        if const_expr(facts.softcap):
            for v in range_constexpr(cute.size(slopes)):
                acc_S[v] = acc_S[v] * slopes[v].to(Float32)
        if const_expr(not in_registers):
            self.write(rP, "P", c.scores + zero)
        self.multiply(acc_dP, self.fragments(parts["V of dP"]), parts["dO of dP"])
        if const_expr(facts.score is not None):
            addresses = rows, rows + cfg.tile_m * FP32
            changed_p_to_ds(facts, acc_S, acc_dP, self.tiles_n, work, first_col, row0, *addresses)
        else:
            p_to_ds(acc_S, acc_dP, self.tiles_n, rows + cfg.tile_m * FP32)
        rdS = self.convert(acc_dP)
        self.write(rdS, "dS", c.scores + zero)
        if const_expr(in_registers):
            self.multiply(c.acc_dV, lambda k: rP[k], parts["dO of dV"])
        cute.arch.sync_threads()
        if const_expr(in_registers):
            loads.do(0)
            self.multiply(c.acc_dK, lambda k: rdS[k], parts["Q of dK"])
        else:
            self.multiply(c.acc_dV, self.fragments(parts["P of dV"]), parts["dO of dV"])
            self.multiply(c.acc_dK, self.fragments(parts["dS of dK"]), parts["Q of dK"])
        if const_expr(cfg.stages == 1):
            cute.arch.sync_threads()
            loads.q(0)
            if const_expr(not in_registers):
                loads.do(0)
        self.add_dq(c, parts, work, number)

    @cute.jit
    def wait(self):
        """Wait until all copies are visible to all threads; also a barrier for all threads."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def add_dq(self, c: Consumer, parts: dict, work: Work, number: Int32):
        """Add dQ = dS K of a query tile to dq_accum, 32 adjacent values per instruction of a warp.

        If deterministic, each warp waits for its semaphore.
        """
        split = self.warps.dq
        acc = cute.make_rmem_tensor(
            (4, self.cfg.tile_m // split.rows // MMA_ROWS, self.facts.head_dim // split.columns // 8), Float32
        )
        acc.fill(0.0)
        self.multiply(acc, self.fragments(parts["dS of dQ"]), parts["K of dQ"])
        to = work.dq + Int64(work.first_tile + number) * (self.sums.size * FP32)
        to = to + self.sums.offset(read_special_register("tid.x"), 0) * FP32
        if const_expr(self.facts.deterministic):
            turn = Int64(work.first_tile + number) * self.cfg.groups + read_special_register("tid.x") // WARP
            turn = work.turns + turn * TURN
            if read_special_register("laneid") == 0:
                wait_for_turn(turn, work.tiles.turn(number))
            cute.arch.sync_warp()
        self.add_values(to, acc)
        if const_expr(self.facts.deterministic):
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if read_special_register("laneid") == 0:
                end_turn(turn, False)

    def add_values(self, to: Int64, acc: cute.Tensor):
        for r in range(self.sums.values):
            add_to_memory(to, acc[r], self.sums.offset(0, r) * FP32)

    # ------------------------------------------------------------------ registers -> shared memory

    def convert(self, acc: cute.Tensor) -> list:
        """Convert a tile of P or dS to 16 bits: an A fragment (8, MMA_M) per MMA step, from two n8 accumulators."""
        steps = []
        for k in range(self.width // self.facts.element.mma_k):
            values = cute.make_rmem_tensor((8, self.tiles_n), self.dtype)
            for i in range(self.tiles_n):
                for half in range(2):
                    part = cute.make_tensor(acc.iterator + 4 * (i + self.tiles_n * (2 * k + half)), 4)
                    to = cute.make_tensor(values.iterator + 8 * i + 4 * half, 4)
                    to.store(part.load().to(self.dtype))
            steps.append(values)
        return steps

    def write(self, steps: list, name: str, to: Int32):
        """Write fragments of P or dS to their tile (tile_n, tile_m), two adjacent values at a time."""
        op = self.ops["dS of dK"]
        for k, values in enumerate(steps):
            words = cute.recast_tensor(cute.make_tensor(values.iterator, 8 * self.tiles_n), Int32)
            for v in range(4 * self.tiles_n):
                row, column = 16 * (v // 4) + 8 * (v % 2), 16 * k + 8 * (v % 4 // 2)
                x, add = op.split(row, column * op.element.width)
                place = make_ptr(Int32, (to ^ x) + (add + self.begin[name]), AddressSpace.smem, assumed_align=4)
                cute.make_tensor(place, 1)[0] = words[v]

    # ------------------------------------------------------------------ shared memory -> registers -> tensor cores

    def fragments(self, part: Part) -> Callable:
        """Return a function k -> fragment (8, MMA_M) of A's MMA step k."""
        op = part.op

        def fragment(k: int) -> cute.Tensor:
            rA = cute.make_rmem_tensor((8, op.span // MMA_ROWS), self.dtype)
            self.tile_steps.read(op, k, part.lanes[0], part.begin, rA)
            return rA

        return fragment

    def multiply(self, acc: cute.Tensor, fragment: Callable, b: Part):
        """acc += A B, with fragment(k) of A, and B in shared memory; fragments are prefetched by one step."""
        op = b.op
        columns = COLUMNS if op.span % COLUMNS == 0 else 16
        tiles = cute.size(acc) // (op.span // 8 * 4)
        # Group steps that share an address
        order = sorted(range(op.tile_k // op.element.mma_k), key=lambda k: op.step(0, k)[0])
        steps = [(k, n) for k in order for n in range(0, op.span, columns)]
        rA, rB = fragment(order[0]), self.fragment_b(b, steps[0], columns)
        for i in range(len(steps)):
            nextA, nextB = rA, rB
            if i + 1 < len(steps):
                if steps[i + 1][1] == 0:
                    nextA = fragment(steps[i + 1][0])
                nextB = self.fragment_b(b, steps[i + 1], columns)
            n = steps[i][1]
            part = cute.make_tensor(acc.iterator + n // 8 * 4 * tiles, (4, tiles, columns // 8))
            self.tile_steps.multiply(part, rA, rB)
            rA, rB = nextA, nextB

    def fragment_b(self, b: Part, step: tuple, columns: int) -> cute.Tensor:
        """Load B fragments (4, MMA_N) of `columns` columns. step: (MMA step, first column)."""
        rB = cute.make_rmem_tensor((4, columns // 8), self.dtype)
        for i in range(columns // 16):
            place = step[1] // 16 + i
            base = place % len(b.lanes)
            piece = cute.make_tensor(rB.iterator + 8 * i, (4, 2))
            self.tile_steps.read(b.op, step[0], b.lanes[base], b.begin, piece, place - base)
        return rB


def lanes_of(op: OperandTile, smem: Int32, lane: Int32, index) -> tuple:
    """Part.lanes of the index-th warp along an operand's rows; shared memory begins at `smem`, a multiple of 128.

    One address is enough if no warp's rows begin inside a swizzle period, or they all begin at powers of two; otherwise
    there is one for each 16 rows of the period.
    """
    size = op.element.width
    if op.k_major or op.span & (op.span - 1) == 0 or op.span * size % (op.chunks * CHUNK) == 0:
        return (smem + op.lane_offset(lane, index),)
    i, r = lane >> 3, lane & 7
    row_half, k_half = (i >> 1, i & 1) if op.is_b else (i & 1, i >> 1)
    first = index * op.span + row_half * 8
    count = op.chunks * CHUNK // (16 * size)
    return tuple(smem + op.offset(k_half * op.element.vector + r, (first + 16 * j) * size) for j in range(count))
