"""The fuzz, small: on the CPU's references, and on the host side of a GPU's calls; its report, and how it ends."""

import json
from unittest import mock

import pytest
import torch

from .. import conformance, gpu_record
from ..guard_zones import Placement, Wrong, Zones
from . import attention as fuzz_attention
from . import gemm as fuzz_products
from . import run as fuzz

FAMILIES = {}  # by op and path
for _family, _, _ in fuzz.tasks_of(1, 0, "sm_"):
    FAMILIES.setdefault(_family.name, []).append(_family)


def run_all(name: str, count: int, seed: int = 0) -> None:
    """Cases of every family of an op and path, the same ones in each run."""
    wrong = []
    for i, family in enumerate(FAMILIES[name]):

        def each(case, run):
            found = fuzz.outcome(case, run, "cpu")
            if found:
                wrong.append(f'{found[0]}: {found[1]}\n  python -m tests.fuzz --device cpu --replay "{case}"')

        fuzz.draw_and_run(family, "cpu", count, 1000 * seed + i, each)
    assert not wrong, f"{len(wrong)} failed; the first: {wrong[0]}"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.endswith("sm_90")])
def test_references(name):
    run_all(name, 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_host_side(emulated, name):
    run_all(name, 3, seed=1)


def test_families():
    """Every op, path, head dimension, block, page size and layout is in some family, the same ones in each run."""
    assert len(FAMILIES) == 20 and fuzz.tasks_of(900, 3, "") == fuzz.tasks_of(900, 3, "")
    products = [f for families in FAMILIES.values() for f in families if isinstance(f, fuzz_products.Family)]
    others = [f for families in FAMILIES.values() for f in families if isinstance(f, fuzz_attention.Family)]
    assert {f.block for f in products} == {None, *conformance.ALL_BLOCKS} and {f.run for f in products} >= {
        64,
        128,
        256,
    }
    for name, families in FAMILIES.items():
        if families[0] in others:
            assert {f.dims for f in families} == set(fuzz_attention.DIMS), name
            assert {f.softcap for f in families} == {None, 5.0} and {f.lse for f in families} == {True, False}
        else:
            sampled = families[0].op == "sddmm"
            assert {d for _, _, d in (f.majors for f in families)} == ({False} if sampled else {False, True})
            assert {f.residual for f in families} == {False, True} or families[0].op.endswith("linear")
            assert {f.view for f in families} == ({False, True} if families[0].op.startswith("bsr") else {False})
            assert {f.align for f in families} == ({8} if name.endswith("sm_90") else {8, 4, 2, 1})
    for name in ("cached attention sm_90", "paged attention sm_80"):
        assert {f.cache for f in FAMILIES[name]} == {None, "e4m3", "e5m2"}
    assert {f.page_size for f in FAMILIES["paged attention sm_80"]} == set(fuzz_attention.PAGES)
    assert fuzz.tasks_of(10, 0, "gemm sm_80")[0][0].op == "gemm"
    with pytest.raises(SystemExit, match="no op and path is called 'conv'"):
        fuzz.tasks_of(10, 0, "conv")


def drawn(name: str, seed: int) -> list:
    cases = []
    fuzz.draw_and_run(FAMILIES[name][0], "cpu", 20, seed, lambda case, run: cases.append(repr(case)))
    return cases


@pytest.mark.parametrize("name", ["bsr_linear sm_80", "paged attention sm_90"])
def test_a_seed_says_which_cases(name):
    assert drawn(name, 5) == drawn(name, 5) != drawn(name, 6)
    for text in drawn(name, 5)[:5]:
        assert fuzz.replay(text, "cpu") == 0


def test_a_whole_run(tmp_path, capsys):
    out = tmp_path / "fuzz.json"
    assert fuzz.main(["--cases", "30", "--jobs", "1", "--only", "gemm", "--device", "cpu", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["counts"] == {"gemm sm_80": 16, "gemm sm_90": 16} and report["failures"] == []
    assert report["cases"] == report["wanted"] == 32 and report["seed"] == 0
    assert "fuzz: 32 of 32 cases of seed 0" in capsys.readouterr().out


def test_the_time_is_up(capsys):
    assert fuzz.main(["--cases", "30", "--minutes", "0", "--device", "cpu"]) == 1
    assert "fuzz: 0 of" in capsys.readouterr().out


RUN = [("case", "Case(1)"), ("done", None), ("case", "Case(2)"), ("done", ("result", "3"))]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([*RUN, ("case", "Case(3)"), EOFError()], "EOFError"),
        ([*RUN, ("case", "Case(3)")], "TimeoutError"),
        ([*RUN, ("end", "Traceback")], "in the fuzz itself"),
    ],
)
def test_a_worker_that_dies_or_hangs_names_its_case(words, kind):
    """And a failure is counted with its case."""
    found, family = fuzz.Fuzz([], "cpu", 1, 0.0), FAMILIES["gemm sm_80"][0]
    left = iter(range(len(words)))
    connection = mock.Mock(poll=lambda seconds: next(left, None) is not None, recv=mock.Mock(side_effect=words))
    if kind == "in the fuzz itself":
        found.hear((family, 3, 0), connection)
    else:
        with pytest.raises((EOFError, TimeoutError)):
            found.hear((family, 3, 0), connection)
    assert found.counts["gemm sm_80"] == 3
    assert found.kinds == {"gemm sm_80: result": 1, f"gemm sm_80: {kind}": 1}
    assert [f["case"] for f in found.failures][0] == "Case(2)" and len(found.failures) == 2
    report = fuzz.report_of(found, 3, 0, "cpu", 1.0)
    assert report["failed"] == 2 and '--replay "Case(2)"' in fuzz.text_of(report)


def test_it_finds_what_is_wrong(monkeypatch):
    """An op that errs, that forgets an element, that writes behind a row, and that changes its operand."""
    family = fuzz_products.Family("gemm", "sm_90", "bf16", "bf16", 8, 8, (False,) * 3, None, None, False)
    plain = Placement()
    case = fuzz_products.Case(family, 9, 9, 16, 1, 1.0, None, (plain, plain, Placement(pads=(0, 7)), plain), True, 1)
    op = conformance.OPS["gemm"]

    def broken(how):
        def gemm(a, b, out, **terms):
            op(a, b, out=out, **terms)
            how(a, out)
            return out

        monkeypatch.setitem(conformance.OPS, "gemm", gemm)
        return fuzz.outcome(case, fuzz_products.run, "cpu")

    assert broken(lambda a, out: None) is None
    assert broken(lambda a, out: out.mul_(1.1))[0] == "result"
    assert broken(lambda a, out: out[3, 4].fill_(torch.nan))[0] == "result"
    assert broken(lambda a, out: out.as_strided((9, 10), out.stride())[:, 9].fill_(0))[0] == "memory outside of out"
    assert broken(lambda a, out: a[0, 0].add_(1))[0] == "input changed"
    assert broken(lambda a, out: 1 / 0)[0] == "ZeroDivisionError"


def test_it_finds_rows_that_should_be_nan():
    """And rows that should not, of out and of lse."""
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (3, 5, 5))
    q[0, 1, 2] = torch.nan
    seen = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    seen[..., 0, :] = False
    expected = fuzz_attention.Expected(q, k, v, seen, None)
    out, lse = expected.by_torch.clone(), expected.lse.float()
    out[0, 1, 2], lse[0, 1, 2] = torch.nan, torch.nan
    expected.judge(out, lse, Zones())
    for change, kind in (
        (lambda out, lse: out[0, 1, 2, 5].fill_(0.0), "NaN in out"),
        (lambda out, lse: out[0, 0, 1, 5].fill_(torch.nan), "NaN in out"),
        (lambda out, lse: lse[0, 1, 2].fill_(-torch.inf), "NaN in lse"),
        (lambda out, lse: lse[0, 0, 0].fill_(0.0), "result"),
        (lambda out, lse: lse[0, 0, 1].add_(1e-3), "result"),
        (lambda out, lse: out[0, 1, 0, 0].fill_(1.0), "result"),
        (lambda out, lse: out[0, 0, 1].mul_(1.1), "result"),
    ):
        wrong, wrong_lse = out.clone(), lse.clone()
        change(wrong, wrong_lse)
        with pytest.raises(Wrong) as error:
            expected.judge(wrong, wrong_lse, Zones())
        assert error.value.kind == kind


