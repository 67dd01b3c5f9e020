"""NativeSparseAttention: against attention with its masks written out in FP64; causality, training, torch.compile."""

import pytest
import torch

from attention.nn import NativeSparseAttention
from cute_kernels.testing.reference import attention_plainly

SMALL = {"block_size": 16, "top": 4, "compress_size": 8, "compress_stride": 4, "window": 20}


def layer(dtype=torch.float64, device="cpu", head_dim=16, **changes) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(24, 4, 2, head_dim, **SMALL | changes, dtype=dtype, device=device)


def plainly(module: NativeSparseAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, selected keys (B, Hkv, S, S) bool) by loops over tokens and blocks, as the paper writes it."""
    S, share = x.shape[1], module.heads // module.kv_heads
    q = module.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
    kv = module.kv(x).unflatten(-1, (6, 2, 16)).permute(2, 0, 3, 1, 4)
    starts = range(0, S - module.compress_size + 1, module.compress_stride)
    ends = torch.tensor([s + module.compress_size - 1 for s in starts])
    compressed = []
    for mlp, t in ((module.compress_k, kv[0]), (module.compress_v, kv[3])):
        parts = [(t[:, :, s : s + module.compress_size] + mlp.position).flatten(2) for s in starts]
        compressed.append(torch.stack([mlp.last(torch.nn.functional.gelu(mlp.first(p))) for p in parts], 2))
    row = torch.arange(S)[:, None]
    first, lse = attention_plainly(q, *compressed, (ends <= row).expand(len(x), 4, S, -1))
    weight = torch.softmax((q @ compressed[0].repeat_interleave(share, 1).mT / 4).masked_fill(ends > row, -1e9), -1)
    weight = weight.masked_fill(ends > row, 0.0).unflatten(1, (2, share)).sum(2)
    seen = torch.zeros(len(x), 2, S, S, dtype=torch.bool)
    for t in range(S):
        newest = t // module.block_size
        score = torch.full((len(x), 2, newest + 1), 0.0, dtype=torch.float64)
        for j in range(newest + 1):
            for i, s in enumerate(starts):
                block = range(j * module.block_size, (j + 1) * module.block_size)
                common = len(set(block) & set(range(s, s + module.compress_size)))
                score[..., j] += weight[:, :, t, i] * common / module.compress_stride
        score[..., : module.initial] = score[..., max(0, newest + 1 - module.local) :] = torch.inf
        for j in score.topk(min(module.top, newest + 1)).indices.unbind(-1):
            keys = j[..., None] * module.block_size + torch.arange(module.block_size)
            seen[:, :, t].scatter_(-1, keys.clamp(max=S - 1), True)
    seen &= torch.arange(S) <= row
    window = (torch.arange(S) <= row) & (torch.arange(S) > row - module.window)
    second, _ = attention_plainly(q, kv[1], kv[4], seen.repeat_interleave(share, 1))
    third, _ = attention_plainly(q, kv[2], kv[5], window.expand(len(x), 4, S, S))
    gates = module.gate(x).sigmoid().unflatten(-1, (4, 3)).transpose(1, 2)
    mixed = gates[..., :1] * first + gates[..., 1:2] * second + gates[..., 2:] * third
    return module.out(mixed.transpose(1, 2).flatten(2)), seen


@pytest.mark.parametrize("S", [5, 8, 77, 96])
def test_against_the_paper(S):
    module = layer()
    x = torch.randn(2, S, 24, dtype=torch.float64)
    if S < module.compress_size:  # no compressed keys
        assert module(x).isfinite().all()
        return
    expected, _ = plainly(module, x)
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)


def test_causal():
    module, x = layer(), torch.randn(1, 90, 24, dtype=torch.float64)
    changed = x.clone()
    changed[:, 60:] = torch.randn(1, 30, 24, dtype=torch.float64)
    torch.testing.assert_close(module(changed)[:, :60], module(x)[:, :60])


def test_rotary_is_applied_to_queries_and_keys():
    module, x = layer(), torch.randn(1, 40, 24, dtype=torch.float64)
    shapes = []
    module(x, lambda t: shapes.append(tuple(t.shape)) or t)
    assert shapes == [(1, 4, 40, 16), *[(1, 2, 40, 16)] * 3]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_parameters_train(device):
    """Gradients reach every parameter, and the layer learns to repeat an earlier token."""
    dtype, head_dim = (torch.float32, 16) if device == "cpu" else (torch.bfloat16, 64)  # which kernels have
    module = layer(dtype, device, head_dim)
    x = torch.randn(2, 64, 24, device=device, dtype=dtype)
    optimizer, losses = torch.optim.Adam(module.parameters(), 2e-2), []
    for _ in range(12):
        loss = (module(x)[:, 3:] - x[:, :-3]).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast(device):
    """An FP32 layer computes in BF16, with scores of blocks in FP32, and trains."""
    module, x = layer(torch.float32, head_dim=64), torch.randn(2, 96, 24)
    expected = module(x).detach()
    module.to(device)
    with torch.autocast(device, torch.bfloat16):
        y = module(x.to(device))
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and all(p.grad.isfinite().all() for p in module.parameters())
    assert (y.float().cpu() - expected).norm() < 0.1 * expected.norm()


def test_on_the_meta_device():
    x = torch.randn(2, 96, 24, device="meta")
    assert layer(torch.float32, "meta")(x).shape == x.shape


@pytest.mark.slow
def test_compiled():
    module, x = layer(torch.float32), torch.randn(2, 64, 24)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"initial": -1}, "initial must be at least 0"),
        ({"top": 2}, "initial \\+ local must be at most top"),
        ({"window": 0}, "window must be at least 1"),
        ({"compress_stride": 16}, "no token is left out"),
        ({"block_size": 32}, "one of 1, 4, 16, 64, 128"),
    ],
)
def test_errors(changes, words):
    arguments = {"dim": 24, "heads": 4, "kv_heads": 2, "head_dim": 16} | SMALL | changes
    with pytest.raises(ValueError, match=words):
        NativeSparseAttention(**arguments)
