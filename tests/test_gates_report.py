"""The gates' runner and page, the gates that ask other tools, and the command; test_gates.py has what gates find."""

import argparse
import io
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from bench import record
from bench.gates import command, counters, gate, resources, sanitizer, tables
from bench.gates.gate import FAILED, PASSED, SKIPPED, Gate, Skip
from cute_kernels import tuned

from . import gpu_record

# -- the runner and its page ----------------------------------------------------------------------------------


def skips():
    raise Skip("no such tool")


def breaks():
    raise ValueError("a line\nand another")


def test_a_gate_that_breaks_has_failed(tmp_path, monkeypatch):
    told, kept = [], []
    checks = {"good": lambda: Gate("good", PASSED, "fine"), "skipped": skips, "broken": breaks}
    good, skipped, broken = found = gate.run(checks, told.append, lambda gates: kept.append(len(gates)))
    assert [each.verdict for each in found] == [PASSED, SKIPPED, FAILED]
    assert skipped.summary == "no such tool" and kept == [1, 2, 3]
    assert "ValueError: a line and another" in broken.summary and broken.details == ["a line", "and another"]
    assert [line.split()[1] for line in told] == ["good", "good", "skipped", "skipped", "broken", "broken"]
    assert [line.split()[2] for line in told] == ["...", PASSED, "...", SKIPPED, "...", FAILED], "before, and after"
    assert gate.exit_status([good, skipped]) == 0 and gate.exit_status([good, broken]) == 1

    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H200", "sources": "abc"})
    path = gate.write(found, tmp_path, "quick")
    assert path == tmp_path / "nvidia-h200" / "gates.json"
    data = json.loads(path.read_text())
    assert (data["mode"], data["ok"], data["environment"]["sources"]) == ("quick", False, "abc")
    assert [(g["name"], g["verdict"]) for g in data["gates"]] == [(each.name, each.verdict) for each in found]


def test_gates_asked_in_several_calls_make_one_record(tmp_path, monkeypatch):
    where = {"card": "NVIDIA H200", "sources": "abc"}
    monkeypatch.setattr(record, "environment", lambda: where)
    monkeypatch.setattr(record, "what_runs", lambda: {"sources": where["sources"]})

    def verdicts(*gates, mode="full"):
        data = json.loads(gate.write(list(gates), tmp_path, mode).read_text())
        return data["ok"], [(each["name"], each["verdict"]) for each in data["gates"]]

    assert verdicts(Gate("speed", FAILED, "slow")) == (False, [("speed", FAILED)])
    both = [("resources", PASSED), ("speed", FAILED)]
    assert verdicts(Gate("resources", PASSED, "fine")) == (False, both), "in their own order"
    assert verdicts(Gate("speed", PASSED, "fast")) == (True, [("resources", PASSED), ("speed", PASSED)])
    data = json.loads((tmp_path / "nvidia-h200" / "gates.json").read_text())
    assert "tables, correctness" in data["conclusion"] and "not asked" in data["conclusion"]
    verdicts(Gate("tables", FAILED, "many", [f"line {i}" for i in range(gate.MOST_DETAILS + 5)]))
    verdicts(Gate("speed", PASSED, "fast"))
    kept = json.loads((tmp_path / "nvidia-h200" / "gates.json").read_text())["gates"][1]
    assert kept["name"] == "tables" and kept["details"][-1] == "and 5 lines more", "cut once"
    where["sources"] = "abd"
    assert verdicts(Gate("speed", PASSED, "fast")) == (True, [("speed", PASSED)]), "of other sources nothing is known"
    assert verdicts(Gate("tables", PASSED, "fit"), mode="quick") == (True, [("tables", PASSED)])


def test_no_verdict_without_a_word():
    with pytest.raises(ValueError, match="not a word why"):
        Gate("speed", SKIPPED, " ")
    with pytest.raises(ValueError, match="there are passed, failed, skipped"):
        Gate("speed", "fine", "fine")


