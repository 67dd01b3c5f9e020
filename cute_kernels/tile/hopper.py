"""What kernels of WGMMA are made of: swizzled rings in shared memory, TMA, products."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

WARPGROUP = 128
ALIGN = 1024  # bytes; what a 128-byte swizzle atom needs


def smem_layout(dtype, rows: int, cols: int, stages: int, row_major: bool):
    """A swizzled ring (rows, cols, PIPE); the contiguous mode gets the widest swizzle it fills."""
    kinds = warpgroup.SmemLayoutAtomKind
    width = (cols if row_major else rows) * dtype.width // 8
    name = next(f"SW{span}" for span in (128, 64, 32) if width % span == 0)
    atom = warpgroup.make_smem_layout_atom(getattr(kinds, f"{'K' if row_major else 'MN'}_{name}"), dtype)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2) if row_major else (1, 0, 2))
