"""The kernel of an epilogue's gradient, as a family."""

from collections.abc import Iterator

from ..arch import arch_named
from ..functions import ACTIVATIONS
from ..runtime.fake import fake_stream, fake_tensor
from ..runtime.families import Family, Request, register
from ..traced.derivative import derivative, followed_by
from .config import VECTOR, EpilogueGradientFacts


class EpilogueGradients(Family):
    """dz = dy f'(z) and the sums of its columns."""

    name = "epilogue gradient"
    ops = ("gemm", "bsr_matmul", "bsr_linear")

    def entry(self, facts: EpilogueGradientFacts):
        from .kernel import EpilogueGradient

        return EpilogueGradient(facts)

    def arguments(self, facts: EpilogueGradientFacts) -> tuple:
        from cutlass import Int32

        matrices = (fake_tensor(facts.dtype, 2, 1, VECTOR) for _ in range(3))
        partial = fake_tensor("float32", 2, 1, 1) if facts.sums else None
        return *matrices, partial, Int32(1), fake_stream()

    def unsupported(self, facts: EpilogueGradientFacts) -> str:
        if facts.dtype not in ("bfloat16", "float16"):
            return f"results of {facts.dtype}: the kernel's derivatives are as exact as bfloat16 and float16 are"
        return ""

    def catalogue(self, arch: str, quick: bool = False) -> Iterator[EpilogueGradientFacts]:
        names = ["gelu"] if quick else ACTIVATIONS
        for dtype in ["bfloat16"] if quick else ["bfloat16", "float16"]:
            for name in names:
                for sums in (True,) if quick else (False, True):
                    yield facts_of(arch_named(arch).target, dtype, name, sums)

    def bundle(self, op: str, request: Request) -> Iterator[EpilogueGradientFacts]:
        target = arch_named(request.arch).target
        for dtype in request.dtypes:
            yield from (facts_of(target, dtype, name, sums) for name in ACTIVATIONS for sums in (False, True))

    def describe(self, facts: EpilogueGradientFacts) -> dict[str, str]:
        return {
            "configuration": "epilogue gradient",
            "problem": "with sums" if facts.sums else "",
            "operands": facts.dtype,
            "epilogue": facts.derivative.text,
        }


def facts_of(target: str, dtype: str, activation: str | None, sums: bool, program=None) -> EpilogueGradientFacts:
    """Facts of an activation followed by a user's function; either may be None."""
    return EpilogueGradientFacts(target, dtype, derivative(followed_by(activation, program)), sums)


EPILOGUE_GRADIENT = register(EpilogueGradients())
