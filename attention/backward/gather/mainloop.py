"""The mainloop of backward with gathered KV tiles: the steps of the consumers for each KV tile.

Query tiles and their unions are those of forward: 128 rows, tokens * query heads of a KV head. A step over a gathered
tile of 64 keys:

    wait K -> issue S = Q K' -> wait V -> issue dP = dO V' -> wait S, mask, P = 2^(S - LSE) -> to shared memory
    wait dP, release V -> dS = P (dP - delta) -> to shared memory -> issue dQ += dS K, dS from registers
    all consumers -> wait dQ, release K -> dV = P' dO, dK = dS' Q, each added to FP32 accumulators in memory

dQ stays in registers. dV and dK are computed for 64 columns at a time, so that those of one WGMMA are added to memory
while the next one runs. The additions are atomic, so dK and dV are nondeterministic; sums.py has the order of columns.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from cute_kernels.tile.barriers import BACKWARD_ALL, BACKWARD_READ
from cute_kernels.tile.hopper import WARPGROUP, start_product
from cute_kernels.tile.ptx import add_vector_to_memory, here, read_special_register

from ...forward.gather.mask import Members, mask_members
from ...forward.gather.source import UnionSteps
from ...forward.mainloop_sm90 import in_steps
from ...forward.softmax import exp2, rows_and_columns
from ..config import FP32
from .config import GROUPS, KEYS
from .operands import Consumer, GatherOperands

WARP, WARP_ROWS = 32, 16
DV, DK = 0, 1  # of dO and Q, of P and dS, and of the accumulators of dV and dK


@dataclass(frozen=True)
class Work:
    """A consumer thread's rows of a query tile."""

    tiles: UnionSteps
    members: Members
    partial: Int32  # number of steps whose positions are compared
    lse: cute.Tensor  # (2,), times log2(e)
    delta: cute.Tensor  # (2,)
    accumulators: tuple  # addresses of key 0 of dV and of dK, at this thread's columns
    scale_log2: Any  # Float32


