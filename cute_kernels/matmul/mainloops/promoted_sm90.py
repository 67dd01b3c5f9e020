"""The sm_90 FP8 mainloop with promoted (two-level) accumulation: partial sums of 128 elements of K are added in FP32.

FP8 WGMMA keeps some 14 bits of its accumulators' mantissas. A warpgroup therefore has two levels of accumulators: WGMMA
writes the partial sum of a short part of K to a fragment, and CUDA cores add it to the FP32 accumulators.

**Double-buffered.** If registers suffice, two partial fragments alternate, so that tensor cores multiply while CUDA
cores add:

    consumer groups    wait full[0] -> start WGMMA 0
                       -> for each WGMMA p: start WGMMA p + 1, of the same K-tile or, after wait full[s + 1], of the
                              next -> wait until one is in flight -> after a K-tile's last: release empty[s] -> add p

A WGMMA has 64 rows and at most 128 columns. Two fragments of 128 columns fit next to a tile's accumulators if its
warpgroup has one WGMMA. A warpgroup with 64x256 accumulators uses WGMMAs of 64x64. These would read 128 bytes of shared
memory a clock, half of it for A, which is all that shared memory delivers. So **A is in registers**: the warpgroup
reads it once per K-tile, by ldmatrix, while the first WGMMA runs; the first takes A from shared memory.

**Single-buffered**, otherwise:

    consumer groups    wait full[s] -> for each slab of 64 rows and part of at most 128 columns:
                           issue the WGMMAs of 128 elements of K, commit -> wait until they are done -> add
                       -> release empty[s] -> s += 1

A warpgroup's own WGMMAs do not overlap with its additions, but the other warpgroup's do. Both share a tile, and neither
waits for the other.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.cute.typing import AddressSpace

from ...tile.ampere import CHUNK
from ...tile.hopper import WARPGROUP, start_product
from ...tile.ptx import load_volatile, read_after_wait
from .mainloop_sm90 import MainloopSm90

STEPS = 4  # MMA steps of 32 elements of K per partial sum
WARP_ROWS = 16  # of a slab
LINE = 128  # bytes of a K-tile


def of_step(fragment: cute.Tensor, k: int) -> cute.Tensor:
    """(MMA, 1) of MMA step k of (MMA, MMA_K)."""
    return cute.append_ones(fragment[None, k], up_to_rank=2)


class PromotedMainloopSm90(MainloopSm90):
    """Steps of one work tile; loads are those of the plain mainloop.

    takes_turns, rows_in_registers: GemmFacts.takes_turns, and the rows of a tile if A is in registers, else 0.
    grouped: True for a grouped GEMM, whose producer needs registers for group indices.

    Partial sums are multiplied by factors as they are added. Subclasses say where the factors come from:
    `first_factors`, `load_factors`, `factors_of`, `promote`. Factors have two sets of registers, so that they can be
    prefetched. Double-buffered, a K-tile uses the set of its parity; single-buffered, always the first.
    """

    loads_factors = False

    def __init__(self, *terms, takes_turns: bool, rows_in_registers: int, grouped: bool = False):
        super().__init__(*terms)
        self.takes_turns = takes_turns
        self.a_in_registers, self.stage_bytes = rows_in_registers > 0, rows_in_registers * LINE
        self.columns = 64 if self.a_in_registers else 128
        if takes_turns and (grouped or not self.a_in_registers):
            self.registers = (40, 232)  # consumers have at most 64 + 128 accumulators
        # Multiply by a 1.0 that the compiler does not know: with FADD, ptxas serialized the WGMMAs, and spilled.
        self.multiplies_by_one = takes_turns and not self.loads_factors

    def operand_a(self, tiled_mma: cute.TiledMma, thr_mma, sA: cute.Tensor, thread: Int32):
        """A as `mma` takes it: fragments, or with A in registers a tuple of the MMA that takes A from shared memory,
        its fragments, and the shared memory address of this thread's ldmatrix of stage 0."""
        if not self.a_in_registers:
            return super().operand_a(tiled_mma, thr_mma, sA, thread)
        dtype, along_k = sA.element_type, cute.nvgpu.OperandMajorMode.K
        groups = self.stage_bytes // (64 * LINE), 1, 1
        from_shared = sm90_utils.make_trivial_tiled_mma(
            dtype, dtype, along_k, along_k, Float32, groups, tiler_mn=(64, self.columns)
        )
        first = cute.arch.make_warp_uniform(thread // WARPGROUP) * WARPGROUP
        fragments = super().operand_a(from_shared, from_shared.get_slice(first), sA, thread)
        # Each lane points to a row of 16 bytes of four 8x8 matrices: rows 0 to 7, 8 to 15, then both again 16 bytes on.
        # Lines of 128 bytes are swizzled: chunk c of 16 bytes in row r lies at c xor r % 8.
        lane = thread % 32
        row = thread // WARPGROUP * 64 + thread % WARPGROUP // 32 * WARP_ROWS + lane % WARP_ROWS
        chunk = (lane // WARP_ROWS) ^ (row % 8)
        return from_shared, fragments, sA.iterator.toint() + row * LINE + chunk * CHUNK

    def make_parts(self, acc: cute.Tensor) -> list:
        """Fragments (MMA, 1, 1) for partial sums."""
        return [cute.make_rmem_tensor((acc.shape[0], 1, 1), Float32) for _ in range(1 + self.takes_turns)]

    @cute.jit
    def mma(
        self,
        k_tiles,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        A,  # operand_a
        tCrB: cute.Tensor,  # (MMA, MMA_N, MMA_K, PIPE)
        pipeline,
        read,
        release,
        consumer_group: cutlass.Int32,
        scales: tuple = (),  # of the work tile, passed to `first_factors`
    ):
        """Accumulate every K-tile into acc; returns the read and release states after them."""
        acc.fill(0.0)
        operands = (tiled_mma, acc, self.make_parts(acc), A, tCrB)
        factors = self.first_factors(k_tiles, scales)
        if const_expr(not self.takes_turns):
            period = const_expr(len(self.k_blocks))  # K-tiles of one block
            for i in cutlass.range(k_tiles.count // period, unroll=1):
                self.load_factors(k_tiles, (i + 1) * period, factors, 1)
                read, release = self.add_period(operands, factors, pipeline, read, release)
                self.keep_factors(factors)
        elif k_tiles.count > 0:
            pipeline.consumer_wait(read)
            self.start(operands, 0, None, read.index)
            last = k_tiles.count - 1
            for i in cutlass.range(last // 2, unroll=1):
                for turn in range_constexpr(2):
                    self.load_factors(k_tiles, 2 * i + turn + 1, factors, 1 - turn)
                    read = self.add_in_turns(operands, factors, turn, pipeline, read, True)
            if last % 2 > 0:
                self.load_factors(k_tiles, last, factors, 1)
                read = self.add_in_turns(operands, factors, 0, pipeline, read, True)
                read = self.add_in_turns(operands, factors, 1, pipeline, read, False)
            else:
                read = self.add_in_turns(operands, factors, 0, pipeline, read, False)
            release = read.clone()
        return read, release

    @cute.jit
    def add_in_turns(self, operands: tuple, factors, turn: cutlass.Constexpr, pipeline, read, more: cutlass.Constexpr):
        """Add the partial sums of a K-tile, whose first WGMMA runs; with `more`, start the first of the next K-tile."""
        acc, parts = operands[1:3]
        count = const_expr(cute.size(acc, mode=[2]))
        this = read.clone()
        rA = self.read_rows(operands, this.index) if const_expr(self.a_in_registers) else None
        found = self.factors_of(factors, turn)
        read.advance()
        for n in range_constexpr(count):
            at = const_expr(turn * count + n)
            if const_expr(n + 1 < count):
                self.start(operands, at + 1, rA, this.index)
            elif const_expr(more):
                pipeline.consumer_wait(read)
                self.start(operands, at + 1, None, read.index)
            warpgroup.wait_group(1 if n + 1 < count or more else 0)
            part = parts[at % 2]
            read_after_wait(part)
            if const_expr(n + 1 == count):
                pipeline.consumer_release(this)
            self.promote(acc[None, 0, n], part[None, 0, 0], 0, n, found)
        return read

    @cute.jit
    def start(self, operands: tuple, at: cutlass.Constexpr, rA, stage: Int32):
        """Start product `at` of two K-tiles, with A in registers, or where rA is None in shared memory."""
        tiled_mma, acc, parts, A, tCrB = operands
        b = tCrB[None, at % cute.size(acc, mode=[2]), None, stage]  # (MMA, MMA_K)
        if const_expr(rA is not None):
            a = rA
        elif const_expr(self.a_in_registers):
            tiled_mma, a = A[0], A[1][None, 0, None, stage]
        else:
            a = A[None, 0, None, stage]
        fragments = [(of_step(a, k), of_step(b, k)) for k in range(self.k_blocks[0])]
        start_product(tiled_mma, parts[at % 2], fragments.__getitem__, self.k_blocks[0], True)

    @cute.jit
    def read_rows(self, operands: tuple, stage: Int32) -> cute.Tensor:
        """(MMA, MMA_K) of A in registers, by ldmatrix."""
        rA = cute.make_rmem_tensor(((4, 2, 2), STEPS), operands[0].op.a_dtype)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), rA.element_type)
        for k in range_constexpr(STEPS):
            place = make_ptr(
                rA.element_type, (operands[3][2] + stage * self.stage_bytes) ^ (2 * k * CHUNK), AddressSpace.smem,
                assumed_align=CHUNK,
            )  # fmt: skip
            cute.copy(atom, cute.make_tensor(place, CHUNK), cute.make_tensor(rA.iterator + CHUNK * k, CHUNK))
        return rA

    @cute.jit
    def add_period(self, operands: tuple, factors, pipeline, read, release):
        """Wait for the K-tiles of one block, and add their products one by one."""
        tiled_mma, acc, parts, tCrA, tCrB = operands
        part = parts[0]
        for j in range_constexpr(len(self.k_blocks)):
            pipeline.consumer_wait(read)
            for first in range_constexpr(0, self.k_blocks[j], STEPS):
                steps = const_expr(min(STEPS, self.k_blocks[j] - first))
                for m in range_constexpr(cute.size(acc, mode=[1])):
                    for n in range_constexpr(cute.size(acc, mode=[2])):
                        a, b = tCrA[None, m, None, read.index], tCrB[None, n, None, read.index]  # (MMA, MMA_K)
                        fragments = [(of_step(a, first + k), of_step(b, first + k)) for k in range(steps)]
                        start_product(tiled_mma, part, fragments.__getitem__, steps, True)
                        warpgroup.wait_group(0)
                        read_after_wait(part)
                        self.promote(acc[None, m, n], part[None, 0, 0], m, n, self.factors_of(factors, 0))
                        read_after_wait(acc[None, m, n])  # added before the next product writes the fragment
            pipeline.consumer_release(release)
            read.advance()
            release.advance()
        return read, release

    def first_factors(self, k_tiles, scales: tuple):
        """Two sets of factor registers, the first one loaded for K-tile 0."""
        return load_volatile(scales[0]) if self.multiplies_by_one else None

    def load_factors(self, k_tiles, i, factors, turn: int) -> None:
        """Load the factors of K-tile i, which may be past the last, into a set."""

    def keep_factors(self, factors) -> None:
        """Move the factors of the second set to the first."""

    def factors_of(self, factors, turn: int):
        """The factors of a set as `promote` takes them."""
        return factors

    def promote(
        self,
        sums: cute.Tensor,  # (MMA,) of slab m and part n
        part: cute.Tensor,  # (MMA,)
        m: int,
        n: int,
        factors,  # None, a factor, or the result of a subclass's `factors_of`
    ):
        """sums += part, or part * factor if there is one."""
        for v in range(cute.size(part)):
            sums[v] = sums[v] + (part[v] if factors is None else part[v] * factors)


class ScaledMainloopSm90(PromotedMainloopSm90):
    """Promoted accumulation with one scale per stored block: FFMA in place of FADD.

    A scale is loaded one block before it is used, by all threads of a warpgroup from one address.
    """

    loads_factors = True

    @cute.jit
    def first_factors(self, k_tiles, scales: tuple):
        factors = cute.make_rmem_tensor(2, Float32)
        factors[0] = k_tiles.scale(0)
        return factors

    @cute.jit
    def load_factors(self, k_tiles, i, factors, turn: cutlass.Constexpr):
        factors[turn] = k_tiles.scale(i)

    @cute.jit
    def keep_factors(self, factors):
        factors[0] = factors[1]

    def factors_of(self, factors, turn: int):
        return factors[turn]
