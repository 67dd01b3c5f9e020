"""FP8 quantization in one pass over memory.

    lanes      load vectors of 16 bytes of one or several groups into registers
    group      reduce the amax: by shuffles, and between warps through shared memory
    lanes      scale = amax / top; divide, round, store

A group is a row, or a block of 1x128 or 128x128. A row that does not fit in registers is read twice, the second time
from L2. One scale per tensor takes two kernels: the first computes `amax`, the second quantizes with its scale. With a
gate, each element is computed as it is loaded, and rounded to x's dtype.

Results are bitwise identical to torch's operations in FP32: scales and quotients are rounded like divisions. A quotient
is x times the reciprocal of the scale, corrected twice by its remainder, which an fma computes exactly. Unlike a
division this has no branches. x and scale are first multiplied by a power of two, so that relevant remainders stay
normal numbers.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import select_

from ..dtypes import TORCH, cutlass_dtype
from ..tile.dependent_launch import chained
from ..tile.element import BYTES, VECTOR_BYTES
from ..tile.fp8 import divided, larger_magnitude, larger_magnitudes, pack, quotient, raise_to_magnitude
from ..tile.ptx import load_vector
from ..traced.activations import ACTIVATIONS
from .config import GATE, THREADS, WARP, QuantizeFacts

TINY, SMALL, LARGE = 2.0**-126, 2.0**-90, 2.0**90  # bounds of scales
SHIFT = 2.0**64  # factor for scales below SMALL, divisor for scales above LARGE
CARVEOUT = 10  # percent of an SM's shared memory; without a value the DSL would query a GPU
RESIDENT = {1: 6, 2: 5, 4: 4, 8: 3, 16: 2}


class Quantize:
    """Quantization kernel for one `QuantizeFacts`."""

    def __init__(self, facts: QuantizeFacts):
        import torch

        self.facts, self.threads = facts, THREADS
        self.dtype, self.size = cutlass_dtype(facts.dtype), BYTES[facts.dtype]
        self.top = torch.finfo(TORCH[facts.out_dtype]).max
        self.per_cta = THREADS // facts.lanes  # groups
        self.words = VECTOR_BYTES // 4
        # Resident CTAs per SM, which bound their registers: 64 KB or more of loads are then in flight.
        self.resident = RESIDENT[facts.vectors * facts.each] - (facts.gate is not None and not facts.held)
        self.turn = facts.lanes * facts.vectors  # vectors of a group that its lanes hold at once
        self.line = facts.columns // facts.elements  # vectors per row of a block

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (rows, columns), contiguous, columns a multiple of a vector; with a gate twice as many
        values: cute.Tensor | None,  # (rows, columns) FP8, contiguous
        scales: cute.Tensor | None,  # (groups,) FP32
        amax: cute.Tensor | None,  # (1,) FP32, for one scale per tensor: not negative; updated or read
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        kernel = self.find_amax if const_expr(self.facts.step == "amax") else self.kernel
        kernel(x, values, scales, amax).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=CARVEOUT,
            use_pdl=self.facts.follows,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, values: cute.Tensor, scales: cute.Tensor, amax: cute.Tensor | None):
        facts = self.facts
        chained(facts)
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        lane = tidx % facts.lanes
        if const_expr(facts.step == "values"):  # each CTA quantizes one chunk of the tensor
            scale = self.scale_of(amax[0])
            if cta == 0 and tidx == 0:
                scales[0] = scale
            words, place, first = self.registers(), self.place(x, Int32(0)), lane + Int64(cta) * self.turn
            self.load(x, place, first, words)
            self.store(values, place, first, words, scale)
        elif const_expr(facts.held):
            groups = [(cta * facts.each + e) * self.per_cta + tidx // facts.lanes for e in range(facts.each)]
            places = [self.place(x, group) for group in groups]
            loaded = [self.registers() for _ in groups]
            for e in range_constexpr(facts.each):
                self.load(x, places[e], lane, loaded[e])
            for e in range_constexpr(facts.each):
                scale = self.scale_of(self.of_group(self.largest(loaded[e], Float32(0.0))))
                if lane == 0 and places[e][0] < x.shape[0]:
                    scales[groups[e]] = scale
                self.store(values, places[e], lane, loaded[e], scale)
        else:
            words, place, most = self.registers(), self.place(x, cta), Float32(0.0)
            turns = cute.ceil_div(values.shape[1], self.turn * facts.elements)
            for turn in cutlass.range(turns, unroll=1):
                self.load(x, place, lane + turn * self.turn, words)
                most = self.largest(words, most)
            scale = self.scale_of(self.of_group(most))
            if lane == 0:
                scales[cta] = scale
            for turn in cutlass.range(turns, unroll=1):
                self.load(x, place, lane + turn * self.turn, words)
                self.store(values, place, lane + turn * self.turn, words, scale)

    @cute.kernel
    def find_amax(self, x: cute.Tensor, values: None, scales: None, amax: cute.Tensor):
        """Reduce the amax of the tensor; each CTA strides over its chunks."""
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        words = self.registers()
        place, most = self.place(x, Int32(0)), Float32(0.0)
        turns = cute.ceil_div(x.shape[1], self.turn * self.facts.elements)
        for turn in cutlass.range(cta, turns, cute.arch.grid_dim()[0], unroll=1):
            self.load(x, place, tidx + Int64(turn) * self.turn, words)
            most = self.largest(words, most)
        raise_to_magnitude(amax.iterator.toint(), most)

    def registers(self) -> cute.Tensor:
        """Fragment of a lane's vectors: (words of a vector, vectors of a lane)."""
        return cute.make_rmem_tensor((self.words, self.facts.vectors), Int32)

    @cute.jit
    def place(self, x: cute.Tensor, group: Int32):
        """(row, column) of the first element of a group. With one scale per tensor, x is a single row."""
        row, column = group, Int32(0)
        if const_expr(self.facts.step != "groups"):
            row = Int32(0)
        elif const_expr(self.facts.columns):
            blocks = cute.ceil_div(x.shape[1], self.facts.columns)
            row = group // blocks
            column = (group - row * blocks) * self.facts.columns
            row = row * self.facts.rows
        return row, column

    def vectors(self, x: cute.Tensor, place: tuple, first, gates: bool = False) -> list:
        """(index of the first element, True if in bounds) for each of a lane's vectors, from vector `first` of the
        group on. gates: x has a gate; the indices are those of the gate's vectors."""
        facts, result = self.facts, []
        columns = x.shape[1] // 2 if gates else x.shape[1]
        for i in range(facts.vectors):
            v = first + i * facts.lanes
            row, column = place[0], place[1] + v * facts.elements
            if facts.rows > 1:
                row, column = place[0] + v // self.line, place[1] + v % self.line * facts.elements
            inside = (row < x.shape[0]) & (column < columns)
            if gates:
                column = column // GATE * (2 * GATE) + column % GATE
            result.append((Int64(row) * x.shape[1] + column, inside))
        return result

    @cute.jit
    def load(self, x: cute.Tensor, place: tuple, first, words: cute.Tensor):
        """Load a lane's vectors; zeros out of bounds."""
        gates = const_expr(self.facts.gate is not None)
        for i in range_constexpr(self.facts.vectors):
            element, inside = self.vectors(x, place, first, gates)[i]
            at = x.iterator.toint() + element * self.size
            loaded = load_vector(at, inside, stream=self.facts.held, fresh=self.facts.follows)
            for w in range_constexpr(self.words):
                words[w, i] = loaded[w]
            if const_expr(gates):
                at = at + GATE * self.size
                other = load_vector(at, inside, stream=self.facts.held, fresh=self.facts.follows)
                self.multiply(words, i, other)

    def multiply(self, words: cute.Tensor, i: int, other: tuple) -> None:
        """Replace vector i, which holds gate, by activation(gate) * other, computed in FP32 and rounded once."""
        size, up = self.facts.elements, cute.make_rmem_tensor((self.words, 1), Int32)
        for w in range(self.words):
            up[w] = other[w]
        gate, result = cute.make_rmem_tensor(size, Float32), cute.make_rmem_tensor(size, self.dtype)
        for e, x in enumerate(self.numbers(words, i)):
            gate[e] = x
        if self.facts.gate != "none":
            gate.store(ACTIVATIONS[self.facts.gate](gate.load()))
        for e, x in enumerate(self.numbers(up, 0)):
            gate[e] = gate[e] * x
        result.store(gate.load().to(self.dtype))
        for w in range(self.words):
            words[w, i] = cute.recast_tensor(result, Int32)[w]

    def numbers(self, words: cute.Tensor, i: int) -> list:
        """The elements of vector i in FP32."""
        if self.size == 4:
            return [cute.recast_tensor(words, Float32)[w, i] for w in range(self.words)]
        if self.dtype is not cutlass.BFloat16:
            halves = cute.recast_tensor(words, self.dtype)
            return [halves[e, i].to(Float32) for e in range(self.facts.elements)]
        bits = cute.make_rmem_tensor(self.facts.elements, Int32)  # BF16 is the upper half of FP32
        for w in range(self.words):
            bits[2 * w], bits[2 * w + 1] = words[w, i] << 16, words[w, i] & -65536
        floats = cute.recast_tensor(bits, Float32)
        return [floats[e] for e in range(self.facts.elements)]

    def largest(self, words: cute.Tensor, most: Float32) -> Float32:
        """The larger of `most` and the largest magnitude among a lane's vectors."""
        if self.size == 4:
            for i in range(self.facts.vectors):
                for x in self.numbers(words, i):
                    most = larger_magnitude(most, x)
            return most
        pair = cute.make_rmem_tensor((self.words, 1), Int32)  # the first word holds two maxima, the others are zero
        pair.fill(0)
        for v in range(cute.size(words)):
            pair[0] = larger_magnitudes(pair[0], words[v], self.facts.dtype)
        for x in self.numbers(pair, 0)[:2]:
            most = larger_magnitude(most, x)
        return most

    @cute.jit
    def of_group(self, most: Float32):
        """Reduce the maximum over all lanes of a group."""
        lanes = self.facts.lanes
        for step in range_constexpr(min(lanes, WARP).bit_length() - 1):
            most = larger_magnitude(most, cute.arch.shuffle_sync_bfly(most, 1 << step))
        if const_expr(lanes > WARP):
            warps = const_expr(THREADS // WARP)
            smem = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), 16)
            tidx = cute.arch.thread_idx()[0]
            if tidx % WARP == 0:
                smem[tidx // WARP] = most
            cute.arch.sync_threads()
            for w in range_constexpr(warps):
                most = larger_magnitude(most, smem[w])
        return most

    def scale_of(self, largest: Float32) -> Float32:
        """largest / top, the scale that maps this magnitude to the end of the FP8 range; `none` if not normal."""
        scale = divided(largest, Float32(self.top))
        return Float32(select_(scale < TINY, Float32(self.facts.none), scale))

    def factors(self, scale: Float32) -> tuple:
        """(factor, divisor, 1 / divisor) such that x / scale is factor * x / divisor. For an infinite scale factor is
        0, which yields 0, and NaN for infinite x."""
        factor = select_(scale < SMALL, Float32(SHIFT), select_(scale > LARGE, Float32(1 / SHIFT), Float32(1.0)))
        infinite = scale == float("inf")
        divisor = Float32(select_(infinite, Float32(1.0), scale * factor))
        return Float32(select_(infinite, Float32(0.0), factor)), divisor, divided(Float32(1.0), divisor)

    @cute.jit
    def store(self, values: cute.Tensor, place: tuple, first, words: cute.Tensor, scale: Float32):
        """Divide a lane's vectors by the scale, round and store those in bounds."""
        factor, divisor, inverse = self.factors(scale)
        out = cute.make_rmem_tensor((self.facts.elements // 4, self.facts.vectors), Int32)
        for i in range_constexpr(self.facts.vectors):
            self.round([quotient(x * factor, divisor, inverse) for x in self.numbers(words, i)], out, i)
        size = const_expr(self.facts.elements)  # bytes of an FP8 vector
        for i in range_constexpr(self.facts.vectors):
            element, inside = self.vectors(values, place, first)[i]
            if inside:
                to = make_ptr(Int32, values.iterator.toint() + element, AddressSpace.gmem, assumed_align=size)
                cute.autovec_copy(out[None, i], cute.make_tensor(to, size // 4))

    def round(self, quotients: list, out: cute.Tensor, i: int) -> None:
        for w in range(len(quotients) // 4):
            out[w, i] = pack(quotients[4 * w : 4 * w + 4], self.facts.out_dtype)
