"""Kernel family of transposed lists."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .config import FAMILY, TransposeFacts


class TransposedLists(Family):
    """The rows of blocks of each column of blocks."""

    name = FAMILY

    def entry(self, facts: TransposeFacts):
        from .kernel import MakeBitmaps, Transpose

        return MakeBitmaps(facts) if facts.rows else Transpose(facts)

    def arguments(self, facts: TransposeFacts) -> tuple:
        from cutlass import Int32

        ranks, numbers = ((3, 4, 4), (Int32(1),)) if facts.rows else ((4, 3, 4), ())
        return *(fake_tensor("int32", n, n - 1, 1) for n in ranks), *numbers, fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[TransposeFacts]:
        target = arch_named(arch).target
        return [TransposeFacts(target, rows) for rows in (True, False)]

    def describe(self, facts: TransposeFacts) -> dict[str, str]:
        problem = "bitmaps of rows" if facts.rows else "lists of columns"
        return {"configuration": "-", "problem": problem, "operands": "int32"}


TRANSPOSED_LISTS = register(TransposedLists())
