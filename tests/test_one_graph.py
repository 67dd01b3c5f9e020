"""A compiled call has one graph for all numbers of tokens: no guard of ours depends on them."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from attention import attention, scaled_dot_product_attention
from cute_kernels import gemm, prune_2_4, quantize
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


TRAINED = {
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
    "scaled_dot_product_attention": lambda d: lambda x: scaled_dot_product_attention(heads(x), heads(x), heads(x)),
}
OF_ROWS = {"bsr_grouped_linear": grouped}  # x has two dimensions
INFERRED = {
    "prune_2_4_": lambda d: dense(d, prune_2_4_),
    "quantize": lambda d: lambda x: quantize(x, per="row")[0].float(),
    "quantize_": lambda d: net(d, quantize_),
    "quantize_ of a SwiGLU": lambda d: gated(d, quantize_),
}
INFERRED_ROWS = {"Sparse24": with_weights(lambda x, W: gemm(W, x.t()), lambda d: prune_2_4(dense_weights(d)))}
ALL = TRAINED | OF_ROWS | INFERRED | INFERRED_ROWS


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
            y = compiled(x.requires_grad_(trained))
            if trained:
                y.float().sum().backward()
                assert x.grad is not None
        # torch compiles twice at once where a function has a float as a default, as gemm has alpha.
        counts.append(graphs.frame_count)
    assert counts[0] == counts[-1], "compiled again for another number of tokens"
