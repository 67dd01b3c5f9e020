"""A chunk of accumulators in registers, and the interface of an epilogue term that changes it."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32


@dataclass(frozen=True)
class Chunk:
    """Accumulators of a thread on their way to D: a fragment (2, 2, J), the layout that mma.sync and WGMMA share.

    Value (c, r, j) of a thread lies at row r * 8 and column j * 8 + c from the thread's first element.
    """

    args: Any  # formula.EpilogueArgs
    rD: cute.Tensor  # (2 * 2 * J,) FP32, updated in place
    cD: list  # (2 * 2 * J,) coordinates (m, n) of its values inside (M, N)
    extent: tuple  # (M, N), at least 1: residual and bias are read inside it only
    outer: tuple  # (outer_m, l) and, if the bias has one row per batch index of A, that index
    one: Float32 | None = None  # a 1.0 to multiply the bias by: see StoreSm90.anchored
    rZ: cute.Tensor | None = None  # (2 * 2 * J,), any dtype: receives the activation's input
    rMax: cute.Tensor | None = None  # (1,) FP32: this thread's largest magnitude so far

    @property
    def size(self) -> int:
        return cute.size(self.rD)

    def fragment(self) -> cute.Tensor:
        """Registers for a value per accumulator."""
        return cute.make_rmem_tensor(self.rD.shape, Float32)


class Term:
    """A term of the epilogue in a kernel, built from an EpilogueSpec; formula.TERMS has them in their order."""

    def __init__(self, spec):
        self.spec = spec

    @staticmethod
    def present(spec) -> bool:
        """True if an epilogue has this term."""
        raise NotImplementedError

    def apply(self, x: cute.TensorSSA, chunk: Chunk) -> cute.TensorSSA:
        """The values of a chunk after this term."""
        raise NotImplementedError

    def finish(self, args, rMax: cute.Tensor) -> None:
        """Write what the term has reduced, once all chunks of a thread are done."""
