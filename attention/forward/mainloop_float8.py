"""The sm_90 mainloops of 8-bit floats (e4m3): Q and K of 8 bits, scores, softmax and sums in fp32.

P and V are fp16 (MainloopFloat8), to which another kernel converts V before (converted_values), or warps of this one do
(values_inside): that is exact, P has 11 bits, and tensor cores add products of 16 bits up in fp32. Scores take half of
bf16's time, and P V all of it.

Or P and V are of 8 bits (MainloopFloat8Fast). WGMMA of 8 bits takes operands that are contiguous along K: Q and K are,
along D. V must be contiguous along its columns' keys, so a kernel before this one transposes it (transposed_values), to
tiles as shared memory has them.

A thread's scores are not where P of 8 bits must be. Of every 16 columns of a row, lane t of a quad has

    scores     2t, 2t + 1, 8 + 2t, 9 + 2t
    P as A     4t, 4t + 1, 4t + 2, 4t + 3, a register

Sums over the keys do not ask for their order, if V has the same. So the lane's four scores become its register as they
are, and the transposed V has its keys in that order: place 4t + i of 16 is KEYS[4t + i].

P's rounding is the largest error there is then: e4m3 has three bits of mantissa, and no number below 2 ** -9. See
OnlineSoftmax.headroom for its range, and Float8Facts. The sums of a row are those of P before it is rounded: they cost
nothing, and LSE errs by what the scores do.

Tensor cores add 8-bit products up with some 14 bits of mantissa: scores lose up to some 2^-12 of the sum of |q k|. So
do fast sums of O, which are long, of the sum of |p v|.

Scores are recomputed by a warp as those of 16 bits are (recompute_scores), by mma.sync. Hopper has none of 8 bits, so Q
and K become fp16 in registers, which holds all numbers of e4m3.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, MmaF16BF16Op

from cute_kernels.tile.hopper import WARPGROUP, smem_layout
from cute_kernels.tile.ptx import float8_to_fp16, read_special_register, to_e4m3

from .config import GIVEN_STAGES, Float8Facts
from .mainloop_sm90 import Consumer, MainloopSm90
from .mask import cap_scores
from .softmax import OnlineSoftmax, rows_and_columns
from .values_inside import ValuesInside

HEADROOM = 3.0  # see Float8Facts
LARGEST = 448.0  # of e4m3
GROUP = 16  # keys that are in another order
KEYS = tuple(8 * (i % 4 // 2) + 2 * (i // 4) + i % 2 for i in range(GROUP))


class MainloopFloat8(MainloopSm90):
    """Q and K of 8 bits, P and V of fp16. The steps are those of 16 bits. Query tiles' scores have scales of heads."""

    def __init__(self, facts: Float8Facts):
        super().__init__(facts, lazy=True)
        self.inside = ValuesInside(facts) if facts.converts else None
        if facts.converts:
            self.given_bytes, self.given_stages = GIVEN_STAGES * self.inside.size, GIVEN_STAGES

    def make_values_load(self, tensor: cute.Tensor, layout, tile: tuple) -> tuple:
        """The TMA load of tiles of V, as it is given."""
        return self.make_load(tensor, self.inside.layout() if self.facts.converts else layout, tile)

    def make_kv_rings(self, storage) -> tuple:
        """The pipelines of K and V; warps that convert V fill the second."""
        if not self.facts.converts:
            return super().make_kv_rings(storage)
        cfg, arrivals = self.cfg, self.inside.arrivals["V"]
        pipe_k = self.make_ring(storage.barriers_k, cfg.stages, cfg.tile_n * self.facts.head_dim, self.dtype)
        return pipe_k, self.make_ring(storage.barriers_v, cfg.stages, 0, self.dtype_v, arrivals)

    def ring_of_loads(self, storage, sV: cute.Tensor, pipe_v) -> tuple:
        """What V is loaded into: (ring, pipeline, stages)."""
        if not self.facts.converts:
            return super().ring_of_loads(storage, sV, pipe_v)
        arrivals = self.inside.arrivals["V of 8 bits"]
        pipe = self.make_ring(storage.barriers_given, GIVEN_STAGES, self.inside.size, self.dtype, arrivals)
        return self.inside.ring(storage), pipe, GIVEN_STAGES

    def of_tile(self, c: Consumer, softcap: Float32, scales: tuple, tile) -> tuple:
        """(consumer, softcap): scales of Q and K multiply the scores.

        With a cap or a score_mod that is done by `softcap`, before it.
        """
        factors = [of_head(s, tile, head) for s, head in zip(scales, (tile.h, tile.h_kv)) if s is not None]
        if not factors:
            return c, softcap
        factor = factors[0] * factors[1] if len(factors) == 2 else factors[0]
        if self.facts.softcap or self.facts.score is not None:
            return c, softcap * factor
        return replace(c, softmax=replace(c.softmax, scale_log2=c.softmax.scale_log2 * factor)), softcap

    def value_scale(self, scales: tuple) -> cute.Tensor | None:
        """A register for V's scale."""
        return cute.make_rmem_tensor(1, Float32) if self.facts.v_descale else None

    def read_value_scale(self, scales: tuple, tile, to: cute.Tensor | None):
        """Fill it: at a query tile's end, so that no register holds it before."""
        if to is not None:
            to[0] = of_head(scales[2], tile, tile.h_kv)

    # ------------------------------------------------------------------ scores once more

    @cute.jit
    def recompute(self, c: Consumer, stage: Int32):
        """acc_S = Q K' of this warp's sixteen rows: recompute_scores, of 8 bits.

        ldmatrix sees two values as one. A lane gets values 4t to 4t + 3 of 16 in a register; as fp16 the first two and
        the other two go to different registers. Sums over D do not ask which.
        """
        sQ, sK = self.in_pairs(c.sQ, self.cfg.tile_m, 1), self.in_pairs(c.sK, self.cfg.tile_n, self.cfg.stages)
        sQ, sK = sQ[None, None, 0], sK[None, None, stage]
        tile_n, pairs = const_expr(self.cfg.tile_n), const_expr(self.facts.head_dim // 2)
        thread = read_special_register("tid.x")
        warp, lane = thread // 32 - WARPGROUP // 32, thread % 32
        op = MmaF16BF16Op(Float16, Float32, (16, 8, 16))
        atom, tiled = cute.make_mma_atom(op), cute.make_tiled_mma(op, permutation_mnk=(16, 16, 16))
        load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), Float16)
        load_q, load_k = cute.make_tiled_copy_A(load, tiled), cute.make_tiled_copy_B(load, tiled)
        # (COPY, rows / 16, D / 32) of this lane
        from_q = load_q.get_slice(lane).partition_S(cute.local_tile(sQ, (16, pairs), (warp, 0)))
        from_k = load_k.get_slice(lane).partition_S(sK)
        rQ, rK = cute.make_rmem_tensor((8, 1), Float16), cute.make_rmem_tensor((4, 2), Float16)
        to_q, to_k = (cute.make_tensor(t.iterator, cute.make_layout(((8, 1),))) for t in (rQ, rK))
        for n in range_constexpr(tile_n // 16):
            acc = cute.make_rmem_tensor((4, 1, 2), Float32)
            acc.fill(0.0)
            for k in cutlass.range(pairs // 16, unroll=1):
                cute.copy(load_q, from_q[None, 0, k], to_q)
                cute.copy(load_k, from_k[None, n, k], to_k)
                for half in range_constexpr(2):  # of 16 values of D
                    cute.gemm(atom, acc, self.fragment_q(rQ, half), self.fragment_k(rK, half), acc)
            cute.make_tensor(acc_of(c.acc_S, n), acc.layout).store(acc.load())

    def in_pairs(self, smem: cute.Tensor, rows: int, stages: int) -> cute.Tensor:
        """A ring (rows, D, PIPE) as one of units of 16 bits, (rows, D / 2, PIPE): its lines and swizzles are the
        same bytes."""
        layout = smem_layout(Float16, rows, self.facts.head_dim // 2, stages, True)
        return cute.make_tensor(cute.recast_ptr(smem.iterator, layout.inner, dtype=Float16), layout.outer)

    def fragment_q(self, pairs: cute.Tensor, half: int) -> cute.Tensor:
        """(8, 1) of A: of the rows' first or second 16 values, by lane 4t to 4t + 3."""
        words = cute.recast_tensor(pairs, Int32)
        rows = [float8_to_fp16(words[2 * half + r], self.facts.dtype, False) for r in range(2)]
        return fragment((8, 1), [rows[0][0], rows[1][0], rows[0][1], rows[1][1]])

    def fragment_k(self, pairs: cute.Tensor, half: int) -> cute.Tensor:
        """(4, 2) of B, the same of two times 8 columns."""
        words = cute.recast_tensor(pairs, Int32)
        columns = [float8_to_fp16(words[2 * n + half], self.facts.dtype, False) for n in range(2)]
        return fragment((4, 2), [*columns[0], *columns[1]])


class MainloopFloat8Fast(MainloopFloat8):
    """P and V of 8 bits, too."""

    def view_of_values(self, mV: cute.Tensor) -> cute.Tensor:
        """V as it is."""
        return mV

    def make_values_load(self, tensor: cute.Tensor, layout, tile: tuple) -> tuple:
        """No TMA: a tile of V is in one piece."""
        return None, tensor

    def make_softmax(self, scale_log2: Float32) -> OnlineSoftmax:
        threshold = self.facts.rescale_threshold
        return OnlineSoftmax.of_rows(2, scale_log2, rescale_threshold=threshold, headroom=HEADROOM, largest_p=LARGEST)

    @cute.jit
    def softmax_of_full_tile(self, c: Consumer, softcap: Float32, stage: Int32):
        """The same as of 16 bits, but finite sums that are too large ask for no scores: their p are multiplied."""
        softmax, scores, grown = c.softmax, rows_and_columns(c.acc_S), cutlass.Boolean(False)
        if const_expr(self.facts.softcap):
            cap_scores(scores, softcap)
        small, *sums = softmax.step_without_max(scores, self.cfg.groups < 3)
        if not small:
            finite = (sums[0] < Float32.inf) & (sums[1] < Float32.inf)
            if cute.arch.vote_all_sync(finite):
                softmax.bring_back(scores, sums)
                grown = cutlass.Boolean(True)
            else:
                self.recompute(c, stage)
                if const_expr(self.facts.softcap):
                    cap_scores(scores, softcap)
                grown = softmax.step_lazily(scores, softmax.too_large(sums))
        return grown

    @cute.jit
    def convert(self, acc_S: cute.Tensor, tOrP: cute.Tensor):
        """P to 8 bits: of each row four scores, two of each 8 columns, make a register."""
        words = cute.recast_tensor(tOrP, Int32)  # (rows, pairs of 8 columns)
        for i in range_constexpr(cute.size(acc_S) // 8):
            for r in range_constexpr(2):
                words[2 * i + r] = to_e4m3([acc_S[8 * i + 4 * (j // 2) + 2 * r + j % 2] for j in range(4)])


def of_head(scale: cute.Tensor, tile, head) -> Float32:
    """Of (B, heads). Rows after the last of packed sequences are those of a sequence that has no scale."""
    return scale[cutlass.min(tile.b, scale.shape[0] - 1), head]


def acc_of(acc_S: cute.Tensor, n: int):
    """Where the n-th 16 columns of the accumulators begin."""
    return acc_S.iterator + 8 * n


def fragment(shape: tuple, words: list) -> cute.Tensor:
    """Registers of fp16, of these words."""
    found = cute.make_rmem_tensor(shape, Float16)
    as_words = cute.recast_tensor(found, Int32)
    for i, word in enumerate(words):
        as_words[i] = word
    return found