def test_recorded_with_the_machine(monkeypatch, tmp_path, capsys):
    """`gpu_record --fuzz`: a process of its own, whose report gets the machine; without a report it has failed."""
    monkeypatch.setattr(gpu_record.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_record, "machine", lambda: {"card": "NVIDIA H200"})
    arguments = ["--fuzz", "--out", str(tmp_path), "--cases", "4", "--only", "gemm sm_90", "--device", "cpu"]
    path = tmp_path / "nvidia-h200" / "fuzz.json"
    assert gpu_record.main([*arguments, "--minutes", "0"]) == 1
    report = json.loads(path.read_text())
    assert report["machine"] == {"card": "NVIDIA H200"} and report["status"] == 1
    assert (report["cases"], report["wanted"]) == (0, 16) and report["arguments"] == [*arguments[3:], "--minutes", "0"]

    def passes(command, limit, show):
        path.write_text('{"cases": 16}')
        return 0, ""

    def fails(command, limit, show):
        return 2, ""

    monkeypatch.setattr(gpu_record, "run", passes)
    assert gpu_record.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["machine"] == {"card": "NVIDIA H200"} and (report["status"], report["cases"]) == (0, 16)
    monkeypatch.setattr(gpu_record, "run", fails)
    assert gpu_record.main([*arguments, "--unknown"]) == 1
    assert "ended without a report" in capsys.readouterr().err
