"""Kernel selection: the supported candidate with the lowest estimated cost."""

from dataclasses import replace

from ..arch import ArchSpec
from ..operand import Layout
from ..runtime.families import families, family_of
from ..tile.element import element_of
from .config import GemmConfig, GemmFacts
from .cost import LAST_RESORT
from .family import ProductFamily
from .problem import Problem


def choose(problem: Problem, spec: ArchSpec, sms: int, forced: str | None) -> tuple[GemmFacts, int, int, list[str]]:
    """Select the kernel for a problem: (facts, raster group, maximal number of CTAs, notes on the selection).

    Unless `forced` names a path, the architecture's own path comes first; Hopper falls back to the sm_80 kernels and
    notes the reason.
    """
    notes = []
    if problem.acc_dtype == "float16":
        problem = replace(problem, mma_rate=spec.fp16_sums_rate)
    order = [forced] if forced else ["sm_90", "sm_80"] if spec.path == "sm_90" else ["sm_80"]
    for path in order:
        reasons, best = [], None
        for family, config in candidates_for(path, problem, spec):
            facts = facts_for(problem, path, spec, config)
            if reason := family.unsupported(facts):
                reasons.append(reason)
                continue
            clocks = family.cost(config, problem, sms)
            if best is None or clocks < best[0]:
                best = (clocks, facts)
        if best:
            clocks, facts = best
            if clocks >= LAST_RESORT:
                notes.append(f"slow: only the {facts.family} kernels support this call, and not tuned for its shape")
            if problem.use_fast_accum and facts.converts:
                notes.append("use_fast_accum has no effect: this kernel converts operands to FP16, accumulates in FP32")
            if problem.acc_dtype != facts.acc_dtype:
                notes.append(f"accumulation_dtype has no effect: the {facts.family} kernels accumulate in FP32")
            if facts.warp_specialised and not facts.tma_store:
                notes.append(
                    "store: element by element, since D's address, strides or contiguous extent are not multiples of "
                    "16 bytes"
                )
            group, ctas = family_of(facts).grid(facts.config, problem, sms)
            return facts, group, ctas, notes
        notes.append(f"not on path {path}: {reasons[0] if reasons else 'it has no kernels'}")
    raise ValueError("no kernel supports this call: " + "; ".join(notes))


def candidates_for(path: str, problem: Problem, spec: ArchSpec) -> list[tuple[ProductFamily, object]]:
    """(family, configuration) of all families that support the problem, in registration order."""
    serving = (family for family in families(ProductFamily) if family.serves_problem(problem))
    return [
        (family, config)
        for family in serving
        for config in family.candidates(path, problem.block, spec, problem.element)
    ]


def store_align(d: Layout, out_dtype: str) -> int:
    """GemmFacts' alignment of D on the sm_90 path, in elements: 16 bytes if it may be stored by TMA, else 1.

    TMA writes whole granules of 16 bytes. If the contiguous extent ended inside a granule, TMA would overwrite memory
    behind each row (neighboring columns if D is a slice), so the extent must be a multiple of 16 bytes, too.
    """
    granule = element_of(out_dtype).vector
    return d.vector if d.vector % granule == 0 else 1


def facts_for(problem: Problem, name: str, spec: ArchSpec, config) -> GemmFacts:
    a, b, d = problem.layouts
    if name == "sm_90":  # TMA loads clip a contiguous extent of any length
        aligns = a.align, b.align, store_align(d, problem.out_dtype)
    else:  # cp.async copies whole vectors, so the extent must be aligned, too
        aligns = a.vector, b.vector, d.vector
    if problem.block and problem.block.operand == "a":
        aligns = (problem.element.vector, *aligns[1:])
    return GemmFacts(
        arch=spec.target,
        path=name,
        config=config,
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        majors=problem.majors,
        aligns=aligns,
        ranks=problem.ranks,
        transposed=problem.transposed,
        block=problem.block,
        epilogue=problem.epilogue,
        use_fast_accum=problem.use_fast_accum and not config.converts,
        promoted=problem.promoted,
        source=problem.source,
        acc_dtype=problem.acc_dtype if type(config) is GemmConfig else "float32",
    )
