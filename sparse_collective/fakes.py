"""What the block-sparse products' functions are compiled from: fakes of their arguments."""

from cute_kernels.matmul.arguments import epilogue_args, launch_args, matrix
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.runtime.fake import fake_tensor


def bsr_args(facts: GemmFacts, tables: tuple) -> tuple:
    """Fakes of all arguments of a BsrFamily's entry."""
    import cutlass.cute as cute

    block = facts.block
    rank = 2 if block.batch == "patterns" else 1
    crow = fake_tensor(block.index_dtype, rank, rank - 1, 1)
    outer = [cute.sym_int32() for _ in range(2 if block.batch == "values" else 1)]
    values = fake_tensor(facts.dtype, len(outer) + 2, len(outer) + 1, 8, (*outer, block.bm, block.bk))
    return crow, *tables, values, matrix(facts, 1), matrix(facts, 2), *epilogue_args(facts), *launch_args(facts)
