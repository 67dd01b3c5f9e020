"""The kernel that makes the index of a transposed view, as a family."""

from collections.abc import Callable

import torch

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register
from cute_kernels.runtime.torch_compat import in_graph_trace

from .tables import TransposedFacts, TransposedIndex, transposed_index


class Transposed(Family):
    """The kernel that makes the index of a transposed view."""

    name = "transposed index"
    ops = ("bsr_matmul", "bsr_linear")

    def entry(self, facts: TransposedFacts):
        from .kernel import TransposedKernel

        return TransposedKernel()

    def arguments(self, facts: TransposedFacts) -> tuple:
        from cutlass import Int32

        index = facts.index_dtype
        tensors = [fake_tensor(index, rank, rank - 1, 1) for rank in (2, 1, 2, 1)]
        return *tensors, fake_tensor("int32", 1, 0, 1), Int32(1), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[TransposedFacts]:
        return [TransposedFacts(arch_named(arch).target, index) for index in ("int32", "int64")[: 1 if quick else 2]]

    def describe(self, facts: TransposedFacts) -> dict[str, str]:
        return {"configuration": "transposed index", "operands": facts.index_dtype}


def index_of(crow: torch.Tensor, col: torch.Tensor, cols: int) -> tuple[TransposedIndex, Callable | None]:
    """tables.transposed_index of a checked pattern; on a GPU by one kernel, and beyond its limits by torch.

    Returns also how the kernel makes it anew in the same tensors, of a BsrMatrix of other indices; None of torch's.
    """
    # Of another type are the tensors without memory that torch.compile and torch.export trace with.
    if crow.is_cuda and type(col) is torch.Tensor and not (torch.compiler.is_compiling() or in_graph_trace()):
        from .kernel import fits, transposed_index_on_gpu

        if fits(crow, len(col), cols):
            return transposed_index_on_gpu(crow, col, cols)
    return transposed_index(crow, col, cols), None


TRANSPOSED = register(Transposed())
