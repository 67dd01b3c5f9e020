"""Kernel families of the exact top k of rows of scores, of an indexer's scores, and of sums of its heads."""

from cute_kernels.arch import arch_named
from cute_kernels.runtime.fake import fake_stream, fake_tensor
from cute_kernels.runtime.families import Family, register

from . import score_config, sums
from .config import CAPACITIES, VECTOR, TopFacts, facts_for
from .score_config import ScoreFacts
from .sums import SumFacts


class Top(Family):
    """Exact top k of rows of scores, as lists of blocks."""

    name = "top blocks"

    def entry(self, facts: TopFacts):
        from .kernel import SelectTop
        from .warp_kernel import SelectTopByWarps

        return (SelectTop if facts.capacity else SelectTopByWarps)(facts)

    def arguments(self, facts: TopFacts) -> tuple:
        from cutlass import Int32

        scores, out = fake_tensor("float32", 4, 3, VECTOR), fake_tensor("int32", 4, 3, 1)
        return scores, out, *(Int32(1) for _ in range(7)), fake_stream()

    def unsupported(self, facts: TopFacts) -> str:
        spec = arch_named(facts.arch)
        if facts.smem_bytes > spec.smem:
            need = f"lists of {facts.longest} blocks need {facts.smem_bytes} bytes of shared memory"
            return f"{need}, {spec.name} has {spec.smem}; use a larger block_size and a smaller top"
        return ""

    def catalogue(self, arch: str, quick: bool = False) -> list[TopFacts]:
        """Each kernel; `quick`: those of models."""
        target = arch_named(arch).target
        calls = [(32768, 512), (1024, 16)]
        if not quick:
            calls += [(32768, TopFacts(target, capacity).longest) for capacity in CAPACITIES[1:]]
            calls += [(256, 16), (512, 16), (2048, 16)]
        found = [facts_for(target, *call) for call in calls]
        return [facts for facts in found if facts is not None and not self.unsupported(facts)]

    def describe(self, facts: TopFacts) -> dict[str, str]:
        return {
            "configuration": f"{facts.threads} threads" if facts.capacity else f"{facts.values} scores per lane",
            "problem": f"up to {facts.longest} blocks",
            "operands": "float32",
        }


class Scores(Family):
    """Scores of an indexer, and their maxima over KV blocks, by WGMMA."""

    name = "block scores"

    def entry(self, facts: ScoreFacts):
        from .kernel_scores import BlockScores

        return BlockScores(facts)

    def arguments(self, facts: ScoreFacts) -> tuple:
        from cutlass import Int32

        q, k = (fake_tensor(facts.dtype, 4, 3, 8) for _ in range(2))
        return q, k, fake_tensor("float32", 3, 2, VECTOR), *(Int32(1) for _ in range(3)), fake_stream()

    def unsupported(self, facts: ScoreFacts) -> str:
        return score_config.reason_against(facts)

    def tensor_core(self, facts: ScoreFacts) -> str:
        return "HGMMA"

    def warp_specialised(self, facts: ScoreFacts) -> bool:
        return True

    def named_barriers(self, facts: ScoreFacts) -> tuple[str, dict[int, int]]:
        return "forward", {}  # none, and the mbarriers of attention's warps

    def overlaps_wgmmas(self, facts: ScoreFacts) -> bool:
        return facts.relu and facts.heads > 1

    def catalogue(self, arch: str, quick: bool = False) -> list[ScoreFacts]:
        """Indexers of models, and one kernel of each other kind."""
        target = arch_named(arch).target
        qsa, msa = ("bfloat16", 128, 4, True, 1, False), ("bfloat16", 128, 1, False, 128, True)
        nsa, others = ("bfloat16", 128, 2, False, 1, False), [("float16", 64, 8, True, 1, False)]
        others += [("bfloat16", 128, 1, True, pool, causal) for pool, causal in ((4, True), (16, False), (64, True))]
        found = [ScoreFacts(target, *terms) for terms in ([qsa, msa] if quick else [qsa, msa, nsa, *others])]
        return [facts for facts in found if not self.unsupported(facts)]

    def describe(self, facts: ScoreFacts) -> dict[str, str]:
        pool = "" if facts.pool == 1 else f"max of {facts.pool}" + (", causal" if facts.causal else "")
        return {
            "path": "sm_90",
            "configuration": f"{facts.stages} stages",
            "problem": f"D {facts.head_dim}, {facts.heads} heads",
            "operands": facts.dtype,
            "epilogue": " ".join(filter(None, ("relu" if facts.relu else "", pool))),
        }


class Sums(Family):
    """Sums of an indexer's heads, as two 16-bit numbers."""

    name = SumFacts.family

    def entry(self, facts: SumFacts):
        from .sum_kernel import SumHeads

        return SumHeads(facts)

    def arguments(self, facts: SumFacts) -> tuple:
        return *(fake_tensor(facts.dtype, 4, 3, sums.VECTOR) for _ in range(2)), fake_stream()

    def catalogue(self, arch: str, quick: bool = False) -> list[SumFacts]:
        """Indexers with heads of 128, and one kernel of each other kind."""
        calls = [("bfloat16", 128, 16)] if quick else [("bfloat16", 128, 16), ("float16", 64, 3), ("float16", 256, 8)]
        return [sums.facts_for(arch_named(arch).target, *call) for call in calls]

    def describe(self, facts: SumFacts) -> dict[str, str]:
        return {
            "configuration": f"{facts.lanes} threads per row, {facts.batch} loads",
            "problem": f"D {facts.lanes * sums.VECTOR}",
            "operands": facts.dtype,
        }


TOP = register(Top())
SCORES = register(Scores())
SUMS = register(Sums())
