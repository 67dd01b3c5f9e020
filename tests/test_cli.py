"""The command line, the bundles it writes, and processes that compile."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cute_kernels
from attention import attention
from cute_kernels import __main__ as cli
from cute_kernels import explain, functions, gemm, progress, report
from cute_kernels.arch import ARCHS
from cute_kernels.matmul.config import BlockFacts, EpilogueSpec
from cute_kernels.matmul.family import DENSE, ProductFamily
from cute_kernels.runtime import families, keys, parallel, record
from cute_kernels.runtime.bundle import Bundle, BundleError
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.compile import MissingCompiler
from cute_kernels.runtime.families import Request, bundle_facts, unsupported
from cute_kernels.runtime.inspect import MissingDisassembler
from cute_kernels.runtime.parallel import attempt, in_parallel
from sparse_collective import BsrMatrix, bsr_linear, bsr_matmul
from sparse_collective.bsr_gemm.catalogue import BLOCKS
from tests.cute_kernels.cache_fixtures import environment_fixture, is_function, kernels  # noqa: F401 (a fixture is used by name)

COMMAND = [sys.executable, "-W", "ignore", "-m", "cute_kernels"]


def small(arch="sm_80"):
    """A kernel that compiles quickly."""
    return DENSE.catalogue(arch, quick=True)[0]


def broken(arch="sm_80"):
    """Facts from which no kernel can be compiled."""
    return replace(small(arch), epilogue=EpilogueSpec(activation="softmax"))


@pytest.fixture
def here(monkeypatch):
    """Commands work in this process, where the test has put something in the place of others."""

    def in_this_process(function, items, jobs, own_process):
        return in_parallel(function, items, 1)

    monkeypatch.setattr(progress, "in_parallel", in_this_process)


def catalogue_of(monkeypatch, facts):
    """All that is registered is the dense family, with these facts."""
    monkeypatch.setattr(families, "_REGISTRY", {"dense": DENSE})
    monkeypatch.setattr(DENSE, "catalogue", lambda arch, quick: [f for f in facts if f.arch == arch], raising=False)


# -- the catalogues of the library's families --------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_catalogues_hold_every_configuration_once_and_quick_ones_a_few_of_each_kind(arch):
    spec, stored = ARCHS[arch], ("a", "d")
    shapes = (None, *(BlockFacts(*block, "int32", operand=operand) for block in BLOCKS for operand in stored))
    entries = [facts for family in families.families() for facts in family.catalogue(arch)]
    titles = {(facts.family, families.family_of(facts).title(facts)) for facts in entries}
    assert len(titles) == len(set(entries)) == len(entries)
    assert all(facts.arch == spec.target and unsupported(facts) == "" for facts in entries)
    for family in families.families(ProductFamily):
        listed = family.catalogue(arch)
        assert all(facts.family == family.name for facts in listed)
        found = {(facts.path, facts.config) for facts in listed}
        for block in filter(family.serves, shapes):
            assert all((spec.path, config) in found for config in family.candidates(spec.path, block, spec))
    quick = [facts for family in families.families() for facts in family.catalogue(arch, quick=True)]
    assert not any(map(unsupported, quick)) and len(quick) <= 31  # one or two of each of 27 families
    assert {"dense", "bsr", "flash forward", "decode"} <= {facts.family for facts in quick}


# -- what bundles hold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_bundles_hold_what_usual_products_ask_for(arch):
    request = Request(arch, ["bfloat16", "float16"], [(64, 64), (32, 32)])
    listed = set(bundle_facts(["gemm", "bsr_matmul", "bsr_linear"], request))
    assert not any(map(unsupported, listed))
    asked = set()
    for dtype, rows in ((torch.bfloat16, 64), (torch.bfloat16, 4096), (torch.float16, 512)):
        x, square = torch.zeros(rows, 256, dtype=dtype), torch.eye(256, dtype=dtype)
        weights = [BsrMatrix.from_dense(square, (side, side)) for side in (64, 32)]
        calls = [(gemm, x, square), (gemm, x, square.t()), *((bsr_linear, x, W) for W in weights)]
        for op, a, b in calls + [(bsr_matmul, W, x.reshape(256, rows)) for W in weights]:
            bias = torch.zeros(b.shape[-1] if op is not bsr_linear else 256, dtype=dtype)
            terms = {}, {"bias": bias}, *({"bias": bias, "activation": name} for name in functions.ACTIVATIONS)
            asked |= {explain(op, a, b, arch=arch, **each).facts for each in terms}
    assert len(asked) > 50
    assert not [families.family_of(facts).title(facts) for facts in asked - listed]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bundles_hold_what_usual_attention_asks_for(arch, dim):
    listed = set(bundle_facts(["attention"], Request(arch, head_dims=[dim])))
    assert not any(map(unsupported, listed))
    asked = set()
    for batch, heads, rows in ((1, 1, 64), (1, 2, 500), (8, 16, 4096), (4, 8, 1)):
        q, k = (torch.empty(batch, heads, n, dim, dtype=torch.bfloat16, device="meta") for n in (rows, max(rows, 300)))
        lengths = torch.empty(batch, dtype=torch.int32, device="meta")
        for causal, more in itertools.product((False, True), ({}, {"seqused_k": lengths})):
            asked.add(explain(attention, q, k, k, causal=causal, arch=arch, **more).facts)
    assert len(asked) > 3
    assert not [families.family_of(facts).title(facts) for facts in asked - listed]


def test_bundles_follow_the_request():
    facts = bundle_facts(["bsr_linear"], Request("sm_89", ["float16"], [(64, 64)], ["int64"]))
    products = [f for f in facts if hasattr(f, "block")]
    assert {f.dtype for f in products} == {"float16"} and all(f.transposed for f in products)
    assert {(f.block.bm, f.block.bk, f.block.index_dtype) for f in products} == {(64, 64, "int64")}
    assert {f.family for f in facts} >= {"bsr", "skinny"}
    with pytest.raises(ValueError, match="unknown operation 'spmm'; known are quantize, gemm"):
        bundle_facts(["spmm"], Request("sm_89"))


# -- inspect -------------------------------------------------------------------------------------------------


def test_inspect_prints_nothing_but_json():
    arguments = ["inspect", "--arch", "sm_86", "--quick", "--family", "dense,backward prepare", "--json", "--jobs", "1"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert [row["arch"] for row in rows] == ["sm_86"] * 3
    assert {row["family"] for row in rows} == {"dense", "backward prepare"}
    assert rows[0]["hmma"] > 0 and rows[0]["hgmma"] == 0 and rows[0]["dynamic_smem"] < rows[0]["smem_limit"]
    assert done.returncode == (1 if any(row["problems"] for row in rows) else 0)


def beside(folder: Path, *command: str, **environment: str):
    """A command of Python in a folder that comes before the packages on sys.path."""
    paths = os.pathsep.join([str(folder), str(Path(cute_kernels.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": paths} | environment
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], capture_output=True, text=True, cwd=folder, env=environment
    )


def test_a_users_attention_py_is_not_run_by_inspect(tmp_path):
    """Neither by the command nor by the process that compiles."""
    (tmp_path / "attention.py").write_text("raise SystemExit('the file of the user ran')\n")
    arguments = ["inspect", "--arch", "sm_80", "--quick", "--family", "backward prepare", "--json", "--jobs", "1"]
    done = beside(tmp_path, "-m", "cute_kernels", *arguments, CUTE_KERNELS_FAMILIES="attention")
    assert done.returncode == 0, done.stderr
    assert [row["family"] for row in json.loads(done.stdout)] == ["backward prepare"] * 2


def test_cache_keys_do_not_depend_on_a_users_attention(tmp_path):
    """Neither on its sources nor on whether it is there."""
    program = "from cute_kernels.runtime import keys; print(keys.source_fingerprint())"
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "__init__.py").write_text("raise SystemExit('the file of the user ran')\n")
    done = beside(tmp_path, "-c", program)
    assert done.stdout.strip() == keys.source_fingerprint(), done.stderr


def test_a_family_in_a_users_attention_is_one_from_outside(tmp_path):
    """A change of its source makes another kernel."""
    program = """
