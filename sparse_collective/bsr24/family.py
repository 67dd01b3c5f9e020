"""The family of block-sparse GEMM kernels with 2:4 sparse blocks, for bsr_matmul and bsr_linear with a Bsr24."""

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.matmul import cost
from cute_kernels.matmul.catalogue import buildable
from cute_kernels.matmul.config import BlockFacts, GemmFacts
from cute_kernels.matmul.problem import Problem
from cute_kernels.runtime.fake import fake_tensor
from cute_kernels.runtime.families import register
from cute_kernels.sparse24.config import judge
from cute_kernels.sparse24.format import KEPT
from cute_kernels.tile.element import BITS_16, Element

from ..alignment import aligned
from ..bsr_gemm.arguments import bsr_args
from ..bsr_gemm.family import BsrFamily, in_step
from . import config


class Bsr24Family(BsrFamily):
    """GEMM with a Bsr24; `block` in its facts is the whole block, of which values hold half."""

    name = config.Bsr24Config.family
    features = frozenset(("float8",))
    config = config.Bsr24Config
    ops = ()  # bundles do not contain its kernels, which are compiled on their first call
    structured = True

    def candidates(self, path: str, block: BlockFacts, spec: ArchSpec, element: Element = BITS_16) -> list:
        return config.candidates_of(path, block, spec, element)

    def cost(self, cfg, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        return config.clocks(cfg, problem, sms, l2_bytes_per_clock)

    def grid(self, cfg, problem: Problem, sms: int) -> tuple[int, int]:
        group = cost.raster_group(cfg, problem)
        return group, in_step(cfg, cost.row_tiles(cfg, problem.extents, problem.block), group, sms)

    def unsupported(self, facts: GemmFacts) -> str:
        return config.unsupported(facts)

    def entry(self, facts: GemmFacts):
        from .gemm import Bsr24Gemm

        return Bsr24Gemm(facts)

    def judge(self, facts: GemmFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        return judge(facts, resources, problems)

    def tables(self, facts: GemmFacts) -> tuple:
        *found, _ = super().tables(facts)
        rank = 5 if facts.block.batch == "values" else 4
        return *found, fake_tensor("int32", rank, rank - 1, 4)

    def arguments(self, facts: GemmFacts) -> tuple:
        return bsr_args(facts, self.tables(facts), KEPT)

    def pattern(self, facts: GemmFacts, W, order, groups) -> tuple:
        """Metadata in the place of a transposed view's numbers."""
        metadata = W.metadata
        if W.nnz == 0:  # a tensor without elements has no address
            outer = metadata.shape[:-4]
            return W.col_indices.new_zeros(1), order, groups, metadata.new_zeros(*outer, 1, *metadata.shape[-3:])
        return W.col_indices, order, groups, aligned(metadata)

    def describe(self, facts: GemmFacts) -> dict[str, str]:
        found = super().describe(facts)
        return found | {"problem": f"{found['problem']} 2:4"}

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        spec = arch_named(arch)
        found = [*config.kernels(self, spec, BITS_16, quick), *config.float8_kernels(self, spec, quick)]
        return buildable(self, found)


BSR24 = register(Bsr24Family())
