"""attention() to caches: lengths of items, pages, and few queries whose K and V are split among CTAs."""

import itertools

import pytest
import torch

from attention import attention
from attention.decode import heuristics
from cute_kernels import explain

from .parts import CAUSAL, cache, check, truth, where_fixture  # noqa: F401 (used by name)


def check_split(splits, **call):
    """With so many splits, or as the op thinks best: right, and twice the same bits."""
    with heuristics.splits(splits):
        plan = check(**call)
        first, again = (attention(**call, return_lse=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "other bits"
    return plan


# Results

LENGTHS = [0, 1, 127, 128, 129, 300, 511, 512]
WINDOWS = [{"window_size": (70, 0)}, {"window_size": (200, 9), "softcap": 3.0}, {"window_size": (None, 2)}]
DIMS = [(64, 64), (96, 96), (192, 128), (256, 256)]
CALLS = [  # of a cache, terms, splits
    *(({"D": 128, "H": H, "rows": n}, CAUSAL, (1, 2, 5, 40)) for H in (2, 4, 8, 10, 16, 32) for n in (1, 2, 5, 9)),
    *(({"D": D, "Dv": Dv, "H": 8, "rows": 3, "dtype": torch.float16}, {}, (1, 3)) for D, Dv in DIMS),
    *(({"D": 128, "H": 8, "rows": 7}, terms, (2, 4)) for terms in WINDOWS),
    ({"D": 128, "H": 8, "rows": 3, "page_size": 16}, CAUSAL, (1, 3)),
    *(({"D": 128, "H": 8, "rows": 3, "page_size": size}, CAUSAL, (3,)) for size in (64, 128, 256)),
    ({"D": 256, "H": 8, "heads": 1, "page_size": 32}, {}, (3,)),
    ({"D": 96, "Dv": 64, "H": 8, "heads": 1, "page_size": 16}, {}, (3,)),
    *(({"D": 128, "H": 8, "rows": n, "before": 41}, CAUSAL, (1, 3)) for n in (1, 5)),
    ({"D": 64, "H": 8, "rows": 3, "page_size": 64, "before": 130}, {"window_size": (70, 0)}, (2,)),
    ({"D": 128, "H": 8, "rows": 100, "page_size": 64}, CAUSAL, (1, 3)),  # several tiles of rows: a part of a prompt
]


@pytest.mark.parametrize(("operands", "terms", "splits"), CALLS, ids=str)
def test_calls(where, operands, terms, splits):
    call = cache(LENGTHS if where == "cuda" else LENGTHS[::3], 512, **operands, device=where)
    for count in splits if where == "cuda" else splits[:2]:
        check_split(count, **call, **terms)


def test_a_length_without_a_stride(where):
    call = cache([40], 64, H=2, device=where)
    length = call["seqused_k"][0].expand(1)
    assert length.stride() == (0,)
    assert torch.equal(attention(**call | {"seqused_k": length}), attention(**call))


def test_lengths_and_pages_that_are_not_there(where):
    call = cache([64, 64], 64, H=2, device=where)
    full = attention(**call)
    changed = [torch.tensor([n, 64], dtype=torch.int32, device=where) for n in (99, -5)]
    assert torch.equal(attention(**call | {"seqused_k": changed[0]}), full)
    negative = attention(**call | {"seqused_k": changed[1]})
    assert not negative[0].count_nonzero() and torch.equal(negative[1], full[1])


def test_pages_that_are_not_there_are_of_zeros():
    call = cache([64, 64], 64, page_size=16)
    call["page_table"][0] = 1000
    assert not attention(**call)[0].count_nonzero()


def test_first_rows_that_are_not_there(where):
    call = cache([64, 64, 64], 64, H=2, device=where)
    full = attention(**call)
    pairs = torch.tensor([[-7, 99], [64, 64], [80, -1]], dtype=torch.int32, device=where)
    found = attention(**call | {"seqused_k": pairs})
    assert torch.equal(found[0], full[0]) and not found[1:].count_nonzero()


def test_nothing_cached(where):
    call = cache([0, 0], 0, device=where)
    assert not attention(**call).count_nonzero()
    assert attention(**{name: t[:0] for name, t in call.items()}).shape == (0, 4, 1, 64)


def test_few_queries_take_the_kernel_by_themselves(device, path):
    call = cache([3000, 3000], 3000, rows=2, H=8, D=128, device=device)
    del call["seqused_k"]
    for splits in (None, 1, 7):
        assert "decode: " in str(check_split(splits, **call))


@pytest.mark.parametrize("page_size", [None, 16])
def test_long_caches_are_split(emulated, path, page_size):
    call = cache([7, 9], 4096, rows=3, H=8, D=128, Dv=64, page_size=page_size)
    plan = explain(attention, **call)
    facts, (_, _, left, right, splits, *ctas) = plan.facts, plan.scalars
    assert facts.split and facts.seqlens and facts.page_size == (page_size or 0) and (left, right) == (0, 0)
    assert 1 < splits <= 4096 // facts.config.tile_n and ctas == ([264] if path == "sm_90" else [])
    assert facts.smem_bytes <= 232_448
    check(**call)


# Splits


def test_best_splits():
    for items, tiles in itertools.product((1, 2, 8, 33, 64, 131, 132, 133, 500, 5000), (1, 2, 7, 128, 1024)):
        count = heuristics.best_splits(items, tiles, 132)
        assert 1 <= count <= max(1, min(tiles, 264))
        assert count == 1 or items < 132 or tiles > 7
    known = {(8, 128): 16, (8, 1024): 16, (64, 128): 2, (132, 128): 1, (1, 1024): 128, (8, 1): 1}
    assert {key: heuristics.best_splits(*key, 132) for key in known} == known
    # 8 heads of K and V, two CTAs an SM, tiles of 64 rows.
    for (batch, rows), count in {(1, 2**14): 32, (1, 2**17): 33, (8, 2**14): 4, (16, 2**14): 2}.items():
        assert heuristics.best_splits(8 * batch, rows // 64, 264) == count


def test_which_calls_it_serves():
    def serves(B, H, heads, Sq):
        return heuristics.serves(torch.empty(B, H, Sq, 64), torch.empty(B, heads, 4096, 64), 132)

    assert serves(1, 32, 8, 1) and serves(64, 32, 8, 16) and serves(1, 16, 1, 9)
    assert not serves(8, 32, 8, 17) and not serves(1, 32, 8, 4096)
