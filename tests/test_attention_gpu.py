"""attention on both paths against fp64: lengths, head dimensions, masks, views, streams, graphs.

Each of these also runs on the CPU, with torch in the kernels' place (the `device` fixture): that checks the host side.
A kernel compiles in a second or two, so most tests share those of head_dim 64 with an lse.
"""

import functools
import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_kernels
from attention import attention
from cute_kernels import explain

from . import attention_parts
from .attention_parts import plainly
from .fuzz import ON_GPU, RELAXED, settings
from .reference import assert_as_good_as_torch, normal, poisoned, poisoned_empty

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CAUSAL = {"causal": True}
qkv = functools.partial(attention_parts.qkv, device="cuda")
BANDS = [{}, CAUSAL, {"window": (70, 30)}, {"window": (100, None)}]  # each is another kernel
LENGTHS = [  # FlashAttention's
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023), (2048, 2048), (1, 147), (239, 1),
]  # fmt: skip
SHORT = [(1, 1), (1, 2), (3, 2), (63, 65), (65, 63), (128, 128), (129, 129), (192, 176), (200, 7), (7, 200)]


def assert_right(out, lse, q, k, v, plan=None, **terms):
    """`out` errs at most twice as much as torch does in its dtype (FlashAttention's measure), lse by a few fp32 ulp."""
    exact, exact_lse = plainly(q, k, v, FP64, **terms)
    by_torch = plainly(q, k, v, q.dtype, **terms)[0]
    assert out.shape == exact.shape
    note = "" if plan is None else str(plan)
    try:
        assert_as_good_as_torch(out, exact, by_torch, k=k.shape[2])
    except AssertionError as error:
        raise AssertionError(f"{error}\n{note}") from None
    empty = exact_lse.isneginf()
    assert lse.dtype is FP32 and torch.equal(lse.isneginf(), empty), f"empty rows\n{note}"
    assert not out[empty].count_nonzero()
    wrong = (lse.double() - exact_lse).masked_fill(empty, 0.0).abs()
    allowed = 2e-5 * (1 + exact_lse.masked_fill(empty, 0.0).abs().max())
    assert wrong.max() <= allowed, f"lse errs by {wrong.max():.3g}, at {wrong.argmax()}, allowed {allowed:.3g}\n{note}"


def check(q, k, v, *, out=None, **terms):
    """One call into poisoned memory against the truth; returns its plan."""
    if out is None:
        out = poisoned(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    plan = explain(attention, q, k, v, out=out, return_lse=True, **terms)
    with poisoned_empty():
        result, lse = attention(q, k, v, out=out, return_lse=True, **terms)
    assert result is out
    assert_right(out, lse, q, k, v, plan, **terms)
    return plan


# Types, lengths, masks

DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (128, 64)]


@pytest.mark.parametrize(("D", "Dv"), DIMS)
def test_head_dims(device, path, D, Dv):
    plan = check(*qkv(200, 333, D, Dv, device=device), **CAUSAL)
    assert (plan.facts.path, plan.facts.head_dim, plan.facts.head_dim_v) == (path, D, Dv)
    check(*qkv(1, 500, D, Dv, device=device), **CAUSAL)
    check(*qkv(333, 333, D, Dv, device=device), **CAUSAL)


@pytest.mark.parametrize(("D", "terms"), [(128, {}), (64, CAUSAL)], ids=str)
def test_float16(device, path, D, terms):
    check(*qkv(200, 333, D, dtype=FP16, device=device), **terms)
    check(*qkv(333, 100, D, dtype=FP16, device=device), **terms)


@pytest.mark.parametrize("terms", BANDS, ids=str)
def test_lengths(device, path, terms):
    for Sq, Sk in LENGTHS + SHORT:
        if device == "cpu" and Sq * Sk > 2**16:
            continue
        try:
            check(*qkv(Sq, Sk, device=device), **terms)
        except AssertionError as error:
            raise AssertionError(f"lengths {(Sq, Sk)}: {error}") from None


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (0, 5), (127, 64), (1000, 0), (0, 1000), (2**31, 3), (3, 2**31)])
def test_windows(device, path, window):
    for lengths in ((129, 300), (300, 129), (256, 256)):
        check(*qkv(*lengths, device=device), window=window)


