"""The sm_80 kernel of attention's backward: cp.async in, ldmatrix and mma.sync, dK and dV from registers.

    all warps    copy, multiply, and compute P and dS of their own rows of K and V (warps.py, mainloop_sm80.py)

Each CTA processes one KV tile. It iterates over the query tiles of all heads that share its head of K and V, so that dK
and dV are written once, with bitwise identical results in every run. dQ is accumulated in memory by all CTAs; the order
is nondeterministic without semaphores (semaphores.py). For sm_80 and newer.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.ampere import CHUNK, WARP, OperandTile
from cute_kernels.tile.ptx import read_special_register, zero_of

from ..forward.mainloop_sm80 import first_vector, lines_at_once, vectors
from .config import FP32, BackwardFacts
from .mainloop_sm80 import Consumer, Loads, MainloopSm80
from .problem import problem_of
from .scores import Work
from .store import store_fragment
from .warps import MMA_ROWS


@dataclass(frozen=True)
class Lines:
    """Rows of an operand in one batch, for all heads: `end` rows from row `begin` on. Later rows are zero-filled."""

    op: OperandTile
    mX: cute.Tensor  # (B, H, S, D)
    b: Int32
    begin: Int32
    end: Int32


class FlashBackwardSm80:
    """Compiles to one kernel per `BackwardFacts`."""

    def __init__(self, facts: BackwardFacts):
        self.facts, self.cfg = facts, facts.config
        self.mainloop = MainloopSm80(facts)
        self.threads = WARP * facts.config.groups
        self.smem_bytes = facts.smem_bytes

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv), packed (total_k, Hkv, Dv)
        mdO: cute.Tensor,  # (B, H, Sq, Dv), packed (total_q, H, Dv)
        mdK: cute.Tensor,  # as K
        mdV: cute.Tensor,  # as V
        rows: cute.Tensor,  # row_tiles: (B * H * tiles, 2, tile_m) FP32
        dq: cute.Tensor,  # row_tiles: dq_accum, (B * H * tiles, tile_m * D) FP32
        turns: cute.Tensor | None,  # (B * H * tiles, warps) int32 zeros; deterministic (semaphores.py)
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        cu_k: cute.Tensor | None,  # (B + 1,); packed
        blocks: tuple | None,  # see problem.problem_of; block mask
        score_tensors: tuple | None,  # tensors that score_mod reads
        score_sums: tuple | None,  # FP32 gradient accumulators of those that need a gradient
        scale_log2: Float32,
        softcap: Float32,
        scale: Float32,  # of dK
        left: Int32 | None,  # None with a block mask
        right: Int32 | None,
        offsets: tuple | None,  # (q_offset, k_offset); BackwardFacts.offsets
        stream: cuda.CUstream,
    ):
        p = problem_of(self.facts, (mQ, mK, mV, mdO, mdK, mdV), rows, (cu_q, cu_k), blocks, left, right, offsets)
        self.kernel(
            p.mQ, p.mK, p.mV, p.mdO, p.mdK, p.mdV, rows, dq, turns, p.source, p.scheduler, p.seqlens, scale_log2,
            softcap, scale, (score_tensors, score_sums),
        ).launch(
            grid=(p.scheduler.count, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (B, H, Sq, D)
        mK: cute.Tensor,  # (B, Hkv, Sk, D)
        mV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        mdO: cute.Tensor,  # (B, H, Sq, Dv)
        mdK: cute.Tensor,  # (B, Hkv, Sk, D)
        mdV: cute.Tensor,  # (B, Hkv, Sk, Dv)
        rows: cute.Tensor,
        dq: cute.Tensor,
        turns: cute.Tensor | None,
        source,
        scheduler,
        seqlens,
        scale_log2: Float32,
        softcap: Float32,
        scale: Float32,
        score: tuple,
    ):
        cfg, ops = self.cfg, self.mainloop.ops
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        tile = scheduler.decode(cute.arch.block_idx()[0])
        seqlen = seqlens.of(tile.b)
        c = self.mainloop.consumer(warp, lane)
        c.acc_dK.fill(0.0)
        c.acc_dV.fill(0.0)
        item_q, item_k = (seqlen.b, seqlen.q0, seqlen.rows), (seqlen.b, seqlen.k0, seqlen.cols)
        from_q, from_do = Lines(ops["Q of S"], mQ, *item_q), Lines(ops["dO of dP"], mdO, *item_q)
        from_k, from_v = Lines(ops["K of S"], mK, *item_k), Lines(ops["V of dP"], mV, *item_k)
        self.copy(from_k, tile.head_group, tile.n, c.smem + self.mainloop.begin["K"])
        self.copy(from_v, tile.head_group, tile.n, c.smem + self.mainloop.begin["V"])

        heads = scheduler.item_heads
        before = seqlens.first_tile(seqlen, tile.b, cfg.tile_m)
        col0 = tile.n * cfg.tile_n
        col = col0 + self.mainloop.first_row(warp) + lane // 4
        of_turns = None if const_expr(turns is None) else turns.iterator.toint()
        stage, number, copied = Int32(0), Int32(0), cutlass.Boolean(False)
        for g in cutlass.range(heads, unroll=1):
            h = tile.head_group * heads + g
            next_g = cutlass.min(g + 1, heads - 1)
            tiles = source.for_tile(tile, h, seqlen)
            of_next = source.for_tile(tile, tile.head_group * heads + next_g, seqlen)
            has_next, next_first = (next_g > g) & (of_next.count > 0), of_next.at(0)
            first = (seqlen.b * scheduler.heads + h) * scheduler.tiles_q + before
            work = Work(
                source, tiles, seqlen, tile.b, h, col, col0, first, dq.iterator.toint(), of_turns, scale_log2, softcap,
                *score,
            )  # fmt: skip
            if tiles.count > 0:
                if not copied:
                    number = tiles.at(0)
                    self.copy_q(c, from_q, rows, h, number, first, stage)
                    self.copy(from_do, h, number, c.smem + self.stage_do(stage))
            for i in cutlass.range(tiles.count, unroll=1):
                last = i + 1 == tiles.count
                then = select_(last, next_first, tiles.at(i + 1))
                exists = has_next | (i + 1 < tiles.count)
                following = exists, h + Int32(last), then, first + scheduler.tiles_q * Int32(last)
                self.visit(c, work, (from_q, from_do, rows), i, number, stage, following)
                stage = (stage + 1) % cfg.stages
                number = then
            copied = has_next & (tiles.count > 0)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        self.store(c, (mdK, mdV), scheduler, seqlens, scale)

    def visit(self, c: Consumer, work: Work, sources: tuple, i: Int32, number: Int32, stage: Int32, following: tuple):
        """Process query tile i of a head. `following` is the next tile: (exists, head, tile, the head's first tile)."""
        from_q, from_do, rows = sources
        exists, h, n, first = following

        def copy_q(stage: Int32):
            self.copy_next_q(exists, c, from_q, rows, h, n, first, stage)

        def copy_do(stage: Int32):
            self.copy_next_do(exists, c, from_do, h, n, stage)

        self.mainloop.step(c, work, i, number, stage, Loads(copy_q, copy_do))

    @cute.jit
    def store(self, c: Consumer, gradients: tuple, scheduler, seqlens, scale: Float32):
        """Store dK and dV of this thread. The tile is decoded again, so that the mainloop keeps no registers for it."""
        split, thread = self.mainloop.warps.kv, read_special_register("tid.x")
        tile = scheduler.decode(read_special_register("ctaid.x"))
        seqlen = seqlens.of(tile.b)
        height = const_expr(self.cfg.tile_n // split.rows)
        row, column = split.of(thread // WARP)
        row = tile.n * self.cfg.tile_n + row * height + thread % WARP // 4
        flat = cute.make_tensor(c.acc_dK.iterator, cute.make_layout(cute.size(c.acc_dK)))
        flat.store(flat.load() * scale)
        dims = self.facts.head_dim, self.facts.head_dim_v
        for acc, m, dim in zip((c.acc_dK, c.acc_dV), gradients, dims):
            begin = cute.domain_offset(
                (seqlen.k0, column * (dim // split.columns)), m[seqlen.b, tile.head_group, None, None]
            )
            store_fragment(acc, begin, row, seqlen.cols, height // MMA_ROWS)

    # ------------------------------------------------------------------ global memory -> shared memory

    def stage_do(self, stage: Int32):
        """Byte offset of a stage of dO from the first operand in shared memory."""
        begin = self.mainloop.begin["dO"]
        return begin if self.facts.stages_do == 1 else begin + stage * self.mainloop.ops["dO of dP"].bytes

    @cute.jit
    def copy_next_q(self, exists, c: Consumer, lines: Lines, rows, h: Int32, n: Int32, first: Int32, stage: Int32):
        if exists:
            self.copy_q(c, lines, rows, h, n, first, stage)

    @cute.jit
    def copy_next_do(self, exists, c: Consumer, lines: Lines, h: Int32, n: Int32, stage: Int32):
        if exists:
            self.copy(lines, h, n, c.smem + self.stage_do(stage))

    @cute.jit
    def copy_q(self, c: Consumer, lines: Lines, rows, h: Int32, n: Int32, first: Int32, stage: Int32):
        """Copy Q, LSE and delta of query tile n of head h. The head's tiles have indices from `first` on."""
        self.copy(lines, h, n, c.smem + self.mainloop.begin["Q"] + stage * lines.op.bytes)
        size = const_expr(2 * self.cfg.tile_m)
        vector = const_expr(CHUNK // FP32)
        tidx = read_special_register("tid.x")
        if tidx < size // vector:
            layout = cute.make_layout(((vector, 1), 1))
            source = rows.iterator.toint() + (Int64(first + n) * size + tidx * vector) * FP32
            to = c.smem + self.mainloop.begin["rows"] + (stage * size + tidx * vector) * FP32
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=8 * CHUNK)
            cute.copy(
                atom,
                cute.make_tensor(make_ptr(Float32, source, AddressSpace.gmem, assumed_align=CHUNK), layout),
                cute.make_tensor(make_ptr(Float32, to, AddressSpace.smem, assumed_align=CHUNK), layout),
            )

    @cute.jit
    def copy(self, lines: Lines, h: Int32, n: Int32, to: Int32):
        """Copy tile n of head h of an operand to address `to`.

        Adjacent threads copy adjacent chunks, `op.chunks` of a row at a time.
        """
        op = lines.op
        line, element = first_vector(op, read_special_register("tid.x"))
        if const_expr(lines_at_once(op) <= op.lines):
            self.copy_vectors(lines, line, element, h, n, to)
        elif line < op.lines:
            self.copy_vectors(lines, line, element, h, n, to)

    @cute.jit
    def copy_vectors(self, lines: Lines, line: Int32, element: Int32, h: Int32, n: Int32, to: Int32):
        """Copy this thread's vectors, the first of which is at (line, element)."""
        op, stride = lines.op, lines.mX.stride
        size = const_expr(op.element.width)
        pitch = Int64(stride[2]) * size
        row = n * op.lines + line
        zero = zero_of(row)  # keeps the compiler from hoisting these addresses out of a loop
        head = (Int64(lines.b + zero) * stride[0] + Int64(h + zero) * stride[1] + element) * size
        source = lines.mX.iterator.toint() + head + (lines.begin + row) * pitch
        offset = op.offset(line, element * size)
        passed = const_expr(0)
        for offset_row, byte in const_expr(vectors(op)):
            if const_expr(offset_row > passed):
                source = source + (offset_row - passed) * pitch
                passed = const_expr(offset_row)
            x, add = op.split(offset_row, byte)
            valid = row + offset_row < lines.end
            self.mainloop.tile_steps.copy_vector(op, source + byte, to + (offset ^ x) + add, valid)
