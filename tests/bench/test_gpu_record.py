"""The record of a GPU run, made here with pytest and the sanitizer replaced by small scripts."""

import json
import sys
import types

import pytest
import torch

from attention.selected import reference

from .. import gpu_record, host_emulation, sanitize_cases


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(gpu_record.torch.cuda, "is_available", lambda: False)
    assert gpu_record.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert sanitize_cases.main([]) == 2


@pytest.mark.parametrize(
    ("status", "output", "ok"),
    [
        (0, "sm_80 dense: right\n========= ERROR SUMMARY: 0 errors\n", True),
        (86, "========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n", False),
        (0, "sm_80 dense: right\n", False),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
        (0, "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", False),
        ("timed out", "", False),
    ],
)
def test_verdicts(status, output, ok):
    found = gpu_record.verdict(status, output, r"(ERROR|RACECHECK) SUMMARY: 0 ")
    assert found["ok"] is ok and found["status"] == status and ("output" in found) is not ok


@pytest.fixture
def pretended(monkeypatch):
    """A GPU, as far as the record looks."""
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(gpu_record.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_record.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_record.torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("broken", [False, True])
def test_a_whole_run(monkeypatch, tmp_path, capsys, pretended, broken):
    """With real processes: pytest on a file of two tests, and scripts in place of the cases and of the sanitizer."""
    tests = tmp_path / "test_small.py"
    tests.write_text(f"import pytest\n@pytest.mark.gpu\ndef test_a(): assert not {broken}\ndef test_b(): pass\n")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho '========= ERROR SUMMARY: 0 errors'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_record, "sanitizer", lambda: str(tool))
    run = gpu_record.run

    def run_all_but_the_cases(command, *args, **kwargs):
        bare = [sys.executable, "-m", "tests.sanitize_cases"]
        return (0, "sm_80 x: right\n") if command[:3] == bare else run(command, *args, **kwargs)

    monkeypatch.setattr(gpu_record, "run", run_all_but_the_cases)
    arguments = ["--sanitize", "--out", str(tmp_path / "out"), str(tests), "-p", "no:cacheprovider"]
    assert gpu_record.main([*arguments, "-o", "markers=gpu: needs a GPU", "--rootdir", str(tmp_path)]) == int(broken)
    record = json.loads((tmp_path / "out" / "nvidia-h200" / "tests.json").read_text())
    t, checked, machine = record["tests"], record["sanitizer"], record["machine"]
    assert (t["passed"], t["failed"], t["skipped"]) == (int(not broken), int(broken), 0)
    assert [f["name"].split("::")[1] for f in t["failures"]] == ["test_a"] * broken
    assert checked["memcheck"] == {"ok": True, "status": 0, "cases": 0, "summary": "ERROR SUMMARY: 0 errors"}
    assert checked["bare"]["cases"] == gpu_record.SANITIZER_JOBS
    assert (machine["card"], machine["capability"], len(machine["sources"])) == ("NVIDIA H200", "9.0", 64)
    assert record["ok"] is not broken
    assert f"{int(not broken)} passed, {int(broken)} failed" in capsys.readouterr().out


