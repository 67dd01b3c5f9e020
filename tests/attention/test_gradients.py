"""Gradients of attention: the reference's by gradcheck, the kernels' on the emulator and on a GPU, against fp64."""

import collections
import contextlib
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as nnf

import cute_kernels
from attention import BlockMask, attention, block_sparse_attention, create_block_mask
from attention.backward import problem, q_tiles
from attention.backward.config import BackwardFacts
from attention.backward.heuristics import pick
from attention.backward.kernel_sm90 import FlashBackwardSm90
from attention.forward.config import WindowKind
from attention.masks.mask_mods import SameDocument
from attention.seqlen import SeqlenInfo
from cute_kernels.testing.reference import assert_as_good_as_torch, normal, poisoned_empty, seed

from ..compiled import FOLDER
from ..emulator.emulate import COMPILER, emulated
from ..emulator.ops import on_emulator
from .emulate_blocks import number
from .parts import FP16, FP64, misaligned, packed, qkv, rows_first

MACHINES = [
    *(pytest.param(("emulator", path), marks=getattr(pytest.mark, path)) for path in ("sm_80", "sm_90")),
    *(pytest.param(("cuda", path), marks=[pytest.mark.gpu, getattr(pytest.mark, path)]) for path in ("sm_80", "sm_90")),
]


def documents(device):
    ids = torch.arange(300, device=device, dtype=torch.int32) * 7 % 300 // 75
    return create_block_mask(SameDocument(ids, ids, False), None, None, 300, 300, device=device)