import attention
from cute_kernels.runtime import families, keys
families.register(attention.Mine())
print(keys.OUTSIDE, keys.sources_of("attention"))"""
    found = []
    for text in ("", "# changed"):
        source = f"from cute_kernels.runtime.families import Family\nclass Mine(Family):\n    name = 'mine'\n{text}"
        (tmp_path / "attention.py").write_text(source)
        found.append(beside(tmp_path, "-B", "-c", program).stdout)
    assert found[0].startswith("{'mine': 'attention'}") and found[0] != found[1]


def test_families_of_sources_that_are_not_installed(tmp_path):
    """The tools know the project's packages without entry points, so that none of their kernels is left out."""
    program = """
import importlib.metadata
importlib.metadata.entry_points = lambda **_: ()
from cute_kernels.runtime.families import families, load_all
load_all()
print(*{type(family).__module__.partition(".")[0] for family in families()})"""
    done = beside(tmp_path, "-c", program, CUTE_KERNELS_FAMILIES="")
    assert {*done.stdout.split()} == {"cute_kernels", "sparse_collective", "attention"}, done.stderr


def test_an_entry_point_without_a_family_is_an_error(tmp_path):
    """It has the name of a package with families, or forgot to register one."""
    (tmp_path / "some_kernels.py").touch()
    command = "-m", "cute_kernels", "inspect", "--quick"
    done = beside(tmp_path, *command, CUTE_KERNELS_FAMILIES="some_kernels")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "some_kernels, named by CUTE_KERNELS_FAMILIES, registers no kernel family" in done.stderr
    assert str(tmp_path / "some_kernels.py") in done.stderr

    (tmp_path / "attention.py").touch()
    program = "import attention, cute_kernels.__main__ as cli; raise SystemExit(cli.main(['inspect', '--quick']))"
    done = beside(tmp_path, "-c", program, CUTE_KERNELS_FAMILIES="attention")
    assert done.returncode == 2 and str(tmp_path / "attention.py") in done.stderr and "Rename that file" in done.stderr


