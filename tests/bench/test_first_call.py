"""`python -m bench.first_call`: rows are printed and written one by one, and --uses selects some."""

import json

import pytest

from bench import first_call, record


@pytest.fixture(name="calls")
def calls_fixture(monkeypatch):
    """The calls that are measured; the second one fails."""
    calls = []

    def seconds(call, cache, *, warm_up=False, **environment):
        calls.append(call)
        if "bias=bias" in call:
            raise RuntimeError("cut off")
        return [2.0, 1.0, 0.25 if "CUTE_KERNELS_BUNDLE" in environment else 3.0, 4.0 * warm_up]

    monkeypatch.setattr(first_call, "seconds", seconds)
    monkeypatch.setattr(first_call.subprocess, "run", lambda *args, **options: None)
    monkeypatch.setattr(record, "environment", lambda: {"card": "NVIDIA H100"})
    return calls


def test_rows_of_a_run_that_is_cut_off_are_kept(calls, tmp_path, capsys):
    with pytest.raises(RuntimeError, match="cut off"):
        first_call.main(["--out", str(tmp_path)])
    data = json.loads(record.file_of(tmp_path, "NVIDIA H100", "first-call").read_text())
    assert data["rows"] == [
        {"use": "gemm", "cold_s": 3.0, "disk_s": 3.0, "bundle_s": 0.25, "warm_up_s": 4.0, "after_warm_up_s": 3.0}
    ]
    assert (data["import_s"], data["torch_import_s"], data["linked"]) == (1.0, 2.0, False)
    assert capsys.readouterr().out.splitlines()[1].split() == ["gemm", "3.00", "3.00", "0.25", "4.00", "3.00"]


def test_uses(calls, tmp_path, capsys):
    first_call.main(["--uses", "1 token", "--out", str(tmp_path)])
    assert set(calls[1:]) == {first_call.USES["bsr_linear, 1 token"]}
    with pytest.raises(SystemExit):
        first_call.main(["--uses", "conv"])
    assert "no use's name contains 'conv'; they are gemm; " in capsys.readouterr().err
