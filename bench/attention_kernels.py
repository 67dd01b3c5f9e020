"""What a compiler tells of attention's forward kernels without a GPU; products have cute_kernels.catalog for that."""

from collections.abc import Iterator

from attention.config import BandKind, FlashFacts
from attention.heuristics import HEAD_DIMS, Extents, pick
from attention.runtime import compile_flash
from cute_kernels.arch import ARCHS
from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import cubin_of
from cute_kernels.runtime.parallel import Report

EXTENTS = Extents(256, 4096, 4096, None, None, 132)  # for which a configuration is picked


def configurations(quick: bool) -> Iterator[FlashFacts]:
    """Each architecture's own path: head dimension 128, causal; all dimensions, without a mask, too, if not quick."""
    for spec in ARCHS.values():
        for dim in (128,) if quick else HEAD_DIMS:
            for causal in (True,) if quick else (True, False):
                facts = FlashFacts(spec.target, spec.path, None, "bfloat16", dim, dim, BandKind(right=causal), lse=True)
                yield pick(facts, EXTENTS)


def name_of(facts: FlashFacts) -> str:
    causal = " causal" if facts.band.right else ""
    return f"attention D{facts.head_dim}{causal} {facts.path} {facts.config}"


def inspect_kernel(facts: FlashFacts) -> Report:
    """Compile a kernel and read its machine code."""
    built = compile_flash(facts, keep_cubin=True)
    resources, smem = inspect.resources(cubin_of(built.compiled), facts.arch), int(built.metadata["smem"])
    sm90 = facts.path == "sm_90"
    problems = inspect.problems(
        resources,
        tensor_core="HGMMA" if sm90 else "HMMA",
        dynamic_smem=smem,
        smem_limit=facts.spec.smem,
        warp_specialised=sm90,
    )
    return Report(resources, smem, tuple(problems))
