"""FlexAttention's idioms (mask_zoo.py): the masks mean what torch says, on the CPU and in kernels."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask
from torch.nn.attention.flex_attention import create_mask

from attention import BlockMask, create_block_mask
from attention.forward.config import BlockKind, FlashFacts
from attention.forward.heuristics import Extents, pick
from attention.masks.element_mask import element_mask
from cute_kernels.arch import ARCHS
from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import cubin_of
from cute_kernels.runtime.families import compile_kernel

from .lowered_mask import lowered
from .mask_zoo import BATCH, HEADS, lengths, masks
from .parts import ON_GPU, check, qkv, where_fixture  # noqa: F401 (fixtures are used by name)

CPU = torch.device("cpu")
EXTENTS = Extents(256, 4096, 4096, None, None, 132)
# Those whose kernels are compiled here, each kind of operation among them, with the bytes that a thread spills. A mask
# that loads something for each element has the loads of 64 elements in flight at once.
COMPILED = {
    "sm_90": {
        "strided": 0, "ring": 0, "tiled natten": 0, "sliding tiles": 0, "block diffusion": 0, "window by head": 0,
        "padding": 0, "tiles of a sequence": 0, "jagged": 0, "pages": 0, "shared prefixes": 0, "images": 8,
        "causal documents": 168, "bits of words": 0, "selected blocks of 4": 0,
    },
    "sm_80": {
        "ring": 0, "tiles of a sequence": 8, "sliding tiles": 0, "scores of pairs": 0, "pages": 0,
        "causal documents": 48,
    },
}  # fmt: skip
every_mask = pytest.mark.parametrize("name", masks(CPU))


def truth(name) -> torch.Tensor:
    """(B, H, Sq, Sk) bool, of the mask called with torch's integers."""
    return create_mask(masks(CPU)[name], BATCH, HEADS, *lengths(name), device="cpu")


@every_mask
def test_elements(name):
    mask_mod, seen = masks(CPU)[name], truth(name)
    assert name == "noop" or 0 < seen.sum() < seen.numel()
    mask = create_block_mask(mask_mod, BATCH, HEADS, *lengths(name))
    assert torch.equal(mask.to_dense(), seen)
    flex = create_flex_mask(mask_mod, BATCH, HEADS, *lengths(name), device="cpu")
    assert torch.equal(BlockMask.from_flex(flex, check=True).to_dense(), seen)


@every_mask
@pytest.mark.parametrize("where", [pytest.param(("cpu", None), id="reference"), *ON_GPU], indirect=True)
def test_attention(where, name):
    """Compared with what torch says of the mask, not with what the mask does."""
    mask = create_block_mask(masks(torch.device(where))[name], BATCH, HEADS, *lengths(name), device=where)
    assert torch.equal(mask.to_dense().cpu(), truth(name))
    check(*qkv(*lengths(name), B=BATCH, H=HEADS, device=where), block_mask=mask)


@every_mask
@pytest.mark.parametrize("by_rows", [False, True], ids=["columns", "rows"])
def test_lowered(name, by_rows):
    """The operations of kernels on a tile, whose columns (forward) or rows (backward) share values."""
    if name == "noop":
        pytest.skip("it has no program")
    found = lowered(masks(CPU)[name], BATCH, HEADS, *lengths(name), by_rows)
    assert torch.equal(found, truth(name))


def inspected(facts: FlashFacts) -> tuple:
    """(resources, what is wrong with a kernel beside what it spills)"""
    built = compile_kernel(facts, keep_cubin=True)
    resources = inspect.resources(cubin_of(built.compiled), facts.arch)
    found = inspect.problems(
        resources,
        tensor_core="HGMMA" if facts.path == "sm_90" else "HMMA",
        dynamic_smem=built.metadata["smem"],
        smem_limit=facts.spec.smem,
        warp_specialised=facts.path == "sm_90",
    )
    return resources, [text for text in found if "stack" not in text and "local memory" not in text]


def kernels():
    for path, names in COMPILED.items():
        for name, spilled in names.items():
            kind = BlockKind(128, 128, element_mask(masks(CPU)[name], CPU)[0])
            facts = FlashFacts(ARCHS[path].target, path, None, "bfloat16", 128, 128, blocks=kind)
            mark = getattr(pytest.mark, path)
            yield pytest.param(pick(facts, EXTENTS), spilled, id=f"{path} {name}", marks=mark)


@pytest.mark.slow
@pytest.mark.parametrize("facts, spilled", list(kernels()))
def test_kernel(facts, spilled, outcome_of):
    outcome = outcome_of(inspected, facts)
    assert not outcome.error
    resources, problems = outcome.value
    assert problems == []
    assert resources.stack <= spilled and (spilled or not resources.stl + resources.ldl)
