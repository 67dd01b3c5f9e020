"""The epilogue: D = f(activation(alpha * S(A B) + bias + beta * residual)), in FP32, before D is stored.

S applies the dequantization scales of A and B. An FP8 D may be multiplied by an output scale after that.

The epilogue has a static half, `EpilogueSpec` (config.py: which terms there are, part of a kernel's facts), and a
dynamic half, `EpilogueArgs` (their tensors and scalars). Each term is a class (chunk.Term) in a file of this folder.
Both stores, sm_80's and sm_90's, pass them *chunks* of accumulators.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, range_constexpr

from ...tile.fp8 import byte, packed
from .activation import Activation, StoredInput, UserFunction
from .amax import Amax
from .bias import Bias
from .chunk import Chunk, Term
from .residual import Residual
from .scale import Alpha, OperandScales, OutputScale

TERMS: tuple[type[Term], ...] = (OperandScales, Alpha, Bias, Residual, StoredInput, Activation, UserFunction)
TERMS_OF_FP8: tuple[type[Term], ...] = (Amax, OutputScale)  # of an FP8 D, after the others


@dataclass(frozen=True)
class EpilogueArgs:
    """Tensors and scalars of the terms.

    bias is (bias extent, outer_m) or (bias extent, outer_m, batch of A); residual is (M, N, outer_m, L) like mD; z is
    written. The scales of A are (M, L) and those of B (N, L), or (1, L) per tensor. Block scales, (M, K / 128, L) and
    (N / 128, K / 128, L), belong to the mainloop."""

    bias: cute.Tensor | None = None
    residual: cute.Tensor | None = None
    z: cute.Tensor | None = None
    alpha: Float32 | None = None
    beta: Float32 | None = None
    scale_m: cute.Tensor | None = None
    scale_n: cute.Tensor | None = None
    scale_out: cute.Tensor | None = None  # (1,) FP32, of an FP8 D
    amax: cute.Tensor | None = None  # (1,) FP32, not negative: raised to the largest magnitude of D before scale_out

    @classmethod
    def of(cls, facts, terms: tuple) -> tuple["EpilogueArgs", tuple]:
        """(EpilogueArgs, launch arguments) of what a compiled function has after its operands: torch's tensors, as
        facts.epilogue_tensors names them, alpha, beta, and the launch arguments (group, max_ctas, stream)."""
        names = facts.epilogue_tensors
        alpha, beta, *launch = terms[len(names) :]
        return cls(alpha=alpha, beta=beta, **dict(zip(names, terms, strict=False))), tuple(launch)

    def viewed(self, **views) -> "EpilogueArgs":
        """The same terms, with each tensor that is present as views[its name] returns it."""
        tensors = {name: getattr(self, name) for name in views}
        return replace(self, **{name: views[name](t) for name, t in tensors.items() if t is not None})


def coordinates(tCcD: cute.Tensor, first: int, count: int, origin: tuple) -> list[tuple]:
    """(m, n) of `count` accumulators from flat index `first`; `origin` is (m, n) of the fragment's tile."""
    return [(origin[0] + c[0], origin[1] + c[1]) for c in (tCcD[first + v] for v in range(count))]


class Epilogue:
    """The terms of a kernel's epilogue, in their order."""

    def __init__(self, spec):
        self.terms = [term(spec) for term in TERMS if term.present(spec)]
        self.last = [term(spec) for term in TERMS_OF_FP8 if term.present(spec)]

    def apply(self, chunk: Chunk) -> None:
        """Run the epilogue on one chunk, in registers."""
        self._run(self.terms, chunk)

    def quantize(self, chunk: Chunk) -> None:
        """Run the steps of an FP8 D after `apply`: record the largest magnitude inside D, apply the output scale."""
        self._run(self.last, chunk)

    def finish(self, args: EpilogueArgs, rMax: cute.Tensor) -> None:
        """Write what terms have reduced, once all chunks of a thread are done."""
        for term in self.last:
            term.finish(args, rMax)

    @staticmethod
    def _run(terms: list[Term], chunk: Chunk) -> None:
        x = chunk.rD.load()
        for term in terms:
            x = term.apply(x, chunk)
        chunk.rD.store(x)


@cute.jit
def store_bytes(rD: cute.Tensor, cD: list, mD: cute.Tensor, extent: tuple, outer: tuple, dtype: cutlass.Constexpr):
    """Store a fragment as FP8 to D (M, N, outer_m, L) with any strides, element by element."""
    bytes_of_d = cute.recast_tensor(mD, cutlass.Uint8)
    for first in range_constexpr(0, cute.size(rD), 4):
        word = packed(rD, first, dtype)
        for v in range_constexpr(min(4, cute.size(rD) - first)):
            at = cD[first + v]
            if cute.elem_less(at, extent):
                bytes_of_d[at[0], at[1], outer[0], outer[1]] = byte(word, v)
