"""Head dimension 512: warps, or warpgroups, share their rows. On the emulator, against fp64; and what it refuses."""

import shutil
from contextlib import nullcontext

import pytest
import torch

from attention import attention
from attention.decode.heuristics import splits
from cute_kernels import path
from cute_kernels.testing.reference import attention_plainly, band_mask, poisoned

from ..emulator import emulate
from ..emulator.ops import on_emulator

pytestmark = pytest.mark.skipif(
    shutil.which(emulate.COMPILER) is None, reason="the emulator needs a C++ compiler (CXX)"
)
D = 512


def operands(rows, columns, heads=2, kv_heads=1, dim=D, batch=1, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    shapes = (heads, rows), (kv_heads, columns), (kv_heads, columns)
    return tuple(torch.randn(batch, n, s, dim, generator=generator).bfloat16().to(device) for n, s in shapes)


def check(q, k, v, seen, out, lse, softcap=None):
    wide = [q.double(), *(t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))]
    exact, exact_lse = attention_plainly(*wide, seen, softcap=softcap)
    torch.testing.assert_close(out.double(), exact, rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ["sm_90", "sm_89"])
def test_forward(arch):
    q, k, v = operands(70, 130, heads=1)
    out = poisoned(*q.shape, dtype=q.dtype, device="cpu")
    with on_emulator(arch, sms=1):  # one multiprocessor is not left idle, so no splits
        _, lse = attention(q, k, v, window_size=(90, 3), softcap=5.0, return_lse=True, out=out)
    check(q, k, v, band_mask(70, 130, 90, 3, "cpu"), out, lse, 5.0)


@pytest.mark.parametrize("heads", [4, 20])
def test_decoding(heads):
    """Few packed rows and many; a length of each item, splits. What follows an item's rows is NaN."""
    q, k, v = operands(1, 100, heads, batch=2)
    lengths = torch.tensor([90, 33], dtype=torch.int32)
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = float("nan")
    out = poisoned(*q.shape, dtype=q.dtype, device="cpu")
    with on_emulator("sm_90"), splits(2):
        _, lse = attention(q, k, v, seqused_k=lengths, return_lse=True, out=out)
    for b, n in enumerate(lengths):
        item = q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]
        check(*item, torch.ones(1, n, dtype=torch.bool), out[b : b + 1], lse[b : b + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("forced", [None, "sm_80"])
@pytest.mark.parametrize("shape", [(70, 130, 2, 1), (512, 777, 4, 2), (1000, 1000, 8, 8), (1, 3000, 8, 1)])
def test_on_a_gpu(shape, forced):
    """Few queries take the decoding kernels."""
    rows, columns, *heads = shape
    q, k, v = operands(rows, columns, *heads, batch=2, device="cuda")
    for left in (None, 90):
        seen = band_mask(rows, columns, left, 0, "cuda")
        out = poisoned(*q.shape, dtype=q.dtype, device="cuda")
        with path(forced) if forced else nullcontext():
            _, lse = attention(q, k, v, window_size=(left, 0), softcap=5.0, return_lse=True, out=out)
        check(q, k, v, seen, out, lse, 5.0)


def test_what_is_refused():
    """Gradients before anything runs, and a head dimension of v alone."""
    q, k, v = operands(8, 8)
    with on_emulator("sm_90"):
        with pytest.raises(RuntimeError, match="gradients are not supported at head_dim 512"):
            attention(q.requires_grad_(), k, v)
        with pytest.raises(
            ValueError, match="v has head_dim 512; kernels exist for .* 256, or 512 for q, k and v alike"
        ):
            attention(q.detach()[..., :64], k[..., :64], v)