def test_windows_without_bounds(device, path):
    """FlashAttention's -1, and None; a bound that nothing reaches; and causal, which takes the right one's place."""
    call = qkv(200, 333, device=device)

    def same(first, second):
        pairs = zip(*(attention(*call, return_lse=True, **terms) for terms in (first, second)), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    assert same({"window": (-1, 30)}, {"window": (None, 30)}) and same({"window": (70, -1)}, {"window": (70, None)})
    assert same({"window": (70, 9), "causal": True}, {"window": (70, 0)})
    assert same({"window": [70, 30]}, {"window": (70, 30)}) and same({"window": (-1, -1)}, {})
    for far in (332, 333, 2**29, 2**30 - 1, 2**30, 2**40):
        check(*call, window=(far, 30))
        check(*call, window=(70, far))


def test_rows_that_see_nothing(device, path):
    """More rows than columns: the first ones have no column before them; of some query tiles none has."""
    for terms in (CAUSAL, {"window": (70, 30)}):
        q, k, v = qkv(500, 100, device=device)
        out, lse = attention(q, k, v, return_lse=True, out=poisoned(*q.shape, device=device), **terms)
        first = 400 if terms is CAUSAL else 370
        assert not out[:, :, :first].count_nonzero() and lse[:, :, :first].isneginf().all()
        assert lse[:, :, first:].isfinite().all()
        assert_right(out, lse, q, k, v, **terms)


def test_no_columns_and_no_rows(device, path):
    q, k, v = qkv(33, 0, device=device)
    out, lse = attention(q, k, v, return_lse=True, out=poisoned(*q.shape, device=device))
    assert not out.count_nonzero() and lse.isneginf().all()
    assert attention(*qkv(0, 33, device=device)).shape == (2, 4, 0, 64)
    assert attention(*qkv(33, 33, B=0, device=device)).shape == (0, 4, 33, 64)


@pytest.mark.parametrize("terms", [{"softcap": 1.5}, {"softcap": 50.0, "scale": 0.3, "window": (70, 30)}], ids=str)
def test_softcap(device, path, terms):
    check(*qkv(200, 333, device=device), **terms)
    check(*qkv(333, 129, device=device), **terms)


def test_scale(device, path):
    """An argument of one kernel, not new kernels; large scores keep one column of each row."""
    call = qkv(200, 333, device=device)
    assert len({check(*call, scale=scale).facts for scale in (0.01, 0.125, 1, 3.0)}) == 1
    q, k, v = call
    check(q * 30, k, v)


def test_without_lse(device, path):
    call = qkv(200, 333, device=device)
    with poisoned_empty():
        out = attention(*call, **CAUSAL)
    with_lse, lse = attention(*call, **CAUSAL, return_lse=True)
    assert_right(out, lse, *call, **CAUSAL)
    # On the sm_80 path the sums are taken in another way where LSE is asked for.
    assert out.is_contiguous() and (path == "sm_80" or torch.equal(out, with_lse))


@pytest.mark.parametrize(("B", "H", "heads"), [(1, 1, 1), (3, 6, 1), (2, 6, 6), (1, 12, 3), (5, 2, 2), (64, 8, 2)])
def test_shared_heads(device, path, B, H, heads):
    check(*qkv(70, 130, B=B, H=H, heads=heads, device=device))


# Views


def rows_first(t):
    """As a projection gives it: (B, S, H, D) in memory."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def test_rows_before_heads(device, path):
    call = [rows_first(t) for t in qkv(200, 333, device=device)]
    out = rows_first(poisoned(2, 4, 200, 64, device=device))
    plan = check(*call, out=out, **CAUSAL)
    assert not any("copied" in note for note in plan.notes)


def test_slices(device, path):
    """Heads of one projection; some heads; some rows; wide rows; an output among others that stay as they are."""
    packed = normal(2, 200, 8 * 64, device=device).view(2, 200, 8, 64).transpose(1, 2)
    check(*packed.split((4, 2, 2), 1), **CAUSAL)
    q, k, v = qkv(200, 333, H=8, heads=4, device=device)
    whole = poisoned(2, 8, 300, 128, device=device)
    check(q[:, ::2], k[:, 1::2], v[:, :2], out=whole[:, 2:6, 50:250, :64], **CAUSAL)
    whole[:, 2:6, 50:250, :64] = math.nan
    assert whole.isnan().all()
    wide = normal(2, 4, 333, 128, device=device)
    check(q[:, :, 50:150], wide[:, :2, :, :64], wide[:, 2:, :, 64:])


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_copies(device, path, which):
    """Addresses and strides that TMA does not take, and expanded tensors, are copied, and explain says so."""

    def misaligned(t):
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    def odd_rows(t):
        return torch.nn.functional.pad(t, (0, 1))[..., :-1]

    def expanded(t):
        return t[:1, :1].expand_as(t)

    for view in (misaligned, odd_rows, expanded):
        call = {name: view(t) if which in (name, "all") else t for name, t in zip("qkv", qkv(70, 130, device=device))}
        plan = check(**call, **CAUSAL)
        copied = {note[0] for note in plan.notes if "is copied" in note}
        assert copied == set("qkv" if which == "all" else which)


def test_any_stride_of_single_extents(device, path):
    q, k, v = (t.as_strided(t.shape, (7, 3, *t.stride()[2:])) for t in qkv(70, 130, B=1, H=1, heads=1, device=device))
    assert "copied" not in str(check(q, k, v))
    q, k, v = qkv(1, 1, device=device)
    check(q.as_strided(q.shape, (*q.stride()[:2], 1, 1)), k, v)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_lies_past_the_end(device, path, bad):
    """Rows of the same memory that are not part of k and v, nor of q, reach no result."""
    q, k, v = (torch.full((2, n, 400, 64), bad, dtype=BF16, device=device) for n in (4, 2, 2))
    for Sq, Sk in ((33, 70), (130, 177), (200, 1)):
        views = q[:, :, :Sq], k[:, :, :Sk], v[:, :, :Sk]
        for view in views:
            view.copy_(normal(*view.shape, device=device))
        for terms in BANDS:
            check(*views, **terms)
        for t in (q, k, v):
            t.fill_(bad)


def test_nan_stays_in_its_head(device, path):
    q, k, v = qkv(200, 333, device=device)
    q[0, 1, 7] = math.nan
    v[1, 1, 5] = math.nan
    out, _ = attention(q, k, v, return_lse=True)
    assert out[0, 1, 7].isnan().all() and out[1, 2:].isnan().all()
    assert out.isnan().any(-1).sum() == 1 + 2 * 200


# Calls that repeat, and calls at the same time


def test_new_tensors_of_known_metadata(device, path):
    for _ in range(3):
        check(*qkv(72, 136, device=device), **CAUSAL)


def test_known_plans_are_not_confused(device):
    """Calls on the same tensors that differ in one argument, each of them after all others."""
    call = qkv(100, 130, device=device)
    variants = [{}, CAUSAL, {"window": (30, 10)}, {"window": (31, 10)}, {"window": (30, 11)}, {"scale": 0.2}]
    for _ in range(2):
        for terms in variants:
            check(*call, **terms)
            check(*call, **terms, out=rows_first(poisoned(2, 4, 100, 64, device=device)))
            out, lse = attention(*call, **terms, return_lse=True)
            assert_right(out, lse, *call, **terms)
    with cute_kernels.path("sm_80"):
        assert check(*call).facts.path == "sm_80"


def test_out_may_not_be_an_operand(device, path):
    """Also where the plan is a known one."""
    q, k, v = qkv(64, 64, H=2, device=device)
    attention(q, k, v, out=torch.empty_like(q), return_lse=True)
    for operand in (q, k, v):
        with pytest.raises(ValueError, match="shares memory"):
            attention(q, k, v, out=operand, return_lse=True)
    both = normal(2, 4, 64, 64, device=device)
    with pytest.raises(ValueError, match="shares memory"):
        attention(
            both.flatten()[: q.numel()].view(q.shape), k, v, out=both.flatten()[64 : 64 + q.numel()].view(q.shape)
        )


def test_errors_before_a_launch(device):
    q, k, v = qkv(64, 64, device=device)
    with pytest.raises(ValueError, match="q has head_dim 80; kernels exist for 64, 96"):
        attention(normal(2, 4, 64, 80, device=device), normal(2, 2, 64, 80, device=device), v)
    with pytest.raises(ValueError, match="v has head_dim 32; kernels exist for 64, 96"):
        attention(q, k, v[..., :32])
    with pytest.raises(ValueError, match="out's address and strides"):
        attention(q, k, v, out=poisoned(2, 4, 64, 65, device=device)[..., :64])
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        attention(q, k, v, scale=math.nan)


def test_same_bits_on_every_run(device, path):
    call = qkv(1000, 1100, B=3, device=device)
    out = poisoned(3, 4, 1000, 64, device=device)
    for terms in (CAUSAL, {}):
        first, first_lse = attention(*call, return_lse=True, **terms)
        for _ in range(50 if device == "cuda" else 1):
            again, lse = attention(*call, return_lse=True, out=out.fill_(math.nan), **terms)
            assert torch.equal(again, first) and torch.equal(lse, first_lse)


def check_any(data, device):
    """Any lengths, heads and masks, of the same few kernels."""
    torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    Sq, Sk = (data.draw(st.integers(1, 400), name) for name in ("Sq", "Sk"))
    heads, group, B = (data.draw(st.integers(1, 3), name) for name in ("heads", "group", "B"))
    bound = st.one_of(st.none(), st.integers(0, 450))
    window = data.draw(st.tuples(bound, bound), "window")
    call = qkv(Sq, Sk, B=B, H=heads * group, heads=heads, device=device)
    if data.draw(st.booleans(), "rows first"):
        call = [rows_first(t) for t in call]
    check(*call, window=window, causal=data.draw(st.booleans(), "causal"))


@settings(max_examples=30, **RELAXED)
@given(st.data())
def test_anything_host_side(emulated, data):
    check_any(data, "cpu")


@pytest.mark.gpu
@settings(ON_GPU, max_examples=100)
@given(st.data())
def test_anything_on_the_gpu(path, data):
    check_any(data, "cuda")


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("D", [64, 128])
    def test_long(self, path, D):
        check(*qkv(5000, 5003, D, B=1, H=2, heads=1), **CAUSAL)

    def test_graph(self, path):
        """A second product of the first one's result; its copy of a misaligned v is captured too."""
        q, k, v = qkv(200, 333)
        v = torch.cat([v.new_zeros(1), v.flatten()])[1:].view(v.shape)
        out = poisoned(2, 4, 200, 64, device="cuda")
        first, _ = attention(q, k, v, out=out, return_lse=True, **CAUSAL)  # both kernels, before the capture
        attention(first, k, v, return_lse=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, lse = attention(q, k, v, out=out, return_lse=True, **CAUSAL)
            second, second_lse = attention(out, k, v, return_lse=True)
        for _ in range(3):
            for t in (q, k, v):
                t.copy_(normal(*t.shape, device="cuda"))
            out.fill_(math.nan)
            graph.replay()
            assert_right(out, lse, q, k, v, **CAUSAL)
            assert_right(second, second_lse, out, k, v)

    def test_current_stream(self, path):
        """A kernel on any other stream would read the inputs before they are there."""
        call = qkv(200, 333)
        expected = attention(*call, return_lse=True)
        late = [torch.zeros_like(t) for t in call]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for t, source in zip(late, call, strict=True):
                t.copy_(source)
            results = [t.clone() for t in attention(*late, return_lse=True)]
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

    def test_two_streams(self, path):
        problems = [(qkv(600, 700), {}), (qkv(900, 500), CAUSAL)]
        expected = [attention(*call, return_lse=True, **terms)[0] for call, terms in problems]
        streams, outs = [torch.cuda.Stream() for _ in problems], [[] for _ in problems]
        torch.cuda.synchronize()
        for _ in range(20):
            for (call, terms), stream, results in zip(problems, streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    results.append(attention(*call, return_lse=True, **terms)[0])
        torch.cuda.synchronize()
        for results, right in zip(outs, expected, strict=True):
            assert all(torch.equal(result, right) for result in results)

    def test_threads(self, path):
        """Four threads, each with its own stream and lengths."""
        failures, inputs = [], [qkv(128 + 8 * i, 200 + 70 * i) for i in range(4)]

        def work(i):
            try:
                with cute_kernels.path(path), torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                    results = [attention(*inputs[i], return_lse=True, **CAUSAL) for _ in range(20)]
                    torch.cuda.current_stream().synchronize()
                for out, lse in results:
                    assert_right(out, lse, *inputs[i], **CAUSAL)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]

    def test_no_synchronisation(self, path):
        call = qkv(200, 333)
        attention(*call, return_lse=True, **CAUSAL)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            attention(*call, return_lse=True, **CAUSAL)
        finally:
            torch.cuda.set_sync_debug_mode("default")
