"""Functions of the epilogue: z = x for backward, a named activation, and a user's function."""

import cutlass.cute as cute
from cutlass import Float32

from ...traced.activations import ACTIVATIONS
from ...traced.lower import lower
from .chunk import Chunk, Term


class StoredInput(Term):
    """z = x: the activation's input, which is stored like D."""

    @staticmethod
    def present(spec) -> bool:
        return spec.stores_z

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        chunk.rZ.store(x.to(chunk.rZ.element_type))
        return x


class Activation(Term):
    """x = activation(x)"""

    @staticmethod
    def present(spec) -> bool:
        return spec.activation is not None

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        return ACTIVATIONS[self.spec.activation](x)


class UserFunction(Term):
    """x = function(x), traced by torch."""

    @staticmethod
    def present(spec) -> bool:
        return spec.function is not None

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        rD = chunk.rD
        rD.store(x)
        for v in range(chunk.size):
            rD[v] = lower(self.spec.function, [rD[v]]).to(Float32)
        return rD.load()