KILLED = """
import os, signal, time
import pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert 1 == 2, "of two"
def test_is_skipped(): pytest.skip()
@pytest.fixture
def closing():
    yield
    raise ValueError("too late")
def test_fails_afterwards(closing): pass
@pytest.fixture
def broken(): raise ValueError("too early")
def test_fails_before(broken): pass
def test_is_killed(request):
    lines, outcomes = [], request.config.getoption("--outcomes")
    while len(lines) < 6:
        time.sleep(0.05)
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        lines = [line for line in lines if "unfinished" not in line]
    assert len(set(lines)) == len(lines)
    os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.parametrize("jobs", ["0", "2"])
def test_a_run_that_is_killed_keeps_its_outcomes(monkeypatch, tmp_path, pretended, capsys, jobs):
    """As the limit kills it, with all its processes; one of them writes."""
    pytest.importorskip("xdist")
    (tmp_path / "test_killed.py").write_text(KILLED)
    run = gpu_record.run
    monkeypatch.setattr(gpu_record, "run", lambda *args, **kw: ("timed out", run(*args, **kw)[1]))
    options = [str(tmp_path), "-p", "no:cacheprovider", "-o", "markers=gpu: needs a GPU", "--rootdir", str(tmp_path)]
    assert gpu_record.main(["--limit", "60", "--out", str(tmp_path / "out"), *options, "-n", jobs]) == 1
    found = json.loads((tmp_path / "out" / "nvidia-h200" / "tests.json").read_text())["tests"]
    assert found["status"] == "timed out"
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 3, 1)
    assert {failure["name"].rpartition("::")[2]: failure["message"] for failure in found["failures"]} == {
        "test_fails": "AssertionError: of two",
        "test_fails_afterwards": "ValueError: too late",
        "test_fails_before": "ValueError: too early",
    }
    assert [name.rpartition("::")[2] for name in found["unfinished"]] == ["test_is_killed"]
    assert "1 passed, 3 failed, 1 skipped in" in (out := capsys.readouterr().out) and "s, timed out" in out


def test_a_sanitizers_cases_are_shared_and_one_bad_share_tells(monkeypatch):
    shares = []

    def run(command, limit):
        shares.append((command[2] if command[0] == "tool" else "bare", tuple(command[command.index("-m") + 2 :])))
        assert 0 < limit <= 100
        bad = command[0] == "tool" and command[2] == "racecheck" and "bsr small blocks" in command
        right = "".join(f"sm_90 {name}: right\n" for name in shares[-1][1])
        return (86 if bad else 0), right + f"========= ERROR SUMMARY: {int(bad)} errors\n"

    monkeypatch.setattr(gpu_record, "sanitizer", lambda: "tool")
    monkeypatch.setattr(gpu_record, "run", run)
    verdicts = gpu_record.sanitize(100, jobs=3)
    assert [name for name, verdict in verdicts.items() if not verdict["ok"]] == ["racecheck"]
    assert verdicts["racecheck"]["status"] == 86 and verdicts["racecheck"]["output"]
    for name, verdict in verdicts.items():
        assert verdict["cases"] == len(sanitize_cases.NAMES)
        own = [share for tool, share in shares if tool == name]
        assert len(own) == 3 and sorted(sum(own, ())) == sorted(sanitize_cases.NAMES)


def test_a_hang_ends_with_what_it_started():
    """The child of a child holds the pipe: the call must not wait for it."""
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    assert gpu_record.run([sys.executable, "-c", code], 2) == ("timed out", "begun\n")


def gathered_gradients(args, out, lse, dout, dlse):
    """Torch in the place of the kernel of backward with gathered KV tiles."""
    q, k, v = (t.detach().double().requires_grad_() for t in args[:3])
    mask, with_lse = args.block_mask, dlse is not None
    terms = {"causal": mask.causal, "scale": args.scale}
    with torch.enable_grad():
        results = reference.selected_attention(q, k, v, mask.indices, mask.block_size, **terms)[: 1 + with_lse]
    given = (dout.double(), dlse.double()) if with_lse else (dout.double(),)
    return tuple(t.to(args.q.dtype) for t in torch.autograd.grad(results, (q, k, v), given))


def test_the_cases_are_right(monkeypatch, capsys):
    """The sanitizer's cases with torch in the kernels' place, on the CPU."""
    host_emulation.install(monkeypatch)
    monkeypatch.setattr(sanitize_cases, "DEVICE", "cpu")
    monkeypatch.setattr("attention.gradients.has_kernel", lambda q: False)  # nothing stands in for other kernels
    monkeypatch.setattr("attention.backward.gather.dispatch.backward", gathered_gradients)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert sanitize_cases.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(sanitize_cases.CASES) + len(sanitize_cases.ODD) + len(sanitize_cases.HOPPER)
    assert all(line.endswith(": right") for line in lines)
    assert sanitize_cases.main(["dense raged"]) == 2


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_gemm" name="test_one"/>
<testcase classname="tests.test_gemm" name="test_two">
<failure message="largest error 3&#10;first at (1, 2)">...</failure></testcase>
<testcase classname="tests.test_gemm" name="test_three"><skipped message="no"/></testcase>
<testcase classname="tests.test_gemm" name="test_four"><error message="fixture">...</error></testcase>
</testsuite></testsuites>"""


def test_errors_of_fixtures_are_failures(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = gpu_record.read_report(tmp_path / "report.xml")
    failures = {failure["name"]: failure["message"] for failure in found.pop("failures")}
    assert failures == {"tests.test_gemm::test_two": "largest error 3", "tests.test_gemm::test_four": "fixture"}
    assert found == {"passed": 1, "failed": 2, "skipped": 1}


def test_a_missing_sanitizer_is_a_failure(monkeypatch):
    monkeypatch.setattr(gpu_record, "sanitizer", lambda: None)
    monkeypatch.setattr(gpu_record, "run", lambda *args, **options: (0, "sm_80 x: right\n"))
    verdicts = gpu_record.sanitize(10)
    assert verdicts["bare"]["ok"] and not verdicts["memcheck"]["ok"]
