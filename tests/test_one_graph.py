"""A compiled call has one graph for all numbers of tokens, and the eager call's results and gradients.

All ops, also in FP8, TF32 and with 2:4 sparse operands.
"""

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from attention import attention, scaled_dot_product_attention, select_blocks, selected_attention
from cute_kernels import Sparse24, gemm, prune_2_4, quantize
from cute_kernels.testing.reference import normal
from sparse_collective import (
    BsrMatrix,
    bsr_gated_linear,
    bsr_grouped_linear,
    bsr_linear,
    bsr_matmul,
    random_bsr,
)
from sparse_collective.nn import BsrMixtureOfExperts, Sparse24Config, SwiGLU, mask_2_4_, prune_2_4_, quantize_

from .sparse_collective.bsr_parts import DEVICES
from .sparse_collective.nn_parts import BF16, layer_of

TOKENS = (24, 40, 57, 700)  # on either side of what kernels for few tokens and for many serve
K = 128


def weights(device, rows=K, block=(32, 32)) -> BsrMatrix:
    W = random_bsr((rows, K), block, density=0.5, device=device, dtype=BF16)
    W.check_indices()
    return W


def net(device, change=None):
    model = nn.Sequential(layer_of(device, grid=(4, 4), activation="silu"), layer_of(device, grid=(4, 4)))
    if change:
        change(model)
    return model


def dense(device, change):
    model = nn.Sequential(*(nn.Linear(K, K, device=device, dtype=BF16) for _ in "ab"))
    change(model, Sparse24Config(dense=True))
    return model


def gated(device, change=None):
    model = nn.Sequential(SwiGLU(K, K, blocksize=(32, 32), density=0.5, device=device, dtype=BF16))
    if change:
        change(model)
    return model


def grouped(device):
    W = BsrMatrix.stack([weights(device) for _ in range(4)])
    W.check_indices()
    bias, offsets = normal(4, K, device=device).requires_grad_(), torch.tensor([3, 3, 9, 20], device=device)
    return lambda x: bsr_grouped_linear(x, W, bias=bias, offs=offsets)


def under_autocast(device):
    model = net(device)

    def call(x):
        with torch.autocast(device, BF16):
            return model(x.float())

    return call


def experts(device):
    more = {"blocksize": (32, 32), "density": 0.5, "group_rows": 64, "device": device, "dtype": BF16}
    return BsrMixtureOfExperts(K, 64, 4, 2, True, **more)


def with_weights(call, make=weights):
    """A function that makes a function of x: call(x, make(device))."""

    def of(device):
        W = make(device)
        return lambda x: call(x, W)

    return of


def dense_weights(device):
    return normal(K, K, device=device)


def heads(x):
    return x.unflatten(-1, (2, 64)).transpose(-3, -2)


def quantized(per):
    return lambda device: quantize(dense_weights(device), per=per)


def fp8_gated(x, W):
    values, scale = quantize(x, per="row")
    return bsr_gated_linear(values, W, scale_x=scale)


def fp8_grouped(device):
    W = BsrMatrix.stack([weights(device) for _ in range(4)]).quantize()
    W.check_indices()
    offsets = torch.tensor([3, 3, 9, 20], dtype=torch.int32, device=device)

    def call(x):
        values, scale = quantize(x, per="row")
        return bsr_grouped_linear(values, W, offs=offsets, scale_x=scale)

    return call


def fp8_out(x, w):
    y, amax = gemm(x, w, out_dtype=torch.float8_e4m3fn, return_amax=True)
    return y.float() + amax


def selected(x):
    indices = select_blocks(heads(x), heads(x), 3, 16, causal=True, local=1, pool="max", groups=2)
    return selected_attention(heads(x), heads(x), heads(x), indices, 16, causal=True)


def fp8_attention(x):
    pairs = [quantize(heads(x)[None], per="head") for _ in "qkv"]
    scales = {f"{name}_descale": scale for name, (_, scale) in zip("qkv", pairs, strict=True)}
    return attention(*(values for values, _ in pairs), causal=True, **scales, use_fast_accum=True)


def fp8_cache(device):
    k, scale = quantize(normal(1, 2, 1024, 64, device=device), per="head")
    terms = {"seqused_k": torch.tensor([900], dtype=torch.int32, device=device), "k_descale": scale, "causal": True}
    return lambda x: attention(heads(x)[None], k, k, **terms)


