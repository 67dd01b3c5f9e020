"""attention() of packed sequences: on CPU tensors, what is refused, and the kernels of both paths on a GPU."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cute_kernels
from attention import attention, reference
from cute_kernels import explain

from .reference import poisoned, poisoned_empty

BF16 = torch.bfloat16
GPU_FUZZ = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def starts(lengths, device="cpu") -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def qkv(rows, cols, heads=4, heads_kv=2, D=64, Dv=None, dtype=BF16, device="cpu", more=(0, 0)):
    """q, k and v of such lengths, with `more` rows after the last sequence; and their cu_seqlens."""
    total_q, total_k, Dv = sum(rows) + more[0], sum(cols) + more[1], Dv or D
    shapes = (total_q, heads, D), (total_k, heads_kv, D), (total_k, heads_kv, Dv)
    tensors = [torch.randn(*shape, device=device).to(dtype) for shape in shapes]
    return *tensors, {"cu_seqlens_q": starts(rows, device), "cu_seqlens_k": starts(cols, device)}


def truth(q, k, v, cu_seqlens_q, cu_seqlens_k, **terms):
    """(out, lse) in fp64, with the rows after the last sequence."""
    end_q, end_k = int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], len(q)), -math.inf, dtype=torch.float64, device=q.device)
    parts = q[:end_q].double(), k[:end_k].double(), v[:end_k].double()
    found = reference.attention_packed(*parts, cu_seqlens_q, cu_seqlens_k, **terms, return_lse=True)
    out[:end_q], lse[:, :end_q] = found
    return out, lse


def check(q, k, v, cu, **terms):
    """Compare a call with the truth, into poisoned memory."""
    with poisoned_empty():
        out, lse = attention(q, k, v, **cu, **terms, return_lse=True)
    exact, exact_lse = truth(q, k, v, **cu, **terms)
    assert out.dtype == q.dtype and out.shape == exact.shape
    assert lse.dtype == torch.float32 and lse.shape == exact_lse.shape
    torch.testing.assert_close(out.double(), exact, atol=8e-3, rtol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, atol=5e-3, rtol=1e-3)
    return out, lse


# CPU tensors


@pytest.mark.parametrize("terms", [{}, {"causal": True}, {"window": (7, 3)}, {"scale": 0.2, "softcap": 5.0}], ids=str)
def test_each_sequence_is_an_attention_of_its_own(terms):
    rows, cols = [5, 0, 33, 1, 12], [9, 4, 20, 0, 12]
    q, k, v, cu = qkv(rows, cols, Dv=96)
    out, lse = check(q, k, v, cu, **terms)
    assert torch.equal(out, attention(q, k, v, **cu, **terms))
    for i, (a, b) in enumerate(zip(cu["cu_seqlens_q"][:-1], cu["cu_seqlens_q"][1:], strict=True)):
        c, d = cu["cu_seqlens_k"][i : i + 2]
        alone = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        one, one_lse = attention(*alone, **terms, return_lse=True)
        assert torch.equal(one[0].transpose(0, 1), out[a:b]) and torch.equal(one_lse[0], lse[:, a:b])


def test_rows_of_no_sequence_see_nothing():
    q, k, v, cu = qkv([5, 6], [5, 6], more=(4, 7))
    out = poisoned(*q.shape)
    result, lse = attention(q, k, v, **cu, return_lse=True, out=out)
    assert result is out and not out[11:].count_nonzero() and lse[:, 11:].isneginf().all()


@pytest.mark.parametrize("lengths", [([0, 0], [3, 0]), ([3, 4], [0, 0]), ([0], [0])], ids=str)
def test_nothing_to_attend_to(lengths):
    q, k, v, cu = qkv(*lengths)
    out, lse = attention(q, k, v, **cu, return_lse=True)
    assert out.shape == q.shape and lse.shape == (4, len(q)) and not out.count_nonzero() and lse.isneginf().all()


def test_explained():
    q, k, v, cu = qkv([5, 6], [5, 6])
    assert "CPU tensors run the reference" in str(explain(attention, q, k, v, **cu))


def changed(**other):
    q, k, v, cu = qkv([5, 6], [7, 8])
    return {"q": q, "k": k, "v": v, **cu, **other}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (changed(cu_seqlens_k=None), ValueError, "must both be given"),
        (changed(cu_seqlens_q=None), ValueError, "must both be given"),
        (changed(q=torch.zeros(2, 4, 33, 64, dtype=BF16)), ValueError, "with cu_seqlens it must be .total, heads"),
        (changed(cu_seqlens_q=[0, 5, 11]), TypeError, "cu_seqlens_q must be a torch.Tensor"),
        (changed(cu_seqlens_q=torch.tensor([0, 5, 11])), TypeError, "cu_seqlens_q is torch.int64; it must be"),
        (changed(cu_seqlens_k=torch.zeros(1, dtype=torch.int32)), ValueError, "must be .sequences . 1,., from 2 on"),
        (changed(cu_seqlens_k=torch.zeros(3, 1, dtype=torch.int32)), ValueError, "must be .sequences . 1,."),
        (changed(cu_seqlens_k=torch.zeros(6, dtype=torch.int32)[::2]), ValueError, "stride 2; call .contiguous"),
        (changed(cu_seqlens_k=starts([7, 4, 4])), ValueError, "is of 2 sequences and cu_seqlens_k of 3"),
        (changed(cu_seqlens_k=starts([7, 9])), ValueError, "must begin at 0, never decrease and end at 15"),
        (changed(cu_seqlens_q=torch.tensor([0, 12, 11], dtype=torch.int32)), ValueError, "never decrease"),
        (changed(v=torch.zeros(14, 2, 64, dtype=BF16)), ValueError, "differ in heads or length"),
        (changed(k=torch.zeros(15, 3, 64, dtype=BF16), v=torch.zeros(15, 3, 64, dtype=BF16)), ValueError, "a multiple"),
        (changed(scale=-1.0), ValueError, "scale is -1.0"),
        (changed(return_lse=1), TypeError, "return_lse must be True or False"),
        (changed(out=torch.zeros(11, 2, 64, dtype=BF16)), ValueError, "out has shape"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        attention(**arguments)


def test_other_devices_are_refused():
    q, k, v, cu = qkv([5, 6], [7, 8])
    with pytest.raises(ValueError, match="cu_seqlens_q is on meta"):
        attention(q, k, v, cu_seqlens_q=cu["cu_seqlens_q"].to("meta"), cu_seqlens_k=cu["cu_seqlens_k"])


def test_gradients_are_refused():
    q, k, v, cu = qkv([5, 6], [7, 8])
    with pytest.raises(RuntimeError, match="does not compute gradients"):
        attention(q, k, v.requires_grad_(), **cu)


# The kernels: as few compiled ones as serve, CAUSAL with D 128, BOTH with 64 (a window and a cap), FULL with 64 and 96.

gpu = pytest.mark.gpu
CAUSAL = {"D": 128}, {"causal": True}
FULL = {"D": 64}, {}
BOTH = {"D": 64}, {"window": (70, 20), "softcap": 20.0}
KERNELS = [CAUSAL, FULL, BOTH, ({"D": 96}, {}), ({"D": 192, "Dv": 128}, {"causal": True})]
LENGTHS = {
    "one": ([300], [300]),
    "tiny": ([1, 0, 1, 2], [1, 3, 0, 2]),
    "edges": ([128, 64, 192, 127, 129, 1], [128, 176, 64, 175, 177, 352]),
    "more_keys": ([1, 5, 100, 40], [700, 513, 300, 41]),
    "more_rows": ([700, 513, 300, 41], [1, 5, 100, 40]),
}


@gpu
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("shape", "terms"), KERNELS, ids=["causal", "full", "both", "96", "192"])
def test_lengths(path, shape, terms, lengths):
    q, k, v, cu = qkv(*LENGTHS[lengths], **shape, device="cuda")
    check(q, k, v, cu, **terms)


@gpu
@pytest.mark.parametrize("B", [31, 32, 33, 300])
def test_many_sequences(path, B):
    """Of which a third is empty; with rows of q, k and v after the last."""
    random = torch.Generator().manual_seed(B)
    rows, cols = (
        (torch.randint(0, 200, (B,), generator=random) * (torch.rand(B, generator=random) > 0.3)).tolist()
        for _ in range(2)
    )
    q, k, v, cu = qkv(rows, cols, D=128, device="cuda", more=(150, 40))
    out, lse = check(q, k, v, cu, causal=True)
    assert torch.equal(out, attention(q, k, v, **cu, causal=True, return_lse=True)[0]), "same bits"
    assert torch.equal(lse, attention(q, k, v, **cu, causal=True, return_lse=True)[1])


@gpu
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 8), (12, 1)])
def test_shared_heads(path, heads):
    q, k, v, cu = qkv([100, 0, 257, 3], [90, 10, 300, 3], *heads, D=128, device="cuda")
    check(q, k, v, cu, causal=True)


@gpu
@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize(("shape", "terms"), KERNELS, ids=["causal", "full", "both", "96", "192"])
def test_neighbours_do_not_contaminate(path, shape, terms, junk):
    """Every other sequence's keys, values and queries are junk, as is what comes after the last one."""
    rows, cols = [100, 130, 70, 65, 1, 30, 200], [177, 33, 100, 257, 1, 9, 340]
    q, k, v, cu = qkv(rows, cols, **shape, device="cuda", more=(0, 100))
    clean = attention(q, k, v, **cu, **terms, return_lse=True)
    for tensor, begin in ((q, cu["cu_seqlens_q"]), (k, cu["cu_seqlens_k"]), (v, cu["cu_seqlens_k"])):
        for i in range(1, 7, 2):
            tensor[begin[i] : begin[i + 1]] = junk
        tensor[begin[-1] :] = junk
    out, lse = attention(q, k, v, **cu, **terms, return_lse=True)
    for i in range(0, 7, 2):
        a, b = cu["cu_seqlens_q"][i : i + 2].tolist()
        assert torch.equal(out[a:b], clean[0][a:b]) and torch.equal(lse[:, a:b], clean[1][:, a:b]), f"sequence {i}"
    assert out[:100].isfinite().all()


