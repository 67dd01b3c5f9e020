"""The interface of a GEMM family to heuristics, planning and tools, and the dense family."""

import itertools
from collections.abc import Iterator
from typing import Any

from ..arch import ArchSpec, arch_named
from ..runtime.families import Family, Request, register
from ..tile.barriers import PRODUCT_GATE, PRODUCT_ORDER, PRODUCT_STORE
from ..tile.element import BITS_16, Element
from . import catalogue, cost, legality
from .arguments import dense_args
from .candidates import dense_sm80, dense_sm90
from .config import BlockFacts, EpilogueSpec, GemmConfig, GemmFacts
from .problem import Problem

FEATURES = frozenset(("float8", "float8 output", "float32", "float16 accumulator", "gate"))


def output_problems(facts: GemmFacts, resources) -> list[str]:
    """FP8 outputs that no F2F instruction converts; amax without the reduction of a warp, or the reduction without
    it."""
    codes, found = resources.opcodes, []
    if facts.narrow and not any(code.startswith("F2F") for code in codes):
        found.append(f"no F2F instruction converts the output to {facts.out_dtype}")
    if facts.epilogue.amax and "REDUX" not in codes:
        found.append("no REDUX: amax is not reduced in each warp")
    if facts.narrow and not facts.epilogue.amax and "REDUX" in codes:
        found.append("REDUX in a kernel without amax")
    return found


def wait_problems(facts: GemmFacts, resources) -> list[str]:
    """More than the last wait for all WGMMAs, in loops that need no other, or more WARPGROUP instructions than an
    ARRIVE and a DEPBAR per K-tile in two loops: the compiler serialized the WGMMAs."""
    fp16 = facts.acc_dtype == "float16"
    tf32 = facts.element.width == 4 and not facts.promoted and facts.block is None and facts.epilogue == EpilogueSpec()
    if facts.warp_specialised and (fp16 or tf32) and resources.wgmma_waits != 1:
        return [f"{resources.wgmma_waits} waits for all warpgroup products, of one: the compiler serialized them"]
    fences = resources.opcodes.get("WARPGROUP", 0)
    if facts.warp_specialised and fp16 and fences != (needed := 4 * len(facts.k_blocks)):
        return [f"{fences} WARPGROUP instructions, of {needed}: the compiler serialized the WGMMAs"]
    return []