def test_inspect_names_what_is_wrong_and_fails(monkeypatch, capsys, here):
    sound = parallel.inspect_kernel(small())
    assert sound.problems == ()
    values = {small(): sound, small("sm_90a"): replace(sound, problems=("a stack frame of 8 bytes",))}
    catalogue_of(monkeypatch, values)
    monkeypatch.setattr(cli, "inspect_kernel", values.get)
    assert cli.main(["inspect", "--arch", "sm_80"]) == 0
    out = capsys.readouterr().out
    assert "sm_80: 1 kernels" in out and "none spills" in out and str(sound.resources.registers) in out
    assert cli.main(["inspect", "--arch", "sm_90,sm_80,sm_90a"]) == 1
    out = capsys.readouterr().out
    assert "a stack frame of 8 bytes" in out and "2 kernels" in out and "1 should not be shipped" in out


@pytest.mark.parametrize("columns", [None, 80, 300])
def test_names_are_whole_whatever_the_width(monkeypatch, capsys, here, columns):
    """None is a pipe; a terminal of 80 columns gets lines, and a wide one the table."""
    sound = parallel.inspect_kernel(small())
    catalogue_of(monkeypatch, [small()])
    monkeypatch.setattr(cli, "inspect_kernel", lambda facts: sound)
    if columns:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["inspect", "--arch", "sm_80"]) == 0
    out = capsys.readouterr().out
    described = DENSE.describe(small())
    assert described["configuration"] in out and described["operands"] in out
    row = next(line for line in out.splitlines() if described["configuration"] in line)
    assert ("ok" in row) == (columns != 80) and str(sound.resources.registers) in out