class GatherMainloop(GatherOperands):
    """Steps over the gathered KV tiles of one query tile."""

    @cute.jit
    def step(self, c: Consumer, work: Work, i: Int32, at):
        """Compute the gradients of one gathered KV tile; `at` is the state of the rings of K and V."""
        other, stage = 1 - c.group, (None, None, None, at.index)
        cute.arch.barrier_arrive(barrier_id=BACKWARD_READ + c.group, number_of_threads=GROUPS * WARPGROUP)
        self.wait(c.pipe_k, at)
        start_product(c.mmas[0], c.acc_S, *in_steps(c.tSrQ, c.tSrK[stage]), True)
        self.wait(c.pipe_v, at)
        start_product(c.mmas[1], c.acc_dP, *in_steps(c.tPrdO, c.tPrV[stage]), True)
        warpgroup.wait_group(1)
        scores, ds = rows_and_columns(c.acc_S), rows_and_columns(c.acc_dP)
        if i < work.partial:
            mask_members(self.facts, scores, work, i, True)
        else:
            mask_members(self.facts, scores, work, i, False)
        for column in range_constexpr(cute.size(scores, mode=[1])):
            for r in range_constexpr(2):
                scores[r, column] = exp2(scores[r, column] * work.scale_log2 - work.lse[r])
        self.convert(c.acc_S, c.rP)
        cute.arch.barrier(barrier_id=BACKWARD_READ + other, number_of_threads=GROUPS * WARPGROUP)
        self.write(c, c.rP, 0)
        warpgroup.wait_group(0)
        c.pipe_v.consumer_release(at)
        for column in range_constexpr(cute.size(ds, mode=[1])):
            for r in range_constexpr(2):
                ds[r, column] = scores[r, column] * (ds[r, column] - work.delta[r])
        self.convert(c.acc_dP, c.tQrdS)
        self.write(c, c.tQrdS, 1)
        cute.arch.fence_view_async_shared()
        self.pin(c.tQrdS)
        start_product(c.mmas[2], c.acc_dQ, *in_steps(c.tQrdS, c.tQrK[stage]), False)
        cute.arch.barrier(barrier_id=BACKWARD_ALL, number_of_threads=GROUPS * WARPGROUP)
        self.add_keys(c, work, i, at)

    def wait(self, pipe, at):
        """Wait for a tile that cp.async wrote, through another proxy than that of WGMMA."""
        pipe.consumer_wait(at)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def add_keys(self, c: Consumer, work: Work, i: Int32, at):
        """Compute dV and dK of a step, and add them to memory; each part is added while the next one is computed."""
        keys = [self.key_of(work, work.tiles.at(i), r) for r in range(2)]
        parts = const_expr(self.parts())
        for j in range_constexpr(len(parts)):
            self.start_part(c, j, parts[j])
            warpgroup.wait_group(1)  # for dQ, or the part before
            if const_expr(j == 0):
                c.pipe_k.consumer_release(at)
            else:
                self.add_part(c, work, keys, j - 1, parts[j - 1])
        warpgroup.wait_group(0)
        self.add_part(c, work, keys, len(parts) - 1, parts[-1])

    def parts(self) -> list:
        """(DV or DK, part of its columns), in the order of their computation; None for those of the warpgroup."""
        if not self.facts.splits:
            return [(None, 0)]
        return [(which, part) for which in (DV, DK) for part in range(self.facts.parts)]

    def start_part(self, c: Consumer, j: int, part: tuple):
        """Issue the j-th part."""
        which, number = part
        which = c.group if which is None else which
        operands = c.tKrP[None, None, None, which], c.tKrQ[number][None, None, None, which]
        start_product(c.mmas[3], c.acc_dK[j % 2], *in_steps(*operands), True)

    def key_of(self, work: Work, step: Int32, r: int) -> Int32:
        """Key of this thread's first (r = 0) or second row of a step's dK; -1 past the end of K. After the union's end
        its last block is repeated, to which zeros are added."""
        size, steps = self.facts.block_size, work.tiles
        row = read_special_register("tid.x") % WARPGROUP // WARP * WARP_ROWS + cute.arch.lane_idx() // 4 + 8 * r
        listed = step * KEYS + row
        key = Int32(steps.union[listed // size]) * size + row % size
        return select_(key < steps.cols, key, Int32(-1))

    @cute.jit
    def add_part(self, c: Consumer, work: Work, keys: list, j: cutlass.Constexpr[int], part: cutlass.Constexpr[tuple]):
        """Add the j-th part to the accumulator in memory."""
        facts, acc = self.facts, c.acc_dK[j % 2]
        which, number = part
        if const_expr(which is None):
            to = select_(c.group == DV, work.accumulators[DV], work.accumulators[DK])
        else:
            to = work.accumulators[which]
        flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        begin = const_expr(number * facts.columns * GROUPS * FP32)
        for r in range_constexpr(2):
            if keys[r] >= 0:
                row = to + Int64(keys[r]) * const_expr(facts.head_dim * FP32)
                for u in range_constexpr(facts.columns // 16):
                    values = [flat[8 * u + 2 * r + v % 2 + v // 2 * 4] for v in range(4)]
                    add_vector_to_memory(row, values, begin + u * 16 * FP32)

    @cute.jit
    def convert(self, acc: cute.Tensor, values: cute.Tensor):
        """Convert to 16 bits, eight values at a time; see forward.mainloop_sm90."""
        for i in range_constexpr(0, cute.size(acc), 8):
            part = cute.make_tensor(acc.iterator + i, cute.make_layout(8))
            cute.make_tensor(values.iterator + i, cute.make_layout(8)).store(part.load().to(self.dtype))

    def write(self, c: Consumer, values: cute.Tensor, index: int):
        """Write P (0) or dS (1) to shared memory."""
        thread = c.copy_P.get_slice(cute.arch.thread_idx()[0] - WARPGROUP)
        values = thread.retile(cute.make_tensor(values.iterator, c.acc_S.layout))
        cute.copy(c.copy_P, values, c.sP[None, None, None, index])

    def pin(self, operand: cute.Tensor):
        """Pin an operand's registers, so that they are written before the WGMMA's wgmma.fence."""
        words = cute.recast_tensor(operand, Int32)
        for i in range(cute.size(words)):
            words[i] = here(words[i])
