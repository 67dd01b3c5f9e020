"""Merge the results of the warps of a CTA, and of the CTAs of a cluster, which have different tiles of the same rows.

Merge16 is decode/fp8/merge.Merge for accumulators in mma.sync's order. ClusterMerge, on sm_90, also combines the splits
of a list, in place of results in global memory and the combine kernel:

    warp     O, row maxima and row sums -> shared memory, O in place of the warp's ring
    CTA      sum over its warps -> st.async to the CTA of the cluster that stores the row
    CTA      wait for all CTAs' parts of its rows -> their sum -> the result

    barrier    arrivals                                   waits
    cluster    all threads, when they start               all threads, before they send: the receivers exist
    arrived    1 thread, and the bytes that CTAs send     all threads, before they add

CTA q of the cluster stores rows q * share to before (q + 1) * share of the tile. The order of all sums is fixed. A CTA
ends after all parts of its rows have arrived, so nothing is sent to a CTA that has ended. No fence is needed: st.async
counts its own bytes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.tile.ampere import WARP

from ...decode.fp8.mainloop import WarpState
from ...decode.fp8.merge import VECTOR, WIDTH, Merge
from ...forward.heads import TileRows
from ...forward.softmax import OnlineSoftmax, exp2, quad_sum
from .config import ROWS, SelectedDecodeFacts

STATS = 2  # row maximum and row sum


class Merge16(Merge):
    """The merge of warps whose accumulators have their columns in mma.sync's order."""

    @cute.jit
    def write(self, c: WarpState, at_acc: Int32):
        """Write a warp's O (16, Dv) to shared memory: a lane has two neighbors of each 8 columns."""
        lane = cute.arch.lane_idx()
        values = cute.make_tensor(c.acc_O.iterator, cute.make_layout((2, 2, cute.size(c.acc_O) // 4)))
        at = at_acc + ((c.warp * ROWS + lane // 4) * self.pitch + lane % 4 * 2) * WIDTH
        for r in range_constexpr(2):
            for i in range_constexpr(self.facts.head_dim_v // 8):
                cute.autovec_copy(values[None, r, i], floats(at + (8 * r * self.pitch + 8 * i) * WIDTH, 2))


def floats(at: Int32, shape, align: int = 0) -> cute.Tensor:
    """View of FP32 values at an address in shared memory, aligned to their size or `align` bytes."""
    layout = cute.make_layout(shape)
    place = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=align or cute.size(layout) * WIDTH)
    return cute.make_tensor(place, layout)


class ClusterMerge:
    """The work of a CTA of a cluster after its last tiles; `merge` writes accumulators to shared memory."""

    def __init__(self, facts: SelectedDecodeFacts, merge: Merge):
        self.facts, self.merge, self.warps = facts, merge, facts.config.groups
        self.cluster, self.share, self.width = facts.cluster, facts.share, facts.head_dim_v
        self.threads, self.vectors = WARP * facts.config.groups, facts.head_dim_v // VECTOR  # threads; vectors of a row

    def own_rows(self, rank: Int32, rows: Int32) -> tuple:
        """(first, number) of the rows that a CTA of the cluster stores, of so many in the tile."""
        first = rank * self.share
        return first, cutlass.max(cutlass.min(cutlass.min(rows, ROWS) - first, self.share), 0)

    @cute.jit
    def init(self, at: Int32, rank: Int32, rows: Int32):
        """Before other work: create the mbarrier, which expects the bytes of the CTA's rows."""
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(self.arrived(at), 1)
            cute.arch.mbarrier_init_fence()
            count = self.own_rows(rank, rows)[1]
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.arrived(at), count * (self.cluster * (self.width + STATS) * WIDTH)
            )
        cute.arch.cluster_arrive_relaxed()

    def arrived(self, at: Int32) -> cute.Pointer:
        """The mbarrier, behind the parts."""
        at = at + (self.facts.exchange_bytes - 8)
        return cute.make_ptr(Int64, at, cute.AddressSpace.smem, assumed_align=8)

    def stats_at(self, at: Int32, sender: Int32 | int, row: Int32) -> Int32:
        """Address of a row's maximum and sum from a CTA; `row` is counted from the receiver's first."""
        parts = self.cluster * self.share
        return at + (parts * self.width + (sender * self.share + row) * STATS) * WIDTH

    def part_at(self, at: Int32, sender: Int32 | int, row: Int32, column: Int32) -> Int32:
        """Address of four columns of a row from a CTA."""
        return at + ((sender * self.share + row) * self.width + column) * WIDTH

    @cute.jit
    def __call__(
        self,
        c: WarpState,
        at_softmax: Int32,
        at: Int32,  # of the exchange in shared memory
        mSinks: cute.Tensor | None,  # (H,)
        v_scale: Float32 | None,
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        rows: TileRows,
        row0: Int32,  # first row of the tile
    ):
        lane, softmax, rank = cute.arch.lane_idx(), c.softmax, rows.tile.split
        # (row maximum or row sum, warp, row)
        stats = floats(at_softmax, (STATS, self.warps, ROWS), 16)
        for r in range_constexpr(2):
            row_sum = quad_sum(softmax.row_sum[r])
            if lane % 4 == 0:
                stats[0, c.warp, lane // 4 + 8 * r] = softmax.row_max[r]
                stats[1, c.warp, lane // 4 + 8 * r] = row_sum
        first_acc = c.ring - c.warp * self.facts.warp_bytes  # of warp 0
        self.merge.write(c, c.ring - c.warp * const_expr(ROWS * self.merge.pitch * WIDTH))
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        self.send(softmax.scale_log2, stats, first_acc, at, rank, cutlass.min(rows.end - row0, ROWS))
        self.store(softmax.scale_log2, at, rank, mSinks, v_scale, mO, mLSE, rows, row0)

    @cute.jit
    def send(self, scale_log2: Float32, stats: cute.Tensor, first_acc: Int32, at: Int32, rank: Int32, rows: Int32):
        """Send the sums over the warps of the tile's first `rows` rows to the CTAs that store them."""
        passes = const_expr(ROWS * self.vectors // self.threads)
        sums = cute.make_rmem_tensor((VECTOR + STATS, passes), Float32)  # of columns, row maximum and row sum
        sums.fill(0.0)
        for i in range_constexpr(passes):  # all sums before the first branch
            row, column = self.place(i)
            of_row, part = cute.make_rmem_tensor((STATS, self.warps), Float32), cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(stats[None, None, row], of_row)
            sums[VECTOR, i], sums[VECTOR + 1, i], weights = combine(of_row, scale_log2)
            for w in range_constexpr(self.warps):
                acc = first_acc + w * self.facts.warp_bytes + (row * self.merge.pitch + column) * WIDTH
                cute.autovec_copy(floats(acc, VECTOR), part)
                for j in range_constexpr(VECTOR):
                    sums[j, i] = sums[j, i] + weights[w] * part[j]
        words = cute.recast_tensor(sums, Int32)
        for i in range_constexpr(passes):
            row, column = self.place(i)
            if row < rows:
                to, row_there = row // self.share, row % self.share
                self.send_words(self.part_at(at, rank, row_there, column), words[None, i], 0, VECTOR, at, to)
                if column == 0:
                    self.send_words(self.stats_at(at, rank, row_there), words[None, i], VECTOR, STATS, at, to)

    def place(self, i: int) -> tuple:
        """(row, first column) of this thread's i-th vector."""
        number = i * self.threads + cute.arch.thread_idx()[0]
        return number // self.vectors, number % self.vectors * VECTOR

    def send_words(self, place: Int32, words: cute.Tensor, first: int, count: int, at: Int32, to: Int32):
        """Send `count` words from the `first` on to the address `place` of CTA `to`."""
        values = tuple(words[first + j] for j in range(count))
        cute.arch.store_async_dsmem(floats(place, count).iterator, values, self.arrived(at), to)

    @cute.jit
    def store(
        self,
        scale_log2: Float32,
        at: Int32,
        rank: Int32,
        mSinks: cute.Tensor | None,  # (H,)
        v_scale: Float32 | None,
        mO: cute.Tensor,  # (B, H, Sq, Dv)
        mLSE: cute.Tensor | None,  # (B, H, Sq)
        rows: TileRows,
        row0: Int32,
    ):
        """Store this CTA's rows when their parts have arrived from all CTAs of the cluster."""
        gO, (first, count) = rows.view(mO), self.own_rows(rank, rows.end - row0)
        width = const_expr(mO.element_type.width // 8)
        passes = const_expr(-(-self.share * self.vectors // self.threads))
        sinks = cute.make_rmem_tensor((1, passes), Float32)
        scale = cute.make_rmem_tensor(1, Float32)
        scale[0] = Float32(1.0) if const_expr(v_scale is None) else v_scale
        for i in range_constexpr(passes):
            rows.heads.read_sinks(mSinks, rows.tile, row0 + first + self.place(i)[0], sinks[None, i])
        cute.arch.mbarrier_wait(self.arrived(at), 0)
        for i in range_constexpr(passes):
            row, column = self.place(i)
            if row < count:
                stats = cute.make_rmem_tensor((STATS, self.cluster), Float32)
                part = cute.make_rmem_tensor(VECTOR, Float32)
                for s in range_constexpr(self.cluster):
                    cute.autovec_copy(floats(self.stats_at(at, s, row), STATS), stats[None, s])
                total, lse = cute.make_rmem_tensor((1, VECTOR), Float32), cute.make_rmem_tensor(1, Float32)
                total.fill(0.0)
                last = OnlineSoftmax.of_rows(1, scale_log2, cute.make_rmem_tensor(1, Float32))
                last.row_max[0], last.row_sum[0], weights = combine(stats, scale_log2)
                for s in range_constexpr(self.cluster):
                    cute.autovec_copy(floats(self.part_at(at, s, row, column), VECTOR), part)
                    for j in range_constexpr(VECTOR):
                        total[0, j] = total[0, j] + weights[s] * part[j]
                last.finish(total, lse, None if const_expr(mSinks is None) else sinks[None, i], scale)
                result = cute.make_rmem_tensor(VECTOR, mO.element_type)
                result.store(cute.make_tensor(total.iterator, VECTOR).load().to(mO.element_type))
                to = gO[row0 + first + row, None].iterator.toint() + Int64(column * width)
                place = cute.make_ptr(mO.element_type, to, cute.AddressSpace.gmem, assumed_align=VECTOR * width)
                cute.autovec_copy(result, cute.make_tensor(place, cute.make_layout(VECTOR)))
                if const_expr(mLSE is not None):
                    if column == 0:
                        rows.view(mLSE)[row0 + first + row] = lse[0]


@cute.jit
def combine(stats: cute.Tensor, scale_log2: Float32) -> tuple:
    """(row maximum, row sum, weight of each part) of a row from (row maximum or row sum, parts)."""
    parts = const_expr(cute.size(stats, mode=[1]))
    row_max = stats[0, 0]
    for p in range_constexpr(1, parts):
        row_max = cute.arch.fmax(row_max, stats[0, p])
    scaled_max = row_max * scale_log2
    if row_max == -Float32.inf:
        scaled_max = Float32(0.0)
    row_sum, weights = Float32(0.0), cute.make_rmem_tensor(parts, Float32)
    for p in range_constexpr(parts):
        weights[p] = exp2(stats[0, p] * scale_log2 - scaled_max)
        row_sum = row_sum + weights[p] * stats[1, p]
    return row_max, row_sum, weights
