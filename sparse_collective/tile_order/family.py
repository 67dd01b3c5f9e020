"""The kernel that orders work tiles, as a family."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .config import OrderFacts


class TileOrder(Family):
    """The kernel that orders work tiles."""

    name = "tile order"
    ops = ("bsr_matmul", "bsr_linear")

    def entry(self, facts: OrderFacts):
        from .kernel import TileDealer

        return TileDealer(facts)

    def arguments(self, facts: OrderFacts) -> tuple:
        from cutlass import Int32

        tensors = fake_tensor(facts.index_dtype, 1, 0, 1), fake_tensor("int32", 2, 1, 2)
        return *tensors, *[Int32(1)] * 7, fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[OrderFacts]:
        target, indices = arch_named(arch).target, ("int32",) if quick else ("int32", "int64")
        return [OrderFacts(target, index, dealt) for index in indices for dealt in (False, True)]

    def describe(self, facts: OrderFacts) -> dict[str, str]:
        return {
            "configuration": "tile order",
            "problem": "to workers" if facts.dealt else "",
            "operands": facts.index_dtype,
        }


TILE_ORDER = register(TileOrder())
