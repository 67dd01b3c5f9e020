"""What a bundle of compiled products holds."""

from collections.abc import Iterable

from ..arch import arch_named
from ..runtime.families import families
from .config import BlockFacts, GemmFacts
from .family import ProductFamily

OPS = ("gemm", "bsr_matmul", "bsr_linear")


def bundle_facts(
    arch: str,
    dtypes: Iterable[str],
    blocks: Iterable[tuple[int, int]],
    ops: Iterable[str] = OPS,
    index_dtypes: Iterable[str] = ("int32",),
) -> list[GemmFacts]:
    """What `ops` ask for on aligned contiguous matrices: with no epilogue, a bias, a bias and each activation.

    Shapes decide between the configurations, so all of them are here; sparse ones with and without an order of work
    tiles. gemm's b may also be the transpose of a contiguous weight. The bias has the operands' dtype, one value for
    each output feature. Not here, and compiled on their first call: batches that do not fold into rows, residuals, fp32
    outputs, alpha, functions of one's own, and batches of block-sparse matrices.
    """
    spec, ops = arch_named(arch), list(ops)
    if unknown := set(ops) - set(OPS):
        raise ValueError(f"unknown operation {min(unknown)!r}; known are {', '.join(OPS)}")
    shapes = [BlockFacts(*block, index) for block in blocks for index in index_dtypes]
    found: dict[GemmFacts, None] = {}
    for dtype in dtypes:
        for op in ops:
            for block in (None,) if op == "gemm" else shapes:
                for family in families(ProductFamily):
                    if family.serves(block):
                        facts = family.bundle(op, spec, block, dtype)
                        found |= dict.fromkeys(f for f in facts if not family.unsupported(f))
    return list(found)
