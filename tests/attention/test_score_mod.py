"""score_mod: the reference's gradients by gradcheck and autograd, kernels on the emulator and on a GPU, torch.compile,
and errors."""

import contextlib
import copy
import functools
import shutil

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as nnf

import cute_kernels
from attention import BlockMask, attention, block_sparse_attention, score_mods, torch_op
from attention.backward.config import BackwardFacts
from attention.backward.heuristics import pick
from attention.decode import heuristics as decode
from attention.masks import function_text
from attention.masks.score_mod import bound
from cute_kernels import explain
from cute_kernels.report import report_of_kernel
from cute_kernels.runtime.families import family_named
from cute_kernels.testing.reference import band_mask, normal, seed

from ..emulator.emulate import COMPILER
from ..emulator.ops import on_emulator
from .parts import BF16, FP16, FP64, cache, packed, pieces

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
    """One address per head for many scores."""
    return lambda s, b, h, q, kv: s + m[h] * (kv - q)


def of_table(t):
    """Relative positions, beside a function of the score."""
    return lambda s, b, h, q, kv: s * 0.5 + t[h, (q - kv).clamp(-50, 49) + 50] * torch.sigmoid(s)


def of_bias(t, gate):
    """Every score its own, and a gate of all."""
    return lambda s, b, h, q, kv: s + gate * t[b, h, q, kv]


