"""The kernel that makes the tables of small blocks, as a family."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .tables import BlockTables, BlockTablesFacts, block_tables
from .tile import CHUNK


class SmallBlockTables(Family):
    """The kernel that makes the tables of small blocks."""

    name = "small block tables"
    ops = ("bsr_matmul", "bsr_linear")

    def entry(self, facts: BlockTablesFacts):
        from .tables_kernel import BlockTablesKernel

        return BlockTablesKernel(facts)

    def arguments(self, facts: BlockTablesFacts) -> tuple:

        indices = [fake_tensor(facts.index_dtype, 1, 0, 1) for _ in range(2)]
        tables = [fake_tensor("int32", rank, rank - 1, align) for rank, align in ((1, 1), (2, 1), (3, 4), (1, 1))]
        return *indices, *tables, fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[BlockTablesFacts]:
        spec = arch_named(arch)
        if spec.path != "sm_90":
            return []
        blocks = ((16, 16),) if quick else ((16, 16), (32, 32), (64, 64), (16, 128), (64, 32))
        kinds = ((1, False), (1, True), (2, True))
        return [BlockTablesFacts(spec.target, *block, "int32", *kind) for block in blocks for kind in kinds]

    def describe(self, facts: BlockTablesFacts) -> dict[str, str]:
        operands = facts.index_dtype + (" k" if facts.b_k_major else " n")
        config = f"small block tables c{facts.cluster}x1"
        return {"configuration": config, "problem": f"{facts.bm}x{facts.bk}", "operands": operands}


def tables_of(W, cluster: int, b_k_major: bool) -> BlockTables:
    """Those of a BsrMatrix, made once, for clusters of so many CTAs. `b_k_major`: whether the dense operand is
    contiguous along K. The order of a transposed view has the numbers of the blocks that its base stores."""
    return W.derived(("small blocks", cluster, b_k_major), lambda: _of_stored(_make(W, cluster, b_k_major), W))


def _of_stored(tables: BlockTables, W) -> BlockTables:
    """The tables with the numbers of the blocks that a transposed view's base stores."""
    if W.numbers is None or W.nnz == 0:
        return tables
    return tables._replace(order=W.numbers.index_select(0, tables.order))


def _make(W, *kind) -> BlockTables:
    pattern = W.crow_indices, W.col_indices, W.shape[-2:], W.blocksize
    if W.device.type == "cuda":
        from .tables_kernel import MOST_CHUNKS, block_tables_on_gpu

        if -(-W.shape[-1] // CHUNK) <= MOST_CHUNKS:
            return block_tables_on_gpu(*pattern, *kind)
    return block_tables(*pattern, *kind)


SMALL_BLOCK_TABLES = register(SmallBlockTables())
