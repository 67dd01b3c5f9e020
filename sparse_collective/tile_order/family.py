"""The kernel that orders work tiles, as a family."""

from collections.abc import Callable

import torch

from cute_kernels.arch import arch_named
from cute_kernels.runtime.derived import Again
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .config import OrderFacts
from .reference import Tiles, work_order


class TileOrder(Family):
    """The kernel that orders work tiles."""

    name = "tile order"
    ops = ("bsr_matmul", "bsr_linear", "bsr_gated_linear")

    def entry(self, facts: OrderFacts):
        from .kernel import TileOrderKernel

        return TileOrderKernel(facts)

    def arguments(self, facts: OrderFacts) -> tuple:
        from cutlass import Int32

        tensors = fake_tensor(facts.index_dtype, 1, 0, 1), fake_tensor("int32", 2, 1, 2)
        return *tensors, *[Int32(1)] * 7, fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[OrderFacts]:
        target, indices = arch_named(arch).target, ("int32",) if quick else ("int32", "int64")
        return [OrderFacts(target, index, to_workers) for index in indices for to_workers in (False, True)]

    def describe(self, facts: OrderFacts) -> dict[str, str]:
        return {
            "configuration": "tile order",
            "problem": "to workers" if facts.to_workers else "",
            "operands": facts.index_dtype,
        }


def order_of(W, tiles: Tiles, starts: Callable | None = None) -> torch.Tensor:
    """The order of work tiles of a BsrMatrix, made once; see work_order.

    starts: makes what stands for crow_indices where rows of tiles are not block rows. On a GPU one kernel makes the
    table, and torch that of problems beyond its limits (kernel.fits).
    """
    key = tiles, starts is not None
    known = W.known(key, rows_alone=starts is None)
    if known is not None:
        return known[0]

    def make() -> tuple[torch.Tensor] | Again:
        crow = W.crow_indices if starts is None else starts()
        if W.device.type == "cuda":
            from .kernel import fits, work_order_on_gpu

            if fits(len(crow) - 1, **tiles._asdict()):
                order, again = work_order_on_gpu(crow, **tiles._asdict())
                return (order,) if starts is not None else Again((order,), lambda W: again(W.crow_indices))
        return (work_order(crow, **tiles._asdict()),)

    return W.derived(key, make, rows_alone=starts is None)[0]


TILE_ORDER = register(TileOrder())