@gpu
def test_views(path):
    """q, k and v of one tensor, heads before rows, an out with gaps; addresses that TMA does not take are copied."""
    rows = [50, 200, 3]
    cu = {"cu_seqlens_q": starts(rows, "cuda"), "cu_seqlens_k": starts(rows, "cuda")}
    both = torch.randn(253, 8, 64, device="cuda").to(BF16)
    q, k, v = both[:, :4], both[:, 4:6], both[:, 6:]

    def attend(*tensors, **terms):
        return attention(*tensors, **cu, **terms, return_lse=True)[0]

    expected, _ = check(q, k, v, cu)
    heads_first = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v))
    assert torch.equal(attend(*heads_first), expected)
    wide = poisoned(253, 4, 96, device="cuda")
    out = attend(q, k, v, out=wide[:, :, 16:80])
    assert torch.equal(out, expected) and wide[:, :, :16].isnan().all() and wide[:, :, 80:].isnan().all()
    odd = torch.randn(253 * 2 * 64 + 1, device="cuda").to(BF16)[1:].view(253, 2, 64).copy_(k)
    assert "k is copied" in str(explain(attention, q, odd, v, **cu))
    assert torch.equal(attend(q, odd, v), expected)


@gpu
@pytest.mark.parametrize("seed", range(6))
def test_bad_entries_stay_in_the_tensors(path, seed):
    """Whatever cu_seqlens hold, nothing around out and its lse is written."""
    random = torch.Generator().manual_seed(seed)
    choice = torch.tensor([-(2**31), -5, 0, 7, 90, 100, 101, 500, 2**31 - 1], dtype=torch.int32)
    cu_q, cu_k = (choice[torch.randint(0, len(choice), (40,), generator=random)].cuda() for _ in range(2))
    q, k, v, _ = qkv([100], [90], D=128, device="cuda")
    around = poisoned(300, 4, 128, device="cuda")
    attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, out=around[100:200])
    torch.cuda.synchronize()
    assert around[:100].isnan().all() and around[200:].isnan().all()


