"""Kernel family of sharded block masks."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .config import FAMILY, SMEM, ShardFacts

LISTS = (3, 4, 3, 4)  # ranks of a BlockMask's tensors
TENSORS = {"rows": (2, 1), "deals": (2, 1, 2, 2, 1, 2, 3, 3), "lists": (2, 2, 2, 1, 1, 1, 4, 5)}
NUMBERS = {"rows": 3, "deals": 3, "lists": 5}
WIDE = {"deals": (5,), "lists": (0, 3)}  # tensors of int64


class ShardedMasks(Family):
    """The tiles of each process, the tiles that it needs, and its block lists."""

    name = FAMILY

    def entry(self, facts: ShardFacts):
        from .kernel_deals import DealTiles, MarkTiles
        from .kernel_lists import ListBlocks

        return {"rows": MarkTiles, "deals": DealTiles, "lists": ListBlocks}[facts.step](facts)

    def arguments(self, facts: ShardFacts) -> tuple:
        from cutlass import Int32

        def tensors(ranks: tuple, wide: tuple = ()) -> tuple:
            return tuple(fake_tensor("int64" if i in wide else "int32", n, n - 1, 1) for i, n in enumerate(ranks))

        step = facts.step
        lists = () if step == "deals" else (tensors(LISTS),)
        numbers = (Int32(1) for _ in range(NUMBERS[step]))
        return *lists, *tensors(TENSORS[step], WIDE.get(step, ())), *numbers, fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[ShardFacts]:
        return [ShardFacts(arch_named(arch).target, step) for step in (["deals"] if quick else SMEM)]

    def describe(self, facts: ShardFacts) -> dict[str, str]:
        return {"configuration": "-", "problem": facts.step, "operands": "int32"}


SHARDED_MASKS = register(ShardedMasks())
