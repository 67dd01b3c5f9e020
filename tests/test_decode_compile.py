"""Decoding kernels compile without spills, without WGMMAs that the compiler serialised, and wait before they load.

Where they are compiled: see `outcome_of` in conftest.py.
"""

import re

import pytest

from attention.decode.choose import pick
from attention.decode.compile import compile_decode
from attention.forward.choose import HEAD_DIMS
from attention.forward.config import DecodeFacts, WindowKind
from cute_kernels.arch import ARCHS
from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import cubin_of

BOTH = WindowKind(left=True, right=True)
ALL = {"seqlens": True, "page_size": 16, "split": True, "lse": True, "softcap": True, "window": BOTH}
SM_90_CASES = [
    *((d, d, {"split": True}) for d in HEAD_DIMS),
    *((d, d, ALL) for d in HEAD_DIMS),
    *((d, d, {"seqlens": True, "page_size": 64, "lse": True}) for d in HEAD_DIMS),
    (128, 128, {"window": WindowKind(right=True), "lse": True}),
    (128, 128, {"seqlens": True, "split": True, "lse": True, "window": WindowKind(right=True)}),
    (192, 128, {"seqlens": True, "page_size": 256, "split": True, "dtype": "float16"}),
    (64, 256, {"seqlens": True, "window": BOTH}),
]
GLOBAL = set("LD LDG LDGSTS ST STG ATOM ATOMG RED REDG UTMALDG UTMASTG UBLKCP UTMAPF UBLKPF CCTL".split())
# With pages and head dimension 256 a few addresses are spilled.
SM_80_CASES = [
    *((d, d, ALL | {"page_size": 16 if d < 256 else 0}) for d in HEAD_DIMS),
    (128, 128, {"seqlens": True, "split": True, "lse": True}),
]


def entries():
    for d, dv, terms in SM_90_CASES:
        yield facts_of("sm_90", "sm_90", d, dv, terms)
    for arch in ("sm_80", "sm_89", "sm_90"):
        for d, dv, terms in SM_80_CASES:
            yield facts_of(arch, "sm_80", d, dv, terms)


def facts_of(arch, path, d, dv, terms) -> DecodeFacts:
    return pick(DecodeFacts(ARCHS[arch].target, path, None, head_dim=d, head_dim_v=dv, **terms))


def inspected(facts: DecodeFacts) -> tuple:
    """(resources, dynamic shared memory, problems) of a kernel."""
    built = compile_decode(facts, keep_cubin=True)
    cubin = cubin_of(built.compiled)
    resources = inspect.resources(cubin, facts.arch)
    smem = {"dynamic_smem": built.metadata["smem"], "smem_limit": facts.spec.smem}
    tensor_core = "HGMMA" if facts.path == "sm_90" else "HMMA"
    # sm_90's consumers are one warpgroup: there are registers enough without setmaxnreg.
    problems = inspect.problems(resources, tensor_core=tensor_core, warp_specialised=False, **smem)
    return resources, built.metadata["smem"], problems + (early_problems(cubin) if facts.path == "sm_90" else [])


def early_problems(cubin: bytes) -> list[str]:
    """Where one of the kernels does not wait for the kernel before it first of all, or does not let the next start."""
    found = []
    for kernel in re.split(r"(?=\.section\s+\.text)", inspect.disassemble(cubin))[1:]:
        ops = [op.partition(".")[0] for op in inspect.instructions(kernel)]
        before = ops[: ops.index("ACQBULK")] if "ACQBULK" in ops else ops
        if GLOBAL & set(before) or ops.count("ACQBULK") != 1 or not GLOBAL & set(ops) or "PREEXIT" not in ops:
            found.append(f"before ACQBULK: {before}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("facts", entries(), ids=str)
def test_decode_kernel(facts, outcome_of):
    outcome = outcome_of(inspected, facts)
    assert not outcome.error
    resources, smem, problems = outcome.value
    assert problems == []
    if facts.path == "sm_90":
        assert resources.utmaldg >= 3 * facts.config.tile_n // facts.box
        assert resources.wgmma_waits < resources.wgmmas / 4
        assert facts.config.ctas == (2 if max(facts.head_dim, facts.head_dim_v) <= 128 else 1)
        # What an SM has, and what it takes of shared memory itself; one of its four parts has two of a CTA's five warps
        # or, of two CTAs, three.
        assert facts.config.ctas * (smem + 1024) <= 233_472
        assert (1 + facts.config.ctas) * 32 * (-(-resources.registers // 8) * 8) <= 16_384
