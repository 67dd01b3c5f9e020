"""The residual of the epilogue: a matrix like D."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .chunk import Chunk, Term


class Residual(Term):
    """x = x + beta * residual"""

    @staticmethod
    def present(spec) -> bool:
        return spec.residual is not None

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        rC, args, outer, extent = chunk.fragment(), chunk.args, chunk.outer, chunk.extent
        # Stored blocks have constant strides: the block's address has 64 bits, offsets inside it 32.
        in_blocks = all(isinstance(stride, int) for stride in args.residual.stride[:2])
        residual = args.residual[None, None, outer[0], outer[1]] if in_blocks else args.residual
        for v in range(chunk.size):
            m, n = cutlass.min(chunk.cD[v][0], extent[0] - 1), cutlass.min(chunk.cD[v][1], extent[1] - 1)
            rC[v] = residual[(m, n) if in_blocks else (m, n, outer[0], outer[1])].to(Float32)
        return x + args.beta * rC.load()