def blocks(sides, lengths, heads=1, device="cpu", **options):
    rows, cols = (-(-n // side) for n, side in zip(lengths, sides, strict=True))
    table = torch.rand(heads, rows, cols) < 0.6
    table[:, 0] = False  # rows that see nothing
    return BlockMask.from_blocks(table.to(device), sides, lengths=lengths, **options)


def by_head(b, h, q, kv):
    return (q - kv).abs() < 40 * (h + 1)


def sinks(device, heads=4):
    return torch.tensor([0.5, 3.0, -2.0, -torch.inf], device=device)[:heads]


# name -> a function of the device: (q, k, v, options of the call)
CASES = {
    "one tile": lambda d: (*qkv(64, 128, 128, B=1, H=1, heads=1, device=d), {}),
    "tails": lambda d: (*qkv(130, 150, 128, B=2, H=2, heads=1, device=d), {}),
    "causal, more columns": lambda d: (*qkv(100, 300, 128, B=1, device=d), {"causal": True}),
    "causal, more rows": lambda d: (*qkv(300, 100, 64, B=1, device=d), {"causal": True}),
    "window": lambda d: (*qkv(300, 310, 64, B=1, device=d), {"window_size": (40, 20)}),
    "left bound, cap": lambda d: (
        *qkv(300, 310, 128, B=1, H=2, device=d),
        {"window_size": (100, None), "softcap": 2.0},
    ),
    "fp16": lambda d: (*qkv(130, 200, 64, B=1, H=2, dtype=FP16, device=d), {"causal": True, "scale": 0.3}),
    "96": lambda d: (*qkv(200, 300, 96, B=1, H=2, device=d), {"softcap": 2.0}),
    "64 and 128": lambda d: (*qkv(200, 200, 64, 128, B=1, H=2, heads=1, device=d), {"causal": True}),
    "128 and 64": lambda d: (*qkv(200, 200, 128, 64, B=1, H=2, heads=1, device=d), {}),
    "192 and 128": lambda d: (*qkv(150, 100, 192, 128, B=1, H=2, heads=1, device=d), {"causal": True}),
    "256": lambda d: (*qkv(100, 150, 256, B=1, H=1, heads=1, device=d), {"causal": True}),
    "blocks": lambda d: (
        *qkv(500, 600, 128, B=1, H=2, device=d),
        {"block_mask": blocks((128, 128), (500, 600), heads=2, device=d)},
    ),
    "blocks, causal": lambda d: (
        *qkv(300, 300, 64, B=2, H=2, device=d),
        {"block_mask": blocks((64, 64), (300, 300), device=d), "causal": True},
    ),
    "narrow blocks, 128": lambda d: (
        *qkv(200, 300, 128, B=1, H=2, heads=1, device=d),
        {"block_mask": blocks((64, 64), (200, 300), device=d), "softcap": 3.0},
    ),
    "mask_mod": lambda d: (
        *qkv(300, 300, 64, B=1, H=2, device=d),
        {"block_mask": create_block_mask(by_head, None, 2, 300, 300, device=d)},
    ),
    "sinks": lambda d: (*qkv(300, 100, 64, B=2, device=d), {"causal": True, "sinks": sinks(d)}),
    "sinks, left bound, cap": lambda d: (
        *qkv(300, 310, 128, B=1, H=2, device=d),
        {"window_size": (100, None), "softcap": 2.0, "sinks": sinks(d, 2)},
    ),
    "sinks, blocks": lambda d: (
        *qkv(300, 300, 64, B=2, H=2, device=d),
        {"block_mask": blocks((64, 64), (300, 300), device=d), "causal": True, "sinks": sinks(d, 2)},
    ),
    "mask_mod of tensors": lambda d: (*qkv(300, 300, 128, B=1, device=d), {"block_mask": documents(d)}),
}
PACKED = {
    "packed": ((60, 70, 0, 130), (100, 70, 5, 130), 128, {}),
    "packed, causal": ((60, 70, 1, 130), (60, 70, 0, 130), 64, {"causal": True}),
    "packed, window": ((60, 170, 130), (60, 270, 3), 96, {"window_size": (30, 10), "softcap": 2.0}),
    "packed, sinks": ((60, 70, 1, 130), (60, 70, 0, 130), 64, {"causal": True}),
    "packed, 192": ((60, 0, 100), (60, 5, 130), 192, {"causal": True}),
}


# Each costs some seconds of compiling.
NOT_EMULATED = {
    "sm_90": ("192 and 128", "causal, more columns"),
    "sm_80": ("one tile", "causal, more columns", "window", "64 and 128", "128 and 64", "mask_mod", "blocks, causal"),
}


@pytest.fixture(name="machine", params=MACHINES, ids=lambda p: " ".join(p))
def machine_fixture(request):
    """(the device of tensors, a context in which kernels of a path compute them, the path).

    On the emulator that is backward alone: forward has tests of its own there, and the reference gives the same. On
    CUDA the path holds for the whole test, since backward takes forward's.
    """
    kind, path = request.param
    if kind == "cuda":
        with cute_kernels.path(path):
            yield "cuda", contextlib.nullcontext, path
        return
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    yield "cpu", lambda: on_emulator("sm_90", sms=4, path=path), path


class Rounded(torch.autograd.Function):
    """To a dtype and back, forward or backward."""

    @staticmethod
    def forward(ctx, t, forward, backward):
        ctx.backward_dtype = backward
        return t if forward is None else t.to(forward).to(t.dtype)

    @staticmethod
    def backward(ctx, g):
        return g if ctx.backward_dtype is None else g.to(ctx.backward_dtype).to(g.dtype), None, None


def plainly(q, k, v, seen, softcap=None, scale=None, sinks=None, rounded=None):
    """(out, lse) of (B, H, S, D); `rounded` is the dtype that P and dS have in the products of a kernel."""
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = Rounded.apply(s, None, rounded)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s, empty = s.masked_fill(~seen, -torch.inf), ~seen.any(-1)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
        empty = (s == -torch.inf).all(-1)
    lse = s.masked_fill(empty[..., None], 0.0).logsumexp(-1)
    p = (s - lse[..., None]).exp()[..., : k.shape[2]]
    return Rounded.apply(p, rounded, None) @ v.repeat_interleave(group, 1), lse, empty


def gradients_plainly(q, k, v, seen, dout, dlse, dtype, rounded=None, sinks=None, **terms):
    inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, sinks) if t is not None]
    terms["sinks"] = None if sinks is None else inputs[3]
    out, lse, empty = plainly(*inputs[:3], seen.expand(*q.shape[:3], k.shape[2]), rounded=rounded, **terms)
    if rounded is not None and sinks is not None:
        # delta is a sum of dO times O as it is stored; where a sink has most of the sum, dP - delta is small beside it.
        error = ((out - out.to(rounded)) * dout).sum(-1).detach()
        lse.register_hook(lambda g: g + error)
    total = (out * dout.to(dtype)).sum()
    if dlse is not None:
        total = total + (lse * dlse.to(dtype)).masked_fill(empty.expand_as(lse), 0.0).sum()
    return torch.autograd.grad(total, inputs)


