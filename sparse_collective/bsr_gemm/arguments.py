"""Fake arguments that the block-sparse GEMM functions are compiled with."""

from cute_kernels.matmul.arguments import epilogue_args, launch_args, matrix, narrow_args
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
    operands = values, matrix(facts, 1), matrix(facts, 2)
    return crow, *tables, *operands, *scale_args(facts), *epilogue_args(facts), *launch_args(facts)


def has_scales(facts: GemmFacts) -> bool:
    """True if W or b has scales; the kernel then has parameters for them."""
    return facts.block.scaled or facts.epilogue.scales_operands


def scale_args(facts: GemmFacts) -> tuple:
    """Fakes of (scales, scale_b): (1,) or (blocks,) for W, (1 or L, 1 or N) for b; () if neither has scales. With an
    FP8 output always these and (scale_out, amax)."""
    if not has_scales(facts) and not facts.narrow:
        return ()
    of_w = fake_tensor("float32", 1, 0, 1) if facts.block.scaled or facts.epilogue.scale_m else None
    of_b = fake_tensor("float32", 2, 1, 1) if facts.epilogue.scale_n else None
    return of_w, of_b, *(narrow_args(facts) if facts.narrow else ())
