"""The convert kernel, last of backward: scale and round dq_accum to dQ. A CTA processes one query tile."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from ..forward.problem import one_item
from .config import ConvertFacts, overlaps
from .dq_accum import sums_of
from .fragments import fragments_of
from .prepare import place_of
from .row_tiles import DenseRows, PackedRows, interleaved
from .store import store_fragment


class Convert:
    """Compiles to one kernel per `ConvertFacts`."""

    def __init__(self, facts: ConvertFacts):
        self.facts = facts
        self.sums = sums_of(facts.path, facts.config, facts.head_dim)

    @cute.jit
    def __call__(
        self,
        dq: cute.Tensor,  # (B * H * tiles, tile_m * D) fp32; packed (H * tiles, ..)
        cu_q: cute.Tensor | None,  # (B + 1,); packed
        mdQ: cute.Tensor,  # (B, H, Sq, D), packed (total_q, H, D)
        scale: Float32,
        stream: cuda.CUstream,
    ):
        if const_expr(self.facts.packed):
            (total, heads, _), batch = mdQ.shape, 1
            seqlens = PackedRows(cu_q, cu_q, total, total)
            mdQ = one_item(mdQ, (1, 0, 2))
        else:
            total = mdQ.shape[2] * self.facts.packed_heads
            mdQ = interleaved(mdQ, self.facts.packed_heads)
            batch, heads, _, _ = mdQ.shape
            seqlens = DenseRows(total, total)
        tiles = dq.shape[0] // (batch * heads)
        self.kernel(dq, seqlens, mdQ, scale).launch(
            grid=(tiles * heads * batch, 1, 1), block=(self.sums.threads, 1, 1), min_blocks_per_mp=1, stream=stream,
            use_pdl=overlaps(self.facts.arch),
        )  # fmt: skip

    @cute.kernel
    def kernel(self, dq: cute.Tensor, seqlens, mdQ: cute.Tensor, scale: Float32):
        facts, sums = self.facts, self.sums
        if const_expr(overlaps(facts.arch)):
            cute.arch.griddepcontrol_wait()  # for dq_accum
        tidx = cute.arch.thread_idx()[0]
        number = cute.arch.block_idx()[0]
        tile, h, b = place_of(number, mdQ.shape[:2], cute.arch.grid_dim()[0])
        at = dq.iterator.toint() + Int64(number) * (sums.size * 4)
        if const_expr(facts.packed):
            b, tile = seqlens.find_q(tile, facts.config.tile_m)
        seqlen = seqlens.rows_of(b)
        acc = self.load(at, tidx)
        acc.store(acc.load() * scale)
        row, column, tiles_m = fragments_of(facts.path, facts.config, facts.head_dim).begin(tidx)
        gdQ = mdQ[seqlen.b, h, None, None]
        gdQ = cute.domain_offset((seqlen.q0 if const_expr(facts.packed_heads == 1) else (0, 0), column), gdQ)
        store_fragment(acc, gdQ, tile * facts.config.tile_m + row, seqlen.rows, tiles_m)

    def load(self, at, tidx) -> cute.Tensor:
        """This thread's values of dq_accum, for the tile at address `at`."""
        sums = self.sums
        acc, layout = cute.make_rmem_tensor(sums.values, Float32), cute.make_layout(sums.vector)
        for r in range(0, sums.values, sums.vector):
            place = make_ptr(Float32, at + sums.offset(tidx, r) * 4, AddressSpace.gmem, assumed_align=4 * sums.vector)
            cute.autovec_copy(cute.make_tensor(place, layout), cute.make_tensor(acc.iterator + r, layout))
        return acc