def test_the_page():
    found = [
        Gate("good", PASSED, "all is well", ["not shown"], 1.25),
        Gate("bad", FAILED, "two of three", [f"line {i}" for i in range(gate.MOST_DETAILS + 5)]),
        Gate("left", SKIPPED, "no [tool]"),
    ]
    text = io.StringIO()
    gate.page(found, Console(file=text))
    shown = text.getvalue()
    assert "not shown" not in shown and "no [tool]" in shown and "line 39" in shown and "line 40" not in shown
    assert "and 5 lines more" in shown and shown.rstrip().endswith("Not to be shipped: bad failed.")
    assert gate.conclusion(found[:1]) == "Every gate passed."
    assert "left skipped" in gate.conclusion([found[0], found[2]])
    assert gate.conclusion(found[:1], ("speed", "tables")).endswith("looked at: speed, tables not asked.")


# -- counters and sanitizer -----------------------------------------------------------------------------------

NCU = """==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "kernel_cutlass_kernel_GemmSm90" - 0: 0%....50%....100% - 4 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Kernel Name","Grid Size",{names}
"","","","",{units}
"0","4242","kernel_cutlass_kernel_GemmSm90","(132, 1, 1)",{values}
"""


def ncu_output(active="81.25"):
    columns = (
        (counters.DRAM, "%", "23.5"),
        (counters.DURATION, "ns", "1,950,016"),
        (counters.L2_READS, "byte", "3,900,032,000"),
        (counters.TENSOR, "%", active),
    )
    names, units, values = (",".join(f'"{x}"' for x in column) for column in zip(*columns, strict=True))
    return NCU.format(names=names, units=units, values=values)


def test_ncu_is_parsed():
    (launch,) = counters.parse(ncu_output())
    assert launch == dict(zip(counters.METRICS, (81.25, 23.5, 3900032000.0, 1950016.0), strict=True))
    for text, reason in (
        ("==PROF== Connected\n==WARNING== No kernels", "profiled no launch: .*==WARNING== No kernels"),
        (ncu_output().rpartition('"0"')[0], "profiled no launch"),
        (ncu_output().replace(counters.TENSOR, "sm__else"), "printed no sm__pipe"),
    ):
        with pytest.raises(ValueError, match=reason):
            counters.parse(text)


@pytest.mark.parametrize(
    ("dense", "bsr", "verdict"), [("80", "70", PASSED), ("74.9", "70", FAILED), ("80", "64", FAILED)]
)
def test_tensor_activity(dense, bsr, verdict):
    found = counters.check(lambda name: ncu_output({"dense": dense, "bsr": bsr}[name]))
    assert found.verdict == verdict
    assert "memory 23.5 %, 2.00 TB/s from L2, 1950.0 us" in found.details[0]


