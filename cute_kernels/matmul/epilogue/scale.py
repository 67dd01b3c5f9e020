"""Scales of the epilogue: dequantization scales of the operands, alpha, and the output scale of an FP8 D."""

import cutlass
import cutlass.cute as cute

from .chunk import Chunk, Term


class OperandScales(Term):
    """The dequantization scales of A and B: per tensor, per row of A, per column of B."""

    @staticmethod
    def present(spec) -> bool:
        return spec.scales_operands

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        spec, args = self.spec, chunk.args
        for mode, kind, scale in ((0, spec.scale_m, args.scale_m), (1, spec.scale_n, args.scale_n)):
            if kind == "tensor":
                x = x * scale[0, chunk.outer[1]]
            elif kind in ("row", "column"):
                rScale = chunk.fragment()
                for v in range(chunk.size):
                    # As for a bias: one value per r, or one per (c, j).
                    first = v & ~2 if mode else v & 2
                    if v == first:
                        at = cutlass.min(chunk.cD[v][mode], chunk.extent[mode] - 1)
                        rScale[v] = scale[at, chunk.outer[1]]
                    else:
                        rScale[v] = rScale[first]
                x = x * rScale.load()
        return x


class Alpha(Term):
    """x = alpha * x"""

    @staticmethod
    def present(spec) -> bool:
        return spec.scale

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        return x * chunk.args.alpha


class OutputScale(Term):
    """x = x * scale_out, the last term of an FP8 D."""

    @staticmethod
    def present(spec) -> bool:
        return spec.scale_out

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        return x * chunk.args.scale_out[0]
