"""The sm_80 GEMM kernel: cp.async in, ldmatrix and mma.sync, 16-byte stores out. It runs on sm_80 and newer.

    all warps    load and multiply (mainloop_sm80.py), then store their own part of the tile (store_sm80.py)

    smem     | A 0 | B 0 | A 1 | B 1 | ...  a ring of stages; after the mainloop, the warps' store buffers

One CTA does one work tile: the grid is all of them, in the scheduler's order, and `max_ctas` has no meaning here.
Two CTAs share an SM where registers and shared memory allow it, so that one multiplies while the other begins or ends.

Which K-tiles a work tile sums over is the source's business; this file owns storage, atoms and launch.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .arch import MMA_K
from .config import ELEMENT, GemmFacts
from .dtypes import cutlass_dtype
from .epilogue import EpilogueArgs
from .mainloop_sm80 import CHUNK, MainloopSm80
from .scheduler import TileScheduler
from .store_sm80 import WARP, StoreSm80

ALIGN = 128  # bytes; all 32 banks


def log2(x: int) -> int:
    assert x > 0 and x & (x - 1) == 0, f"{x} is no power of two"
    return x.bit_length() - 1


@dataclass(frozen=True)
class OperandTile:
    """A (rows, tile_k) tile of A or B: where its elements lie in a stage, who copies them and who reads them.

    A stage holds lines along the contiguous mode: tile_k elements of one row, or all rows of one k. The 16-byte
    chunks of a line are permuted by an XOR with bits of the line's number, so that eight lanes hit 32 banks both
    when they copy along a line and when ldmatrix reads one chunk from each of eight lines.

    Offsets are linear over disjoint bits: offset(line + 2^i, byte) differs from offset(line, byte) by an XOR and an
    addition that are known at compile time (`split`). So a thread needs one base, however many vectors it moves.
    The methods take Python integers as well as Int32, and are checked on the host.
    """

    rows: int
    tile_k: int
    k_major: bool
    vector: int  # elements of one copy
    threads: int
    warps: int  # how many share the rows
    is_b: bool

    @property
    def lines(self) -> int:
        return self.rows if self.k_major else self.tile_k

    @property
    def line_bytes(self) -> int:
        return ELEMENT * (self.tile_k if self.k_major else self.rows)

    @property
    def bytes(self) -> int:
        return self.lines * self.line_bytes

    @property
    def span(self) -> int:
        """Rows of one warp."""
        return self.rows // self.warps

    @property
    def chunks(self) -> int:
        """Neighbouring chunks that the XOR permutes: a power of two that divides a line's."""
        chunks = self.line_bytes // CHUNK
        return min(8, chunks & -chunks)

    def swizzle(self, line):
        """The XOR for a line, in bytes."""
        return ((line >> log2(8 // self.chunks)) & (self.chunks - 1)) << 4

    def offset(self, line, byte):
        return line * self.line_bytes + (byte ^ self.swizzle(line))

    def split(self, line: int, byte: int) -> tuple[int, int]:
        """(x, add): offset(l + line, b + byte) == (offset(l, b) ^ x) + add where no bit is set on both sides."""
        mask = (self.chunks - 1) * CHUNK
        return (byte & mask) ^ self.swizzle(line), line * self.line_bytes + (byte & ~mask)

    # ------------------------------------------------------------------ copying: vector index = thread + j * active

    @property
    def active(self) -> int:
        """Threads that copy: a small tile has fewer vectors than the CTA has threads."""
        return min(self.threads, self.bytes // (ELEMENT * self.vector))

    @property
    def copies(self) -> int:
        return self.bytes // (ELEMENT * self.vector * self.active)

    @property
    def stride(self) -> int:
        """Lines between two vectors of a thread, where they are 16 bytes long."""
        return self.position(self.active)[0]

    def position(self, index):
        """(line, element) of a vector."""
        bits = log2(self.line_bytes // (ELEMENT * self.vector))
        return index >> bits, (index & ((1 << bits) - 1)) * self.vector

    # ------------------------------------------------------------------ reading: ldmatrix x4 = 16 rows x 16 k

    def lane_offset(self, lane, index_warp):
        """Where a lane's eight-element row of its 8 x 8 matrix lies, for the warp's first 16 rows and first 16 k.

        A fragment's four matrices run along its rows first for A, along k first for B.
        """
        i, r = lane >> 3, lane & 7
        row_half, k_half = (i >> 1, i & 1) if self.is_b else (i & 1, i >> 1)
        row = index_warp * self.span + row_half * 8
        if self.k_major:
            return self.offset(row + r, k_half * CHUNK)
        return self.offset(k_half * 8 + r, row * ELEMENT)

    def step(self, i: int, k: int) -> tuple[int, int]:
        """`split` of the warp's i-th 16 rows and k-th 16 columns."""
        return self.split(16 * i, MMA_K * ELEMENT * k) if self.k_major else self.split(MMA_K * k, 16 * ELEMENT * i)


class GemmSm80:
    """Compiles to one kernel per `GemmFacts`; called with operands in the kernel's modes (see k_tiles)."""

    def __init__(self, facts: GemmFacts):
        cfg = facts.config
        assert cfg.stages >= 3, "the last MMA step of a K-tile waits for the next one, with one more in flight"
        self.facts, self.cfg = facts, cfg
        self.dtype = cutlass_dtype(facts.dtype)
        self.out_dtype = cutlass_dtype(facts.out_dtype)
        self.threads = WARP * cfg.warps_m * cfg.warps_n
        vectors = [1 if major == "any" else align for major, align in zip(facts.majors, facts.aligns)]
        a_k, b_k = facts.majors[0] != "m", facts.majors[1] != "n"
        a = OperandTile(cfg.tile_m, cfg.tile_k, a_k, vectors[0], self.threads, cfg.warps_m, False)
        b = OperandTile(cfg.tile_n, cfg.tile_k, b_k, vectors[1], self.threads, cfg.warps_n, True)
        self.mainloop = MainloopSm80(facts, self.dtype, a, b)
        self.store = StoreSm80(facts, self.out_dtype)
        self.smem_bytes = max(cfg.stages * self.mainloop.stage_bytes, self.store.bytes)

    # ------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (M, K, outer_a)
        mB: cute.Tensor,  # (N, K, outer_k, L)
        mD: cute.Tensor,  # (M, N, outer_m, L)
        source,
        args: EpilogueArgs,
        tiles_m: Int32,  # row tiles of the whole product
        group: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        tiles_n = cute.ceil_div(mD.shape[1], self.cfg.tile_n)
        scheduler = TileScheduler(tiles_m, tiles_n, mD.shape[3], group, source.order)
        self.kernel(mA, mB, mD, source, args, scheduler).launch(
            grid=(scheduler.count, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    # ------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        source,
        args: EpilogueArgs,
        scheduler: TileScheduler,
    ):
        cfg = self.cfg
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index_warp = (warp % cfg.warps_m, warp // cfg.warps_m)  # (warp_m, warp_n)
        smem = cutlass.memory.SmemAllocator().allocate(self.smem_bytes, byte_alignment=ALIGN).toint()

        m, n, l = scheduler.decode(cute.arch.block_idx()[0])
        k_tiles = source.for_tile(m, l, source.bounds(m, n, l))
        main = self.mainloop
        # (MMA, MMA_M, MMA_N)
        acc = cute.make_rmem_tensor((4, main.mmas_m, main.mmas_n), Float32)
        acc.fill(0.0)
        main.mma(k_tiles, mA, mB[None, None, None, l], n, acc, smem, index_warp)

        # The last copies, zero fills, and other warps' reads must be done before the ring becomes store buffers.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        out_m, outer_m = k_tiles.out
        extent = (mD.shape[0], mD.shape[1])
        self.store.store(acc, args, mD, smem, extent, (out_m, n, outer_m, l, k_tiles.l), index_warp, warp)