class ProductFamily(Family):
    """A GEMM family: its facts are GemmFacts with a `config` of the family's own type.

    `features`: which of FEATURES its kernels have besides 16-bit operands and outputs, and FP32 accumulators.
    `orders`: True if its kernel takes a table with the order of its work tiles. `structured`: True if A is 2:4 sparse.
    """

    config: type = GemmConfig
    features: frozenset[str] = frozenset()
    orders = False
    structured = False

    def serves(self, block: BlockFacts | None) -> bool:
        """True if it has kernels for an A with such blocks; None is a dense A."""
        raise NotImplementedError

    def serves_problem(self, problem: Problem) -> bool:
        """True if it has kernels for this problem."""
        return problem.structured == self.structured and self.serves(problem.block)

    def candidates(self, path: str, block: Any, spec: ArchSpec, element: Element = BITS_16) -> list:
        """Configurations worth trying for operands of this element type; among equal costs the first one is taken."""
        raise NotImplementedError

    def cost(self, config, problem: Problem, sms: int, l2_bytes_per_clock: float = cost.L2_BYTES_PER_CLOCK) -> float:
        """Estimated clocks of the GEMM under a configuration."""
        return cost.cost(config, problem, sms, l2_bytes_per_clock)

    def grid(self, config, problem: Problem, sms: int) -> tuple[int, int]:
        """(width of a raster panel in cluster tiles, CTAs of a persistent kernel)."""
        return cost.raster_group(config, problem), cost.all_ctas(config, sms)

    def unsupported(self, facts: GemmFacts) -> str:
        return legality.gemm(facts)

    def tensor_core(self, facts: GemmFacts) -> str:
        return ("Q" if facts.element.width == 1 else "H") + ("GMMA" if facts.warp_specialised else "MMA")

    def warp_specialised(self, facts: GemmFacts) -> bool:
        return facts.warp_specialised

    def judge(self, facts: GemmFacts, cubin: bytes, resources, problems: list[str]) -> list[str]:
        """Add problems: FP8 operands are multiplied as such in each MMA step of a K-tile, promoted accumulators are
        added or scaled one by one, FP8 outputs are converted by F2F, and WGMMAs are not serialized."""
        found = problems + output_problems(facts, resources) + wait_problems(facts, resources)
        if not facts.promotes and (facts.element.width > 1 or facts.config.converts):
            return found
        cfg, codes, name = facts.config, resources.opcodes, self.tensor_core(facts)
        if facts.element.width == 1 and (wide := codes.get("HMMA", 0) + codes.get("HGMMA", 0)):
            found.append(f"{wide} 16-bit MMAs in a kernel for {facts.dtype}")
        if (products := codes.get(name, 0)) < max(facts.k_blocks):
            found.append(f"{products} {name} for {max(facts.k_blocks)} MMA steps per K-tile")
        if facts.promotes:
            scaled = facts.epilogue.scales_blocks or facts.block is not None and facts.block.scaled
            added = "FFMA" if scaled or facts.takes_turns else "FADD"  # double-buffered: partial sums times 1.0
            sums = cfg.tile_m * cfg.tile_n // (cfg.warps_m * cfg.warps_n * (128 if facts.warp_specialised else 32))
            # 1x128 and 128x128 scales: on sm_90 for each 128 of K, twice in the loop and once after it; on sm_89 for
            # each MMA step, of which a K-tile has two.
            times = 1 if not facts.epilogue.scales_blocks else 3 * cfg.tile_k // 128 if facts.warp_specialised else 2
            if codes.get(added, 0) < (least := times * sums):
                found.append(f"{codes.get(added, 0)} {added}, of at least {least}: not promoted to FP32")
        return found

    def named_barriers(self, facts: GemmFacts) -> tuple[str, dict[int, int]] | None:
        cfg = facts.config
        if not facts.warp_specialised:
            return None
        return "product", {
            PRODUCT_STORE: cfg.warps_m * cfg.warps_n * cfg.consumer_groups,
            PRODUCT_ORDER: 2 * (cfg.consumer_groups > cfg.rings),
            PRODUCT_GATE: 4 * facts.gate_apart,
        }

    def kernel(self, entry):
        return entry.kernel

    def dynamic_smem(self, entry) -> int:
        return entry.kernel.smem_bytes

    def describe(self, facts: GemmFacts) -> dict[str, str]:
        return catalogue.describe(facts)

    def bundle(self, op: str, request: Request) -> Iterator[GemmFacts]:
        """Facts of calls with aligned contiguous matrices: without an epilogue, with a bias, and with a bias and each
        activation.

        All configurations are included, since shapes decide between them; block-sparse ones with and without an order
        of work tiles. gemm's b may also be the transpose of a contiguous weight. The bias has the operands' dtype, one
        value per output feature. Not included, and compiled on their first call: batches that do not fold into rows,
        residuals, FP32 outputs, alpha, user epilogue functions, batches of block-sparse matrices, and the other kernels
        that training needs.
        """
        spec = arch_named(request.arch)
        blocks = [BlockFacts(*block, index) for block in request.blocks for index in request.index_dtypes]
        for dtype, block in itertools.product(request.dtypes, filter(self.serves, (None, *blocks))):
            yield from self.usual(op, spec, block, dtype)

    def usual(self, op: str, spec: ArchSpec, block: Any, dtype: str) -> Iterator[GemmFacts]:
        """Yield the facts of `bundle` for one kind of blocks and one dtype."""
        raise NotImplementedError


class Dense(ProductFamily):
    """The dense GEMM, cute_kernels.gemm."""

    name = "dense"
    features = FEATURES
    ops = ("gemm",)

    def serves(self, block: BlockFacts | None) -> bool:
        return block is None

    def candidates(self, path: str, block: Any, spec: ArchSpec, element: Element = BITS_16) -> list:
        return (dense_sm90 if path == "sm_90" else dense_sm80)(spec, element)

    def entry(self, facts: GemmFacts):
        from .dense import DenseGemm

        return DenseGemm(facts)

    def arguments(self, facts: GemmFacts) -> tuple:
        return dense_args(facts)

    def usual(self, op: str, spec: ArchSpec, block: Any, dtype: str) -> Iterator[GemmFacts]:
        for config in self.candidates(spec.path, None, spec):
            for epilogue in catalogue.epilogues_of("col", dtype):
                for b in "nk":
                    terms = {"majors": ("k", b, "n"), "epilogue": epilogue, "dtype": dtype, "out_dtype": dtype}
                    yield catalogue.dense(spec, spec.path, config, **terms)

    def catalogue(self, arch: str, quick: bool = False) -> list[GemmFacts]:
        made = [catalogue.dense_kernels, catalogue.float8_kernels, catalogue.fp16_sums_kernels]
        made += [catalogue.narrow_kernels, catalogue.tf32_kernels]
        return [facts for kernels in made for facts in kernels(self, arch, quick)]


DENSE = register(Dense())
