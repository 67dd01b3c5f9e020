"""attention against fp64: head dimensions, lengths, masks, views; and every form of a call in graphs and on streams.

Most tests run on the CPU's reference, on the host side of a GPU's calls with torch in the kernels' place, and on a GPU.
A kernel compiles in a second or two, so most tests share those of head_dim 64 with an lse.
"""

import math
import threading

import pytest
import torch

import cute_kernels
from attention import attention
from cute_kernels.runtime.device import forced_path
from cute_kernels.testing.reference import normal, poisoned, poisoned_empty

from ..fuzz import attention as fuzz_attention
from ..fuzz import run as fuzz
from .mask_parts import random_mask
from .parts import (  # noqa: F401 (fixtures are used by name)
    CAUSAL,
    assert_right,
    cache,
    captured,
    check,
    misaligned,
    nothing_waits,
    packed,
    qkv,
    rows_first,
    run,
    where_fixture,
)

BANDS = [{}, CAUSAL, {"window_size": (70, 30)}, {"window_size": (100, None)}]  # each is another kernel
LENGTHS = [  # FlashAttention's
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023), (2048, 2048), (1, 147), (239, 1), (500, 100),
]  # fmt: skip
SHORT = [(1, 1), (1, 2), (3, 2), (63, 65), (65, 63), (128, 128), (129, 129), (192, 176), (200, 7), (7, 200)]

# What is computed

DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (128, 64)]
WINDOWS = [(0, 0), (5, 0), (0, 5), (127, 64), (1000, 0), (0, 1000), (2**31, 3), (3, 2**31)]
SHARED = [(1, 1, 1), (3, 6, 1), (2, 6, 6), (1, 12, 3), (5, 2, 2), (64, 8, 2)]  # B, heads of q and of k
CALLS = [
    *(({"D": D, "Dv": Dv}, CAUSAL, [(200, 333), (1, 500), (333, 333)]) for D, Dv in DIMS),
    ({"D": 128, "dtype": torch.float16}, {}, [(200, 333), (333, 100)]),
    ({"dtype": torch.float16}, CAUSAL, [(200, 333), (333, 100)]),
    ({}, {"softcap": 1.5}, [(200, 333), (333, 129)]),
    ({}, {"softcap": 50.0, "scale": 0.3, "window_size": (70, 30)}, [(200, 333), (333, 129)]),
    *(({}, {"window_size": window}, [(129, 300), (300, 129), (256, 256)]) for window in WINDOWS),
    *(({"B": B, "H": H, "heads": heads}, {}, [(70, 130)]) for B, H, heads in SHARED),
]


@pytest.mark.parametrize(("operands", "terms", "lengths"), CALLS, ids=str)
def test_calls(where, operands, terms, lengths):
    for Sq, Sk in lengths:
        q, k, v = qkv(Sq, Sk, **operands, device=where)
        facts = check(q, k, v, **terms).facts
        if facts is not None:
            assert (facts.path, facts.head_dim, facts.head_dim_v) == (forced_path(), q.shape[-1], v.shape[-1])


@pytest.mark.parametrize("terms", BANDS, ids=str)
def test_lengths(where, terms):
    for Sq, Sk in LENGTHS + SHORT:
        if where == "cpu" and Sq * Sk > 2**16:
            continue
        try:
            check(*qkv(Sq, Sk, device=where), **terms)
        except AssertionError as error:
            raise AssertionError(f"lengths {(Sq, Sk)}: {error}") from None


