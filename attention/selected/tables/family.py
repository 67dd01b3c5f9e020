"""Kernel family of the tables of selected blocks."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from ..unions.config import WORD
from .config import FAMILY, OrderFacts, TableFacts, facts_for


class SelectedTables(Family):
    """Bits, lists of columns and the order of tiles."""

    name = FAMILY

    def entry(self, facts: TableFacts | OrderFacts):
        from .kernel import MakeOrder, MakeTables

        return MakeOrder() if isinstance(facts, OrderFacts) else MakeTables(facts)

    def arguments(self, facts: TableFacts | OrderFacts) -> tuple:
        from cutlass import Int32

        if isinstance(facts, OrderFacts):
            counts, table = (fake_tensor("int32", n, n - 1, 1) for n in (3, 2))
            return counts, table, *(Int32(1) for _ in range(4)), fake_stream()
        tensors = (fake_tensor("int32", n, n - 1, 1) for n in (4, 4, 3, 4))
        ranges = (fake_tensor("int32", 1, 0, 1) if facts.ranges else None for _ in range(2))
        return *tensors, *ranges, *(Int32(1) for _ in range(6)), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[TableFacts | OrderFacts]:
        """Lists of the models at 131,072 keys, each block size and each option."""
        target = arch_named(arch).target
        calls = [(128, 1024, 16, False), (4, 32768, 512, False), (64, 2048, 16, True), (16, 8192, 128, True)]
        calls += [(1, 131072, 2048, False), (64, 2048, 16, False), (16, 8192, 33, False), (4, 4096, 40, True)]
        found = [facts_for(target, *call) for call in (calls[:1] if quick else calls)]
        return [*found, OrderFacts(target)]

    def describe(self, facts: TableFacts | OrderFacts) -> dict[str, str]:
        if isinstance(facts, OrderFacts):
            return {"configuration": "-", "problem": "order of query tiles", "operands": "int32"}
        combined = ", combined" if facts.combines else ""
        ranges = ", packed sequences" if facts.ranges else ""
        return {
            "configuration": f"{facts.chunk * WORD} blocks x {facts.batch}{combined}",
            "problem": f"blocks of {facts.block_size}{ranges}",
            "operands": "int32",
        }


SELECTED_TABLES = register(SelectedTables())
