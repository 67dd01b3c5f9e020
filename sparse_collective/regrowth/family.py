"""The kernels that change a pattern in place, as families; and who calls them."""

import functools
from types import ModuleType

from torch import Tensor

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .config import MOST_TENSORS, BlockMoveFacts, RegrowthFacts


class Regrowth(Family):
    """The kernel that chooses which blocks a pattern stores next."""

    name = "regrowth"
    ops = ("bsr_linear",)

    def entry(self, facts: RegrowthFacts):
        from .choose_kernel import RegrowthKernel

        return RegrowthKernel(facts)

    def arguments(self, facts: RegrowthFacts) -> tuple:
        from cutlass import Int32

        scores = [fake_tensor("float32", 1, 0, 1) for _ in range(2)]
        indices = [fake_tensor("int32", 1, 0, 1) for _ in range(3)]
        return *scores, *indices, Int32(1), Int32(1), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[RegrowthFacts]:
        return [RegrowthFacts(arch_named(arch).target, even) for even in (False, True)[: 1 if quick else 2]]

    def describe(self, facts: RegrowthFacts) -> dict[str, str]:
        return {"configuration": "regrowth", "problem": "by rows" if facts.even else "all rows"}


class BlockMoves(Family):
    """The kernel that moves stored blocks to their places in a new pattern."""

    name = "block moves"
    ops = ("bsr_linear",)

    def entry(self, facts: BlockMoveFacts):
        from .move_kernel import BlockMoveKernel

        return BlockMoveKernel(facts)

    def arguments(self, facts: BlockMoveFacts) -> tuple:
        from cutlass import Int32

        align = 4 if facts.dtype in ("float32", "int32") else 8  # 16 bytes
        blocks = [fake_tensor(facts.dtype, 3, 2, align) for _ in range(facts.tensors)]
        none = [None] * (MOST_TENSORS - facts.tensors)
        result = None if facts.in_place else fake_tensor(facts.dtype, 4, 3, align)
        return *blocks, *none, result, fake_tensor("int32", 1, 0, 1), Int32(1), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[BlockMoveFacts]:
        """AdamW's without a gradient; of an optimizer without state that of the values alone."""
        target = arch_named(arch).target
        facts = [BlockMoveFacts(target, "bfloat16", n, in_place) for n in (3, 1) for in_place in (True, False)]
        return facts[: 1 if quick else None]

    def describe(self, facts: BlockMoveFacts) -> dict[str, str]:
        return {
            "configuration": "block moves",
            "problem": f"{facts.tensors} tensors " + ("in place" if facts.in_place else "to another tensor"),
            "operands": facts.dtype,
        }


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """The modules that need the compiler's package, imported once: an import that has been done takes 1 us."""
    from . import choose_kernel, move_kernel

    return choose_kernel, move_kernel


def regrown(
    scores: Tensor, candidates: Tensor, crow: Tensor, col: Tensor, cols: int, dropped: int, even: bool
) -> Tensor | None:
    """Change a pattern in place, on a GPU and by one kernel; None, and nothing is changed, where none serves it.

    Args:
        scores: (nnz,) float32 of the stored blocks, of which those of lowest score are dropped.
        candidates: (rows * cols,) float32, of which the highest grow, where no block is kept.
        crow, col: int32, (rows + 1,) and (nnz,); written to.
        cols: block columns.
        dropped: how many blocks are dropped, and grow; with `even` in each block row, which hold equally many.

    Returns (nnz,) int32: which of the blocks before each of the blocks now is, -1 for one that has grown.
    """
    if not scores.is_cuda:
        return None
    choose_kernel, _ = _kernels()
    if not choose_kernel.fits(crow.shape[0] - 1, cols, even):
        return None
    return choose_kernel.regrown_on_gpu(scores, candidates, crow, col, cols, dropped, even)


def blocks_moved(tensors: list[Tensor], origin: Tensor, lane: int | None) -> list[Tensor]:
    """Move tensors' blocks (nnz, ...) in place, each from its origin (nnz,) int32, zeros for -1, on a GPU by a kernel.

    lane: every run of so many blocks stays within itself, as a block row of an even pattern does; None: all may move.
    Origins ascend, but for those that are -1.

    Returns the tensors that no kernel can move, which are left as they were.
    """
    if not origin.is_cuda:
        return tensors
    _, move_kernel = _kernels()
    suited, left = [], []
    for t in tensors:
        (suited if t.is_cuda and move_kernel.fits(t) else left).append(t)
    if suited:
        move_kernel.move_blocks_on_gpu(suited, origin, lane)
    return left


REGROWTH = register(Regrowth())
BLOCK_MOVES = register(BlockMoves())
