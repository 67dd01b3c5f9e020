"""Every attention configuration compiles for every architecture, without spills and with its tensor-core instruction.

Where they are compiled: see `outcome_of` in conftest.py.
"""

from dataclasses import replace

import pytest
import torch

from attention.forward.choose import HEAD_DIMS, Extents, candidates_sm80, candidates_sm90, pick
from attention.forward.compile import compile_forward
from attention.forward.config import BlockKind, FlashFacts, WindowKind
from attention.masks.element_mask import element_mask
from attention.masks.mask_mods import And, Band, RowRange
from cute_kernels.arch import ARCHS
from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import cubin_of

from .mask_parts import BLOCKSIZES, by_head

EXTENTS = Extents(256, 4096, 4096, None, None, 132)

# (band, softcap, lse): nothing, causal, and everything, without and with LSE
FEATURES = (
    (WindowKind(), False, False),
    (WindowKind(right=True), False, True),
    (WindowKind(left=True, right=True), True, False),
    (WindowKind(left=True, right=True), True, True),
)

HALF = 233472 // 2 - 1024  # of sm_90's shared memory: what a block may have if two share an SM
CPU = torch.device("cpu")
ROWS = torch.zeros(1, dtype=torch.int32)
MASKS = {
    "none": None,
    "function": element_mask(by_head, CPU)[0],
    "tensors": element_mask(And(RowRange(ROWS, ROWS + 1), Band(None, 0, 3)), CPU)[0],
}


# What a kernel without LSE, or one of packed sequences, adds to the others' code is the same for all head dimensions.
ALL_FEATURES = 128


def configurations(spec):
    """Of sm_90 and of sm_80 the first candidate with each set of features, the others with LSE; other GPUs' picks.

    The third set, and packed sequences with the two in the middle, at one head dimension.
    """
    for path in ("sm_80", "sm_90") if spec.path == "sm_90" else ("sm_80",):
        for dim in HEAD_DIMS:
            for i, (band, softcap, lse) in enumerate(FEATURES):
                if path != spec.name and i < 3 or i == 2 and dim != ALL_FEATURES:
                    continue
                facts = FlashFacts(spec.target, path, None, "bfloat16", dim, dim, band, softcap, lse)
                for config in candidates(facts, spec)[: None if facts.lse and path == spec.name else 1]:
                    dynamic = path == "sm_90" and (band.left or band.right)
                    yield replace(facts, config=replace(config, dynamic=dynamic))
                if path == spec.name and (i in (0, 3) or dim == ALL_FEATURES):
                    yield pick(replace(facts, packed=True), EXTENTS)
        yield pick(FlashFacts(spec.target, path, None, "float16", 192, 128), EXTENTS)
        yield from with_blocks(spec, path)


def candidates(facts: FlashFacts, spec) -> list:
    if facts.path == "sm_90":
        return [config for config, _ in candidates_sm90(facts, EXTENTS)]
    return candidates_sm80(spec, facts.head_dim, facts.head_dim_v, facts.lse)


def with_blocks(spec, path):
    """Block masks: on a path's first architecture all, on others the largest.

    Masks with tensors, which cost the most, with every block shape; those without in turn, each with either shape.
    """
    facts = FlashFacts(spec.target, path, None, "bfloat16", softcap=True, lse=True)
    for turn, dim in enumerate(HEAD_DIMS if path == spec.name else (128, 256)):
        facts = replace(facts, head_dim=dim, head_dim_v=dim)
        for blocksize in BLOCKSIZES:
            yield pick(replace(facts, blocks=BlockKind(*blocksize, MASKS["tensors"])), EXTENTS)
        if path == spec.name:
            for block, name in ((64, "function"), (128, "none")) if turn % 2 else ((128, "function"), (64, "none")):
                plain = replace(facts, softcap=False, lse=False)
                yield pick(replace(plain, blocks=BlockKind(block, block, MASKS[name])), EXTENTS)
    for dims in ((192, 128), (64, 256)):
        facts = replace(facts, head_dim=dims[0], head_dim_v=dims[1])
        yield pick(replace(facts, blocks=BlockKind(64, 64, MASKS["tensors"])), EXTENTS)


def name_of(f: FlashFacts) -> str:
    switches = (("left", f.window.left), ("right", f.window.right), ("softcap", f.softcap), ("packed", f.packed))
    more = [text for text, there in switches if there]
    if f.blocks:
        mask = next(name for name, mask in MASKS.items() if mask == f.blocks.mask)
        more.append(f"blocks {f.blocks.block_q}x{f.blocks.block_k} mask {mask}")
    return f"{f.arch}: {f.path} {f.dtype} D {f.head_dim} Dv {f.head_dim_v} {f.config} {' '.join(more)}".rstrip()


def entries():
    for spec in ARCHS.values():
        for facts in configurations(spec):
            yield pytest.param(facts, id=name_of(facts), marks=getattr(pytest.mark, spec.name))


def divided(sass: str) -> list[str]:
    """Instructions of a whole warpgroup between the vote that sends some of its warps to recompute their scores, and
    the mma.sync instructions by which they do."""
    found, since = [], []
    for opcode in inspect.instructions(sass):
        if opcode.startswith("VOTE"):
            since = []
        elif opcode.startswith("WARPGROUP"):
            since.append(opcode)
        elif opcode.startswith("HMMA"):
            found += since
            since = []
    return found


def inspected(facts: FlashFacts) -> tuple:
    """(resources, problems) of a kernel."""
    built = compile_forward(facts, keep_cubin=True)
    cubin = cubin_of(built.compiled)
    resources = inspect.resources(cubin, facts.arch)
    alone = []
    if facts.path == "sm_90" and facts.skips_max:
        alone = [f"{opcode}, which not all warps may reach" for opcode in divided(inspect.disassemble(cubin))]
        alone += [] if resources.hmma else ["no scores are recomputed"]
    found = alone + inspect.problems(
        resources,
        tensor_core="HGMMA" if facts.path == "sm_90" else "HMMA",
        dynamic_smem=built.metadata["smem"],
        smem_limit=facts.spec.smem if facts.config.ctas == 1 else HALF,
        warp_specialised=facts.path == "sm_90",
    )
    return resources, found


@pytest.mark.slow
@pytest.mark.parametrize("facts", entries())
def test_flash_kernel(facts, outcome_of):
    outcome = outcome_of(inspected, facts)
    assert not outcome.error
    resources, problems = outcome.value
    # Where an H200 runs the sm_80 path; see choose.BLOCKS_SM_80.
    if (facts.arch, facts.path) == ("sm_90a", "sm_80") and facts.blocks and resources.stack <= 32:
        problems = [text for text in problems if "stack" not in text and "local memory" not in text]
    assert problems == []
    assert resources.utmaldg >= 3 if facts.path == "sm_90" else resources.ldgsts >= 6
