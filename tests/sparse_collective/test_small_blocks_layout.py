"""Addresses at which the small-block kernel's WGMMAs read blocks in shared memory: a model of TMA and descriptors.

TMA swizzles what it copies; WGMMA reads by descriptors, in the canonical layouts that PTX documents. Both are played
here on the elements of one block, with the box, the descriptor and the steps that the kernel has.
"""

import pytest
import torch

from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts
from cute_kernels.tile.descriptors import SWIZZLE, descriptor_low
from cute_kernels.tile.element import Element, element_of
from sparse_collective.bsr_gemm import catalogue
from sparse_collective.small_blocks.family import SMALL_BLOCKS
from sparse_collective.small_blocks.kernel_sm90 import SmallBlocksSm90

SPEC = ARCHS["sm_90"]
SPAN = {code: row_bytes for row_bytes, code in SWIZZLE.items()}
BLOCKS = [(bm, k_bytes) for bm in (16, 32, 64) for k_bytes in (32, 64, 128, 256)]


def swizzled(address: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """The 16 bytes of a row: those of the address, flipped by the number of the 128 bytes that they lie in."""
    return address ^ (address >> 7 & row_bytes // 16 - 1) << 4


def copied(box: torch.Tensor, width: int, address: int, smem: torch.Tensor) -> None:
    """TMA: the rows of a box of elements of `width` bytes one after another, swizzled as wide as they are."""
    places = address + width * torch.arange(box.numel())
    smem[swizzled(places, width * box.shape[1]) // width] = box.flatten()


def read(smem: torch.Tensor, e: Element, low: int, high: int, rows: int, transposed: bool) -> torch.Tensor:
    """WGMMA: the operand (rows, K) of a descriptor of one atom along the rows, or along K where that is contiguous."""
    span, stride, start = SPAN[high >> 30 & 3], (high & 0x3FFF) << 4, (low & 0x3FFF) << 4
    row, k = torch.arange(rows)[:, None], torch.arange(e.mma_k)
    assert e.width * (rows if transposed else e.mma_k) <= span, "no second atom: the leading offset is not used"
    line, element = (k, row) if transposed else (row, k)
    return smem[swizzled(start + line // 8 * stride + line % 8 * span + e.width * element, span) // e.width]


def kernel_of(block: tuple[int, int], dtype: str, permuted: bool) -> SmallBlocksSm90:
    config = SMALL_BLOCKS.candidates("sm_90", BlockFacts(*block, "int32"), SPEC)[0]
    view = {"permuted": True, "majors": ("m", "k", "m")} if permuted else {}
    return SmallBlocksSm90(catalogue.linear(SPEC, "sm_90", config, block, dtype=dtype, **view))


@pytest.mark.parametrize("slot", [0, 3])
@pytest.mark.parametrize(("dtype", "permuted"), [("bfloat16", False), ("bfloat16", True), ("float8_e4m3fn", False)])
@pytest.mark.parametrize(("bm", "k_bytes"), BLOCKS)
def test_products_read_what_was_copied(bm, k_bytes, dtype, permuted, slot):
    e = element_of(dtype)
    bk = k_bytes // e.width
    kernel = kernel_of((bm, bk), dtype, permuted)
    width, address = kernel.geometry.width, 1024 + slot * kernel.slot_bytes
    block = torch.arange(bm * width).view(bm, width)
    smem = torch.full((address + kernel.slot_bytes,), -1)
    box = block.t() if permuted else block.reshape(kernel.block_tile)
    assert kernel.block_tile == (box.t() if permuted else box).shape
    copied(box.contiguous(), e.width, address, smem)
    rows = torch.arange(bm)
    if kernel.fold > 1:  # odd groups of 8 have come with neighbours swapped
        rows = rows ^ rows // 8 % 2
    for k in range(width // e.mma_k):
        low = descriptor_low(address, int(not permuted)) + k * kernel.a_step
        found = read(smem, e, low, kernel.a_high, bm, permuted)
        assert torch.equal(found, block[rows, k * e.mma_k : (k + 1) * e.mma_k])
