"""WGMMA with a 2:4 sparse A: loads of metadata, and wgmma.mma_async.sp in place of the dense instruction.

    producer warp      acquire empty[s] -> expect bytes on full[s] -> TMA A (its stored half), bulk copies of metadata,
                       TMA B -> s += 1
    consumer groups    wait full[s] -> read this thread's metadata -> issue the stage's WGMMAs, commit
                       -> wait until they are done -> release empty[s - 1] -> s += 1

WGMMA reads the metadata registers while it runs, which the compiler does not know: with a group in flight, it loaded
the next K-tile's words to the same registers, and results were wrong (H100). So a warpgroup waits for its WGMMAs; those
of the other warpgroup keep the tensor cores busy.

Each thread reads one word per 64 rows and 64 columns, and a warp 128 contiguous bytes. CuTe has no sparse WGMMA, so
operands are descriptors of whole rings, to which stages and steps are added. A step is one WGMMA of 32 columns of
16-bit elements or 64 columns of FP8:

    A    (tile_m, tile_k / 2)    K-major, one swizzled row per row of a K-tile's stored half, 32 bytes of it per step
    B    (tile_n, tile_k)        K-major, swizzled rows of 128 bytes, 64 of them per step, the rows of a K-tile one
                                 after the other; or 16-bit N-major, swizzled rows of up to 64 columns, 32 rows per step

Under promoted FP8 accumulation, the partial sum of a K-tile of 256 columns has 128 nonzero terms, as many as a dense
one; that of a K-tile of 128 columns has 64.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ..matmul.contexts import ConsumerCtx, Load
from ..matmul.mainloops.issue_sm90 import PARTIAL_COLUMNS, IssueSS
from ..tile.descriptors import MMA_M, descriptor_high, descriptor_low
from ..tile.hopper import WARPGROUP
from ..tile.ptx import bulk_load, load_shared_word, sparse_wgmma_slabs
from .format import KEPT, SPAN, WORDS

STEP_BYTES = 32  # of A's stored half of one sparse WGMMA, which multiplies 64 bytes of B
SLAB_BYTES = WORDS * 4  # of metadata
LINE = 128  # bytes of B's swizzled row, where it is K-major


class IssueSparse24(IssueSS):
    """A 2:4 sparse A and its metadata in shared memory; B's columns of a warpgroup are at most 256."""

    stored = KEPT

    def __init__(self, facts):
        super().__init__(facts)
        self.partial_steps = max(self.k_blocks)
        cfg, width = facts.config, facts.element.width
        self.dtype, self.metadata_bytes = facts.dtype, cfg.metadata_bytes
        self.tile_m, self.warps_m, self.n = cfg.tile_m, cfg.warps_m, cfg.tile_n // cfg.warps_n
        self.spans = cfg.tile_k // SPAN
        self.row_a = cfg.tile_k * width // self.stored  # bytes
        self.stage_a, self.stage_b = cfg.tile_m * self.row_a, cfg.tile_n * cfg.tile_k * width
        self.ring_a = cfg.stages * cfg.rings * self.stage_a
        self.cluster_m, self.share_a = cfg.cluster_m, self.stage_a // cfg.cluster_n
        self.b_n_major = facts.majors[1] == "n"
        line = next((row for row in facts.element.rows if cfg.tile_n % row == 0), cfg.tile_n) * width  # of N
        self.row_b = line if self.b_n_major else LINE
        # Swizzled rows of N, one for each column of K, from one to the next; and B's columns of a warpgroup.
        self.next_row_b = cfg.tile_k * line
        self.group_b = self.n * width // line * self.next_row_b if self.b_n_major else self.n * LINE
        self.step_k = 2 * STEP_BYTES // width  # columns of one sparse WGMMA
        spans = [k * self.step_k * width for k in range(cfg.tile_k // self.step_k)]  # bytes of K before each step
        k_major = [at // LINE * cfg.tile_n * LINE + at % LINE for at in spans]
        self.steps_b = [at // width * line for at in spans] if self.b_n_major else k_major

    def operand_a(self, tiled_mma: cute.TiledMma, thr_mma, sA: cute.Tensor, thread: Int32):
        """(the descriptor of this warpgroup's first slab in stage 0, the address of this thread's metadata there)."""
        start = sA.iterator.toint()
        slab = cute.arch.make_warp_uniform(thread // WARPGROUP) % self.warps_m
        a = descriptor_low(start + slab * (MMA_M * self.row_a), 1)
        metadata = start + self.ring_a + slab * SLAB_BYTES + thread % WARPGROUP * 4
        return cute.arch.make_warp_uniform(a), metadata

    def operand_b(self, tiled_mma: cute.TiledMma, thr_mma, sB: cute.Tensor, warpgroup: Int32):
        """The descriptor of this warpgroup's columns in stage 0."""
        leading = self.next_row_b >> 4 if self.b_n_major else 1
        start = sB.iterator.toint() + warpgroup // self.warps_m * self.group_b
        return cute.arch.make_warp_uniform(descriptor_low(start, leading))

    @cute.jit
    def load_a(
        self,
        tile,  # Sparse24KTile
        a: Load,
        barrier: cute.Pointer,
        stage: Int32,
    ):
        IssueSS.load_a(self, tile, a, barrier, stage)
        size = cutlass.const_expr(self.tile_m // MMA_M * SLAB_BYTES)  # of 64 columns
        to = a.sX.iterator.toint() + self.ring_a + stage * self.metadata_bytes
        if cutlass.const_expr(a.mask is not None):  # a.sX begins with the rows that this CTA loads for both
            to -= cute.arch.block_idx_in_cluster() // self.cluster_m * self.share_a
        with cute.arch.elect_one():
            for span in range_constexpr(len(tile.metadata)):
                bulk_load(to + span * size, tile.metadata[span], size, barrier.toint())

    def multiply(self, ctx: ConsumerCtx, stage: Int32, steps: int, clear: bool) -> None:
        """steps: of dense WGMMAs, of half as many columns."""
        slabs = cute.size(ctx.acc) // (self.n // 2)
        words = self.metadata_words(ctx.A, stage, slabs, steps * self.step_k // 2 // SPAN)
        warpgroup.fence()
        for k in range(steps // 2):
            self.start_step(ctx.acc, self.n, ctx.A, ctx.B, stage, words, k, k > 0 or not clear)
        warpgroup.commit_group()
        warpgroup.wait_group(0)  # it reads `words` until then

    def prepare(self, ctx: ConsumerCtx, stage: Int32) -> list:
        return self.metadata_words(ctx.A, stage, cute.size(ctx.acc, mode=[1]), self.spans)

    def a(self, ctx: ConsumerCtx, prepared: list, stage: Int32, m: int) -> tuple:
        """(stage, slab, its metadata of each 64 columns)"""
        return stage, m, [[words[m]] for words in prepared]

    def b(self, ctx: ConsumerCtx, stage: Int32, n: int) -> Int32:
        """The descriptor of the columns in stage 0."""
        columns = min(self.n, PARTIAL_COLUMNS)
        return ctx.B + (n * columns * LINE >> 4)

    def start(self, part: cute.Tensor, ctx: ConsumerCtx, a: tuple, b: Int32, first: int, steps: int) -> None:
        """Start all MMA steps of a stage; the caller waits for them before it loads other metadata."""
        stage, m, words = a
        warpgroup.fence()
        for k in range(steps // 2):
            self.start_step(part, 2 * cute.size(part), ctx.A, b, stage, words, k, k > 0, m)
        warpgroup.commit_group()

    def metadata_words(self, tCrA: tuple, stage: Int32, slabs: int, spans: int) -> list:
        """This thread's metadata of a stage, of each 64 columns, of each of its warpgroup's slabs."""
        words = []
        for span in range(spans):
            at = tCrA[1] + stage * self.metadata_bytes + span * (self.tile_m // MMA_M * SLAB_BYTES)
            words.append([load_shared_word(at + slab * self.warps_m * SLAB_BYTES) for slab in range(slabs)])
        return words

    def start_step(
        self,
        acc: cute.Tensor,  # (n / 2 of each slab,)
        n: int,
        tCrA: tuple,  # operand_a
        tCrB: Int32,  # the descriptor of n of B's columns in stage 0
        stage: Int32,
        words: list,  # metadata_words; of the slabs that are multiplied
        k: int,
        accumulate: bool,
        first: int = 0,  # which of the warpgroup's slabs is the first
    ):
        """Start the WGMMAs of step k, 64 bytes of B along K."""
        slabs, per_slab = len(words[0]), n // 2
        a_step = self.warps_m * MMA_M * self.row_a >> 4
        step = k * self.step_k // SPAN
        result = sparse_wgmma_slabs(
            [acc[i] for i in range(slabs * per_slab)],
            n,
            self.dtype,
            tCrA[0] + stage * (self.stage_a >> 4) + ((k * STEP_BYTES >> 4) + first * a_step),
            descriptor_high(self.row_a),
            a_step,
            tCrB + stage * (self.stage_b >> 4) + (self.steps_b[k] >> 4),
            descriptor_high(self.row_b),
            self.b_n_major,
            words[step],
            k % 2 if self.step_k < SPAN else 0,
            accumulate,
        )
        for i in range(slabs * per_slab):
            acc[i] = result[i]
