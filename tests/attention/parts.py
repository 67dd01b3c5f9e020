"""Helpers of the tests of attention: operands of every form of a call, what it must give, and the check of it."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

import cute_kernels
from attention import attention, block_sparse_attention
from attention.reference import spans_of
from cute_kernels import explain
from cute_kernels.dtypes import FLOAT8
from cute_kernels.testing.reference import (
    assert_as_good_as_torch,
    attention_plainly,
    band_mask,
    normal,
    poisoned,
    poisoned_empty,
)

from .. import host_emulation

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CAUSAL = {"causal": True}
ON_GPU = [
    pytest.param(("cuda", path), marks=[pytest.mark.gpu, getattr(pytest.mark, path)], id=f"cuda {path}")
    for path in ("sm_80", "sm_90")
]
ON_HOST = [
    pytest.param(("emulated", path), marks=getattr(pytest.mark, path), id=f"emulated {path}")
    for path in ("sm_80", "sm_90")
]


@pytest.fixture(name="where", params=[pytest.param(("cpu", None), id="reference"), *ON_HOST, *ON_GPU])
def where_fixture(request, monkeypatch):
    """The device of the tensors: the CPU's reference runs, the host side of a GPU's calls, or kernels of each path."""
    kind, path = request.param
    with contextlib.ExitStack() as stack:
        if kind == "emulated":
            stack.enter_context(host_emulation.without_gpu(request, monkeypatch))
        if path:
            stack.enter_context(cute_kernels.path(path))
        yield "cuda" if kind == "cuda" else "cpu"


# Operands


def qkv(Sq=200, Sk=200, D=64, Dv=None, B=2, H=4, heads=2, dtype=BF16, device="cpu") -> tuple:
    """q (B, H, Sq, D), k (B, heads, Sk, D) and v (B, heads, Sk, Dv), Dv being D where it is None."""
    shapes = (B, H, Sq, D), (B, heads, Sk, D), (B, heads, Sk, D if Dv is None else Dv)
    return tuple(normal(*shape, dtype=dtype, device=device) for shape in shapes)


def rows_first(t):
    """As a projection gives it: (B, S, H, D) in memory."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def of_one_projection(*tensors):
    """(B, H, S, D) parts of one (B, S, 3, H, D) tensor, as one projection for all of them gives it: with gaps."""
    B, H, S, D = tensors[0].shape
    whole = torch.cat([t.transpose(1, 2).reshape(B, S, 1, H, D) for t in tensors], 2)
    return tuple(whole[:, :, i].transpose(1, 2) for i in range(len(tensors)))


def misaligned(t):
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def starts(lengths, device="cpu") -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def packed(rows, cols, H=4, heads=2, D=64, Dv=None, device="cpu", more=(0, 0)) -> dict:
    """A call of sequences of such lengths, with `more` rows after the last one."""
    total_q, total_k = sum(rows) + more[0], sum(cols) + more[1]
    shapes = (total_q, H, D), (total_k, heads, D), (total_k, heads, Dv or D)
    tensors = zip("qkv", (normal(*shape, device=device) for shape in shapes), strict=True)
    return dict(tensors) | {"cu_seqlens_q": starts(rows, device), "cu_seqlens_k": starts(cols, device)}


