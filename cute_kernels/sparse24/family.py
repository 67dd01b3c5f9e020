"""The family of GEMM kernels with a 2:4 sparse A, for cute_kernels.gemm with a Sparse24."""

from ..arch import ArchSpec, arch_named
from ..matmul import cost
from ..matmul.arguments import matrix, term_args
from ..matmul.config import BlockFacts, GemmFacts
from ..matmul.family import ProductFamily
from ..matmul.problem import Problem
from ..runtime.fake import fake_tensor
from ..runtime.families import register
from ..tile.element import BITS_16, Element
from . import config


class Sparse24Family(ProductFamily):
    """gemm with a Sparse24; `a` in its facts is the stored half. It has no `ops`: bundles do not contain its kernels,
    which are compiled on their first call."""

    name = config.Sparse24Config.family
    features = frozenset(("float8",))
    config = config.Sparse24Config
    structured = True

    def serves(self, block: BlockFacts | None) -> bool:
        return False

    def serves_problem(self, problem: Problem) -> bool:
        return problem.structured and problem.block is None

    def candidates(self, path: str, block: BlockFacts | None, spec: ArchSpec, element: Element = BITS_16) -> list:
        return (config.candidates if path == "sm_90" else config.candidates_sm80)(spec, element)

    def cost(self, cfg, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        return config.clocks(cfg, problem, sms, l2_bytes_per_clock)

    def unsupported(self, facts: GemmFacts) -> str:
        return config.unsupported(facts)

    def entry(self, facts: GemmFacts):
        from .product import Sparse24Gemm

        return Sparse24Gemm(facts)

    def arguments(self, facts: GemmFacts) -> tuple:
        """Fakes of all arguments of product.Sparse24Gemm."""
        a, b, d = (matrix(facts, operand) for operand in range(3))
        return a, fake_tensor("int32", 3, 2, 4), b, d, *term_args(facts)

    def judge(self, facts: GemmFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        return config.judge(facts, resources, problems)

    def describe(self, facts: GemmFacts) -> dict[str, str]:
        return super().describe(facts) | {"problem": "2:4"}

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        spec = arch_named(arch)
        made = [*config.kernels(self, spec, BITS_16, quick), *config.float8_kernels(self, spec, quick)]
        found = dict.fromkeys(made)
        return [facts for facts in found if not self.unsupported(facts)]


SPARSE24 = register(Sparse24Family())