def test_progress_is_in_lines_where_there_is_no_terminal(monkeypatch, capsys, here):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    assert len(list(progress.with_progress("inspecting", int, ["1", "2", "x"], 1))) == 3
    assert capsys.readouterr().err.startswith("inspecting: 1 of 3 kernels, 0 s, about 0.0 minutes left\n")


def test_a_kernel_that_does_not_compile_is_a_row_like_others(monkeypatch, capsys, here):
    catalogue_of(monkeypatch, [broken()])
    assert cli.main(["inspect", "--arch", "sm_80", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert "softmax" in row["problems"][0] and "registers" not in row
    assert cli.main(["inspect", "--arch", "sm_80"]) == 1
    assert "softmax" in capsys.readouterr().out


def test_inspect_of_a_call_reads_the_kernel_that_it_takes():
    a = torch.empty(512, 256, dtype=torch.bfloat16, device="meta")
    found = inspect_gemm(a, epilogue=lambda x: x.clamp(min=0.25), arch="sm_80")
    assert found.arch == "sm_80" and found.opcodes["HMMA"] > 0 and found.spills == found.stack == 0
    assert "function" in found.name and found.shared_memory <= found.shared_memory_limit and not found.problems
    assert f"registers {found.registers}" in str(found)
    with pytest.raises(TypeError, match="gemm: b is torch.float16"):
        inspect_gemm(a, b=a.t().half(), arch="sm_80")
    with pytest.raises(ValueError, match="runs no kernel: its result is empty"):
        inspect_gemm(a[:0], b=a.t(), arch="sm_80")
    with pytest.raises(ValueError, match='runs no kernel: no tensor is on a GPU; name one, such as arch="sm_90"'):
        inspect_gemm(torch.zeros(16, 16, dtype=torch.float16))


def inspect_gemm(a, b=None, **terms) -> report.KernelReport:
    return cute_kernels.inspect(gemm, a, a.t() if b is None else b, **terms)


def test_explaining_for_another_gpu_compiles_nothing(monkeypatch):
    monkeypatch.setattr(families, "compile_kernel", lambda facts: pytest.fail("compiled"))
    a = torch.zeros(512, 512, dtype=torch.float16)
    plans = {arch: explain(gemm, a, a, arch=arch) for arch in ARCHS}
    assert {arch: plan.facts.spec.name for arch, plan in plans.items()} == {arch: arch for arch in ARCHS}
    assert "with 132 multiprocessors" in str(plans["sm_90"]) and "with 82" in str(plans["sm_86"])
    with pytest.raises(RuntimeError, match="was not compiled"):
        plans["sm_90"].function()
    assert explain(gemm, a, a).facts is None and torch.equal(gemm(a, a), a), "other calls are as before"
    with pytest.raises(ValueError, match="unknown architecture 'sm_70'"):
        explain(gemm, a, a, arch="sm_70")


# -- compile -------------------------------------------------------------------------------------------------


def test_a_compiled_bundle_serves_the_cache(tmp_path, monkeypatch, capsys):
    """For the kernels that a program recorded."""
    wanted = [small(arch) for arch in ("sm_90a", "sm_89")]
    calls, folder = tmp_path / "calls", tmp_path / "bundle"
    monkeypatch.setenv(record.VARIABLE, str(calls))
    for facts in (*wanted, *wanted):
        record.note(facts)
    assert cli.main(["compile", "--calls", str(calls), "--out", str(folder), "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    size = sum(path.stat().st_size for path in kernels(folder))
    assert "sm_90a: 1 kernels" in out and f"2 kernels, {size:,} bytes" in out
    assert err.startswith(f"compiling 2 kernels into {folder}: about 0.1 MB and 0.0 minutes with 1 processes\n")
    assert len(Bundle(folder).entries) == 2

    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(folder))
    cache = KernelCache()
    for facts in wanted:
        assert is_function(cache.get(facts, lambda: pytest.fail("compiled although the bundle has it")))
        assert cache.metadata(facts)["smem"] <= facts.spec.smem
    assert (cache.stats().bundle_hits, cache.stats().compiles) == (2, 0)
    assert record.read(calls, {"cute_kernels"}) == wanted and len(calls.read_text().splitlines()) == 6


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_recorded_facts_are_the_same_when_they_are_read(arch):
    """For all families, through JSON; with users' functions in them."""
    packages = {"cute_kernels", "sparse_collective", "attention"}
    for family in families.families():
        for facts in family.catalogue(arch):
            read = record.decoded(json.loads(json.dumps(record.encoded(facts))), packages)
            assert read == facts and repr(read) == repr(facts) and hash(read) == hash(facts)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nothing", "line 1: Expecting value"),
        ('{"type": "os:system", "fields": {}}', "os:system is not in a package"),
        ('{"type": "cute_kernels.runtime.cache:KernelCache", "fields": {}}', "there is no frozen dataclass"),
        ('{"type": "cute_kernels.matmul.config:GemmFacts", "fields": {"no": 1}}', "unexpected keyword argument 'no'"),
    ],
)
def test_a_record_that_cannot_be_read_is_one_line(line, reason, tmp_path, capsys):
    calls = tmp_path / "calls"
    calls.write_text(line)
    assert cli.main(["compile", "--calls", str(calls), "--out", str(tmp_path / "bundle")]) == 2
    err = capsys.readouterr().err
    assert reason in err and "record it again" in err and err.count("\n") == 1


def test_no_bundle_is_left_if_a_kernel_fails_and_other_files_are_left_alone(tmp_path, monkeypatch, capsys, here):
    monkeypatch.setattr(cli, "bundle_facts", lambda *request: [broken()])
    folder = tmp_path / "bundle"
    assert cli.main(["compile", "--arch", "sm_80", "--out", str(folder)]) == 1
    assert "softmax" in capsys.readouterr().err
    with pytest.raises(BundleError, match="is not a bundle"):
        Bundle(folder)
    folder.rmdir()
    (tmp_path / "main.o").touch()
    (tmp_path / f"{'0' * 64}.o").touch()
    (tmp_path / f"{'0' * 64}.so").touch()
    monkeypatch.setattr(cli, "bundle_facts", lambda *request: [])
    assert cli.main(["compile", "--arch", "sm_80", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["main.o", "manifest.json"]


# -- cache ---------------------------------------------------------------------------------------------------


def test_cache_is_described_and_cleared(tmp_path, monkeypatch, capsys):
    facts = small()
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["cache"]) == 0
    assert "0 kernels, 0 bytes" in capsys.readouterr().out
    KernelCache().get(facts, lambda: families.compile_kernel(facts))
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
        ("", "COMMAND"),
        ("inspect --arch sm_70", "unknown architecture 'sm_70'; known are sm_80, sm_86, sm_89, sm_90"),
        ("inspect --jobs 0", "'0' is not a positive number"),
        ("inspect --family none", "unknown family 'none'; known are quantize, dense"),
        ("compile --out x", "the following arguments are required: --arch, or --calls"),
        ("compile --out x --calls y --op gemm", "leave out the options ops"),
        ("compile --out x --arch sm_80 --head-dim 100", "head dimension must be 64"),
        ("compile --out x --arch sm_80 --block 128", "'128' is not a block shape"),
        ("compile --out x --arch sm_80 --block 64x64,100x100", "'100x100' is not a block shape"),
        ("compile --out x --arch sm_80 --block 0x16", "'0x16' is not a block shape"),
        ("compile --out x --arch sm_80 --dtype float32", "unknown operand type 'float32'"),
        ("compile --out x --arch sm_80 --op spmm", "unknown operation 'spmm'"),
    ],
)
def test_wrong_arguments_are_named(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    assert stop.value.code == 2 and reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "error"), [("import_cutlass", MissingCompiler), ("find_nvdisasm", MissingDisassembler)]
)
def test_a_missing_package_or_folder_is_one_line(missing, error, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["compile", "--arch", "sm_80", "--out", str(tmp_path / "file" / "bundle")]) == 2
    assert capsys.readouterr().err.count("\n") == 1

    def absent():
        raise error("pip install it")

    monkeypatch.setattr(cli, missing, absent)
    assert cli.main(["inspect", "--quick"]) == 2
    assert capsys.readouterr().err == "python -m cute_kernels: error: pip install it\n"