def test_windows_without_bounds(where):
    """FlashAttention's -1, and None; a bound that nothing reaches; and causal, which takes the right one's place."""
    call = qkv(200, 333, device=where)

    def same(first, second):
        pairs = zip(*(attention(*call, return_lse=True, **terms) for terms in (first, second)), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    assert same({"window_size": (-1, 30)}, {"window_size": (None, 30)})
    assert same({"window_size": (70, -1)}, {"window_size": (70, None)})
    assert same({"window_size": (70, 9), "causal": True}, {"window_size": (70, 0)})
    assert same({"window_size": [70, 30]}, {"window_size": (70, 30)}) and same({"window_size": (-1, -1)}, {})
    for far in (332, 333, 2**29, 2**30 - 1, 2**30, 2**40):
        check(*call, window_size=(far, 30))
        check(*call, window_size=(70, far))


def test_no_columns_and_no_rows(where):
    q, k, v = qkv(33, 0, device=where)
    out, lse = attention(q, k, v, return_lse=True, out=poisoned(*q.shape, device=where))
    assert not out.count_nonzero() and lse.isneginf().all()
    assert attention(*qkv(0, 33, device=where)).shape == (2, 4, 0, 64)
    assert attention(*qkv(33, 33, B=0, device=where)).shape == (0, 4, 33, 64)


def test_scale(where):
    """An argument of one kernel, not new kernels; large scores keep one column of each row."""
    q, k, v = qkv(200, 333, device=where)
    assert len({check(q, k, v, scale=scale).facts for scale in (0.01, 0.125, 1, 3.0)}) == 1
    check(q * 30, k, v)


def test_without_lse(where):
    call = qkv(200, 333, Dv=96, device=where)
    with poisoned_empty():
        out = attention(*call, **CAUSAL)
    with_lse, lse = attention(*call, **CAUSAL, return_lse=True)
    assert_right(out, lse, *call, **CAUSAL)
    # On the sm_80 path the sums are taken in another way where LSE is asked for.
    assert out.is_contiguous() and (forced_path() == "sm_80" or torch.equal(out, with_lse))


# Views


def test_slices(where):
    """Heads of one projection; some heads; some rows; wide rows; an output among others that stay as they are."""
    call = [rows_first(t) for t in qkv(200, 333, device=where)]
    assert "copied" not in str(check(*call, out=rows_first(poisoned(2, 4, 200, 64, device=where)), **CAUSAL))
    heads = normal(2, 200, 8 * 64, device=where).view(2, 200, 8, 64).transpose(1, 2)
    check(*heads.split((4, 2, 2), 1), **CAUSAL)
    q, k, v = qkv(200, 333, H=8, heads=4, device=where)
    whole = poisoned(2, 8, 300, 128, device=where)
    check(q[:, ::2], k[:, 1::2], v[:, :2], out=whole[:, 2:6, 50:250, :64], **CAUSAL)
    whole[:, 2:6, 50:250, :64] = math.nan
    assert whole.isnan().all()
    wide = normal(2, 4, 333, 128, device=where)
    check(q[:, :, 50:150], wide[:, :2, :, :64], wide[:, 2:, :, 64:])


def odd_rows(t):
    return torch.nn.functional.pad(t, (0, 1))[..., :-1]


def expanded(t):
    return t[:1, :1].expand_as(t)


@pytest.mark.parametrize("view", [misaligned, odd_rows, expanded])
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_copies(device, path, which, view):
    """Addresses and strides that TMA does not take, and expanded tensors, are copied, and explain says so."""
    call = {name: view(t) if name in which else t for name, t in zip("qkv", qkv(70, 130, device=device), strict=True)}
    plan = check(**call, **CAUSAL)
    assert {note[0] for note in plan.notes if "is copied" in note} == set(which)


def test_any_stride_of_single_extents(where):
    q, k, v = (t.as_strided(t.shape, (7, 3, *t.stride()[2:])) for t in qkv(70, 130, B=1, H=1, heads=1, device=where))
    assert "copied" not in str(check(q, k, v))
    q, k, v = qkv(1, 1, device=where)
    check(q.as_strided(q.shape, (*q.stride()[:2], 1, 1)), k, v)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_lies_past_the_end(where, bad):
    """Rows of the same memory that are not part of k and v, nor of q, reach no result."""
    q, k, v = (torch.full((2, n, 400, 64), bad, dtype=torch.bfloat16, device=where) for n in (4, 2, 2))
    for Sq, Sk in ((33, 70), (130, 177), (200, 1)):
        views = q[:, :, :Sq], k[:, :, :Sk], v[:, :, :Sk]
        for view in views:
            view.copy_(normal(*view.shape, device=where))
        for terms in BANDS:
            check(*views, **terms)
        for t in (q, k, v):
            t.fill_(bad)


def test_nan_stays_in_its_head(where):
    q, k, v = qkv(200, 333, device=where)
    q[0, 1, 7] = math.nan
    v[1, 1, 5] = math.nan
    out, _ = attention(q, k, v, return_lse=True)
    assert out[0, 1, 7].isnan().all() and out[1, 2:].isnan().all()
    assert out.isnan().any(-1).sum() == 1 + 2 * 200


# Calls that repeat, and calls at the same time


def test_known_plans_are_not_confused(device):
    """Calls on the same tensors that differ in one argument, each of them after all others; then new tensors."""
    call = qkv(100, 130, device=device)
    variants = [
        {},
        CAUSAL,
        {"window_size": (30, 10)},
        {"window_size": (31, 10)},
        {"window_size": (30, 11)},
        {"scale": 0.2},
    ]
    for _ in range(2):
        for terms in variants:
            check(*call, **terms)
            check(*call, **terms, out=rows_first(poisoned(2, 4, 100, 64, device=device)))
            out, lse = attention(*call, **terms, return_lse=True)
            assert_right(out, lse, *call, **terms)
            check(*qkv(100, 130, device=device), **terms)
    with cute_kernels.path("sm_80"):
        assert check(*call).facts.path == "sm_80"


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_long(path, D):
    check(*qkv(5000, 5003, D, B=1, H=2, heads=1, device="cuda"), **CAUSAL)


def some_families():
    for f in fuzz_attention.families()[::6]:
        marks = [getattr(pytest.mark, f.path), *([] if f.op == "attention" else [pytest.mark.slow])]
        yield pytest.param(f, marks=marks, id=str(f))


@pytest.mark.gpu
@pytest.mark.parametrize("family", list(some_families()))
def test_any_call(family):
    """Calls as the fuzz draws them. It runs more of them, and of every family."""

    def right(case, make):
        found = fuzz.outcome(case, make, "cuda")
        assert found is None, f"{found}\n{case}"

    fuzz.draw_and_run(family, "cuda", 20, 0, right)


# Graphs, streams and threads

LENGTHS_OF = {  # in turns
    "seqused_k": ([512, 1, 0, 200], [3, 300, 129, 128], [512] * 4),
    "cu_seqlens_q": ([0, 0, 1, 384], [0, 128, 256, 356], [0, 100, 300, 384]),
    "cu_seqlens_k": ([0, 500, 502, 512], [0, 1, 1, 301], [0, 150, 400, 512]),
}
FORMS = {
    "dense": lambda: dict(zip("qkv", qkv(200, 333, device="cuda"), strict=True)),
    "packed": lambda: packed([100, 200, 84], [150, 250, 112], D=128, device="cuda"),
    "cache": lambda: cache([512] * 4, 512, H=8, D=128, device="cuda"),
    "pages": lambda: cache([512] * 4, 512, H=8, D=128, page_size=16, device="cuda"),
    "blocks": lambda: (
        dict(zip("qkv", qkv(512, 640, device="cuda"), strict=True))
        | {"block_mask": random_mask((512, 640), (64, 64), full=False, device="cuda")}
    ),
}


def renew(call, turn):
    """Other numbers in the same memory, and other lengths."""
    for name in "qkv":
        call[name].copy_(normal(*call[name].shape, device="cuda"))
    for name in LENGTHS_OF.keys() & call.keys():
        call[name].copy_(torch.tensor(LENGTHS_OF[name][turn], dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
class TestCuda:
    @pytest.mark.parametrize("known", [False, True])
    def test_graph(self, path, form, known):
        """With a second call of the first one's result, a copy of a misaligned v, and what is made of new tensors."""
        out = torch.empty_like(FORMS[form]()["q"])

        def both(call):
            _, lse = run(**call, out=out, return_lse=True, **CAUSAL)
            return lse, *run(**call | {"q": out}, return_lse=True)

        call = FORMS[form]()
        call["v"] = misaligned(call["v"])
        both(FORMS[form]() | {"v": misaligned(call["v"])} if not known else call)  # compiles
        graph, (lse, second, second_lse) = captured(lambda: both(call))
        for turn in range(3):
            renew(call, turn)
            out.fill_(math.nan)
            graph.replay()
            assert_right(out, lse, **call, **CAUSAL)
            assert_right(second, second_lse, **call | {"q": out})

    def test_current_stream(self, path, form):
        """A kernel on any other stream would read the inputs before they are there."""
        call = FORMS[form]()
        expected = run(**call, return_lse=True)
        late = call | {name: torch.zeros_like(call[name]) for name in "qkv"}
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for name in "qkv":
                late[name].copy_(call[name])
            results = [t.clone() for t in run(**late, return_lse=True)]
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

    def test_two_streams(self, path, form):
        calls = [FORMS[form](), FORMS[form]() | CAUSAL]
        expected = [run(**call) for call in calls]
        streams, outs = [torch.cuda.Stream() for _ in calls], [[] for _ in calls]
        torch.cuda.synchronize()
        for _ in range(20):
            for call, stream, results in zip(calls, streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    results.append(run(**call))
        torch.cuda.synchronize()
        for results, right in zip(outs, expected, strict=True):
            assert all(torch.equal(result, right) for result in results)

    def test_threads(self, path, form):
        """Four threads, each with its own stream and call."""
        failures, calls = [], [FORMS[form]() | CAUSAL for _ in range(4)]

        def work(call):
            try:
                with cute_kernels.path(path), torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                    results = [run(**call, return_lse=True) for _ in range(20)]
                    torch.cuda.current_stream().synchronize()
                for out, lse in results:
                    assert_right(out, lse, **call)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]

    def test_nothing_waits(self, path, form):
        """Neither the first call with a mask, nor later ones."""
        run(**FORMS[form](), return_lse=True, **CAUSAL)
        call = FORMS[form]()
        with nothing_waits():
            for _ in range(2):
                run(**call, return_lse=True, **CAUSAL)