def of_parts(rows, columns, tiles):
    """Values of a row, of a column and of a tile, which a thread's scores share."""
    return lambda s, b, h, q, kv: (
        torch.tanh(s * rows[h, q]) + columns[h, kv] * (kv % 8 - 3) / 4 + tiles[h, q // 32, kv // 32]
    )


# name -> (captured tensors -> score_mod, a function of (B, H, S, T) that gives them)
MODS = {
    "cap": (lambda: cap, lambda B, H, S, T: ()),
    "slopes": (of_slopes, lambda B, H, S, T: (normal(H, dtype=torch.float32),)),
    "table": (of_table, lambda B, H, S, T: (normal(H, 100, dtype=BF16),)),
    "parts": (of_parts, lambda B, H, S, T: [normal(H, *n, dtype=torch.float32) for n in ((S,), (T,), (8, 8))]),
    "bias": (of_bias, lambda B, H, S, T: (normal(B, H, T, S, dtype=torch.float32).mT, torch.tensor(0.3))),
}


def plainly(q, k, v, mod, seen, sinks=None):
    """(out, lse) by torch, in the dtype of q."""
    (B, H, S, D), T = q.shape, k.shape[2]
    k, v = (t.repeat_interleave(H // k.shape[1], 1) for t in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device=q.device) for n in (B, H, S, T)), indexing="ij")
    s = mod(q @ k.mT * D**-0.5, b, h, i, j).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.view(-1, 1))
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


SHORT = torch.tensor([3], dtype=torch.int32)


class TestErrors:
    q = normal(1, 2, 8, 64)

    def test_gradients_in_one_order(self):
        """Gradients of captured tensors are nondeterministic in kernels, and nothing says so later."""
        t = torch.ones(2, requires_grad=True)
        with on_emulator("sm_90"), pytest.raises(RuntimeError, match="use atomics on a GPU and are nondeterministic"):
            attention(self.q, self.q, self.q, score_mod=lambda s, b, h, q, kv: s * t[h], deterministic=True)

    @pytest.mark.parametrize(
        "more, kind, text",
        [
            ({"softcap": 1.0}, ValueError, "torch.tanh"),
            ({"seqused_k": SHORT, "score_mod": lambda s, b, h, q, kv: s + torch.ones(5)[kv]}, IndexError, "up to 7"),
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

    def test_what_a_cache_and_packed_sequences_lack(self):
        t = torch.ones(2, requires_grad=True)
        with pytest.raises(RuntimeError, match="gradients are not supported with seqused_k, page_table"):
            attention(self.q, self.q, self.q, seqused_k=SHORT, score_mod=lambda s, b, h, q, kv: s * t[h])
        call = packed([5, 3], [5, 3])
        with pytest.raises(IndexError, match="with b, which goes up to 1"):
            attention(**call, score_mod=lambda s, b, h, q, kv: s * torch.ones(1)[b])


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
    "table, window": (2, 2, 2, 70, 130, 64, "table", None, {"window_size": (60, 20)}),
    "bias, blocks": (2, 2, 1, 130, 200, 128, "bias", (128, 128), {}),
    "slopes, narrow blocks": (1, 2, 2, 70, 130, 64, "slopes", (64, 64), {"causal": True}),
    "bias, 256": (1, 2, 1, 70, 90, 256, "bias", None, {}),
    "parts, causal": (1, 2, 1, 70, 150, 64, "parts", None, {"causal": True}),
}
EMULATED = {"sm_80": ("table, window", "parts, causal"), "sm_90": ("bias, blocks", "parts, causal")}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, machine):
    """For all operands and captured tensors, against fp64."""
    device, context, path = machine
    if path and device == "cpu" and name not in EMULATED[path]:
        pytest.skip("each costs some seconds of compiling")
    B, H, heads, S, T, D, mod, sides, options = CASES[name]
    seed(name)
    q, k, v = operands(B, H, heads, S, T, D, FP16 if path else torch.float32, device)
    make, tensors = MODS[mod]
    captured = [t.to(device).requires_grad_() for t in tensors(B, H, S, T)]
    left, right = options.get("window_size", (None, None))
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


# name -> (lengths of q, lengths of k, H, heads, D, score_mod, options)
PACKED = {
    "slopes, causal": ([70, 0, 33], [90, 5, 33], 4, 2, 128, "slopes", {"causal": True}),
    "bias": ([40, 130], [70, 64], 2, 1, 64, "bias", {}),
    "table, window": ([150, 7], [150, 60], 2, 2, 64, "table", {"window_size": (30, 5)}),
}
PACKED_EMULATED = {"sm_80": "bias", "sm_90": "slopes, causal"}


@pytest.mark.parametrize("name", PACKED)
def test_packed(name, machine):
    """Positions count from 0 in each sequence, and b is its number."""
    device, context, path = machine
    if path and device == "cpu" and name != PACKED_EMULATED[path]:
        pytest.skip("each costs some seconds of compiling")
    rows, cols, H, heads, D, mod, options = PACKED[name]
    seed(name)
    call = packed(rows, cols, H, heads, D, device=device, more=(3, 2))
    q, k, v = (call[n].to(FP16 if path else torch.float32).requires_grad_() for n in "qkv")
    make, tensors = MODS[mod]
    captured = [t.to(device).requires_grad_() for t in tensors(len(rows), H, max(rows), max(cols))]
    dout, dlse = (normal(*shape, dtype=q.dtype, device=device) for shape in (q.shape, (H, len(q))))
    with context():
        terms = call | {"q": q, "k": k, "v": v} | options
        out, lse = attention(**terms, score_mod=make(*captured), return_lse=True)
        found = torch.autograd.grad((out, lse), (q, k, v, *captured), (dout, dlse.float()))
    wide, exact = ([t.detach().double().requires_grad_() for t in ts] for ts in ((q, k, v), captured))
    terms, loss = call | dict(zip("qkv", wide, strict=True)) | options, 0.0
    for b, ((_, _, place), *parts, seen) in enumerate(pieces(**terms)):
        seen = torch.ones(parts[0].shape[2], parts[1].shape[2], dtype=torch.bool) if seen is None else seen
        out64, lse64 = plainly(*parts, functools.partial(of_item, make(*exact), b), seen.to(device))
        there = lse64 != -torch.inf
        assert error(out[place], out64[0].transpose(0, 1)) < 1e-3
        assert error(lse[:, place][there[0]], lse64[there]) < 1e-6
        loss = loss + (out64[0].transpose(0, 1) * dout[place]).sum() + (lse64[there] * dlse[:, place][there[0]]).sum()
    want = torch.autograd.grad(loss, (*wide, *exact))
    errors = [error(a, b) for a, b in zip(found, want, strict=True)]
    assert max(errors[:3]) < 1e-3 and max(errors) < 5e-3, errors
    assert not out[sum(rows) :].count_nonzero()


def of_item(mod, item, s, b, h, q, kv):
    """For scores of that item alone."""
    return mod(s, b + item, h, q, kv)


# name -> (arguments of attention_parts.cache, score_mod, splits, options)
CACHED = {
    "slopes, causal": ({"rows": 3, "H": 8, "D": 128}, "slopes", 2, {"causal": True}),
    "table, pages": ({"rows": 2, "H": 10, "page_size": 32}, "table", 3, {"causal": True}),
    "bias, window": ({"rows": 1, "H": 6}, "bias", 1, {"window_size": (70, 0)}),
    "cap, many rows": ({"rows": 50, "H": 4, "page_size": 16}, "cap", 1, {"causal": True}),
    "bias, no lengths": ({"rows": 3, "H": 4}, "bias", 2, {}),
}
CACHED_EMULATED = {"sm_80": ("table, pages",), "sm_90": ("slopes, causal", "bias, no lengths")}


@pytest.mark.parametrize("name", CACHED)
def test_cached(name, machine):
    """In the decoding kernels, whose tiles have rows of several heads; k has as many rows as an item's length says."""
    device, context, path = machine
    if path and device == "cpu" and name not in CACHED_EMULATED[path]:
        pytest.skip("each costs some seconds of compiling")
    operands, mod, splits, options = CACHED[name]
    seed(name)
    whole, lengths = "no lengths" in name, [0, 1, 130, 192]
    call = cache([192] * 4 if whole else lengths, 192, **operands, dtype=FP16, device=device)
    if whole:
        del call["seqused_k"]
    make, tensors = MODS[mod]
    captured = [t.to(device) for t in tensors(4, operands["H"], operands["rows"], 192)]
    with context(), decode.splits(splits) if path else contextlib.nullcontext():
        if path:
            plan = explain(attention, **call, **options, score_mod=make(*captured))
            assert "decode: " in str(plan) and "score_mod" in str(plan)
        out, lse = attention(**call, **options, score_mod=make(*captured), return_lse=True)
    make = functools.partial(functools.partial, of_item, make(*(t.double() for t in captured)))
    of_items = [(slice(b, b + 1), *(t[b : b + 1] for t in (call["q"], call["k"], call["v"])), None) for b in range(4)]
    for b, (place, *parts, seen) in enumerate(of_items if whole else pieces(**call, **options)):
        seen = torch.ones(parts[0].shape[2], parts[1].shape[2], dtype=torch.bool) if seen is None else seen
        out64, lse64 = plainly(*(t.double() for t in parts), make(b), seen.to(device))
        assert error(out[place], out64) < 1e-3 and torch.equal(lse[place].isneginf(), lse64.isneginf())
        assert error(lse[place].nan_to_num(neginf=0.0), lse64.nan_to_num(neginf=0.0)) < 1e-5


SINKS_EMULATED = {"sm_80": ("packed", "cache"), "sm_90": ("dense", "cache")}


@pytest.mark.parametrize("form", ["dense", "blocks", "packed", "cache"])
def test_beside_sinks(form, machine):
    """With the gradients of both, and compiled. Of caches from each item's first row on, which is not column 0."""
    device, context, path = machine
    if path and device == "cpu" and form not in SINKS_EMULATED[path]:
        pytest.skip("each costs some seconds of compiling")
    seed(form)
    dtype, H, cached = FP16 if path else torch.float32, 4, form == "cache"
    if form == "packed":
        call = packed([70, 0, 33], [90, 5, 40], H, device=device)
    elif cached:
        call = cache([90, 130, 192], 192, 2, H, before=20, dtype=dtype, device=device)
    else:
        call = dict(zip("qkv", operands(2, H, 2, 70, 130, 64, dtype, device), strict=True))
    if form == "blocks":
        call["block_mask"] = BlockMask.from_blocks(torch.tensor([[True, False]], device=device), lengths=(70, 130))
    given = [call.pop(n).detach().to(dtype) for n in "qkv"]
    given += [normal(H, dtype=torch.float32, device=device) / 50, normal(H, dtype=torch.float32, device=device)]
    given = [t.requires_grad_(not cached) for t in given]

    def run(q, k, v, slopes, sinks):
        op = block_sparse_attention if form == "blocks" else attention
        more = {"score_mod": of_slopes(slopes), "sinks": sinks, "return_lse": True}
        return op(q, k, v, causal=True, **call, **more)

    def with_gradients(run):
        out, lse = run(*given)
        return out, lse, *(() if cached else torch.autograd.grad((out, lse), given, douts))

    shape = given[0].shape
    of_lse = (H, shape[0]) if form == "packed" else shape[:3]
    douts = [normal(*s, dtype=t, device=device) for s, t in ((shape, dtype), (of_lse, torch.float32))]
    with context(), decode.splits(2) if path and cached else contextlib.nullcontext():
        out, lse, *found = with_gradients(run)
    if path is None:
        torch._dynamo.reset()
        compiled = with_gradients(torch.compile(run, fullgraph=True, backend="aot_eager"))
        torch.testing.assert_close(compiled, (out, lse, *found))
    *wide, slopes, sinks = exact = [t.detach().double().requires_grad_() for t in given]
    loss = 0.0
    for b, (place, *parts, seen) in enumerate(pieces(*wide, causal=True, **call)):
        first = 20 * b if cached else 0
        mod = lambda s, b, h, q, kv, first=first: of_slopes(slopes)(s, b, h, q, kv + first)  # noqa: E731
        out64, lse64 = plainly(*parts, mod, seen.to(device), sinks)
        if form == "packed":
            out64, lse64, place = out64[0].transpose(0, 1), lse64[0], place[2]
        of_lse = (slice(None), place) if form == "packed" else place
        assert error(out[place], out64) < 1e-3 and error(lse[of_lse], lse64) < 1e-5
        loss = loss + (out64 * douts[0][place]).sum() + (lse64 * douts[1][of_lse]).sum()
    errors = [] if cached else [error(*pair) for pair in zip(found, torch.autograd.grad(loss, exact), strict=True)]
    assert max(errors[:3], default=0.0) < 1e-3 and max(errors, default=0.0) < 5e-3, errors


def test_decoding_without_lengths(machine):
    """A few queries take the decoding kernel by themselves, with a score_mod as without."""
    device, context, path = machine
    if path is None:
        pytest.skip("the reference has one way")
    q, k, v = (t.detach() for t in operands(1, 8, 2, 1, 700, 64, FP16, device))
    with context():
        assert "decode: " in str(explain(attention, q, k, v, score_mod=score_mods.Alibi(torch.ones(8).to(device), 699)))


def scaled(c):
    return lambda s, b, h, q, kv: s * c


class Layer(torch.nn.Module):
    """A score_mod as each form in which users write it; `table` and `x` get gradients."""

    def __init__(self, form):
        super().__init__()
        self.form, self.table, self.shift = form, torch.nn.Parameter(normal(4, 100, dtype=torch.float32)), 3

    def score(self, s, b, h, q, kv):
        return s + self.table[h, (q - kv + self.shift).clamp(-50, 49) + 50]

    def score_mod(self, x):
        slopes, shift, half = x.exp(), x.shape[0] - 1, 0.5
        if self.form == "closure":
            return of_slopes(slopes)
        if self.form == "def":

            def change(s, b, h, q, kv):
                return half * s + slopes[h] * (q - kv + shift) + of_table(self.table)(s, b, h, q, kv)

            return change
        if self.form == "nested":
            inner = of_table(self.table)
            return lambda s, b, h, q, kv, more=(slopes, inner): more[1](s, b, h, q, kv) * more[0][h]
        if self.form == "partial":
            return functools.partial(lambda t, s, b, h, q, kv: s - t[h] * (q - kv).abs(), slopes)
        forms = {"dataclass": lambda: score_mods.Alibi(slopes, 2), "method": lambda: self.score}
        return forms[self.form]()

    def forward(self, q, k, v, x, **terms):
        return attention(q, k, v, score_mod=self.score_mod(x), **terms)


NEAR = {"rtol": 2e-2, "atol": 2e-2}  # on a GPU sums in any order, of 16 bits
FORMS = ["closure", "def", "nested", "partial", "dataclass", "method"]
BACKENDS = [("cpu", "eager"), ("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh_dynamo(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def gradients(self, run, layer, *tensors):
        """The result, and the gradients of what it depends on."""
        out = run(*tensors)
        wrt = [t for t in (*tensors, layer.table) if t.requires_grad]
        return out, *torch.autograd.grad(out.square().sum(), wrt, allow_unused=True)

    def call(self, S, T, device):
        dtype = FP16 if device == "cuda" else FP64
        x = normal(4, dtype=torch.float32, device=device) / 8
        return *operands(2, 4, 2, S, T, 64, dtype, device), x.requires_grad_()

    @pytest.mark.parametrize(("device", "backend"), BACKENDS)
    @pytest.mark.parametrize("form", FORMS)
    def test_forms(self, form, device, backend):
        """One graph each, of other lengths too, with the gradients of what the function captures."""
        layer = Layer(form).to(device)
        graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
        step = torch.compile(layer, fullgraph=True, backend=graphs)
        for S, T in ((20, 30), (33, 47), (5, 64)):
            call = self.call(S, T, device)
            found, want = (self.gradients(run, layer, *call) for run in (step, layer))
            for a, b in zip(found, want, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, **({"rtol": 1e-4, "atol": 1e-4} if device == "cpu" else NEAR))
        assert graphs.frame_count <= 2

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_other_ops(self, backend):
        """Block masks, packed sequences, caches, sinks."""
        q, k, v, x = self.call(130, 130, "cpu")
        mask = BlockMask.from_blocks(torch.tensor([[True, False], [True, True]]), lengths=(130, 130))
        sequences = packed([20, 30], [20, 30])
        cached = cache([9, 40], 64, rows=2)

        def run(q, k, v, x):
            mod = of_slopes(x.exp())
            out = block_sparse_attention(q, k, v, mask, causal=True, score_mod=mod, return_lse=True)
            with torch.no_grad():
                more = attention(**cached, score_mod=mod, causal=True)
            return *out, attention(**sequences, score_mod=mod, sinks=x), more

        step = torch.compile(run, fullgraph=True, backend=backend)
        for a, b in zip(step(q, k, v, x), run(q, k, v, x), strict=True):
            torch.testing.assert_close(a, b)
        found, want = (
            torch.autograd.grad(sum(t.double().sum() for t in f(q, k, v, x)), (q, k, x)) for f in (step, run)
        )
        torch.testing.assert_close(found, want)

    def test_functions_are_told_apart(self):
        """For equal code and other constants, and of other code."""
        graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
        q = self.call(9, 9, "cpu")[0].detach()
        step = torch.compile(lambda q, mod: attention(q, q, q, score_mod=mod) * 1, fullgraph=True, backend=graphs)
        for mod in (scaled(0.5), scaled(2.0), scaled(0.5), scaled(2), scaled(3), scaled(4), cap):
            torch.testing.assert_close(step(q, mod), attention(q, q, q, score_mod=mod))
        assert graphs.frame_count <= 6

    def test_opcheck(self):
        q, k, v, x = self.call(9, 13, "cpu")
        score = function_text.written(of_table(torch.nn.Parameter(normal(4, 100, dtype=torch.float32))), "score_mod")
        torch.library.opcheck(torch.ops.attention.attention_with_score, (q, k, v, *score), {"return_lse": True})
        mask = torch_op.crossing(BlockMask.from_blocks(torch.ones(1, 1, dtype=torch.bool), lengths=(9, 13)))
        torch.library.opcheck(torch.ops.attention.block_sparse_attention_with_score, (q, k, v, *mask, *score))
        detached = (q.detach(), k.detach(), v.detach(), *score[:2], [t.detach() for t in score[2]])
        torch.library.opcheck(torch.ops.attention.attention_with_score_out, (*detached, torch.zeros_like(q)), {})

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("form", ["def", "dataclass"])
    def test_export(self, form, strict):
        layer, call = Layer(form), self.call(9, 13, "cpu")
        program = torch.export.export(copy.deepcopy(layer), call, strict=strict)
        assert torch.equal(program.module()(*call), layer(*call))
        assert "attention_with_score" in str(program.graph)

    @pytest.mark.parametrize(
        "make, text",
        [
            (lambda t: lambda s, b, h, q, kv: s * t.exp()[h], "as a whole.*compute that outside of the function"),
            (lambda t: lambda s, b, h, q, kv: s * globals()["GLOBAL"][h], "does not show; capture the tensor"),
            (lambda t: scaled({"a": {1.0}}), "not a set; capture what of it is needed"),
            (lambda t: lambda s, b, h, q, kv, *, t=t: s * t[h], "no arguments by keyword"),
            (lambda t: lambda s, b, h, q, kv: s > 0, "floating-point"),
            (lambda t: 3, "not a int|a function of"),
        ],
    )
    def test_what_cannot_be_compiled(self, make, text):
        q, _, _, x = self.call(9, 9, "cpu")
        mod = make(x.detach())
        with pytest.raises(Exception, match=text):
            torch.compile(lambda q: attention(q, q, q, score_mod=mod), fullgraph=True, backend="eager")(q)

    def test_out_with_a_captured_gradient(self):
        q, _, _, x = self.call(9, 9, "cpu")
        run = lambda q, out: attention(q, q, q, score_mod=of_slopes(x), out=out)  # noqa: E731
        with pytest.raises(Exception, match="gradient"):
            torch.compile(run, fullgraph=True, backend="eager")(q.detach(), q.detach().clone())


GLOBAL = torch.ones(4)


class TestReadyMade:
    def test_alibi(self):
        assert score_mods.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
        assert score_mods.alibi_slopes(12)[8:].log2().tolist() == [-i / 2 for i in range(1, 8, 2)]
        q, k, v = (t.detach() for t in operands(1, 4, 2, 5, 7, 8, FP64, "cpu"))
        slopes = score_mods.alibi_slopes(4)
        distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
        want = nnf.scaled_dot_product_attention(q, k, v, -slopes.double().view(-1, 1, 1) * distance, enable_gqa=True)
        torch.testing.assert_close(attention(q, k, v, score_mod=score_mods.Alibi(slopes, 2)), want)
        lengths = torch.tensor([7], dtype=torch.int32)
        out = attention(q, k, v, seqused_k=lengths, score_mod=score_mods.Alibi(slopes, lengths - 5))
        torch.testing.assert_close(out, want)

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


def test_positions_are_not_converted_for_each_score():
    """There is one conversion for sixteen scores, or a few more (traced.lower.Place)."""
    name = "flash forward"
    found = [f for f in family_named(name).catalogue("sm_90") if f.path == "sm_90" and f.score and f.window.right]
    facts = next(f for f in found if f.head_dim == 128 and any(n.op == "abs" for n in f.score.program.nodes))
    opcodes = report_of_kernel(facts).opcodes
    assert sum(count for name, count in opcodes.items() if name.startswith("I2F")) < 40


@pytest.mark.parametrize("sums", [(), (0,)], ids=["", "gradient"])
def test_backward_shares_loads(sums):
    """Values of a column, or of a tile, are loaded once for all scores of a thread (traced.indices.Shared)."""
    values = torch.zeros(4, 64, 64)
    for score_mod, most in (
        (lambda s, b, h, q, kv: s + values[h, 0, kv], 2),
        (lambda s, b, h, q, kv: s + values[h, q // 64, kv // 64], 1),
    ):
        facts = BackwardFacts("sm_90a", "sm_90", None, score=bound(score_mod, torch.device("cpu")).mod, score_sums=sums)
        report = report_of_kernel(pick(facts))
        assert sum(n for name, n in report.opcodes.items() if name.startswith("LDG")) <= most and not report.spills
