"""The kernel that makes the tables of row pairs, as a family."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .tables import PairTables, PairTablesFacts, pair_tables


class RowPairTables(Family):
    """The kernel that makes the tables of pairs of block rows."""

    name = "row pair tables"
    ops = ("bsr_matmul", "bsr_linear")

    def entry(self, facts: PairTablesFacts):
        from .tables_kernel import PairTablesKernel

        return PairTablesKernel()

    def arguments(self, facts: PairTablesFacts) -> tuple:
        from cutlass import Int32

        indices = [fake_tensor(facts.index_dtype, 1, 0, 1) for _ in range(2)]
        tables = [fake_tensor("int32", 2, 1, 1) for _ in range(2)]
        return *indices, *tables, Int32(1), Int32(1), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[PairTablesFacts]:
        spec = arch_named(arch)
        return [PairTablesFacts(spec.target, index) for index in ("int32", "int64")] if spec.path == "sm_90" else []

    def describe(self, facts: PairTablesFacts) -> dict[str, str]:
        return {"configuration": "row pair tables", "operands": facts.index_dtype}


def tables_of(W) -> PairTables:
    """Those of a BsrMatrix, made once."""
    return W.derived(("row pairs",), lambda: _make(W))


def _make(W) -> PairTables:
    pattern = W.crow_indices, W.col_indices, W.n_block_cols
    if W.device.type == "cuda":
        from .tables_kernel import MOST_COLUMNS, pair_tables_on_gpu

        if W.n_block_cols <= MOST_COLUMNS:
            return pair_tables_on_gpu(*pattern)
    return pair_tables(*pattern)


ROW_PAIR_TABLES = register(RowPairTables())
