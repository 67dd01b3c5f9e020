"""Every attention configuration compiles for every architecture, without spills and with its tensor-core instruction.

Where they are compiled: see `outcome_of` in conftest.py.
"""

from dataclasses import replace

import pytest

from attention.config import BandKind, FlashFacts
from attention.heuristics import HEAD_DIMS, Extents, candidates_sm80, candidates_sm90, pick
from attention.runtime import compile_flash
from cute_kernels.arch import ARCHS
from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import cubin_of

EXTENTS = Extents(256, 4096, 4096, None, None, 132)

# (band, softcap, lse): nothing, causal, and everything, without and with LSE
FEATURES = (
    (BandKind(), False, False),
    (BandKind(right=True), False, True),
    (BandKind(left=True, right=True), True, False),
    (BandKind(left=True, right=True), True, True),
)


def configurations(spec):
    """The first candidate of sm_90 and of sm_80 with each set of features, the others with LSE; other GPUs' picks."""
    for path in ("sm_80", "sm_90") if spec.path == "sm_90" else ("sm_80",):
        for dim in HEAD_DIMS:
            for band, softcap, lse in FEATURES if path == spec.name else FEATURES[-1:]:
                facts = FlashFacts(spec.target, path, None, "bfloat16", dim, dim, band, softcap, lse)
                for config in candidates(facts, spec)[: None if facts.lse and path == spec.name else 1]:
                    dynamic = path == "sm_90" and (band.left or band.right)
                    yield replace(facts, config=replace(config, dynamic=dynamic))
                if path == spec.name:
                    yield pick(replace(facts, packed=True), EXTENTS)
        yield pick(FlashFacts(spec.target, path, None, "float16", 192, 128), EXTENTS)


def candidates(facts: FlashFacts, spec) -> list:
    if facts.path == "sm_90":
        return [config for config, _ in candidates_sm90(facts, EXTENTS)]
    return candidates_sm80(spec, facts.head_dim, facts.head_dim_v, facts.lse)


def name_of(f: FlashFacts) -> str:
    switches = (("left", f.band.left), ("right", f.band.right), ("softcap", f.softcap), ("packed", f.packed))
    more = [text for text, there in switches if there]
    return f"{f.arch}: {f.path} {f.dtype} D {f.head_dim} Dv {f.head_dim_v} {f.config} {' '.join(more)}".rstrip()


def entries():
    for spec in ARCHS.values():
        for facts in configurations(spec):
            yield pytest.param(facts, id=name_of(facts), marks=getattr(pytest.mark, spec.name))


def inspected(facts: FlashFacts) -> tuple:
    """(resources, problems) of a kernel."""
    built = compile_flash(facts, keep_cubin=True)
    resources = inspect.resources(cubin_of(built.compiled), facts.arch)
    found = inspect.problems(
        resources,
        tensor_core="HGMMA" if facts.path == "sm_90" else "HMMA",
        dynamic_smem=built.metadata["smem"],
        smem_limit=facts.spec.smem,
        warp_specialised=facts.path == "sm_90",
    )
    return resources, found


@pytest.mark.slow
@pytest.mark.parametrize("facts", entries())
def test_flash_kernel(facts, outcome_of):
    outcome = outcome_of(inspected, facts)
    assert not outcome.error
    resources, problems = outcome.value
    assert problems == []
    assert resources.utmaldg >= 3 if facts.path == "sm_90" else resources.ldgsts >= 6