@pytest.mark.parametrize(
    ("script", "verdict", "word"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1", SKIPPED, "ERR_NVGPUCTRPERM"),
        ("echo 'no such option' >&2; exit 1", FAILED, "ncu ended with 1: no such option"),
        ("echo '==PROF== Connected'", FAILED, "profiled no launch"),
        (None, SKIPPED, "neither on PATH nor"),
    ],
)
def test_ncu_that_says_no(tmp_path, monkeypatch, script, verdict, word):
    if script:
        (tmp_path / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(counters, "need_gpu", lambda: None)
    (found,) = gate.run({"counters": counters.check})
    assert found.verdict == verdict and word in found.summary


def test_the_sanitizer_gate(monkeypatch):
    clean = {"ok": True, "status": 0, "cases": 18, "summary": "ERROR SUMMARY: 0 errors"}
    bad = {"ok": False, "status": 86, "cases": 3, "summary": "RACECHECK SUMMARY: 2 hazards", "output": ["=== race"]}
    assert sanitizer.check(lambda: {"memcheck": clean}).summary == "clean: memcheck 18 cases"
    found = sanitizer.check(lambda: {"memcheck": clean, "racecheck": bad})
    assert found.verdict == FAILED and found.summary == "not clean: racecheck" and "    === race" in found.details
    monkeypatch.setattr(sanitizer, "need_gpu", lambda: None)
    monkeypatch.setattr(gpu_record, "sanitizer", lambda: None)
    (found,) = gate.run({"sanitizer": sanitizer.check})
    assert found.verdict == SKIPPED and "compute-sanitizer" in found.summary


# -- the command ----------------------------------------------------------------------------------------------


def run(*given) -> int:
    """The exit status of the command."""
    args = arguments(*given)
    return args.run(args)


def arguments(*given):
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    return parser.parse_args(["gates", *given])


def test_arguments(capsys):
    args = arguments("--only", "speed,resources", "--quick")
    assert (args.only, args.quick, args.set_floors, args.out) == (("resources", "speed"), True, False, record.RESULTS)
    assert arguments().only == command.NAMES
    with pytest.raises(SystemExit):
        arguments("--only", "sped")
    assert "unknown gate 'sped'" in capsys.readouterr().err


def test_what_needs_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--set-floors") == 2 and "needs a CUDA GPU" in capsys.readouterr().err
    assert run("--set-floors", "--quick") == 2 and "neither --quick nor --only" in capsys.readouterr().err
    assert run("--only", "speed,counters,sanitizer") == 0
    assert capsys.readouterr().out.count("no CUDA GPU") == 3


@pytest.mark.parametrize(
    ("suites", "asked"), [(("attention",), ["attention"]), (("gemm", "attention"), ["products", "attention"])]
)
def test_without_a_gpu_the_suites_kernels_are_compiled(monkeypatch, capsys, suites, asked):
    given = []

    def check(quick, package):
        given.extend(resources.catalogues(quick, package))
        return Gate("resources", FAILED, "so many kernels", ["one spills"])

    monkeypatch.setattr(resources, "check", check)
    assert command.compile_only(suites, quick=True) == 1
    families = {facts.family for facts in given}
    assert {"flash forward", "decode"} <= families and {f.arch for f in given} == {"sm_80", "sm_90a"}
    assert ("dense" in families) == ("products" in asked)
    assert "Not to be shipped: resources" in capsys.readouterr().out


def in_a_process(*given) -> str:
    command = [sys.executable, "-m", "bench", "gates", "--quick", *given]
    done = subprocess.run(command, cwd=gpu_record.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="what the command does without a GPU")
def test_the_command_without_a_gpu():
    """But for the two gates that compile and compute: .ci/run asks one, test_kernels_compile.py has the other's."""
    asked = [name for name in command.NAMES if name not in ("resources", "correctness")]
    shown = in_a_process("--only", ",".join(asked))
    assert all(name in shown for name in asked)
    assert "Nothing failed, but not all was looked at" in shown


@pytest.mark.gpu
@pytest.mark.slow
def test_the_command_on_a_gpu(tmp_path):
    """Quick, without the speed that floors of another state of the card would judge, and without compiling all."""
    in_a_process("--only", "correctness,determinism,stability", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*/gates.json")
    data = json.loads(path.read_text())
    assert data["ok"] and [each["name"] for each in data["gates"]] == ["correctness", "determinism", "stability"]


def test_tables_of_these_sources_pass_and_older_ones_are_told(tmp_path):
    with pytest.raises(Skip, match="no tuned tables"):
        tables.check(folder=tmp_path)
    shipped = next(tuned.SHIPPED.glob("*.json"))
    fitting = shipped.read_text()
    for key, found in tuned.read(shipped).fingerprints.items():
        fitting = fitting.replace(found, tuned.kernel_fingerprint(*key.split(" ", 1)))
    (tmp_path / shipped.name).write_text(fitting)
    assert tables.check(folder=tmp_path).verdict == PASSED
    (tmp_path / shipped.name).write_text(fitting.replace(tuned.kernel_fingerprint("sm_90", "dense"), "0" * 16))
    with pytest.raises(Skip, match=r"sm_90.*other sources"):
        tables.check(folder=tmp_path)