TRAINED = {
    "gemm, TF32": with_weights(
        lambda x, w: gemm(x.float(), w.float(), activation="gelu", precision="tf32"), dense_weights
    ),
    "gemm, 3xTF32": with_weights(lambda x, w: gemm(x.float(), w.float(), precision="3xtf32"), dense_weights),
    "gemm, FP16 accumulation": with_weights(
        lambda x, w: gemm(x.half(), w.half(), activation="relu", accumulation_dtype=torch.float16), dense_weights
    ),
    "gemm": with_weights(lambda x, w: gemm(x, w, activation="silu"), dense_weights),
    "bsr_linear": with_weights(lambda x, W: bsr_linear(x, W, activation="silu")),
    "bsr_matmul": with_weights(lambda x, W: bsr_matmul(W, x.mT)),
    "bsr_gated_linear": with_weights(bsr_gated_linear),
    "BsrLinear": net,
    "autocast": under_autocast,
    "SwiGLU": gated,
    "BsrMixtureOfExperts": experts,
    "mask_2_4_": lambda d: dense(d, mask_2_4_),
    "attention": lambda d: lambda x: attention(heads(x), heads(x), heads(x), causal=True),
    "selected_attention": lambda d: selected,
    "scaled_dot_product_attention": lambda d: lambda x: scaled_dot_product_attention(heads(x), heads(x), heads(x)),
}
OF_ROWS = {"bsr_grouped_linear": grouped}  # x has two dimensions
INFERRED = {
    "prune_2_4_": lambda d: dense(d, prune_2_4_),
    "quantize": lambda d: lambda x: quantize(x, per="row")[0].float(),
    "quantize_": lambda d: net(d, quantize_),
    "quantize_ of a SwiGLU": lambda d: gated(d, quantize_),
}
INFERRED_ROWS = {
    "Sparse24": with_weights(lambda x, W: gemm(W, x.t()), lambda d: Sparse24.from_dense(prune_2_4(dense_weights(d)))),
    "Bsr24": with_weights(bsr_linear, lambda d: weights(d, block=(64, 64)).prune_2_4()),
    "FP8 gemm": with_weights(lambda x, w: gemm(quantize(x, per="row"), w, activation="silu"), quantized("column")),
    "FP8 gemm, fast": with_weights(
        lambda x, w: gemm(quantize(x, per="row"), w, use_fast_accum=True), quantized("tensor")
    ),
    "FP8 gemm, scales of blocks": with_weights(lambda x, w: gemm(quantize(x, per="1x128"), w), quantized("128x128")),
    "FP8 output": with_weights(fp8_out, dense_weights),
    "FP8 bsr_linear": with_weights(
        lambda x, W: bsr_linear(quantize(x, per="row"), W, activation="silu"), lambda d: weights(d).quantize()
    ),
    "FP8 bsr_linear, fast": with_weights(
        lambda x, W: bsr_linear(quantize(x, per="row"), W, use_fast_accum=True),
        lambda d: weights(d).quantize(per="tensor"),
    ),
    "bsr_linear, TF32": with_weights(
        lambda x, W: bsr_linear(x.float(), W, precision="tf32"), lambda d: weights(d).float()
    ),
    "bsr_linear, FP8 output": with_weights(lambda x, W: bsr_linear(x, W, out_dtype=torch.float8_e4m3fn).float()),
    "FP8 bsr_gated_linear": with_weights(fp8_gated, lambda d: weights(d, 256, (128, 128)).quantize()),
    "FP8 bsr_grouped_linear": fp8_grouped,
    "FP8 attention": lambda d: fp8_attention,
    "FP8 KV cache": fp8_cache,
}
ALL = TRAINED | OF_ROWS | INFERRED | INFERRED_ROWS


def same(found, expected, device) -> None:
    near = {"rtol": 0.02, "atol": 0.02} if device == "cuda" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, expected, **near)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ALL)
def test_one_graph(device, name):
    torch._dynamo.reset()
    call, trained = ALL[name](device), name in TRAINED | OF_ROWS
    batch = (2,) if name in TRAINED else ()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(call, fullgraph=True, backend=graphs, dynamic=True), []
    for tokens in TOKENS:
        x = normal(*batch, tokens, K, device=device)
        with torch.set_grad_enabled(trained):
            y, expected = (each(x.requires_grad_(trained)) for each in (compiled, call))
            same(y, expected, device)
            if trained:
                of_x = [torch.autograd.grad(each.float().sum(), x)[0] for each in (y, expected)]
                same(*of_x, device)
        # torch compiles twice at once where a function has a float as a default, as gemm has alpha.
        counts.append(graphs.frame_count)
    assert counts[0] == counts[-1], "compiled again for another number of tokens"


@pytest.mark.parametrize("op", ["gemm", "bsr_linear", "bsr_grouped_linear"])
def test_no_gradient_of_fp8_is_dropped_in_a_graph(op):
    torch._dynamo.reset()
    W = BsrMatrix.stack([weights("cpu")] * 2).quantize() if "grouped" in op else weights("cpu").quantize()
    (x, scale), w = quantize(normal(128, K), per="row"), quantized("column")("cpu")
    groups = torch.tensor([1, 0], dtype=torch.int32)
    call = {
        "gemm": lambda bias: gemm(x, w, scale_a=scale, bias=bias),
        "bsr_linear": lambda bias: bsr_linear(x, W, scale_x=scale, bias=bias),
        "bsr_grouped_linear": lambda bias: bsr_grouped_linear(x, W, scale_x=scale, expert_ids=groups, bias=bias),
    }[op]
    bias = torch.zeros(2, K) if "grouped" in op else torch.zeros(K)
    with pytest.raises(Exception, match="does not compute gradients"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(bias.requires_grad_())
