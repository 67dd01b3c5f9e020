"""Fake arguments that the block-sparse GEMM functions are compiled with."""

from cute_kernels.matmul.arguments import matrix, term_args
from cute_kernels.matmul.config import GemmFacts
from cute_kernels.runtime.fake import fake_tensor


def bsr_args(facts: GemmFacts, tables: tuple, stored: int = 1) -> tuple:
    """Fakes of all arguments of a BsrFamily's entry. stored: of so many columns of a block one is stored."""
    import cutlass.cute as cute

    block = facts.block
    rank = 2 if block.batch == "patterns" else 1
    crow = fake_tensor(block.index_dtype, rank, rank - 1, 1)
    outer = [cute.sym_int32() for _ in range(2 if block.batch == "values" else 1)]
    sides = (block.bk, block.bm) if block.permuted else (block.bm, block.bk // stored)
    values = fake_tensor(facts.dtype, len(outer) + 2, len(outer) + 1, facts.element.vector, (*outer, *sides))
    fakes = {"scale_m": lambda: fake_tensor("float32", 1, 0, 1)}  # (1,), or (blocks,)
    return crow, *tables, values, matrix(facts, 1), matrix(facts, 2), *term_args(facts, **fakes)
