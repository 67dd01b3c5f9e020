"""CUDA graphs of FP8, 2:4 sparse and quantizing calls: operands, scales, metadata and routing are written in place.

Where there is no GPU, what would be replayed runs eagerly: that checks the tests themselves.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention import attention
from attention.forward.config import SCALE_TOKENS
from cute_kernels import Sparse24, gemm, prune_2_4, quantize
from cute_kernels.dtypes import FLOAT8
from cute_kernels.testing.reference import normal
from sparse_collective import BsrMatrix, bsr_gated_linear, bsr_grouped_linear, bsr_linear, random_bsr

from .sparse_collective.bsr_parts import DEVICES
from .test_cuda_graphs import captured

E4M3 = torch.float8_e4m3fn
K = 384


def fp8_gemm(device, per_a="row", per_b="row", **terms) -> tuple[Callable, list[Tensor]]:
    a, b = quantize(normal(256, K, device=device), per=per_a), quantize(normal(512, K, device=device), per=per_b)
    return lambda: gemm(a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), **terms), [*a, *b]


def fp8_output(device):
    a, b, scale = normal(256, K, device=device), normal(K, 512, device=device), torch.ones(1, device=device)
    return lambda: gemm(a, b, out_dtype=E4M3, scale_out=scale, return_amax=True), [a, b, scale]


def matrix(device, block=(128, 128), shape=(512, 768)) -> BsrMatrix:
    W = random_bsr(shape, block, density=0.4, device=device)
    W.check_indices()
    return W


def fp8_linear(device, op=bsr_linear):
    W, (x, scale) = matrix(device).quantize(), quantize(normal(256, 768, device=device), per="row")
    return lambda: op(x, W, scale_x=scale), [x, scale, W.values, W.scales]


def fp8_grouped(device):
    W = BsrMatrix.stack([matrix(device) for _ in range(4)]).quantize()
    W.check_indices()
    x, scale = quantize(normal(1024, 768, device=device), per="row")
    experts = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=device)
    call = lambda: bsr_grouped_linear(x, W, scale_x=scale, expert_ids=experts, group_rows=256)  # noqa: E731
    return call, [x, scale, W.values, W.scales, experts]


def sparse24(device):
    W, b = Sparse24.from_dense(prune_2_4(normal(256, K, device=device))), normal(K, 512, device=device)
    return lambda: gemm(W, b), [W.values, W.metadata, b]


def bsr24(device):
    V, x = matrix(device).prune_2_4(), normal(256, 768, device=device)
    return lambda: bsr_linear(x, V), [V.values, V.metadata, x]


def quantizing(device):
    x = normal(256, K, device=device)
    return lambda: quantize(x, per="1x128"), [x]


def fp8_attention(device, tokens=False, **terms):
    call = {}
    for name, rows in (("q", 300), ("k", 700), ("v", 700)):
        call[name], scale = quantize(normal(1, 2, rows, 128, device=device), per="head")
        blocks = (-(-rows // SCALE_TOKENS),) if tokens else ()
        call[f"{name}_descale"] = scale.view(1, 2, *(1 for _ in blocks)).expand(1, 2, *blocks).contiguous()
    return lambda: attention(**call, **terms), [*call.values()]


def fp8_cache(device):
    k, v = (quantize(normal(48, 2, 16, 64, device=device), per="tensor").values for _ in "kv")
    scales = {f"{name}_descale": torch.rand(3, 2, device=device) + 0.5 for name in "kv"}
    lengths = torch.tensor([70, 3, 200], dtype=torch.int32, device=device)
    table = torch.arange(48, dtype=torch.int32, device=device).view(3, 16)
    call = {"q": normal(3, 8, 1, 64, device=device), "k": k, "v": v, "seqused_k": lengths, "page_table": table}
    return lambda: attention(**call, **scales), [*call.values(), *scales.values()]


CALLS = {
    "FP8 gemm": fp8_gemm,
    "FP8 gemm, fast": lambda d: fp8_gemm(d, use_fast_accum=True),
    "FP8 gemm, scales of blocks": lambda d: fp8_gemm(d, "1x128", "128x128"),
    "FP8 output": fp8_output,
    "FP8 bsr_linear": fp8_linear,
    "FP8 bsr_gated_linear": lambda d: fp8_linear(d, bsr_gated_linear),
    "FP8 bsr_grouped_linear": fp8_grouped,
    "Sparse24": sparse24,
    "Bsr24": bsr24,
    "quantize": quantizing,
    "FP8 attention": fp8_attention,
    "FP8 attention, fast": lambda d: fp8_attention(d, use_fast_accum=True),
    "FP8 attention, scales of tokens": lambda d: fp8_attention(d, tokens=True),
    "FP8 KV cache": fp8_cache,
}


def rewrite(t: Tensor) -> None:
    """Other contents: scales from 1/2 to 2, other operands, and rolled routing, lengths, pages and metadata."""
    if t.dtype is torch.float32:
        t.uniform_(0.5, 2.0)
    elif t.dtype in FLOAT8 or t.is_floating_point():
        t.copy_(torch.randn(t.shape, device=t.device))
    else:
        t.copy_(t.roll(1, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_replay(device, name):
    needed = (9, 0) if "FP8 attention" in name else (8, 9) if "FP8" in name else (8, 0)
    if device == "cuda" and torch.cuda.get_device_capability() < needed:
        pytest.skip(f"{name} needs a newer GPU")
    call, tensors = CALLS[name](device)

    def results() -> list[Tensor]:
        found = call()
        return list(found) if isinstance(found, tuple) else [found]

    replay, outputs = captured(results, device == "cuda")
    for _ in range(2):
        before = [t.clone() for t in outputs]
        for t in tensors:
            rewrite(t)
        for t in outputs:
            t.fill_(float("nan"))
        replay()
        for mine, right, old in zip(outputs, results(), before, strict=True):
            assert torch.equal(mine.float(), right.float()) and not torch.equal(mine.float(), old.float())
