"""The amax of an FP8 D: its largest magnitude before the output scale, over all of D."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import select_

from ...tile.fp8 import larger_magnitude, raise_to_magnitude
from .chunk import Chunk, Term


class Amax(Term):
    """amax = max |x|"""

    @staticmethod
    def present(spec) -> bool:
        return spec.amax

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        rMax = chunk.rMax
        for v in range(chunk.size):
            inside = cute.elem_less(chunk.cD[v], chunk.extent)
            rMax[0] = larger_magnitude(rMax[0], Float32(select_(inside, chunk.rD[v], Float32(0.0))))
        return x

    def finish(self, args, rMax: cute.Tensor) -> None:
        """Raise amax to the largest magnitude that the 32 lanes of a warp have seen; NaN counts as the largest."""
        raise_to_magnitude(args.amax.iterator.toint(), rMax[0])