@gpu
def test_cuda_graph(path):
    """Lengths are changed between replays."""
    q, k, v, cu = qkv([100, 200, 84], [150, 250, 112], D=128, device="cuda")
    out = poisoned(*q.shape, device="cuda")
    attention(q, k, v, **cu, causal=True, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, k, v, **cu, causal=True, out=out)
    for rows, cols in (([100, 200, 84], [150, 250, 112]), ([0, 1, 383], [500, 2, 10]), ([128, 128, 100], [1, 0, 300])):
        cu["cu_seqlens_q"].copy_(starts(rows))
        cu["cu_seqlens_k"].copy_(starts(cols))
        out.fill_(math.nan)
        graph.replay()
        torch.testing.assert_close(out.double(), truth(q, k, v, **cu, causal=True)[0], atol=8e-3, rtol=1e-2)


lengths = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 128, 176, 177]), st.integers(0, 400))
RANDOM = {
    "pairs": st.lists(st.tuples(lengths, lengths), min_size=1, max_size=40),
    "more": st.tuples(st.integers(0, 200), st.integers(0, 200)),
    "heads": st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    "kernel": st.sampled_from([CAUSAL, FULL, BOTH]),
    "seed": st.integers(0, 2**31),
}


def check_random(pairs, more, heads, kernel, seed, device):
    torch.manual_seed(seed)
    rows, cols = zip(*pairs, strict=True)
    q, k, v, cu = qkv(rows, cols, *heads, **kernel[0], device=device, more=more)
    check(q, k, v, cu, **kernel[1])


@settings(GPU_FUZZ, max_examples=10)
@given(**RANDOM)
def test_random_lengths_host_side(emulated, **drawn):
    check_random(**drawn, device="cpu")


@gpu
@GPU_FUZZ
@given(**RANDOM, name=st.sampled_from(["sm_80", "sm_90"]))
def test_random_lengths(name, **drawn):
    if name == "sm_90" and torch.cuda.get_device_capability() != (9, 0):
        name = "sm_80"
    with cute_kernels.path(name):
        check_random(**drawn, device="cuda")
