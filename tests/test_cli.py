"""The command line, the catalogue behind it, and the bundles it writes."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cute_kernels import __main__ as cli
from cute_kernels import explain, gemm
from cute_kernels.arch import ARCHS, arch_named
from cute_kernels.functions import ACTIVATIONS
from cute_kernels.matmul.bundle import bundle_facts
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec
from cute_kernels.matmul.family import DENSE, ProductFamily
from cute_kernels.runtime import parallel
from cute_kernels.runtime.bundle import Bundle, BundleError
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.compile import MissingCompiler
from cute_kernels.runtime.families import compile_kernel, families, family_of, unsupported
from cute_kernels.runtime.inspect import MissingDisassembler
from cute_kernels.runtime.parallel import Outcome, attempt, in_parallel
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul
from sparse_collective.catalogue import BLOCKS
from tests import emulate
from tests.cache_fixtures import environment_fixture, is_function  # noqa: F401 (a fixture is used by name)

NAMES = ("sm_80", "sm_86", "sm_89", "sm_90a")


def small(arch="sm_80"):
    """A kernel that compiles quickly."""
    return DENSE.catalogue(arch, quick=True)[0]


def broken(arch="sm_80"):
    """Facts from which no kernel can be compiled."""
    return replace(small(arch), epilogue=EpilogueSpec(activation="softmax"))


# -- the catalogue -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", NAMES)
def test_catalogues_have_every_configuration_once(arch):
    """Of products each that is tried for some blocks; a quick catalogue is a part of the whole."""
    every = [facts for family in families() for facts in family.catalogue(arch)]
    titles = {(facts.family, family_of(facts).title(facts)) for facts in every}
    assert len(titles) == len(set(every)) == len(every)
    assert all(facts.arch == arch and unsupported(facts) == "" for facts in every)
    spec, found = arch_named(arch), {(facts.family, facts.config) for facts in every if hasattr(facts, "config")}
    for family in families(ProductFamily):
        for block in (None, *(BlockFacts(*block, "int32") for block in BLOCKS)):
            if family.serves(block):
                tried = family.candidates(spec.path, block, spec)
                assert {(family.name, config) for config in tried} <= found
    quick = [facts for family in families() for facts in family.catalogue(arch, quick=True)]
    assert 3 <= len(quick) <= 20 and {f for f in quick if f.family in ("dense", "bsr")} < set(every)


@pytest.mark.parametrize("arch", ARCHS)
def test_bundle_facts_are_what_ops_ask_for(arch, monkeypatch):
    emulate.install(monkeypatch, arch)
    listed = set(bundle_facts(arch, ["bfloat16", "float16"], [(64, 64), (32, 32)]))
    assert all(unsupported(facts) == "" for facts in listed)
    asked = set()
    for dtype, rows in ((torch.bfloat16, 64), (torch.bfloat16, 4096), (torch.float16, 512)):
        x, square = torch.zeros(rows, 256, dtype=dtype), torch.eye(256, dtype=dtype)
        for side in (64, 32):
            W = BsrMatrix.from_dense(square, (side, side))
            calls = [
                (gemm, x, square),
                (gemm, x, square.t()),
                (bsr_linear, x, W),
                (bsr_matmul, W, x.reshape(256, rows)),
            ]
            for op, a, b in calls:
                bias = torch.zeros(b.shape[-1] if op is not bsr_linear else 256, dtype=dtype)
                for epilogue in ({}, {"bias": bias}, *({"bias": bias, "activation": name} for name in ACTIVATIONS)):
                    asked.add(explain(op, a, b, **epilogue).facts)
    assert len(asked) > 50
    assert not [family_of(facts).title(facts) for facts in asked - listed]


def test_bundle_facts_follow_the_request():
    facts = bundle_facts("sm_89", ["float16"], [(64, 64)], ["bsr_linear"], ["int64"])
    assert {f.dtype for f in facts} == {"float16"}
    assert {(f.block.bm, f.block.bk, f.block.index_dtype) for f in facts} == {(64, 64, "int64")}
    assert all(f.transposed for f in facts)
    with pytest.raises(ValueError, match="unknown operation 'spmm'; known are gemm"):
        bundle_facts("sm_89", ["float16"], [], ["spmm"])


# -- inspect -------------------------------------------------------------------------------------------------


def test_inspect_prints_nothing_but_json():
    command = [sys.executable, "-m", "cute_kernels", "inspect", "--arch", "sm_86", "--quick", "--json", "--jobs", "2"]
    done = subprocess.run([*command, "--family", "dense,bsr"], capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert [row["arch"] for row in rows] == ["sm_86"] * 3
    assert all(row["hmma"] > 0 and row["hgmma"] == 0 and row["dynamic_smem"] < row["smem_limit"] for row in rows)
    assert done.returncode == (1 if any(row["problems"] for row in rows) else 0)


def test_inspect_names_what_is_wrong_and_fails(monkeypatch, capsys):
    sound = parallel.inspect_kernel(small())
    assert sound.problems == ()
    values = {small(): sound, small("sm_90a"): replace(sound, problems=("a stack frame of 8 bytes",))}
    monkeypatch.setattr(cli, "families", lambda: [DENSE])
    monkeypatch.setattr(DENSE, "catalogue", lambda arch, quick: [f for f in values if f.arch == arch])
    monkeypatch.setattr(cli, "inspect_kernel", values.get)
    assert cli.main(["inspect", "--arch", "sm_80", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "sm_80: 1 kernels" in out and "none spills" in out and str(sound.resources.registers) in out
    assert cli.main(["inspect", "--arch", "sm_90,sm_80,sm_90a", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "a stack frame of 8 bytes" in out and "2 kernels" in out and "1 should not be shipped" in out


def test_a_kernel_that_does_not_compile_is_a_row_like_others(monkeypatch, capsys):
    entries = [broken()]
    monkeypatch.setattr(cli, "families", lambda: [DENSE])
    monkeypatch.setattr(DENSE, "catalogue", lambda arch, quick: entries)
    assert cli.main(["inspect", "--arch", "sm_80", "--json", "--jobs", "1"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert "softmax" in row["problems"][0] and "registers" not in row
    assert cli.main(["inspect", "--arch", "sm_80", "--jobs", "1"]) == 1
    assert "softmax" in capsys.readouterr().out


# -- compile -------------------------------------------------------------------------------------------------


def test_a_compiled_bundle_serves_the_cache(tmp_path, monkeypatch, capsys):
    wanted = {arch: [small(arch)] for arch in ("sm_90a", "sm_89")}
    monkeypatch.setattr(cli, "bundle_facts", lambda arch, *request: wanted[arch])
    folder = tmp_path / "bundle"
    assert cli.main(["compile", "--arch", "sm_90,sm_89", "--out", str(folder), "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    size = sum(path.stat().st_size for path in folder.glob("*.o"))
    assert "sm_90a: 1 kernels" in out and f"2 kernels, {size:,} bytes" in out
    assert len(Bundle(folder).entries) == 2

    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(folder))
    cache = KernelCache()
    for (facts,) in wanted.values():
        assert is_function(cache.get(facts, lambda: pytest.fail("compiled although the bundle has it")))
        assert cache.metadata(facts)["smem"] <= facts.spec.smem
    assert (cache.stats().bundle_hits, cache.stats().compiles) == (2, 0)


def test_no_bundle_is_left_if_a_kernel_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "bundle_facts", lambda *request: [broken()])
    folder = tmp_path / "bundle"
    assert cli.main(["compile", "--arch", "sm_80", "--out", str(folder), "--jobs", "1"]) == 1
    assert "softmax" in capsys.readouterr().err
    with pytest.raises(BundleError, match="is not a bundle"):
        Bundle(folder)


def test_a_bundle_leaves_other_files_alone(tmp_path, monkeypatch):
    (tmp_path / "main.o").touch()
    (tmp_path / f"{'0' * 64}.o").touch()
    monkeypatch.setattr(cli, "bundle_facts", lambda *request: [])
    assert cli.main(["compile", "--arch", "sm_80", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["main.o", "manifest.json"]


# -- cache ---------------------------------------------------------------------------------------------------


def test_cache_is_described_and_cleared(tmp_path, monkeypatch, capsys):
    facts = small()
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["cache"]) == 0
    assert "0 kernels, 0 bytes" in capsys.readouterr().out
    KernelCache().get(facts, lambda: compile_kernel(facts))
    older = tmp_path / "cache" / ("0" * 16)
    older.mkdir()
    (older / "old.o").write_bytes(b"12345")
    assert cli.main(["cache"]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "cache") in out and "2 kernels" in out and "1 fit these sources" in out
    assert cli.main(["cache", "--clear"]) == 0
    assert "cleared: 2 kernels" in capsys.readouterr().out
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    assert cli.main(["cache"]) == 0
    assert "the cache is off" in capsys.readouterr().out.lower()


# -- wrong calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["inspect", "--arch", "sm_70"], "unknown architecture 'sm_70'; known are sm_80, sm_86, sm_89, sm_90"),
        (["inspect", "--jobs", "0"], "'0' is no positive number"),
        (["compile", "--out", "x"], "the following arguments are required: --arch"),
        (["compile", "--out", "x", "--arch", "sm_80", "--block", "128"], "'128' is no block shape"),
        (["compile", "--out", "x", "--arch", "sm_80", "--block", "64x64,100x100"], "'100x100' is no block shape"),
        (["compile", "--out", "x", "--arch", "sm_80", "--block", "0x16"], "'0x16' is no block shape"),
        (["compile", "--out", "x", "--arch", "sm_80", "--dtype", "float32"], "unknown operand type 'float32'"),
        (["compile", "--out", "x", "--arch", "sm_80", "--op", "spmm"], "unknown operation 'spmm'"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments_are_named(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "error"),
    [
        ("import_cutlass", MissingCompiler("pip install 'nvidia-cutlass-dsl[cu13]'")),
        ("find_nvdisasm", MissingDisassembler("pip install 'nvidia-cuda-nvdisasm'")),
    ],
)
def test_a_missing_package_is_one_line(missing, error, monkeypatch, capsys):
    def absent():
        raise error

    monkeypatch.setattr(cli, missing, absent)
    assert cli.main(["inspect", "--quick"]) == 2
    assert capsys.readouterr().err == f"python -m cute_kernels: error: {error}\n"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["compile", "--arch", "sm_80", "--out", str(tmp_path / "file" / "bundle")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- processes -----------------------------------------------------------------------------------------------


def test_items_fail_one_by_one():
    found = {outcome.item: outcome for outcome in in_parallel(int, ["1", "x", "3"], jobs=2)}
    assert (found["1"].value, found["3"].value, found["x"].value) == (1, 3, None)
    assert "ValueError" in found["x"].error and not found["1"].error


def test_a_dead_process_is_an_outcome_too():
    found = list(in_parallel(os._exit, [1, 2], jobs=2))
    assert len(found) == 2
    assert all("died" in outcome.error for outcome in found)


def test_messages_of_the_compiler_are_plain_and_short():
    def fail(item):
        raise RuntimeError("\x1b[91mbad\x1b[0m " + "x" * 10_000)

    outcome = attempt(fail, "item")
    assert isinstance(outcome, Outcome)
    assert outcome.error.startswith("RuntimeError: bad x")
    assert len(outcome.error) < 2000
