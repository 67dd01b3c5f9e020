"""The kernels that copy fp32 operands, as a family."""

from ..arch import arch_named
from ..matmul.precision import PARTS, SMALL_OF_A, SMALL_OF_B
from ..runtime.fake import fake_stream, fake_tensor
from ..runtime.families import Family, register
from .config import PartsFacts


class TF32Parts(Family):
    """fp32 operands along K, as they are or in TF32 parts."""

    name = "tf32 parts"
    ops = ("gemm", "bsr_matmul", "bsr_linear")

    def entry(self, facts: PartsFacts):
        from .kernel import Parts

        return Parts(facts)

    def arguments(self, facts: PartsFacts) -> tuple:
        if facts.turned:
            return fake_tensor("float32", 3, 2, 1), fake_tensor("float32", 4, 3, 4), fake_stream()
        return fake_tensor("float32", 2, 1, 4), fake_tensor("float32", 2, 1, 4), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[PartsFacts]:
        target = arch_named(arch).target
        small = SMALL_OF_A, SMALL_OF_B
        found = [PartsFacts(target, PARTS, of, turned) for of in small for turned in (False, True)]
        return found[:1] if quick else [*found, PartsFacts(target, 1, turned=True)]

    def bundle(self, op: str, request) -> list[PartsFacts]:
        return self.catalogue(request.arch) if "float32" in request.dtypes else []

    def describe(self, facts: PartsFacts) -> dict[str, str]:
        kind = f"{facts.parts} parts, number {facts.small} small" if facts.parts > 1 else "as it is"
        return {"configuration": kind, "problem": "turned" if facts.turned else "along K", "operands": "fp32"}


TF32_PARTS = register(TF32Parts())
