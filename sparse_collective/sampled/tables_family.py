"""The kernel that makes the groups of boxes of sampled products, as a family."""

import torch

from cute_kernels.arch import arch_named
from cute_kernels.runtime.derived import Again
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from .tables import BoxFacts, box_groups, rows_of


class BoxGroups(Family):
    """The kernel that makes the groups of boxes of sampled products."""

    name = "box groups"
    ops = ("sddmm",)

    def entry(self, facts: BoxFacts):
        from .tables_kernel import BoxGroupsKernel

        return BoxGroupsKernel()

    def arguments(self, facts: BoxFacts) -> tuple:
        from cutlass import Int32

        tensors = fake_tensor(facts.index_dtype, 2, 1, 1), fake_tensor("int32", 2, 1, 1)
        return *tensors, *[Int32(1)] * 3, fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[BoxFacts]:
        return [BoxFacts(arch_named(arch).target, index) for index in ("int32", "int64")[: 1 if quick else 2]]

    def describe(self, facts: BoxFacts) -> dict[str, str]:
        return {"configuration": "box groups", "operands": facts.index_dtype}


def groups_of(W, parts: int, boxes: int) -> torch.Tensor:
    """box_groups of a BsrMatrix, made once; on a GPU by one kernel, and beyond its limits by torch."""
    key = "boxes", parts, boxes
    known = W.known(key, rows_alone=True)
    if known is not None:
        return known[0]

    def make() -> tuple[torch.Tensor] | Again:
        crow = W.crow_indices
        if W.device.type == "cuda":
            from .tables_kernel import box_groups_on_gpu, fits

            if fits((crow.shape[-1] - 1) * (1 if crow.dim() == 1 else len(crow)), W.nnz, parts, boxes):
                groups, again = box_groups_on_gpu(crow, W.nnz, parts, boxes)
                return Again((groups,), lambda W: again(W.crow_indices))
        return (box_groups(rows_of(W), W.nnz, parts, boxes),)

    return W.derived(key, make, rows_alone=True)[0]


BOX_GROUPS = register(BoxGroups())
