"""The bias of the epilogue: one value per row or column of D."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .chunk import Chunk, Term


class Bias(Term):
    """x = x + bias; with `bias_items` each matrix of a batch of A has its own."""

    @staticmethod
    def present(spec) -> bool:
        return spec.bias is not None

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        rBias, by_row = chunk.fragment(), self.spec.bias == "row"
        mode = 0 if by_row else 1
        for v in range(chunk.size):
            # A row bias has one value per r, a column bias one per (c, j): load each once, then copy.
            first = v & 2 if by_row else v & ~2
            if v == first:
                # Clamped rather than guarded: values outside are not stored, and loads without branches overlap.
                at = cutlass.min(chunk.cD[v][mode], chunk.extent[mode] - 1)
                item = (chunk.outer[2],) if self.spec.bias_items else ()
                rBias[v] = chunk.args.bias[(at, chunk.outer[0], *item)].to(Float32)
                if chunk.one is not None:
                    rBias[v] = rBias[v] * chunk.one
            else:
                rBias[v] = rBias[first]
        return x + rBias.load()
