"""What kernels of WGMMA are made of: swizzled rings in shared memory, TMA, products."""

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from .element import SWIZZLES

WARPGROUP = 128
ALIGN = 1024  # bytes; what a 128-byte swizzle atom needs


def smem_layout(dtype, rows: int, cols: int, stages: int, row_major: bool, boxes: int = 1):
    """A swizzled ring (rows, cols, PIPE); the contiguous mode gets the widest swizzle it fills.

    With `boxes` each of so many parts of the rows, loaded one by one, lies in one piece.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    width = (cols if row_major else rows // boxes) * dtype.width // 8
    name = next(f"SW{span}" for span in SWIZZLES if width % span == 0)
    atom = warpgroup.make_smem_layout_atom(getattr(kinds, f"{'K' if row_major else 'MN'}_{name}"), dtype)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2) if row_major else (1, 0, 2))


class RingState:
    """Where a user of one of several rings is, whose stages are numbered one ring after the other: the part of
    cutlass.pipeline.PipelineState that pipelines and mainloops use."""

    def __init__(self, stages: int, first: Int32, index: Int32, phase: Int32):
        self.stages, self.first, self.index, self.phase = stages, first, index, phase

    @classmethod
    def begin(cls, stages: int, first: Int32, produces: bool):
        """At the stage `first` of a ring of so many; to a producer all are free."""
        return cls(stages, Int32(first), Int32(first), Int32(1 if produces else 0))

    def clone(self):
        return RingState(self.stages, self.first, self.index, self.phase)

    def advance(self, *, loc=None, ip=None) -> None:
        """To the next stage."""
        following = self.index + 1
        wraps = following == self.first + self.stages
        self.index = select_(wraps, self.first, following)
        self.phase = select_(wraps, self.phase ^ 1, self.phase)

    def __extract_mlir_values__(self) -> list:
        return [value.ir_value() for value in (self.first, self.index, self.phase)]

    def __new_from_mlir_values__(self, values: list):
        return RingState(self.stages, *(Int32(value) for value in values))


def start_product(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, fragments: Callable, steps: int, clear: bool = False, add=None
) -> None:
    """Start acc += A B, or acc = A B with `clear`, as one group of WGMMAs; warpgroup.wait_group tells when it is done.

    fragments: MMA step k -> (A, B), of shapes (MMA, MMA_M) and (MMA, MMA_N), both or B alone in shared memory.
    add: in the place of `clear` its opposite, which may be a Boolean of the kernel.
    """
    warpgroup.fence()
    # A fresh atom: whether it accumulates is a field of it, and one of the tiled_mma must not change inside of a loop.
    step = cute.make_mma_atom(tiled_mma.op)
    for k in range(steps):
        step.set(warpgroup.Field.ACCUMULATE, k > 0 or (not clear if add is None else add))
        cute.gemm(step, acc, *fragments(k), acc)
    warpgroup.commit_group()
