"""What kernels of WGMMA are made of: swizzled rings in shared memory, TMA, products."""

from collections.abc import Callable

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

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