def cache(
    lengths, capacity, rows=1, H=4, heads=2, D=64, Dv=None, page_size=None, dtype=BF16, device="cpu", before=None
) -> dict:
    """A call of caches. What no item has is NaN, and page numbers are garbage there.

    before: item b's first row is b times that; what lies before is large.

    Pages are in (pages, page_size, heads, D) order in memory, shuffled.
    """
    B = len(lengths)
    q, k, v = (t.cpu() for t in qkv(rows, capacity, D, Dv, B, H, heads, dtype))
    for b, length in enumerate(lengths):
        k[b, :, max(length, 0) :] = v[b, :, max(length, 0) :] = math.nan
    for b, length in enumerate(lengths if before else ()):
        for t in (k, v):
            t[b, :, : min(b * before, max(length, 0))] *= 1e3
    pairs = [(b * before, n) for b, n in enumerate(lengths)] if before else lengths
    tables = {"seqused_k": torch.tensor(pairs, dtype=torch.int32, device=device)}
    if page_size:
        each, spare = capacity // page_size, 3
        order = torch.randperm(B * each + spare)[: B * each]
        table = order.view(B, each).to(torch.int32)
        for b, length in enumerate(lengths):
            first = -(-max(length, 0) // page_size)
            table[b, first::2], table[b, first + 1 :: 2] = -1, 2**30
        k, v = (paged(t, order, B * each + spare, page_size) for t in (k, v))
        tables["page_table"] = table.to(device)
    return {"q": q.to(device), "k": k.to(device), "v": v.to(device), **tables}


def paged(t, order, pages, page_size):
    """(B, heads, rows, D) as pages (pages, heads, page_size, D)."""
    page = t.new_full((pages, page_size, t.shape[1], t.shape[3]), math.nan)
    page[order] = t.transpose(1, 2).reshape(len(order), page_size, t.shape[1], t.shape[3])
    return page.transpose(1, 2)


# What a call must give


def pieces(
    q, k, v, *, causal=False, window_size=None, block_mask=None, seqused_k=None, page_table=None, cu_seqlens_q=None,
    cu_seqlens_k=None,
):  # fmt: skip
    """(where in the result, q, k, v, what they see) of parts whose rows and columns are all there."""
    left, right = (None if bound == -1 else bound for bound in window_size or (None, None))
    right = 0 if causal else right

    def band(rows, cols):
        return band_mask(rows, cols, left, right, q.device)

    if cu_seqlens_q is not None:
        rows, cols = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for a, b, c, d in zip(rows[:-1], rows[1:], cols[:-1], cols[1:], strict=True):
            parts = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
            yield (slice(None), slice(None), slice(a, b)), *parts, band(b - a, d - c)
    elif seqused_k is not None:
        for b, (first, length) in enumerate(spans_of(seqused_k)):
            one = slice(b, b + 1)
            kv = k[one], v[one]
            if page_table is not None:
                numbers = page_table[b, : -(-length // k.shape[2])].long()
                kv = (t[numbers].transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
            keys, values = (t[:, :, first:length] for t in kv)
            yield one, q[one], keys, values, band(q.shape[2], keys.shape[2])
    else:
        seen = band(q.shape[2], k.shape[2])
        yield ..., q, k, v, seen if block_mask is None else seen & block_mask.to_dense(*q.shape[:2])


def truth(q, k, v, *, softcap=None, scale=None, sinks=None, k_descale=None, v_descale=None, **terms):
    """For a call, (B, H, Sq, Dv): out and lse in fp64; out as torch computes it in q's dtype; and out of |v|.

    k and v of 8 bits are taken as they are, times their scales.
    """
    shape = (1, q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    more, scores = {"dtype": FP64, "device": q.device}, {"softcap": softcap, "scale": scale, "sinks": sinks}
    found = SimpleNamespace(lse=torch.full(shape, -math.inf, **more), columns=0)
    if sinks is not None:  # of rows that are in no part
        found.lse.copy_(sinks.view(-1, 1))
    found.out, found.spread = (torch.zeros(*shape, v.shape[-1], **more) for _ in range(2))
    found.by_torch = torch.zeros(*shape, v.shape[-1], dtype=q.dtype, device=q.device)
    for where, *parts, seen in pieces(q, k, v, **terms):
        wide = [t.double() for t in parts]
        if k.dtype in FLOAT8:
            for i, factor in enumerate((k_descale, v_descale), 1):
                if factor is not None:
                    wide[i] *= factor.double().expand(q.shape[0], k.shape[1])[where][..., None, None]
            parts = [t.to(q.dtype) for t in wide]
        found.out[where], found.lse[where] = attention_plainly(*wide, seen, **scores)
        found.spread[where] = attention_plainly(*wide[:2], wide[2].abs(), seen, **scores)[0]
        found.by_torch[where] = attention_plainly(*parts, seen, **scores)[0]
        found.columns = max(found.columns, seen.shape[-1])
    return found


def assert_right(out, lse, q, k, v, plan=None, **terms):
    """`out` errs at most twice as much as torch does in its dtype, lse by a few fp32 ulp; no element of `out` by more
    than rounding P and O to 16 bits may do to it, or out of proportion to its row."""
    expected = truth(q, k, v, **terms)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    if q.dim() == 3:
        out, lse = out.transpose(0, 1)[None], lse[None]
    exact, empty = expected.out, expected.lse.isneginf()
    try:
        assert_as_good_as_torch(out, exact, expected.by_torch, k=expected.columns)
        assert lse.dtype is FP32 and torch.equal(lse.isneginf(), empty), "empty rows"
        assert not out[empty].count_nonzero(), "empty rows"
        error, size = (out.double() - exact).abs(), exact.abs()
        for bound in (
            torch.finfo(q.dtype).eps * expected.spread + 1e-4,
            8e-3 + 1e-2 * size,
            2.0**-6 * size.amax(-1, keepdim=True),
        ):
            assert (error <= bound).all(), f"{(error / bound).max():.3} times the bound, at {(error / bound).argmax()}"
        wrong, size = ((t.double().masked_fill(empty, 0.0)) for t in (lse - expected.lse, expected.lse))
        allowed = 2e-5 * (1 + size.abs().max()) if size.numel() else 0.0
        assert (wrong.abs() <= allowed).all(), f"lse errs by {wrong.abs().max():.3g}, allowed {allowed:.3g}"
    except AssertionError as error:
        raise AssertionError(f"{error}\n{plan}") from None


def run(q, k, v, **terms):
    op = block_sparse_attention if "block_mask" in terms else attention
    return op(q, k, v, **terms)


def check(q, k, v, *, out=None, **terms):
    """One call into poisoned memory against the truth; returns its plan."""
    if out is None:
        out = poisoned(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    terms |= {"return_lse": True, "out": out}
    plan = explain(block_sparse_attention if "block_mask" in terms else attention, q, k, v, **terms)
    with poisoned_empty():
        result, lse = run(q, k, v, **terms)
    assert result is out
    del terms["return_lse"], terms["out"]
    assert_right(out, lse, q, k, v, plan, **terms)
    return plan


# GPUs


@contextlib.contextmanager
def nothing_waits():
    """Inside, what waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call) -> tuple:
    """(a graph of the call, what it gave)"""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
