"""Additive masks of scaled_dot_product_attention beside torch in float64: results, gradients, torch's modules."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attention import scaled_dot_product_attention
from cute_kernels.testing.reference import normal

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [
    (5, 70), (1, 70), (5, 1), (1, 1), (4, 5, 70), (4, 1, 1), (1, 5, 70), (2, 4, 5, 70), (2, 1, 5, 70), (1, 1, 5, 70),
    (1, 1, 1, 70), (2, 1, 1, 70), (2, 4, 1, 70), (1, 1, 1, 1), (2, 4, 1, 1),
]  # fmt: skip

BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def dtype_of(place: str) -> torch.dtype:
    return torch.float64 if place == "cpu" else torch.bfloat16


def qkv(place: str, rows: int, columns: int, heads: int = 4, kv_heads: int = 4, D: int = 64):
    shapes = (2, heads, rows, D), (2, kv_heads, columns, D), (2, kv_heads, columns, D)
    return [normal(*shape, dtype=dtype_of(place), device=place) for shape in shapes]


def additive(*shape, dtype=torch.float32, place="cpu", hidden=0.3):
    """Normal numbers, some of them -inf."""
    mask = normal(*shape, dtype=dtype, device=place)
    return mask.masked_fill(torch.rand(shape, device=place) < hidden, -torch.inf)


def agree(q, k, v, mask, run=scaled_dot_product_attention, **options):
    """Result and gradients, the mask's too, are those of torch in float64, up to the rounding of their dtype."""
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, mask)]
    out64 = torchs(*wide, **options)
    dout = normal(*out64.shape, dtype=q.dtype, device=q.device)
    inputs = [t.detach().requires_grad_() for t in (q, k, v, mask)]
    out = run(*inputs, **options)
    found = out, *torch.autograd.grad(out, inputs, dout)
    want = out64, *torch.autograd.grad(out64, wide, dout.double())
    assert out.dtype == q.dtype
    for ours, exact, like in zip(found, want, (q, *inputs), strict=True):
        assert ours.dtype == like.dtype and ours.shape == exact.shape
        exact = exact.nan_to_num()  # torch's math gives NaN as the gradient of rows that see nothing
        size = exact.abs().max() + 1e-3
        if q.dtype != torch.float64 and like is inputs[3]:  # a sum over scores, which may be 0
            size += 0.3 * (out64.numel() / v.shape[-1] * k.shape[-2] / mask.numel()) ** 0.5
        assert (ours.double() - exact).abs().max() <= max(BOUNDS[ours.dtype], BOUNDS[q.dtype]) * size
    with torch.no_grad():  # kernels for short queries differ
        torch.testing.assert_close(run(q, k, v, mask, **options), out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, place):
    agree(*qkv(place, 5, 70), additive(*shape, place=place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("rows", "columns"), [(0, 70), (5, 0), (0, 0)])
def test_no_scores(rows, columns, place):
    q, k, v = (t.requires_grad_() for t in qkv(place, rows, columns))
    for shape in ((rows, columns), (1, columns), (rows, 1), (2, 4, rows, columns)):
        mask = additive(*shape, place=place).requires_grad_()
        out = scaled_dot_product_attention(q, k, v, mask)
        assert out.shape == q.shape and not out.any()
        gradients = torch.autograd.grad(out, (q, k, v, mask), torch.ones_like(out))
        assert [g.shape for g in gradients] == [t.shape for t in (q, k, v, mask)]
        assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_lengths(dtype, place):
    for rows, columns in ((1, 300), (200, 130), (129, 1)):
        agree(*qkv(place, rows, columns), additive(2, 1, rows, columns, dtype=dtype, place=place))
    if place == "cpu":
        agree(*qkv(place, 40, 50), additive(2, 1, 40, 50, dtype=torch.float64))
    agree(*qkv(place, 40, 50, 4, 2), additive(4, 40, 50, dtype=dtype, place=place), enable_gqa=True)


@pytest.mark.parametrize("place", PLACES)
def test_strides_and_other_ranks(place):
    q, k, v = qkv(place, 40, 50)
    agree(q, k, v, additive(50, 40, place=place).t())
    agree(q, k, v, additive(1, 1, 1, 50, place=place).expand(2, 4, 40, 50))
    agree(q, k, v, additive(2, 1, 80, 100, place=place)[..., ::2, ::2])
    agree(q[0], k[0], v[0], additive(4, 40, 50, place=place))
    agree(q[0, 0], k[0, 0], v[0, 0], additive(40, 50, place=place))
    five = (t.unflatten(1, (2, 2)) for t in (q, k, v))
    agree(*five, additive(2, 1, 2, 40, 50, place=place))


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_see_nothing(place):
    q, k, v = qkv(place, 150, 150)
    mask = torch.zeros(2, 1, 150, 150, device=place)
    mask[:, :, 3] = mask[1, :, 60:, :140] = -torch.inf
    mask[0, :, :, 140:] = -torch.inf
    agree(q, k, v, mask)
    assert not scaled_dot_product_attention(q, k, v, mask)[:, :, 3].any()
    same = scaled_dot_product_attention(q, k, v, mask == 0)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), same, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("rows", "columns"), [(0, 7), (5, 0), (0, 0)])
