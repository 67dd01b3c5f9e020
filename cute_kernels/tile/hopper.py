"""Building blocks of WGMMA kernels: swizzled rings in shared memory, TMA, WGMMA."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.atom import make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup.mma import MmaOp, MmaTraits
from cutlass.cutlass_dsl import select_

from .element import MMA_K_BYTES, SWIZZLES

WARPGROUP = 128
ALIGN = 1024  # bytes; required by a 128-byte swizzle atom


def smem_layout(dtype, rows: int, cols: int, stages: int, row_major: bool, boxes: int = 1):
    """Layout of a swizzled ring (rows, cols, PIPE) with the widest swizzle that the contiguous mode fills.

    boxes: number of parts of the rows that are loaded separately; each is contiguous in shared memory.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    width = (cols if row_major else rows // boxes) * dtype.width // 8
    name = next(f"SW{span}" for span in SWIZZLES if width % span == 0)
    atom = warpgroup.make_smem_layout_atom(getattr(kinds, f"{'K' if row_major else 'MN'}_{name}"), dtype)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2) if row_major else (1, 0, 2))


class MmaTF32Op(MmaOp):
    """TF32 WGMMA of 64 rows and K = 8: FP32 operands, whose lower 13 bits are ignored, and FP32 accumulators.

    Both operands are contiguous along K. CuTe DSL has the type of such an atom, but no operation that creates it.
    """

    descriptive_name = "warpgroup TF32 MMA Operation"

    def __init__(self, columns: int, a_source: warpgroup.OperandSource):
        k_major = cute.nvgpu.OperandMajorMode.K
        operand, shape = cutlass.TFloat32, (64, columns, MMA_K_BYTES * 8 // cutlass.TFloat32.width)
        super().__init__(operand, operand, cutlass.Float32, shape, a_source, k_major, k_major)

    def _make_trait(self, *, loc=None, ip=None, **kwargs) -> MmaTraits:
        kind = cute_nvgpu.MmaAtomSM90Type.get(
            _pack_shape(self.shape_mnk, loc=loc, ip=ip).type.attribute,
            self.a_major_mode._to_ir(),
            self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type,
            self.b_dtype.mlir_type,
            self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )
        return MmaTraits(make_atom(kind, [Boolean(False).ir_value(loc=loc, ip=ip)], loc=loc, ip=ip))


class RingState:
    """Pipeline state in one of several rings, whose stages are numbered consecutively: the part of
    cutlass.pipeline.PipelineState that pipelines and mainloops use."""

    def __init__(self, stages: int, first: Int32, index: Int32, phase: Int32):
        self.stages, self.first, self.index, self.phase = stages, first, index, phase

    @classmethod
    def begin(cls, stages: int, first: Int32, produces: bool):
        """State at the first stage of a ring; for a producer all stages are free."""
        return cls(stages, Int32(first), Int32(first), Int32(1 if produces else 0))

    def clone(self):
        return RingState(self.stages, self.first, self.index, self.phase)

    def advance(self, *, loc=None, ip=None) -> None:
        """Advance to the next stage."""
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
    """Start acc += A B, or acc = A B with `clear`, as one group of WGMMAs; warpgroup.wait_group waits for it.

    fragments: MMA step k -> (A, B), with shapes (MMA, MMA_M) and (MMA, MMA_N), both or B alone in shared memory.
    add: replaces `clear` by its opposite, which may be a Boolean of the kernel.
    """
    warpgroup.fence()
    # A new atom: ACCUMULATE is a field of the atom, and that of tiled_mma must not change inside a loop.
    step = cute.make_mma_atom(tiled_mma.op)
    for k in range(steps):
        step.set(warpgroup.Field.ACCUMULATE, k > 0 or (not clear if add is None else add))
        cute.gemm(step, acc, *fragments(k), acc)
    warpgroup.commit_group()