def band(rows, cols, window=None, causal=False):
    left, right = window or (None, None)
    right = 0 if causal else right
    away = torch.arange(cols) - torch.arange(rows)[:, None] - (cols - rows)
    seen = torch.ones(rows, cols, dtype=torch.bool)
    seen &= away >= -left if left is not None else seen
    return seen & (away <= right) if right is not None else seen


def check(got, q, k, v, seen, dout, dlse, sinks=None, **terms):
    """Against fp64, by what rounding P, dS and the results to the operands' dtype costs torch."""
    q, k, v, dout, seen = (t.cpu() for t in (q, k, v, dout, seen))
    terms["sinks"] = sinks = None if sinks is None else sinks.detach().cpu()
    dlse = None if dlse is None else dlse.cpu()
    exact = gradients_plainly(q, k, v, seen, dout, dlse, FP64, **terms)
    theirs = gradients_plainly(q, k, v, seen, dout, dlse, torch.float32, q.dtype, **terms)
    for name, mine, true, other in zip("qkv", got, exact, theirs, strict=False):
        assert mine.dtype == q.dtype, name
        assert_as_good_as_torch(mine.cpu(), true, other.to(q.dtype), k=max(q.shape[2], k.shape[2]))
    for mine, true in zip(got[3:], exact[3:], strict=False):
        assert mine.dtype == sinks.dtype
        allowed = of_rounding(q, k, v, seen, dout, **terms) + torch.finfo(mine.dtype).eps * true.abs()
        assert ((mine.cpu().double() - true).abs() <= allowed).all()


def of_rounding(q, k, v, seen, dout, *, sinks, **terms):
    """(H,): four standard deviations of what rounding O does to the gradient of sinks, and of fp32 sums.

    A sink's gradient is one sum over rows, of -exp(sink - LSE) sum(dO O): a single error of torch's says little.
    """
    wide = [t.detach().double() for t in (q, k, v)]
    out, lse, _ = plainly(*wide, seen.expand(*q.shape[:3], k.shape[2]), sinks=sinks.double(), **terms)
    share, terms_of = (sinks.double().view(1, -1, 1) - lse).exp(), dout.double() * out
    step = torch.finfo(q.dtype).eps / 2
    deviation = (share * (terms_of * (step / 3**0.5)).norm(dim=-1)).norm(dim=-1).norm(dim=0)
    return 4 * deviation + 1e-6 * (share * terms_of.abs().sum(-1)).sum((0, 2))