def test_empty(rows, columns, place):
    q, k, v = qkv(place, rows, columns)
    mask = torch.zeros(rows, columns, device=place)
    out = scaled_dot_product_attention(q, k, v, mask)
    assert out.shape == (2, 4, rows, 64) and not out.any()


@pytest.mark.parametrize("place", PLACES)
def test_a_mask_that_is_written_to(place):
    """Nothing of its contents is kept."""
    q, k, v = qkv(place, 40, 50)
    mask = torch.zeros(40, 50, device=place)
    for _ in range(2):
        out = scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(out, torchs(q, k, v, mask.to(q.dtype)), rtol=2e-2, atol=2e-2)
        mask[:, 20:] = -torch.inf


@pytest.mark.parametrize("place", PLACES)
def test_deterministic_gradients(place):
    """Gradients of a mask are not deterministic on a GPU; the error says so."""
    q, k, v = qkv(place, 40, 50)
    mask = torch.zeros(40, 50, device=place, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        if place == "cpu":
            scaled_dot_product_attention(q, k, v, mask).sum().backward()
        else:
            with pytest.raises(RuntimeError, match="deterministic"):
                scaled_dot_product_attention(q, k, v, mask)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("place", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
def test_under_compile(place, backend):
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend=graphs)
    for rows, columns in ((20, 30), (33, 47), (5, 64)):
        agree(*qkv(place, rows, columns), additive(2, 1, rows, columns, place=place), compiled)
    assert graphs.frame_count <= 4  # static and dynamic sizes, each with and without gradients
    agree(*qkv(place, 20, 30), additive(2, 1, 1, 30, place=place), compiled)
    torch._dynamo.reset()


@pytest.mark.parametrize("place", PLACES)
def test_transforms_and_modes(place):
    """Calls that go through the dispatcher: torch.func, FLOP counters; and checkpoints."""
    q, k, v = qkv(place, 20, 30)
    mask = additive(2, 1, 20, 30, place=place)
    near = {"rtol": 2e-2, "atol": 2e-2} if place == "cuda" else {"rtol": 1e-6, "atol": 1e-8}

    def square(q, mask):
        return scaled_dot_product_attention(q, k, v, mask).square().sum()

    inputs = q.clone().requires_grad_(), mask.clone().requires_grad_()
    want = torch.autograd.grad(square(*inputs), inputs)
    for found in (
        torch.func.grad(square, argnums=(0, 1))(q, mask),
        torch.autograd.grad(checkpoint(square, *inputs, use_reentrant=False), inputs),
    ):
        for ours, exact in zip(found, want, strict=True):
            torch.testing.assert_close(ours, exact, **near)
    out = scaled_dot_product_attention(q, k, v, mask)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), out, **near)
    each = torch.vmap(lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask))(q, k, v, mask)
    torch.testing.assert_close(each, out, **near)


# ------------------------------------------------------------------ torch's modules


def causal_and_padding(place, dtype):
    causal = nn.Transformer.generate_square_subsequent_mask(20, device=place, dtype=dtype)
    padding = torch.zeros(3, 20, device=place, dtype=dtype)
    padding[1, 15:] = padding[2, 4:] = -torch.inf
    return causal, padding


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("masked", ["none", "causal", "padding", "both", "both, bool"])
def test_transformer_encoder_layer(masked, place, monkeypatch):
    """nn.TransformerEncoderLayer passes float masks for training; result and gradients are those that it has."""
    dtype = dtype_of(place)
    layer = nn.TransformerEncoderLayer(128, 2, 64, dropout=0.0, batch_first=True, device=place, dtype=dtype)
    x = normal(3, 20, 128, dtype=dtype, device=place)
    causal, padding = causal_and_padding(place, dtype)
    if masked == "both, bool":
        causal, padding = causal == -torch.inf, padding == -torch.inf
    masks = {}
    if masked != "none" and masked != "padding":
        masks["src_mask"] = causal
    if masked != "none" and masked != "causal":
        masks["src_key_padding_mask"] = padding

    def step():
        y = layer(x, **masks)
        return y, *torch.autograd.grad(y.square().mean(), list(layer.parameters()))

    want, called = step(), []

    def ours(*args, **kwargs):
        called.append(args)
        return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", ours)
    tight = {"rtol": 1e-6, "atol": 1e-8} if place == "cpu" else {"rtol": 5e-2, "atol": 2e-2}
    for found, exact in zip(step(), want, strict=True):
        torch.testing.assert_close(found, exact, **tight)
    assert called
    layer.self_attn.dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout_p is 0.1; .*dropout=0.0 of nn.MultiheadAttention"):
        step()
