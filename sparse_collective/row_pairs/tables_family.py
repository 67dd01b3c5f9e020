"""The kernel that makes the tables of row pairs, as a family."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .tables import PairPlanFacts


class RowPairTables(Family):
    """The kernel that makes the tables of pairs of block rows."""

    name = "row pair tables"
    ops = ("bsr_matmul", "bsr_linear")

    def entry(self, facts: PairPlanFacts):
        from .tables_kernel import PairPlanner

        return PairPlanner()

    def arguments(self, facts: PairPlanFacts) -> tuple:
        from cutlass import Int32

        indices = [fake_tensor(facts.index_dtype, 1, 0, 1) for _ in range(2)]
        tables = [fake_tensor("int32", 2, 1, 1) for _ in range(2)]
        return *indices, *tables, Int32(1), Int32(1), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[PairPlanFacts]:
        spec = arch_named(arch)
        return [PairPlanFacts(spec.target, index) for index in ("int32", "int64")] if spec.path == "sm_90" else []

    def describe(self, facts: PairPlanFacts) -> dict[str, str]:
        return {"configuration": "row pair tables", "operands": facts.index_dtype}


ROW_PAIR_TABLES = register(RowPairTables())
