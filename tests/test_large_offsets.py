"""Addresses past 2^31 elements. On the CPU the emulator runs kernels on memory that is reserved and hardly touched.

A pattern's index may begin anywhere, so a kernel can be made to read the last blocks of a large tensor alone.
"""

import shutil
from contextlib import nullcontext

import pytest
import torch

import cute_kernels
from attention import selected_attention
from attention.decode import heuristics as decode
from cute_kernels import gemm
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_linear, sddmm
from sparse_collective.sddmm_kernel import dispatch as sampled
from sparse_collective.sddmm_kernel.tables import groups_of

from .emulator import emulate
from .emulator.ops import on_emulator

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
BLOCK, LAST = (64, 64), 2  # blocks that are read or written
NEEDS_COMPILER = pytest.mark.skipif(shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler")
DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=NEEDS_COMPILER), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def empty(shape, device, dtype=BF16, stride=None):
    """A large tensor of any contents."""
    try:
        stride = stride or torch.empty(shape, device="meta").stride()
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"no memory for it: {str(error)[:80]}")


def large(device) -> tuple[BsrMatrix, BsrMatrix]:
    """(one block row of the last blocks of 2^31 elements and more, a matrix of these blocks alone)"""
    bm, bk = BLOCK
    nnz = 2**31 // (bm * bk) + 6
    values = empty((nnz, bm, bk), device)
    values[-LAST:] = normal(LAST, bm, bk, device=device)
    columns = torch.zeros(nnz, dtype=torch.int32, device=device)
    columns[-LAST:] = torch.tensor([0, 2], device=device)
    crow = torch.tensor([nnz - LAST, nnz], dtype=torch.int32, device=device)
    W = BsrMatrix(crow, columns, values, (bm, nnz * bk), check=False)
    W._set(shape=(bm, 3 * bk))  # of which it needs no more
    return W, BsrMatrix(crow - crow[0], columns[-LAST:].clone(), values[-LAST:].clone(), W.shape)


def kernels(device, path):
    """Device of a path's kernels."""
    if device == "cpu":
        return on_emulator("sm_90", path=path)
    if path == "sm_90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("runs on sm_90")
    return cute_kernels.path(path) if path else nullcontext()


@DEVICES
@pytest.mark.parametrize(("path", "tokens"), [("sm_80", 40), (None, 8)], ids=["sm_80", "few tokens"])
def test_values(device, path, tokens):
    W, small = large(device)
    x = normal(tokens, W.shape[1], device=device)
    with kernels(device, path):
        assert torch.equal(bsr_linear(x, W), bsr_linear(x, small))


@DEVICES
@pytest.mark.parametrize("path", ["sm_80", "sm_90"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sampled_blocks(monkeypatch, device, path, accumulate):
    """Stored, and added to: what is there before is read element by element."""

    def present(W, *terms):
        groups = groups_of(W, *terms)
        return groups[groups[:, 2] > 0].contiguous()

    monkeypatch.setattr(sampled, "groups_of", present)
    W, small = large(device)
    a, b = normal(W.shape[0], 64, device=device), normal(64, W.shape[1], device=device)
    out, right = empty(W.values.shape, device), torch.ones_like(small.values)
    out[-LAST:] = 1
    with kernels(device, path):
        sddmm(a, b, W, out=out, accumulate=accumulate)
        sddmm(a, b, small, out=right, accumulate=accumulate)
    assert torch.equal(out[-LAST:], right)


@DEVICES
def test_scales_far_apart(device):
    """63 rows of scales, 2^31 bytes and more from each other."""
    a, b = (normal(64, 256, device=device).to(FP8) for _ in "ab")
    scale_a, scale_b = torch.rand(64, 2, device=device), torch.rand(2, 1, device=device)
    far = empty((64, 2), device, torch.float32, (9_000_000, 1)).copy_(scale_a)
    with kernels(device, "sm_90"):
        right = gemm(a, b.t(), scale_a=scale_a, scale_b=scale_b)
        assert torch.equal(gemm(a, b.t(), scale_a=far, scale_b=scale_b), right)


@DEVICES
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_selected_blocks_of_the_last_pages(device, dtype):
    """A cache of more than 2^31 elements."""
    page, count = (1, 16, 64), 4
    pages = 2**31 // (16 * 64) + count
    k, v = (empty((pages, *page), device, dtype) for _ in "kv")
    for t in (k, v):
        t[-count:] = normal(count, *page, device=device).to(dtype)
    q, table = normal(1, 2, 1, 64, device=device), torch.arange(count, dtype=torch.int32, device=device)[None]
    indices = torch.tensor([[[0, 3, 9, 15, -1]]], dtype=torch.int32, device=device)
    seqused_k = torch.tensor([61], dtype=torch.int32, device=device)

    def attend(k, v, table):
        return selected_attention(q, k, v, indices, 4, seqused_k=seqused_k, page_table=table)

    with kernels(device, None), decode.splits(1):
        right = attend(k[-count:].clone(), v[-count:].clone(), table)
        assert torch.equal(attend(k, v, table + (pages - count)), right)
