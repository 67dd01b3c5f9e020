"""Kernel family of backward with gathered KV tiles."""

from collections.abc import Iterator

from cute_kernels.arch import arch_named
from cute_kernels.runtime.families import Family, Request, register
from cute_kernels.tile.barriers import BACKWARD_ALL, BACKWARD_READ

from ...forward.family import short
from .arguments import gather_backward_args
from .config import BLOCK_SIZES, GROUPS, HEAD_DIMS, GatherBackwardFacts


class GatherBackward(Family):
    """Backward of selected_attention: a CTA has a query tile, gathers KV tiles, and adds to dK and dV."""

    name = GatherBackwardFacts.family

    def entry(self, facts: GatherBackwardFacts):
        from .kernel import GatherBackwardSm90

        return GatherBackwardSm90(facts)

    def arguments(self, facts: GatherBackwardFacts) -> tuple:
        return gather_backward_args(facts)

    def catalogue(self, arch: str, quick: bool = False) -> list[GatherBackwardFacts]:
        """Each head dimension and block size, causal; some in FP16, not causal, or with a gradient of LSE."""
        spec = arch_named(arch)
        if spec.path != "sm_90":
            return []
        if quick:
            return [GatherBackwardFacts(spec.target, head_dim=256)]
        found = [GatherBackwardFacts(spec.target, "bfloat16", d, n) for d in HEAD_DIMS for n in BLOCK_SIZES]
        others = [GatherBackwardFacts(spec.target, "float16", d, 4, False, True) for d in HEAD_DIMS]
        return found + others

    def bundle(self, op: str, request: Request) -> Iterator[GatherBackwardFacts]:
        return iter(())

    def tensor_core(self, facts: GatherBackwardFacts) -> str:
        return "HGMMA"

    def warp_specialised(self, facts: GatherBackwardFacts) -> bool:
        return True

    def named_barriers(self, facts: GatherBackwardFacts) -> tuple[str, dict[int, int]]:
        return "backward, shared columns", {BACKWARD_ALL: 1, BACKWARD_READ: GROUPS}

    def describe(self, facts: GatherBackwardFacts) -> dict[str, str]:
        features = f"gathered blocks of {facts.block_size}{' causal' * facts.causal}"
        return {
            "path": facts.path,
            "configuration": str(facts.config),
            "problem": f"dQ, dK, dV D {facts.head_dim}",
            "operands": short(facts.dtype),
            "epilogue": features + " of LSE, too" * facts.lse_gradient,
        }


GATHER_BACKWARD = register(GatherBackward())
