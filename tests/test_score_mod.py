"""score_mod: the reference's gradients by gradcheck and autograd, kernels on the emulator and on a GPU, and errors."""

import contextlib
import shutil

import pytest
import torch
import torch.nn.functional as nnf

import cute_kernels
from attention import BlockMask, attention, block_sparse_attention, score_mods

from .attention_parts import BF16, FP16, FP64
from .emulator.emulate import COMPILER
from .emulator.ops import on_emulator
from .reference import band_mask, normal, seed

MACHINES = [
    pytest.param(("cpu", None), id="reference"),
    *(pytest.param(("emulator", p), marks=getattr(pytest.mark, p), id=f"emulator {p}") for p in ("sm_80", "sm_90")),
    *(
        pytest.param(("cuda", p), marks=[pytest.mark.gpu, getattr(pytest.mark, p)], id=f"cuda {p}")
        for p in ("sm_80", "sm_90")
    ),
]


def cap(s, b, h, q, kv):
    """The score alone."""
    return 2.0 * torch.tanh(s / 2.0)


def of_slopes(m):
    """Of a head: one address for many scores."""
    return lambda s, b, h, q, kv: s + m[h] * (kv - q)


def of_table(t):
    """Relative positions, beside a function of the score."""
    return lambda s, b, h, q, kv: s * 0.5 + t[h, (q - kv).clamp(-50, 49) + 50] * torch.sigmoid(s)


def of_bias(t, gate):
    """Every score its own, and a gate of all."""
    return lambda s, b, h, q, kv: s + gate * t[b, h, q, kv]


# name -> (captured tensors -> score_mod, a function of (B, H, S, T) that gives them)
MODS = {
    "cap": (lambda: cap, lambda B, H, S, T: ()),
    "slopes": (of_slopes, lambda B, H, S, T: (normal(H, dtype=torch.float32),)),
    "table": (of_table, lambda B, H, S, T: (normal(H, 100, dtype=BF16),)),
    "bias": (of_bias, lambda B, H, S, T: (normal(B, H, T, S, dtype=torch.float32).mT, torch.tensor(0.3))),
}


