"""The examples run, and a family from outside is in the tools."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cute_kernels
from cute_kernels import explain, gemm
from cute_kernels.report import report_of_kernel
from cute_kernels.runtime import families, keys

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("epilogue", "k_tiles", "mask", "family")


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    """The examples' modules by name. Their families are registered for the time of a test, no longer."""
    monkeypatch.setattr(families, "_REGISTRY", dict(families._REGISTRY))
    found = {name: importlib.import_module(f"examples.{name}") for name in (*EXAMPLES, "show")}
    families.register(found["family"].FAMILY)
    return found


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_computes_what_torch_does_and_refuses_what_is_wrong(examples, name, device, monkeypatch, capsys):
    example = examples[name]
    for module in (examples["show"], example):
        monkeypatch.setattr(module, "DEVICE", device)
    with torch.device(device):
        example.check()
        example.errors()
        example.times()
    out = capsys.readouterr().out
    assert f"on {device}" in out and out.count("Error: ") >= 2
    assert "not measured" in out if device == "cpu" else " us" in out


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_kernels_compile_without_spills(examples, name, capsys):
    if name == "mask" and not any(type(f).__module__.startswith("attention") for f in families.families()):
        pytest.skip("attention registers no family of kernels")
    examples[name].inspect()
    out = capsys.readouterr().out
    assert "sm_80: " in out and "sm_90a: " in out and "instructions" in out
    assert "problem: " not in out and out.count("spills 0, stack 0 bytes") == out.count("registers")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_registered_family_is_supported_and_not_chosen_by_gemm(examples, arch):
    """It has a name of its own, and computes something else."""
    a = torch.empty(512, 512, dtype=torch.bfloat16, device="meta")
    assert explain(gemm, a, a, arch=arch).facts.family == "dense"
    family = examples["family"].FAMILY
    facts = family.catalogue(arch)
    assert facts and not any(map(families.unsupported, facts))
    assert len({family.title(f) for f in facts}) == len(facts)


def test_a_family_from_outside_is_in_inspect():
    arguments = ["inspect", "--arch", "sm_80", "--family", "silu product", "--json", "--jobs", "1"]
    command = [sys.executable, "-m", "cute_kernels", *arguments]
    environment = os.environ | {"CUTE_KERNELS_FAMILIES": "examples.family"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    rows = json.loads(done.stdout)
    assert {row["family"] for row in rows} == {"silu product"} and len(rows) == 2
    assert done.returncode == 0 and not any(row["problems"] for row in rows)


def test_a_changed_source_of_a_family_from_outside_makes_another_kernel(examples, monkeypatch):
    facts, dense = examples["family"].SiluFacts("sm_80", "bfloat16"), families.family_named("dense")
    dense = dense.catalogue("sm_80", quick=True)[0]
    before = [keys.entry_key(each, "", {}) for each in (facts, dense)]
    monkeypatch.setattr(keys, "sources_of", {"examples.family": "changed"}.get)
    after = [keys.entry_key(each, "", {}) for each in (facts, dense)]
    assert before[0] != after[0] and before[1] == after[1]
    monkeypatch.undo()
    assert keys.sources_of("examples.family") != keys.sources_of("tests.demo.test_examples")


def test_reports_have_public_names(examples):
    family = examples["family"]
    report = report_of_kernel(family.FAMILY.catalogue("sm_90")[0])
    assert report.arch == "sm_90a" and 0 < report.registers < 64 and report.spills == report.stack == 0
    assert report.opcodes["LDG"] == 2 and report.opcodes["STG"] == 1, "16 bytes a load and a store"
    assert report.problems == () and 0 < report.instructions < 200
    with pytest.raises(ValueError, match="cannot explain 'silu_product'; supported ops are"):
        cute_kernels.inspect(family.silu_product, arch="sm_90")


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_as_a_file(name):
    """`python examples/NAME.py` imports what it needs; that it computes is tested above."""
    code = f"import runpy, sys; sys.path[0] = 'examples'; runpy.run_path('examples/{name}.py', run_name='imported')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
