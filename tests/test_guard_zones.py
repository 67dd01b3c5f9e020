"""Every op writes its result and nothing else, and reads nothing but its operands: extents 1 to 17 past multiples of 8.

The same calls run the CPU's references, the host side with torch in the kernels' place, and the kernels on a GPU.
"""

import dataclasses

import pytest
import torch

from . import host_emulation
from .conformance import FAMILIES, FEW, axes_of, case_of, run
from .fuzz import attention as fuzz_attention
from .guard_zones import PATTERN, Placement, Wrong, Zones

MORE = range(1, 18)
PATHS = ("sm_90", "sm_80")


@pytest.fixture(params=["reference", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request, monkeypatch):
    """The device of the tensors: on the CPU the ops' own references, or the host side of a GPU's calls."""
    if request.param == "emulated":
        host_emulation.install(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


def complete(run, cases, where: str) -> None:
    """Run all; of those that fail, name the kinds and the first of each."""
    wrong = {}
    for case in cases:
        try:
            run(case, where)
        except Exception as error:
            wrong.setdefault(getattr(error, "kind", type(error).__name__), []).append(f"{error}\n{case}")
    assert not wrong, "\n".join(f"{len(found)} of {kind}; the first: {found[0]}" for kind, found in wrong.items())


# The harness itself


@pytest.mark.parametrize("shape", [(5, 7), (3, 1, 4), (0, 4), (6,)], ids=str)
def test_placements(shape):
    """All elements are there, and nothing else is the tensor's."""
    values = torch.randn(shape).bfloat16()
    order = tuple(reversed(range(len(shape))))
    for place in (Placement(), Placement(order, (1,) * len(shape), 3)):
        zones = Zones()
        given, out = zones.input(values, place), zones.output(shape, torch.bfloat16, place)
        assert torch.equal(given, values) and given.stride() == out.stride() and out.isnan().all()
        out.copy_(given)
        zones.check()
        assert (zones.outputs[0][1] != PATTERN[2]).sum() <= values.numel()


@pytest.mark.parametrize("at", [-1, 7, 8 * 5])
def test_a_stray_write_is_seen(at):
    """One element before, in the gap behind a row, and after the last one."""
    zones = Zones()
    out = zones.output((5, 7), torch.bfloat16, Placement(pads=(0, 1)))
    out.zero_()
    zones.check()
    zones.outputs[0][1][out.storage_offset() + at] = 0
    with pytest.raises(Wrong, match=rf"1 elements around out .* \[{at}\] elements after its first"):
        zones.check()


def test_a_changed_input_is_seen():
    zones = Zones()
    x = zones.input(torch.zeros(3, 3), Placement(pads=(0, 1)), "x")
    x[1, 1] = -0.0
    with pytest.raises(Wrong, match="input changed: 1 elements of x's buffer"):
        zones.check()


# Products


def products(family, op, where):
    """All extents, beside others of each axis in turn."""
    axes = axes_of(family, op)
    for more in MORE:
        chosen = {axis: values[more % len(values)] for axis, values in axes.items()} | {"pattern": "bernoulli"}
        chosen |= {"epilogue": "nothing", "batch": axes["batch"][0], "rows": 0} if more % 2 else {}
        extent = more + (1000 if where == "cuda" and more % 4 == 0 else 192 if where == "cuda" else 24)
        if op == "gemm":
            chosen["size"] = (extent, 65, 64) if more % 2 else (65, extent, 64)
        elif op == "bsr_grouped_linear":
            chosen["columns"] = more % 6
        else:
            chosen["columns"] = more if family.columns is FEW else extent
        yield case_of(family, op, chosen, more)


@pytest.mark.parametrize(
    ("family", "op"), [(name, op) for name, family in FAMILIES.items() if family.plain for op in family.ops]
)
def test_products(where, monkeypatch, family, op):
    family = FAMILIES[family]
    family.force(monkeypatch)
    complete(run, [case for case in products(family, op, where) if family.takes(case.signature)], where)


# Attention


def family_of(op, path, causal, dims=(64, 64), block=(128, 128), lse=True):
    """(family, whether it has a cache)"""
    more = {"page_size": 16 if op == "paged attention" else 0}
    more["blocksize"] = block if op == "block_sparse_attention" else None
    base = fuzz_attention.Family(op, path, "bf16", dims, causal, False, None, lse)
    return dataclasses.replace(base, **more), op in ("cached attention", "paged attention")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("swap", [False, True], ids=["BHSD", "BSHD"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 64)], ids=str)
@pytest.mark.parametrize("op", fuzz_attention.OPS)
def test_attention(where, path, op, dims, swap):
    """Lengths 1 to 17 past a multiple of 8; rows further apart than they are long."""
    family, cached = family_of(op, path, op != "cached attention", dims, (64, 64))
    order = () if not swap else (1, 0, 2) if op == "packed attention" else (0, 2, 1, 3)

    def case(more):
        length = (200 if where == "cuda" else 24) + more
        rows = 1 if cached else length
        places = []
        for align in (1, 8, 8, 8):  # q is copied where it may not be read as it is
            pads = (0,) * (2 if op == "packed attention" else 3) + (align,)
            places.append(Placement(order, pads, 8))
        capacity = -(-2 * length // 16) if family.page_size else 2 * length if cached else 0
        terms = {"window": None, "density": 0.6, "nan_q": (), "nan_k": (), "give_out": True, "seed": more}
        lengths = (rows,) * 2, (length, 2 * length if cached else length)
        return fuzz_attention.Case(family, (6, 3), *lengths, capacity, places=tuple(places), **terms)

    complete(fuzz_attention.run, map(case, MORE), where)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("op", fuzz_attention.OPS)
def test_rows_of_nan(where, path, op, lse):
    """A row of q that is NaN makes its row of out NaN, and its lse; a row of k all that see it. No other row is NaN."""
    base, cached = family_of(op, path, True, lse=lse)
    calls = [(1, 2, 90), (3, 2, 90)] if cached else [(None, 3, 200), (None, 200, 200), (3, 3, 300)]
    cases = []
    for splits, rows, cols in calls:
        family = dataclasses.replace(base, splits=splits if cached or op == "attention" else None)
        for nan_q, nan_k in [((0.3,), ()), ((), (0.7,)), ((0.0, 0.99), (0.01,)), ((), (1.0,)), ((), ())]:
            capacity = -(-cols // 16) if family.page_size else cols if cached else 0
            more = {"nan_q": nan_q, "nan_k": nan_k, "places": (Placement(),) * 4, "give_out": True, "seed": 5}
            cases.append(fuzz_attention.Case(family, (4, 2), (rows,) * 2, (cols,) * 2, capacity, None, 1.0, **more))
    complete(fuzz_attention.run, cases, where)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dims", fuzz_attention.DIMS, ids=str)
@pytest.mark.parametrize("heads", [(3, 3), (8, 2)], ids=str)
def test_pages_in_a_wider_buffer(where, path, dims, heads):
    """Pages whose rows lie further apart than they are long, and more of them than a CTA has stages for."""
    cases = []
    for page_size, pad, splits in [(16, 0, None), (16, 8, None), (32, 1, None), (64, 8, 1), (16, 8, 1), (16, 8, 2)]:
        family = fuzz_attention.Family(
            "paged attention", path, "bf16", dims, True, False, None, True, splits, page_size
        )
        for rows, cols in [(1, (512, 300)), (3, (36, 130))]:
            places = (Placement(), *(Placement(pads=(0, 0, 0, pad)),) * 2, Placement())
            more = {"nan_q": (), "nan_k": (), "places": places, "give_out": True, "seed": 3}
            capacity = -(-max(cols) // page_size) + 1
            cases.append(fuzz_attention.Case(family, heads, (rows,) * 2, cols, capacity, None, 1.0, **more))
    complete(fuzz_attention.run, cases if where == "cuda" else cases[:4], where)