@pytest.mark.parametrize("of_lse", [False, True], ids=["", "and of LSE"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_exact_as_torchs(machine, name, of_lse):
    if of_lse and name not in ("tails", "left bound, cap", "blocks", "sinks"):
        pytest.skip("the gradient of LSE is a term of delta, whatever the rest is")
    device, computed, path = machine
    if device == "cpu" and name in NOT_EMULATED[path]:
        pytest.skip("a kernel that is emulated on the other path, or with other terms")
    check_case(name, device, computed, of_lse)


def check_case(name, device, computed, of_lse=False):
    """The gradients of one of CASES, whose backward pass runs in the context computed()."""
    seed(name)
    *tensors, options = CASES[name](device)
    q, k, v, *_ = inputs = [t.requires_grad_() for t in (*tensors, *([options["sinks"]] if "sinks" in options else []))]
    dout = normal(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=device)
    mask = options.get("block_mask")
    call = attention if mask is None else block_sparse_attention
    with poisoned_empty():
        out, lse = call(q, k, v, **options, return_lse=True)
    dlse = torch.randn_like(lse) if of_lse else None
    outputs, given = ([out, lse], [dout, dlse]) if of_lse else ([out], [dout])
    with computed(), poisoned_empty():
        got = torch.autograd.grad(outputs, inputs, given)
    terms = {key: options[key] for key in ("softcap", "scale", "sinks") if key in options}
    seen = band(q.shape[2], k.shape[2], options.get("window_size"), options.get("causal", False))
    if mask is not None:
        seen = seen & mask.to_dense(*q.shape[:2]).cpu()
    check(got, q, k, v, seen[None, None] if seen.dim() == 2 else seen, dout, dlse, **terms)


FORMS = {
    "rows first": rows_first,
    "misaligned": misaligned,
    "with gaps": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_every_memory_format(form):
    """For one kernel: what its operands are views of does not matter, nor what dO is."""
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    q, k, v = (FORMS[form](t).requires_grad_() for t in qkv(130, 150, 128, B=2, H=2, heads=1))
    dout = FORMS[form](normal(*q.shape))
    out = attention(q, k, v)
    with on_emulator("sm_90", sms=4), poisoned_empty():
        got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for mine, t, exact in zip(got, (q, k, v), torch.autograd.grad(out, (q, k, v), dout), strict=True):
        assert mine.shape == t.shape
        torch.testing.assert_close(mine.float(), exact.float(), rtol=0.05, atol=0.03)


def strided(t):
    """Every second element of a tensor, as the gradient of one slice of a torch.stack(..., -1)."""
    return torch.stack([t, t], -1)[..., 0]


GRADIENT_FORMS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "misaligned": misaligned,
    "with gaps": FORMS["with gaps"],
    "expanded": FORMS["expanded"],
    "last stride 2": strided,
    "last stride 0": lambda t: t[..., :1].expand_as(t),
    "one element": lambda t: t.new_ones(()).expand_as(t),  # of out.sum()
    "columns first": lambda t: t.mT.contiguous().mT,
    "last stride 2, misaligned": lambda t: misaligned(torch.stack([t, t], -1))[..., 0],
}


@pytest.mark.parametrize("where", ["cpu", "emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", GRADIENT_FORMS)
@pytest.mark.parametrize("kind", ["dense", "packed", "blocks", "one row"])
def test_gradients_by_any_strides(kind, form, where):
    """The gradients of out and of LSE, which autograd hands over as it has them."""
    device = "cuda" if where == "cuda" else "cpu"
    if where == "emulator" and shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    if where == "emulator" and (kind == "blocks" or "2" not in form and kind == "dense"):
        pytest.skip("what a gradient is copied for is the same in packed sequences")
    rows, batch, heads = (1, 1, 1) if kind == "one row" else (70, 2, 2)
    q, k, v = qkv(rows, 90, 128, B=batch, H=heads, heads=1, device=device)
    options, call = {}, attention
    if kind == "packed":
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
        starts = (torch.tensor([0, 50, n], dtype=torch.int32, device=device) for n in (70, 90))
        options = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    elif kind == "blocks":
        call, options = block_sparse_attention, {"block_mask": blocks((128, 128), (70, 90), device=device)}
    tensors = [t.requires_grad_() for t in (q, k, v)]
    out, lse = call(q, k, v, **options, return_lse=True)
    dout, dlse = (GRADIENT_FORMS[form](torch.randn_like(t)) for t in (out, lse))
    for given in ((dout, dlse), (dout, None), (None, dlse))[: 1 if where == "emulator" else 3]:
        outputs, given = zip(*((o, g) for o, g in zip((out, lse), given, strict=True) if g is not None), strict=True)
        with on_emulator("sm_90", sms=4) if where == "emulator" else contextlib.nullcontext(), poisoned_empty():
            got = torch.autograd.grad(outputs, tensors, given, retain_graph=True)
        plain = [g.clone(memory_format=torch.contiguous_format) for g in given]
        want = torch.autograd.grad(outputs, tensors, plain, retain_graph=True)
        for mine, right in zip(got, want, strict=True):
            torch.testing.assert_close(mine, right, rtol=0.05, atol=0.03)


@pytest.mark.parametrize("name", PACKED)
def test_gradients_of_packed_sequences(machine, name):
    """Each sequence's are its own, and rows after the last one have none, whatever they hold."""
    device, computed, path = machine
    if device == "cpu" and path == "sm_80" and name in ("packed", "packed, 192"):
        pytest.skip("the others are packed, too")
    check_packed(name, device, computed)


def check_packed(name, device, computed):
    seed(name)
    rows, cols, dim, options = PACKED[name]
    call = packed(rows, cols, 4, 2, dim, device=device, more=(9, 11))
    cu_q, cu_k = call.pop("cu_seqlens_q"), call.pop("cu_seqlens_k")
    q, k, v = call.values()
    dout = normal(*q.shape, device=device)
    for t, total in ((q, sum(rows)), (dout, sum(rows)), (k, sum(cols)), (v, sum(cols))):
        t[total:] = torch.nan
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    given = {"sinks": sinks(device).requires_grad_()} if "sinks" in name else {}
    with poisoned_empty():
        out = attention(q, k, v, **options, **given, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with computed(), poisoned_empty():
        got = list(torch.autograd.grad(out, (q, k, v, *given.values()), dout))
    of_sinks = [got.pop()] if given else []
    for g, total in zip(got, (sum(rows), sum(cols), sum(cols)), strict=True):
        assert not g[total:].any()
    terms = {key: options[key] for key in ("softcap", "scale") if key in options} | given
    for i in range(len(rows)):
        a, b, c, d = (int(x) for cu in (cu_q, cu_k) for x in cu[i : i + 2])
        if b == a or d == c:
            assert not got[0][a:b].any() and not got[1][c:d].any() and not got[2][c:d].any()
            continue
        parts = [t.detach()[s].transpose(0, 1)[None] for t, s in ((q, slice(a, b)), (k, slice(c, d)), (v, slice(c, d)))]
        mine = [g[s].transpose(0, 1)[None] for g, s in zip(got, (slice(a, b), slice(c, d), slice(c, d)), strict=True)]
        seen = band(b - a, d - c, options.get("window_size"), options.get("causal", False))[None, None]
        of_part = seen, dout[a:b].transpose(0, 1)[None], None
        check(mine, *parts, *of_part, **terms)
        if given:
            wide = (None if t is None else t.detach().cpu() for t in (*parts, *of_part))
            of_sinks.append(gradients_plainly(*wide, FP64, sinks=given["sinks"].detach().cpu())[3])
    if of_sinks:
        torch.testing.assert_close(of_sinks[0].cpu().double(), sum(of_sinks[1:]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (3, 2), "softcap": 2.0}, {"causal": True, "scale": 0.3}], ids=str
)
def test_the_references_gradients_are_the_functions(options):
    q, k, v = (t.requires_grad_() for t in qkv(9, 13, 8, 6, dtype=FP64))
    assert torch.autograd.gradcheck(lambda *t: attention(*t, **options, return_lse=True), (q, k, v))


def test_the_references_gradients_of_packed_sequences_and_of_blocks():
    call = packed((5, 0, 13), (7, 2, 11), 4, 2, 8, 6, more=(2, 2))
    q, k, v = (call.pop(name).double().requires_grad_() for name in "qkv")
    assert torch.autograd.gradcheck(lambda *t: attention(*t, **call, causal=True), (q, k, v))
    mask = blocks((64, 64), (70, 80))
    q, k, v = (t.requires_grad_() for t in qkv(70, 80, 4, dtype=FP64, B=1))
    assert torch.autograd.gradcheck(lambda *t: block_sparse_attention(*t, mask, causal=True), (q, k, v), fast_mode=True)


def test_gradients_are_torchs():
    q, k, v = (t.requires_grad_() for t in qkv(40, 40, 16, dtype=FP64))
    out = nnf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    want = torch.autograd.grad(out.sin().sum(), (q, k, v))
    got = torch.autograd.grad(attention(q, k, v, causal=True).sin().sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_only_what_is_asked_for_has_a_gradient():
    q, k, v = qkv(40, 40, 16, dtype=FP64)
    attention(q, k.requires_grad_(), v, causal=True).sum().backward()
    assert q.grad is None and v.grad is None and k.grad.shape == k.shape
    _, lse = attention(q, k, v.requires_grad_(), return_lse=True)
    assert torch.autograd.grad(lse.sum(), (k, v))[1].eq(0).all()


def test_no_gradient_where_there_is_nothing_to_see():
    q, k, v = (t.requires_grad_() for t in (*qkv(5, 0, 16, dtype=FP64),))
    for g in torch.autograd.grad(attention(q, k, v).sum(), (q, k, v)):
        assert not g.any()


@pytest.mark.parametrize("name", ["attention", "block mask", "FlexAttention's mask"])
def test_gradients_under_torch_compile(name):
    from torch.nn.attention.flex_attention import create_block_mask as create_flex_mask

    q, k, v = (t.requires_grad_() for t in qkv(130, 140, 16, dtype=torch.float32))
    if name == "attention":

        def call(q, k, v):
            return attention(q, k, v, causal=True, softcap=3.0)
    else:
        mask = blocks((128, 128), (130, 140))
        if name != "block mask":
            mask = create_flex_mask(lambda b, h, q, kv: q >= kv, None, None, 130, 140, device="cpu")

        def call(q, k, v):
            return block_sparse_attention(q, k, v, mask)

    with contextlib.closing(torch._dynamo) if hasattr(torch._dynamo, "close") else contextlib.nullcontext():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        got = torch.autograd.grad(compiled(q, k, v).sin().sum(), (q, k, v))
    want = torch.autograd.grad(call(q, k, v).sin().sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_the_registered_op_without_lse_has_gradients():
    from attention import torch_op  # noqa: F401 (registers the ops, as torch.compile does)

    q, k, v = (t.requires_grad_() for t in qkv(20, 30, 16, dtype=FP64))
    out, _ = torch.ops.attention.attention(q, k, v, causal=True)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


def test_what_has_no_gradient_says_so():
    q, k, v = (t.requires_grad_() for t in qkv(4, 16, 16, dtype=FP64))
    lengths = torch.tensor([16, 7], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="seqused_k, page_table or FP8.*cu_seqlens"):
        attention(q, k, v, seqused_k=lengths)
    with pytest.raises(RuntimeError, match="out=.*requires a gradient|requires one"):
        attention(q, k, v, out=torch.empty_like(q))
    (first,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.sum().backward()


@pytest.mark.parametrize(
    "path", [pytest.param("sm_80", marks=pytest.mark.sm_80), pytest.param("sm_90", marks=pytest.mark.sm_90)]
)
def test_the_gradient_of_q_has_one_order_on_request(path):
    """On an emulator whose warps and copies come in another order each time."""
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    narrow = {"block_mask": blocks((64, 64), (300, 500), heads=2)}
    dense = ((attention, 64, {"window_size": (150, 20)}), (attention, 128, {"causal": True}))
    for call, dim, terms in (*dense, (block_sparse_attention, 128, narrow)):
        q, k, v = (t.requires_grad_() for t in qkv(300, 500, dim, B=1, H=2, heads=1))
        out = call(q, k, v, **terms, deterministic=True)
        found = []
        for chance in (1, 77):
            with on_emulator("sm_90", sms=3, path=path, seed=chance), poisoned_empty():
                found.append(torch.autograd.grad(out.sum(), q, retain_graph=True)[0])
        (exact,) = torch.autograd.grad(out.sum(), q)  # of the reference
        assert torch.equal(*found)
        torch.testing.assert_close(found[0].float(), exact.float(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    "path", [pytest.param("sm_80", marks=pytest.mark.sm_80), pytest.param("sm_90", marks=pytest.mark.sm_90)]
)
def test_one_order_where_most_heads_go_up(path, monkeypatch):
    """As with more heads than L2 has room for: here it has for one."""
    if shutil.which(COMPILER) is None:
        pytest.skip("the emulator needs a C++ compiler")
    monkeypatch.setattr(problem, "L2_BYTES", 1)
    monkeypatch.setattr(problem, "LAST_TILES", 1)
    monkeypatch.delenv(FOLDER, raising=False)  # kernels of this test are this test's own
    emulated.cache_clear()
    for sq, sk, dim, terms in (
        (200, 420, 64, {"causal": True}),
        (600, 450, 128, {"causal": True}),
        (500, 500, 128, {"window_size": (200, 70)}),
    ):
        q, k, v = (t.requires_grad_() for t in qkv(sq, sk, dim, B=1, H=6, heads=3))
        out = attention(q, k, v, **terms, deterministic=True)
        dout, found = normal(*out.shape), []
        for chance in (1, 77):
            with on_emulator("sm_90", sms=3, path=path, seed=chance), poisoned_empty():
                found.append(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
        assert all(map(torch.equal, *found))
        seen = band(sq, sk, terms.get("window_size"), terms.get("causal", False))
        check(found[0], *(t.detach() for t in (q, k, v)), seen[None, None], dout, None)
    emulated.cache_clear()


@pytest.mark.parametrize("right", [0, 70, -40])
@pytest.mark.parametrize(("rows", "cols"), [(600, 600), (200, 700), (700, 200), (330, 345)])
@pytest.mark.parametrize(("last_tiles", "last_heads"), [(1, 3), (256, 0)])
def test_turns_are_taken_in_the_order_in_which_tiles_are_begun(rows, cols, right, last_tiles, last_heads, monkeypatch):
    """So a tile waits only for tiles that were begun before. Each sees its query tiles once."""
    monkeypatch.setattr(problem, "LAST_TILES", last_tiles)
    for module in (problem, q_tiles):
        monkeypatch.setattr(module, "select_", lambda condition, a, b: a if condition else b)
    window, tile_m, tile_n, heads, batch = WindowKind(right=True), 64, 128, 2, 2
    tiles = -(-cols // tile_n), -(-rows // tile_m)
    assert number(problem.last_group(heads * batch, tiles[0], 3)) == last_heads
    scheduler = problem.KvScheduler(*tiles, 2 * heads, heads, batch, 3, last_heads, True)
    source = q_tiles.WindowRows(window, tile_m, tile_n, None, right, last_heads=(last_heads * 2, 2 * heads))
    taken, seen = collections.Counter(), band(rows, cols, (None, right))
    for index in range(scheduler.count):
        tile = [number(x) for x in scheduler.fields(index)]
        for h in (2 * tile[1], 2 * tile[1] + 1):
            tiles = source.for_tile(problem.KvTile(*tile), h, SeqlenInfo(tile[2], rows, cols))
            for i in range(number(tiles.count)):
                m = number(tiles.at(i))
                assert number(tiles.turn(m)) == taken[tile[2], h, m]
                taken[tile[2], h, m] += 1
    for m in range(-(-rows // tile_m)):
        columns = seen[m * tile_m : (m + 1) * tile_m].any(0)
        expected = sum(bool(part.any()) for part in columns.split(tile_n))
        assert all(taken[b, h, m] == expected for b in range(batch) for h in range(2 * heads))


@pytest.mark.gpu
@pytest.mark.parametrize("path", [pytest.param(p, marks=getattr(pytest.mark, p)) for p in ("sm_80", "sm_90")])
def test_the_gradient_of_q_has_the_same_bits_on_every_run(path):
    q, k, v = (t.requires_grad_() for t in qkv(4096, 4096, 128, B=2, H=16, heads=8, device="cuda"))
    with cute_kernels.path(path):
        out = attention(q, k, v, causal=True, deterministic=True)
        first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
            assert all(map(torch.equal, first, again))


@pytest.mark.sm_90
def test_configurations_that_have_no_order():
    """dQ that is added to memory from registers."""
    facts = pick(BackwardFacts("sm_90a", "sm_90", None, head_dim=192, head_dim_v=192))
    assert facts.config.direct and not pick(replace(facts, config=None, deterministic=True)).config.direct
    with pytest.raises(ValueError, match="direct is nondeterministic; use direct=False"):
        FlashBackwardSm90(replace(facts, deterministic=True))


def test_what_deterministic_may_be():
    q, k, v = qkv(8, 8, 16)
    with pytest.raises(TypeError, match="deterministic must be True, False or None"):
        attention(q, k, v, deterministic=1)
