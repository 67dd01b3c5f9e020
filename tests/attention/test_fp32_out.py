"""FP32 outputs of attention with 16-bit operands, for shards that attention.merge combines."""

import contextlib
import math

import pytest
import torch

import cute_kernels
from attention import attention, block_sparse_attention, create_block_mask, merge
from attention.decode import heuristics as decode
from cute_kernels.testing.reference import poisoned

from ..emulator.ops import needs_compiler, on_emulator
from .parts import cache, packed, qkv

PATHS = pytest.mark.parametrize("path", ["sm_80", "sm_90"])
FP32 = torch.float32


def call(q, k, v, dtype, **terms) -> tuple:
    """(out, lse) with an `out` of a dtype, filled with NaN first."""
    out = poisoned(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    op = block_sparse_attention if "block_mask" in terms else attention
    result, lse = op(q, k, v, out=out, return_lse=True, **terms)
    assert result is out
    return out, lse


def exact(device="cpu", Sq=72, Sk=200, D=64) -> tuple:
    """(q, k, v, scale) whose scores are powers of 2 after the exponential, so that 16-bit P has no rounding error."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-1, 2, (1, 2, Sq, D), generator=generator)
    k = torch.randint(-1, 2, (1, 1, Sk, D), generator=generator)
    q[..., D // 4 :] = 0
    v = torch.randn(1, 1, Sk, D, generator=generator)
    return *(t.to(device, torch.bfloat16) for t in (q, k, v)), math.log(2)


def check_merged(device: str, context) -> None:
    """The merged shards equal attention to all keys within FP32 rounding; 16-bit shards do not."""
    *tensors, scale = exact(device)
    terms = {"causal": True, "scale": scale, "q_offset": 100}
    truth = attention(*(t.cpu().double() for t in tensors), **terms)
    with context:
        check_shards(*tensors, terms, truth)


def check_shards(q, k, v, terms: dict, truth) -> None:
    whole, lse = call(q, k, v, FP32, **terms)
    wide, narrow = (
        [call(q, k[:, :, a:b], v[:, :, a:b], dtype, k_offset=a, **terms) for a, b in ((0, 96), (96, 200))]
        for dtype in (FP32, torch.bfloat16)
    )
    out, merged_lse = merge(*zip(*wide, strict=True))
    assert out.dtype is FP32
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)
    assert (whole.cpu() - truth).abs().max() < 1e-5
    assert (merge(*zip(*narrow, strict=True), dtype=FP32)[0].cpu() - truth).abs().max() > 1e-3


def check_rounded(**terms) -> None:
    """Rounded to 16 bits, the FP32 output is bitwise the 16-bit output, and LSE is the same."""
    (wide, wide_lse), (narrow, lse) = (call(**terms, dtype=dtype) for dtype in (FP32, terms["q"].dtype))
    assert torch.equal(wide.to(narrow.dtype), narrow) and torch.equal(wide_lse, lse)
    assert not torch.equal(wide, narrow.float())


def documents(b, h, q, kv):
    return (kv <= q) & (q // 96 == kv // 96)


CASES = {
    "two row tiles of a warp": lambda d: dict(zip("qkv", qkv(136, 80, 96, B=1, H=2, device=d), strict=True)),
    "packed": lambda d: packed((70, 0, 30), (100, 30, 60), device=d) | {"causal": True},
    "blocks": lambda d: (
        dict(zip("qkv", qkv(192, 192, B=1, H=2, device=d), strict=True))
        | {"block_mask": create_block_mask(documents, None, None, 192, 192, device=d)}
    ),
    "head_dim 512": lambda d: dict(zip("qkv", qkv(40, 70, 512, B=1, H=2, device=d), strict=True)),
    "KV cache": lambda d: cache((130, 0), 192, H=8, page_size=64, device=d),
}


def test_reference():
    check_merged("cpu", contextlib.nullcontext())
    check_rounded(**CASES["packed"]("cpu"))
    check_rounded(**CASES["KV cache"]("cpu"))


@needs_compiler
@PATHS
def test_merged(path):
    check_merged("cpu", on_emulator("sm_90", sms=3, path=path))


@needs_compiler
@PATHS
@pytest.mark.parametrize("name", CASES)
def test_rounded(name, path):
    with on_emulator("sm_90", sms=3, path=path):
        check_rounded(**CASES[name]("cpu"))


@needs_compiler
def test_fp8_cache_and_splits():
    """Decode with split-KV and from an FP8 cache."""
    terms = cache((130, 40), 192, H=8)
    with on_emulator("sm_90", sms=3), decode.splits(3):
        check_rounded(**terms)
        check_rounded(**terms | {name: terms[name].to(torch.float8_e4m3fn) for name in "kv"})


@pytest.mark.gpu
@PATHS
def test_on_gpu(path):
    check_merged("cuda", cute_kernels.path(path))
    with cute_kernels.path(path):
        for make in CASES.values():
            check_rounded(**make("cuda"))


def test_other_dtypes():
    q, k, v = qkv(8, 8)
    with pytest.raises(TypeError, match="out"):
        attention(q, k, v, out=torch.empty_like(q, dtype=torch.float16))
    with pytest.raises(TypeError, match="out"):
        attention(q.double(), k.double(), v.double(), out=torch.empty_like(q, dtype=FP32))


def test_compiled():
    """Under torch.compile `out` may be FP32, too."""
    q, k, v = qkv(8, 8)
    eager, compiled = (poisoned(*q.shape, dtype=FP32) for _ in range(2))
    attention(q, k, v, out=eager)
    torch.compile(lambda out: attention(q, k, v, out=out), fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(eager, compiled)
