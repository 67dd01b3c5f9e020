"""WGMMA with A in registers, for FP8 work tiles of 64 rows a warpgroup with several WGMMAs of 64 columns.

WGMMAs of 64x64 would read 128 bytes of shared memory a clock, half of it for A, which is all that shared memory
delivers. So a warpgroup reads A once per K-tile of 128 bytes, by ldmatrix, while the K-tile's first WGMMA runs; that
one takes A from shared memory.
"""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Float32, Int32, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.nvgpu import warp
from cutlass.cute.typing import AddressSpace

from ...tile.ampere import CHUNK
from ...tile.hopper import WARPGROUP, start_product
from ..contexts import ConsumerCtx
from .issue_sm90 import PARTIAL_STEPS, IssueSS, of_step

COLUMNS = 64  # of a WGMMA
WARP_ROWS = 16  # of a slab
LINE = 128  # bytes of a K-tile


class IssueRS(IssueSS):
    """A in registers, B in shared memory; every K-tile has PARTIAL_STEPS MMA steps."""

    a_in_registers = True

    def __init__(self, facts):
        super().__init__(facts)
        self.groups = facts.config.tile_m // 64
        self.stage_bytes = facts.config.tile_m * LINE

    def operand_a(self, tiled_mma: cute.TiledMma, thr_mma, sA: cute.Tensor, thread: Int32) -> tuple:
        """(MMA that takes A from shared memory, its fragments, address of this thread's ldmatrix of stage 0)."""
        dtype, along_k = sA.element_type, cute.nvgpu.OperandMajorMode.K
        from_shared = sm90_utils.make_trivial_tiled_mma(
            dtype, dtype, along_k, along_k, Float32, (self.groups, 1, 1), tiler_mn=(64, COLUMNS)
        )
        first = cute.arch.make_warp_uniform(thread // WARPGROUP) * WARPGROUP
        fragments = super().operand_a(from_shared, from_shared.get_slice(first), sA, thread)
        # Each lane points to a row of 16 bytes of four 8x8 matrices: rows 0 to 7, 8 to 15, then both again 16 bytes on.
        # Lines of 128 bytes are swizzled: chunk c of 16 bytes in row r lies at c xor r % 8.
        lane = thread % 32
        row = thread // WARPGROUP * 64 + thread % WARPGROUP // 32 * WARP_ROWS + lane % WARP_ROWS
        chunk = (lane // WARP_ROWS) ^ (row % 8)
        return from_shared, fragments, sA.iterator.toint() + row * LINE + chunk * CHUNK

    @cute.jit
    def prepare(self, ctx: ConsumerCtx, stage: Int32) -> cute.Tensor:
        """(MMA, MMA_K) of A in registers, by ldmatrix."""
        rA = cute.make_rmem_tensor(((4, 2, 2), PARTIAL_STEPS), ctx.tiled_mma.op.a_dtype)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), rA.element_type)
        for k in range_constexpr(PARTIAL_STEPS):
            place = make_ptr(
                rA.element_type, (ctx.A[2] + stage * self.stage_bytes) ^ (2 * k * CHUNK), AddressSpace.smem,
                assumed_align=CHUNK,
            )  # fmt: skip
            cute.copy(atom, cute.make_tensor(place, CHUNK), cute.make_tensor(rA.iterator + CHUNK * k, CHUNK))
        return rA

    def a(self, ctx: ConsumerCtx, prepared: cute.Tensor | None, stage: Int32, m: int) -> tuple:
        """(MMA, fragments (MMA, MMA_K)): in registers if `prepared` are those of A, else in shared memory."""
        return (ctx.A[0], ctx.A[1][None, m, None, stage]) if prepared is None else (ctx.tiled_mma, prepared)

    def start(self, part: cute.Tensor, ctx: ConsumerCtx, a: tuple, b: cute.Tensor, first: int, steps: int) -> None:
        mma, a = a
        fragments = [(of_step(a, first + k), of_step(b, first + k)) for k in range(steps)]
        start_product(mma, part, fragments.__getitem__, steps, True)
