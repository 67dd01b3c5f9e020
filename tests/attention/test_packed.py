"""attention() of packed sequences: results, the kernels of both paths, and entries that are wrong."""

import math

import pytest
import torch

from attention import attention
from cute_kernels.testing.reference import poisoned, poisoned_empty

from .parts import check, packed, starts, where_fixture  # noqa: F401 (fixtures are used by name)

# As few compiled kernels as serve: CAUSAL with D 128, BOTH with 64 (a window and a cap), FULL with 64 and 96.
CAUSAL = {"D": 128}, {"causal": True}
FULL = {"D": 64}, {}
BOTH = {"D": 64}, {"window_size": (70, 20), "softcap": 20.0}
KERNELS = {
    "causal": CAUSAL, "full": FULL, "both": BOTH, "96": ({"D": 96}, {}),
    "192": ({"D": 192, "Dv": 128}, {"causal": True}), "scale": ({"D": 64, "Dv": 96}, {"scale": 0.2, "softcap": 5.0}),
}  # fmt: skip
every_kernel = pytest.mark.parametrize(("shape", "terms"), KERNELS.values(), ids=KERNELS)
LENGTHS = {
    "one": ([300], [300]),
    "tiny": ([1, 0, 1, 2], [1, 3, 0, 2]),
    "edges": ([128, 64, 192, 127, 129, 1], [128, 176, 64, 175, 177, 352]),
    "more_keys": ([1, 5, 100, 40], [700, 513, 300, 41]),
    "more_rows": ([700, 513, 300, 41], [1, 5, 100, 40]),
}


def check_twice(**call):
    """Into memory that is given and into the op's own: the same bits."""
    out = poisoned(*call["q"].shape[:2], call["v"].shape[2], device=call["q"].device)
    check(**call, out=out)
    with poisoned_empty():
        again, lse = attention(**call, return_lse=True)
    assert torch.equal(again, out)
    return out, lse


@every_kernel
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(where, shape, terms, lengths):
    check_twice(**packed(*LENGTHS[lengths], **shape, device=where), **terms)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 8), (12, 1)])
def test_shared_heads(where, heads):
    check(**packed([100, 0, 257, 3], [90, 10, 300, 3], *heads, D=128, device=where), causal=True)


@pytest.mark.parametrize("more", [(4, 7), (0, 0)])
@pytest.mark.parametrize(
    "lengths", [([5, 6], [5, 6]), ([0, 0], [3, 0]), ([3, 4], [0, 0]), ([0], [0]), ([], [])], ids=str
)
def test_rows_of_no_sequence_see_nothing(where, lengths, more):
    call = packed(*lengths, more=more, device=where)
    out, lse = check_twice(**call)
    end = sum(lengths[0]) if sum(lengths[1]) else 0
    assert not out[end:].count_nonzero() and lse[:, end:].isneginf().all()


@pytest.mark.gpu
@pytest.mark.parametrize("B", [31, 32, 33, 300])
def test_many_sequences(path, B):
    """A third of the sequences is empty; with rows of q, k and v after the last."""
    random = torch.Generator().manual_seed(B)
    rows, cols = (
        (torch.randint(0, 200, (B,), generator=random) * (torch.rand(B, generator=random) > 0.3)).tolist()
        for _ in range(2)
    )
    call = packed(rows, cols, D=128, device="cuda", more=(150, 40))
    _, lse = check_twice(**call, causal=True)
    assert torch.equal(lse, attention(**call, causal=True, return_lse=True)[1])


@every_kernel
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_neighbours_do_not_contaminate(where, shape, terms, junk):
    """Every other sequence's keys, values and queries are junk, as is what comes after the last one."""
    rows, cols = [100, 130, 70, 65, 1, 30, 200], [177, 33, 100, 257, 1, 9, 340]
    call = packed(rows, cols, **shape, device=where, more=(0, 100))
    clean = attention(**call, **terms, return_lse=True)
    for name in "qkv":
        begin = call["cu_seqlens_q" if name == "q" else "cu_seqlens_k"]
        for i in range(1, 7, 2):
            call[name][begin[i] : begin[i + 1]] = junk
        call[name][begin[-1] :] = junk
    out, lse = attention(**call, **terms, return_lse=True)
    for i in range(0, 7, 2):
        a, b = call["cu_seqlens_q"][i : i + 2].tolist()
        assert torch.equal(out[a:b], clean[0][a:b]) and torch.equal(lse[:, a:b], clean[1][:, a:b]), f"sequence {i}"
    assert out[:100].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_bad_entries_stay_in_the_tensors(path, seed):
    """Whatever cu_seqlens hold, nothing around out and its lse is written."""
    random = torch.Generator().manual_seed(seed)
    choice = torch.tensor([-(2**31), -5, 0, 7, 90, 100, 101, 500, 2**31 - 1], dtype=torch.int32)
    cu_q, cu_k = (choice[torch.randint(0, len(choice), (40,), generator=random)].cuda() for _ in range(2))
    call = packed([100], [90], D=128, device="cuda") | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    around = poisoned(300, 4, 128, device="cuda")
    attention(**call, causal=True, out=around[100:200])
    torch.cuda.synchronize()
    assert around[:100].isnan().all() and around[200:].isnan().all()