def plainly(q, k, v, mod, seen):
    """(out, lse) by torch, in the dtype of q."""
    (B, H, S, D), T = q.shape, k.shape[2]
    k, v = (t.repeat_interleave(H // k.shape[1], 1) for t in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device=q.device) for n in (B, H, S, T)), indexing="ij")
    s = mod(q @ k.mT * D**-0.5, b, h, i, j).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    return (s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp() @ v, lse


def operands(B, H, heads, S, T, D, dtype, device):
    shapes = (B, H, S, D), (B, heads, T, D), (B, heads, T, D)
    return [normal(*shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def error(got, want) -> float:
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


class TestReference:
    @pytest.mark.parametrize("name", MODS)
    def test_gradcheck_of_operands(self, name):
        q, k, v = operands(2, 2, 1, 5, 7, 4, FP64, "cpu")
        make, tensors = MODS[name]
        mod = make(*tensors(2, 2, 5, 7))
        run = lambda *x: attention(*x, causal=True, score_mod=mod, return_lse=True)  # noqa: E731
        assert torch.autograd.gradcheck(run, (q, k, v))

    def test_a_score_of_no_score(self):
        """The result does not depend on the score, and is -inf for some."""
        q, k, v = operands(1, 1, 1, 5, 7, 4, FP64, "cpu")
        out = attention(q, k, v, score_mod=lambda s, b, h, q, kv: torch.where(kv > 2, -torch.inf, s * 0 + 1.0))
        torch.testing.assert_close(out, v[:, :, :3].mean(2, keepdim=True).expand_as(out))
        out.sum().backward()
        assert not q.grad.any() and not k.grad.any() and not v.grad[:, :, 3:].any()


class TestErrors:
    q = normal(1, 2, 8, 64)

    def test_gradients_in_one_order(self):
        """Those of captured tensors are added up in any order by kernels, and nothing says so later."""
        t = torch.ones(2, requires_grad=True)
        with on_emulator("sm_90"), pytest.raises(RuntimeError, match="in any order"):
            attention(self.q, self.q, self.q, score_mod=lambda s, b, h, q, kv: s * t[h], deterministic=True)

    @pytest.mark.parametrize(
        "more, kind, text",
        [
            ({"softcap": 1.0}, ValueError, "torch.tanh"),
            ({"seqlens_k": torch.tensor([8], dtype=torch.int32)}, ValueError, "no score_mod"),
            ({"cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32)}, ValueError, "packed"),
            ({"score_mod": 3}, TypeError, "a function of"),
            ({"score_mod": lambda s, b, h, q, kv: s > 0}, TypeError, "floating-point"),
            ({"score_mod": lambda s, b, h, q, kv: s + torch.ones(5)[q]}, IndexError, "goes up to 7"),
        ],
    )
    def test_what_cannot_be(self, more, kind, text):
        options = {"score_mod": lambda s, b, h, q, kv: s} | more
        with pytest.raises(kind, match=text):
            attention(self.q, self.q, self.q, **options)

    def test_a_gradient_that_would_be_lost(self):
        t = torch.ones(2, requires_grad=True)
        with pytest.raises(RuntimeError, match="outside of the function"):
            attention(self.q, self.q, self.q, score_mod=lambda s, b, h, q, kv: s * t.exp()[h])

    def test_out_with_a_captured_gradient(self):
        t = torch.ones(2, requires_grad=True)
        with pytest.raises(RuntimeError, match="gradient"):
            attention(self.q, self.q, self.q, score_mod=lambda s, b, h, q, kv: s * t[h], out=self.q.clone())

    def test_under_compile(self):
        t = torch.ones(2, requires_grad=True)
        run = lambda q: attention(q * 1, q, q, score_mod=lambda s, b, h, q, kv: s * t[h])  # noqa: E731
        out = torch.compile(run, backend="eager")(self.q)
        assert torch.equal(out, run(self.q)) and out.requires_grad


@pytest.fixture(name="machine", params=MACHINES)
def machine_fixture(request):
    """(the device of tensors, a context in which kernels of a path compute them, the path)."""
    kind, path = request.param
    if kind == "emulator" and shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    if kind == "cpu":
        return "cpu", contextlib.nullcontext, None
    if kind == "cuda":
        return "cuda", lambda: cute_kernels.path(path), path
    return "cpu", lambda: on_emulator("sm_90", sms=4, path=path), path


# name -> (B, H, heads, S, T, D, score_mod, blocks' sides, options)
CASES = {
    "capped": (1, 2, 1, 100, 150, 64, "cap", None, {}),
    "slopes, causal": (1, 2, 1, 70, 90, 128, "slopes", None, {"causal": True}),
    "table, window": (2, 2, 2, 70, 130, 64, "table", None, {"window": (60, 20)}),
    "bias, blocks": (2, 2, 1, 130, 200, 128, "bias", (128, 128), {}),
    "slopes, narrow blocks": (1, 2, 2, 70, 130, 64, "slopes", (64, 64), {"causal": True}),
    "bias, 256": (1, 2, 1, 70, 90, 256, "bias", None, {}),
}
EMULATED = {"sm_80": ("table, window",), "sm_90": ("bias, blocks",)}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, machine):
    """Of all operands and captured tensors, against fp64."""
    device, context, path = machine
    if path and device == "cpu" and name not in EMULATED[path]:
        pytest.skip("each costs some seconds of compiling")
    B, H, heads, S, T, D, mod, sides, options = CASES[name]
    seed(name)
    q, k, v = operands(B, H, heads, S, T, D, FP16 if path else torch.float32, device)
    make, tensors = MODS[mod]
    captured = [t.to(device).requires_grad_() for t in tensors(B, H, S, T)]
    left, right = options.get("window", (None, None))
    seen = band_mask(S, T, left, 0 if options.get("causal") else right, device)
    seen = torch.ones(S, T, dtype=torch.bool, device=device) if seen is None else seen
    op, masks = attention, ()
    if sides:
        op, listed = block_sparse_attention, torch.rand(H, -(-S // sides[0]), -(-T // sides[1]), device=device) < 0.7
        listed[:, 0, 0] = True
        masks = (BlockMask.from_blocks(listed, sides, lengths=(S, T)),)
        seen = seen & listed.repeat_interleave(sides[0], 1).repeat_interleave(sides[1], 2)[:, :S, :T]
    dout, dlse = (normal(B, H, S, *more, dtype=q.dtype, device=device) for more in ((D,), ()))
    with context():
        out, lse = op(q, k, v, *masks, score_mod=make(*captured), return_lse=True, **options)
        found = torch.autograd.grad((out, lse), (q, k, v, *captured), (dout, dlse.float()))
    wide, exact = ([t.detach().double().requires_grad_() for t in ts] for ts in ((q, k, v), captured))
    out64, lse64 = plainly(*wide, make(*exact), seen)
    there = lse64 != -torch.inf
    assert error(out, out64) < 1e-3 and error(lse[there], lse64[there]) < 1e-6
    loss = (out64 * dout).sum() + (lse64[there] * dlse[there]).sum()
    want = torch.autograd.grad(loss, (*wide, *exact))
    # What many scores share is a sum of terms of either sign, each as exact as out in 16 bits.
    errors = [error(a, b) for a, b in zip(found, want, strict=True)]
    assert max(errors[:3]) < 1e-3 and max(errors) < 5e-3, errors


class TestReadyMade:
    def test_alibi(self):
        assert score_mods.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
        assert score_mods.alibi_slopes(12)[8:].log2().tolist() == [-i / 2 for i in range(1, 8, 2)]
        q, k, v = (t.detach() for t in operands(1, 4, 2, 5, 7, 8, FP64, "cpu"))
        slopes = score_mods.alibi_slopes(4)
        distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
        want = nnf.scaled_dot_product_attention(q, k, v, -slopes.double().view(-1, 1, 1) * distance, enable_gqa=True)
        torch.testing.assert_close(attention(q, k, v, score_mod=score_mods.Alibi(slopes, 2)), want)

    @pytest.mark.parametrize("bidirectional", [True, False])
    def test_t5(self, bidirectional):
        """As transformers computes it, with the gradient of the table."""
        T5Attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
        table = normal(4, 32, dtype=torch.float32).requires_grad_()
        q, k, v = (t.detach() for t in operands(1, 4, 4, 150, 150, 8, FP64, "cpu"))
        place = torch.arange(150) - torch.arange(150)[:, None]
        buckets = T5Attention._relative_position_bucket(place, bidirectional, 32, 128)
        want = nnf.scaled_dot_product_attention(q, k, v, table.double()[:, buckets], scale=1.0)
        mod = score_mods.t5_bias(table, bidirectional=bidirectional)
        out = attention(q, k, v, score_mod=mod, scale=1.0)
        torch.testing.assert_close(out, want)
        got, expected = (torch.autograd.grad(x.square().sum(), table)[0] for x in (out, want))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    def test_bias_of_all_heads(self):
        q, k, v = (t.detach() for t in operands(2, 4, 2, 5, 7, 8, FP64, "cpu"))
        bias = normal(2, 1, 5, 7, dtype=torch.float32)
        want = nnf.scaled_dot_product_attention(q, k, v, bias.double().expand(2, 4, 5, 7), enable_gqa=True)
        torch.testing.assert_close(attention(q, k, v, score_mod=score_mods.Bias(bias)), want)
