"""The kernel that adds the parts of dK and dV that work items of some query heads stored (items.py), in their order.

A thread adds eight columns of a row, loaded 16 bytes at a time. For each element the kernel reads 4 bytes per part and
writes one of dK or dV, so DRAM bandwidth bounds it.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import make_ptr
from cutlass.cute.typing import AddressSpace

from ..forward.problem import one_item
from .config import FP32, CombineFacts, overlaps

THREADS = 128
VECTOR = 8  # columns of a thread


class CombineKv:
    """Compiles to one kernel per `CombineFacts`."""

    def __init__(self, facts: CombineFacts):
        self.facts = facts

    @cute.jit
    def __call__(
        self,
        k_parts: cute.Tensor,  # (B, items, Sk, D) FP32, packed (total_k, items, D)
        v_parts: cute.Tensor,  # (B, items, Sk, Dv) FP32, packed (total_k, items, Dv)
        mdK: cute.Tensor,  # (B, Hkv, Sk, D), packed (total_k, Hkv, D)
        mdV: cute.Tensor,
        stream: cuda.CUstream,
    ):
        tensors = [k_parts, mdK, v_parts, mdV]
        if const_expr(self.facts.packed):
            tensors = [one_item(t, (1, 0, 2)) for t in tensors]
        batch, heads, rows, _ = tensors[1].shape
        columns = const_expr(max(self.facts.head_dim, self.facts.head_dim_v))
        self.kernel(*tensors).launch(
            grid=(cute.ceil_div(rows * (columns // VECTOR), THREADS), heads, batch), block=(THREADS, 1, 1),
            stream=stream, use_pdl=overlaps(self.facts.arch),
        )  # fmt: skip

    @cute.kernel
    def kernel(self, k_parts: cute.Tensor, mdK: cute.Tensor, v_parts: cute.Tensor, mdV: cute.Tensor):
        if const_expr(overlaps(self.facts.arch)):
            cute.arch.griddepcontrol_wait()  # for the parts
        first, h, b = cute.arch.block_idx()
        index = first * THREADS + cute.arch.thread_idx()[0]
        self.add(k_parts, mdK, b, h, index)
        self.add(v_parts, mdV, b, h, index)

    @cute.jit
    def add(self, parts: cute.Tensor, gradient: cute.Tensor, b: Int32, h: Int32, index: Int32):
        """Write the index-th VECTOR columns of a head's gradient."""
        vectors = const_expr(gradient.shape[3] // VECTOR)
        row, column = index // vectors, index % vectors * VECTOR
        count = parts.shape[1] // gradient.shape[1]
        if row < gradient.shape[2]:
            total = self.load(parts, b, h * count, row, column)
            for i in cutlass.range(1, count, unroll=1):
                total.store(total.load() + self.load(parts, b, h * count + i, row, column).load())
            rounded = cute.make_rmem_tensor(VECTOR, gradient.element_type)
            rounded.store(total.load().to(gradient.element_type))
            width = const_expr(gradient.element_type.width // 8)
            at = self.address(gradient, b, h, row, column, width)
            place = make_ptr(gradient.element_type, at, AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(rounded, cute.make_tensor(place, cute.make_layout(VECTOR)))

    def load(self, parts: cute.Tensor, b, item, row, column) -> cute.Tensor:
        at, values = self.address(parts, b, item, row, column, FP32), cute.make_rmem_tensor(VECTOR, Float32)
        place = make_ptr(Float32, at, AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(VECTOR)), values)
        return values

    def address(self, t: cute.Tensor, b, h, row, column, width: int):
        offset = sum(Int64(i) * s for i, s in zip((b, h, row), t.stride[:3], strict=True)) + column
        return t.iterator.toint() + offset * width
