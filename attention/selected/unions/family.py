"""Kernel family of union tiles."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .config import BITMAPS, WORD, UnionFacts, facts_for


class Unions(Family):
    """Union tiles of lists of KV blocks."""

    name = "union tiles"

    def entry(self, facts: UnionFacts):
        from .kernel import MakeUnions

        return MakeUnions(facts)

    def arguments(self, facts: UnionFacts) -> tuple:
        from cutlass import Int32

        indices = fake_tensor("int32", 4, 3, 1)
        tables = (fake_tensor("int32", rank, rank - 1, 1) for rank in (2, 1, 2))
        return indices, *tables, Int32(1), Int32(1), Int32(1), fake_stream()

    def unsupported(self, facts: UnionFacts) -> str:
        spec = arch_named(facts.arch)
        if facts.smem_bytes > spec.smem:
            most = facts.bitmap - -(-(facts.smem_bytes - spec.smem) // (8 * BITMAPS[-1])) * BITMAPS[-1]
            return (
                f"{facts.bitmap * WORD} KV blocks need {facts.smem_bytes} bytes of shared memory, {spec.name} has "
                f"{spec.smem}; use at most {most * WORD} blocks, or a larger block_size"
            )
        return ""

    def catalogue(self, arch: str, quick: bool = False) -> list[UnionFacts]:
        """Lists of the models at 131,072 keys, and each block size and size of the bitmap."""
        target = arch_named(arch).target
        calls = [(4, 32768, 512), (128, 1024, 16), (64, 2048, 16), (1, 131072, 2048), (16, 8192, 128), (4, 262144, 512)]
        found = [facts_for(target, *call) for call in (calls[:1] if quick else calls)]
        return [facts for facts in found if not self.unsupported(facts)]

    def describe(self, facts: UnionFacts) -> dict[str, str]:
        return {
            "configuration": f"{facts.lanes} lanes x {facts.batch}",
            "problem": f"blocks of {facts.block_size}, up to {facts.bitmap * WORD}",
            "operands": "int32",
        }


UNIONS = register(Unions())