# -- processes -----------------------------------------------------------------------------------------------


def test_items_fail_one_by_one_and_a_dead_process_is_an_outcome_too():
    found = {outcome.item: outcome for outcome in in_parallel(int, ["1", "x", "3"], jobs=1, own_process=True)}
    assert (found["1"].value, found["3"].value, found["x"].value) == (1, 3, None)
    assert "ValueError" in found["x"].error and not found["1"].error
    dead = list(in_parallel(os._exit, [1, 2], jobs=1, own_process=True))
    assert len(dead) == 2 and all("died" in outcome.error for outcome in dead)


def state_of(pid: str) -> tuple[str, int]:
    """(state, parent) of a process: "Z" of one that has ended."""
    try:
        state, parent = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "Z", 0
    return state, int(parent)


def children(parent: int) -> list[str]:
    """The processes that this one has started."""
    pids = [path.parent.name for path in Path("/proc").glob("[0-9]*/stat")]
    return [pid for pid in pids if state_of(pid)[1] == parent]


def wait_for(happened, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def have_ended(pids: list[str]) -> bool:
    return all(state_of(pid)[0] == "Z" for pid in pids)


@pytest.mark.parametrize("command", ["inspect --arch sm_90 --jobs 1", "compile --arch sm_90 --out {} --jobs 2"])
def test_ctrl_c_ends_compiling_at_once_in_one_line_and_leaves_no_process(command, tmp_path):
    arguments = command.format(tmp_path / "bundle").split()
    # A shell starts what it runs in the background without SIGINT, and children inherit that.
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *arguments], **options)
    wait_for(lambda: len(children(process.pid)) >= 2, 120)  # a worker, and one that keeps track of resources
    time.sleep(1)
    workers, start = children(process.pid), time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 2 and process.returncode == 130
    assert [line for line in err.splitlines() if not line.startswith("compiling")] == ["interrupted"]
    wait_for(lambda: have_ended(workers), 2)


def test_workers_end_with_a_parent_that_is_killed():
    lines = (
        "import os, time; from cute_kernels.runtime.parallel import worker_pool",
        "pool = worker_pool(1); print(pool.submit(os.getpid).result(), flush=True); pool.submit(time.sleep, 60)",
    )
    process = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True)
    worker = process.stdout.readline().strip()
    assert state_of(worker)[1] == process.pid
    process.kill()
    wait_for(lambda: have_ended([worker]), 20)
    process.communicate()


def test_messages_of_the_compiler_are_plain_and_short():
    def fail(item):
        raise RuntimeError("\x1b[91mbad\x1b[0m " + "x" * 10_000)

    error = attempt(fail, "item").error
    assert error.startswith("RuntimeError: bad x") and len(error) < 2000


def test_without_rich():
    """The command line says what to install; the library needs no rich."""
    code = "import runpy, sys; sys.modules['rich'] = None; runpy.run_module('cute_kernels', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (
        done.returncode == 2 and done.stderr == "cute-kernels: the command line requires rich; run pip install rich\n"
    )
