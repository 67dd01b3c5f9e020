"""The kernels that change a pattern in place, as families; and who calls them."""

from torch import Tensor

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .config import BlockMoveFacts, RegrowthFacts


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

        blocks = fake_tensor("int32", 2, 1, 4)
        other = None if facts.in_place else fake_tensor("int32", 2, 1, 4)
        return blocks, other, fake_tensor("int32", 1, 0, 1), Int32(1), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[BlockMoveFacts]:
        return [BlockMoveFacts(arch_named(arch).target, in_place) for in_place in (False, True)[: 1 if quick else 2]]

    def describe(self, facts: BlockMoveFacts) -> dict[str, str]:
        return {"configuration": "block moves", "problem": "in place" if facts.in_place else "to another tensor"}


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
    from .choose_kernel import fits, regrown_on_gpu

    if not fits(len(crow) - 1, cols, even):
        return None
    return regrown_on_gpu(scores, candidates, crow, col, cols, dropped, even)


def blocks_moved(t: Tensor, origin: Tensor, lane: int | None) -> bool:
    """Move t's blocks (nnz, ...) in place, each from its origin (nnz,) int32, zeros for -1; False where no kernel can.

    lane: every run of so many blocks stays within itself, as a block row of an even pattern does; None: all may move.
    Origins ascend, but for those that are -1.
    """
    if not t.is_cuda or not t.is_contiguous():
        return False
    from .move_kernel import fits, move_blocks_on_gpu

    if not fits(t):
        return False
    move_blocks_on_gpu(t, origin, lane)
    return True


REGROWTH = register(Regrowth())
BLOCK_MOVES = register(BlockMoves())
