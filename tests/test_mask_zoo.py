"""FlexAttention's idioms (mask_zoo.py): the masks mean what torch says, on the CPU and in kernels."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from attention import BlockMask, block_sparse_attention
from attention.forward.choose import Extents, pick
from attention.forward.config import BlockKind, FlashFacts
from attention.masks.element_mask import element_mask
from cute_kernels.arch import ARCHS
from cute_kernels.runtime import inspect
from cute_kernels.runtime.compile import cubin_of
from cute_kernels.runtime.families import compile_kernel

from .mask_zoo import BATCH, HEADS, ZOO
from .reference import poisoned

CPU = torch.device("cpu")
EXTENTS = Extents(256, 4096, 4096, None, None, 132)
# Those whose kernels are compiled here, each kind of operation among them, with the bytes that a thread spills. A mask
# that indexes by what it has loaded, or loads a word for each element, has the loads of 64 elements in flight at once.
COMPILED = {
    "sm_90": {
        "strided": 0, "ring": 0, "tiled natten": 0, "sliding tiles": 0, "block diffusion": 0, "window by head": 0,
        "padding": 0, "jagged": 0, "pages": 8, "shared prefixes": 16, "images": 32, "causal documents": 168,
        "bits of words": 168,
    },
    "sm_80": {"ring": 0, "sliding tiles": 0, "scores of pairs": 0, "pages": 16, "causal documents": 48},
}  # fmt: skip
every_mask = pytest.mark.parametrize("name", ZOO)


def made(name, device="cpu") -> tuple:
    """(mask_mod, lengths)"""
    lengths, make = ZOO[name]
    return make(torch.device(device)), lengths


def truth(mask_mod, lengths) -> torch.Tensor:
    """(B, H, Sq, Sk) bool, of the mask called with torch's integers."""
    return create_mask(mask_mod, BATCH, HEADS, *lengths, device="cpu")


@every_mask
def test_elements(name):
    mask_mod, lengths = made(name)
    seen = truth(mask_mod, lengths)
    assert name == "noop" or 0 < seen.sum() < seen.numel()
    mask = BlockMask.from_mask_mod(mask_mod, lengths, batch=BATCH, heads=HEADS)
    assert torch.equal(mask.to_dense(), seen)
    flex = create_block_mask(mask_mod, BATCH, HEADS, *lengths, device="cpu")
    assert torch.equal(BlockMask.from_flex(flex, check=True).to_dense(), seen)


def check(name, device):
    """block_sparse_attention on poisoned memory against fp64; each element within what rounding P and O may do."""
    mask_mod, (sq, sk) = made(name, device)
    shapes = (BATCH, HEADS, sq, 64), (BATCH, 2, sk, 64), (BATCH, 2, sk, 64)
    q, k, v = (torch.randn(*shape).to(device, torch.bfloat16) for shape in shapes)
    mask = BlockMask.from_mask_mod(mask_mod, (sq, sk), batch=BATCH, heads=HEADS, device=device)
    out = poisoned(*q.shape, device=device)
    _, lse = block_sparse_attention(q, k, v, mask, return_lse=True, out=out)
    k, v = (t.double().repeat_interleave(2, 1) for t in (k, v))
    scores = q.double() @ k.mT / math.sqrt(64)
    scores = scores.masked_fill(~truth(made(name)[0], (sq, sk)).to(device), -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    error, bound = (out.double() - weights @ v).abs(), 2.0**-7 * (weights @ v.abs()) + 1e-4
    assert (error <= bound).all(), f"{(error / bound).max():.3} times the bound"
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=4e-3, rtol=1e-4)


@every_mask
def test_attention_on_the_cpu(name):
    check(name, "cpu")


@pytest.mark.gpu
@every_mask
def test_attention_on_a_gpu(name, path):
    check(name, "cuda")


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
            element = element_mask(made(name)[0], CPU)[0]
            facts = FlashFacts(
                ARCHS[path].target, path, None, "bfloat16", 128, 128, blocks=BlockKind(128, 128, element)
            )
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
