"""Kernels linked to shared libraries: loaded and run where CuTe DSL cannot be imported, or left as object files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels import explain, gemm
from cute_kernels.runtime import keys, linked
from cute_kernels.runtime.bundle import MANIFEST
from cute_kernels.runtime.cache import KernelCache, write_bundle
from cute_kernels.runtime.compile import compile_for, import_cutlass, load_object, ptx_of
from cute_kernels.runtime.disk_store import sha256
from cute_kernels.runtime.families import compile_kernel

from . import tiny_kernels
from .cache_fixtures import (  # noqa: F401
    Facts,
    build_fixture,
    corrupt,
    environment_fixture,
    is_function,
    kernels,
    truncate,
)

needs_linker = pytest.mark.skipif(not linked.compiler(), reason="no C compiler")
RUN = "import sys; sys.modules['cutlass'] = None  # importing it raises ModuleNotFoundError\n"


@pytest.fixture
def bundle(tmp_path, build):
    write_bundle(tmp_path / "bundle", [(Facts(), build(Facts()))])
    return tmp_path / "bundle"


def without_dsl(code: str, *arguments) -> str:
    """Return what the code prints in a process that cannot import CuTe DSL."""
    command = [sys.executable, "-c", RUN + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


# machine() loads the emulator with RTLD_GLOBAL, so its functions precede those of CuTe DSL's runtime library.
EMULATED = """
import torch
from pathlib import Path
from cute_kernels.runtime import keys
from cute_kernels.runtime.bundle import Bundle
from cute_kernels.runtime.compile import load_object
from tests.emulator import emulate
emulate.machine()
opened = Bundle(sys.argv[1])
[key] = opened.entries
add = load_object(opened.find(key)[0], keys.function_name(key))
a, b, out = torch.randn(1000), torch.randn(1000), torch.full((1000,), float("nan"))
emulate._prepare(emulate._load(Path(sys.argv[2]).read_text()), [a, b, out])
add(*map(emulate.on_device, (a, b, out)))
print(torch.equal(out, a + b), type(add).__name__)
"""


@needs_linker
def test_a_bundles_kernel_runs_without_the_dsl(bundle, tmp_path):
    kernel = compile_for("sm_90a", tiny_kernels.add, *tiny_kernels.fake_arguments(), keep_cubin=True)
    (tmp_path / "add.ptx").write_text(ptx_of(kernel))
    assert [path.suffix for path in kernels(bundle)] == [".so"]
    assert without_dsl(EMULATED, bundle, tmp_path / "add.ptx") == "True Function"


FIRST_CALL = """
import os, torch
from cute_kernels import explain, gemm
from cute_kernels.runtime import cache
from cute_kernels.runtime.device import assume
cache.assumed = lambda: None  # load the kernel for the assumed GPU
a = torch.zeros(256, 256, dtype=torch.bfloat16)
with assume("sm_90"):
    plan = explain(gemm, a, a)
print(type(plan.function).__name__, cache.default_cache().stats().bundle_hits)
"""


@needs_linker
def test_the_first_call_of_gemm_needs_no_dsl(tmp_path, monkeypatch):
    """Up to the launch: the plan of a call has the function."""
    a = torch.zeros(256, 256, dtype=torch.bfloat16)
    facts = explain(gemm, a, a, arch="sm_90").facts
    write_bundle(tmp_path / "bundle", [(facts, lambda: compile_kernel(facts))])
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "bundle"))
    assert without_dsl(FIRST_CALL) == "Function 1"


@needs_linker
def test_a_cached_kernel_needs_no_dsl(tmp_path, build, monkeypatch):
    """In the process after the one that compiled it."""
    a = torch.zeros(256, 256, dtype=torch.bfloat16)
    facts = explain(gemm, a, a, arch="sm_90").facts
    KernelCache(tmp_path).get(facts, lambda: compile_kernel(facts))
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    assert without_dsl(FIRST_CALL.replace("bundle_hits", "disk_hits")) == "Function 1"


@needs_linker
@pytest.mark.parametrize("damage", [corrupt, truncate, Path.unlink, "not loadable"])
def test_without_its_library_a_cached_kernel_is_an_object(tmp_path, build, caplog, damage):
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    [library] = tmp_path.glob("*/*.so")
    if damage == "not loadable":
        library.write_bytes(b"no library")
        sidecar = library.with_suffix(".json")
        sidecar.write_text(
            json.dumps(json.loads(sidecar.read_text()) | {"library_sha256": sha256(library.read_bytes())})
        )
    else:
        damage(library)
    later = KernelCache(tmp_path)
    assert is_function(later.get(Facts(), build(Facts())))
    assert later.stats().disk_hits == 1 and len(build.built) == 1 and not caplog.text


@pytest.mark.parametrize("command", ["", "false"], ids=["no compiler", "a compiler that fails"])
def test_the_cache_has_objects_without_a_compiler(tmp_path, build, monkeypatch, command):
    monkeypatch.setenv(linked.COMPILER_VARIABLE, command)
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    assert not list(tmp_path.glob("*/*.so"))
    later = KernelCache(tmp_path)
    assert is_function(later.get(Facts(), build(Facts()))) and later.stats().disk_hits == 1


ON_GPU = """
import torch
from cute_kernels import gemm
from cute_kernels.runtime import cache
a, b = (torch.randint(-4, 5, (256, 256), device="cuda", dtype=torch.bfloat16) for _ in range(2))
out = torch.full_like(a, float("nan"))
gemm(a, b, out=out)
expected = (a.double() @ b.double()).to(torch.bfloat16)  # sums of integers are exact in FP32
print(torch.equal(out, expected), cache.default_cache().stats().bundle_hits)
"""


@needs_linker
@pytest.mark.gpu
def test_a_bundles_gemm_on_a_gpu_without_the_dsl(tmp_path, monkeypatch):
    """The process ends without an error, too, when the libraries unload their GPU code."""
    a = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
    facts = explain(gemm, a, a).facts
    write_bundle(tmp_path / "bundle", [(facts, lambda: compile_kernel(facts))])
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "bundle"))
    assert without_dsl(ON_GPU) == "True 1"


@pytest.mark.parametrize("command", ["", "no-such-compiler -O2"])
def test_without_a_compiler_kernels_are_object_files(bundle, build, command, monkeypatch):
    monkeypatch.setenv("CC", command)
    write_bundle(bundle, [(Facts(), build(Facts()))])
    assert [path.suffix for path in kernels(bundle)] == [".o"]
    cache = KernelCache(disk=False)
    cache.add_bundle(bundle)
    assert is_function(cache.get(Facts(), lambda: pytest.fail("compiled although the bundle has it")))


def test_a_compiler_that_fails_is_named(tmp_path, build, monkeypatch):
    monkeypatch.setenv("CC", f"{sys.executable} -c 'raise SystemExit(\"no linker here\")'")
    with pytest.raises(RuntimeError, match=r"could not be linked by .*python.*\(no linker here\); set CC to a C comp"):
        write_bundle(tmp_path / "bundle", [(Facts(), build(Facts()))])
    assert not (tmp_path / "bundle" / MANIFEST).exists()


def undefined(tmp_path) -> bytes:
    """A shared library with a kernel's name that needs a function which nothing has."""
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("extern int nothing_has_this(void); int (*pointer)(void) = nothing_has_this;")
    subprocess.run([*linked.compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library.read_bytes()


@needs_linker
@pytest.mark.parametrize(
    ("broken", "reason"),
    [(lambda _: b"not a library", "invalid ELF header|too short"), (undefined, "nothing_has_this")],
)
def test_a_library_that_cannot_be_loaded_is_named_and_compiled(bundle, tmp_path, build, caplog, broken, reason):
    """As one of another version of the runtime would be, were its checksum right."""
    [path], data = kernels(bundle), broken(tmp_path)
    path.write_bytes(data)
    manifest = json.loads((bundle / MANIFEST).read_text())
    [entry] = manifest["entries"].values()
    entry["sha256"] = sha256(data)
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RuntimeError, match=f"{path.name} cannot be loaded: (?s:.*)({reason})"):
        load_object(path, "kernel")
    build.built.clear()
    cache = KernelCache(disk=False)
    cache.add_bundle(bundle)
    assert is_function(cache.get(Facts(), build(Facts()))) and build.built == [Facts()]
    assert "is not used" in caplog.text and "cannot be loaded" in caplog.text


@needs_linker
def test_a_library_without_the_function_is_named(bundle):
    [path] = kernels(bundle)
    with pytest.raises(RuntimeError, match=f"{path.name} cannot be loaded: .*other"):
        load_object(path, "other")


def test_the_runtime_is_the_one_that_the_dsl_selects():
    major, path = linked.dsl_runtime()
    import_cutlass()
    from cutlass.cute.runtime import find_runtime_libraries

    assert keys.versions()["cuda"] == f"cu{import_cutlass().CUDA_VERSION.major}" == f"cu{major}"
    assert path.resolve() in [Path(library).resolve() for library in find_runtime_libraries()]


@pytest.mark.parametrize(("driver", "major"), [(None, 13), (13010, 13), (14000, 13), (12090, 12), (11080, None)])
def test_the_driver_selects_the_runtime(driver, major, tmp_path, monkeypatch):
    for folder in ("cu12/lib", "cu13/lib"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / linked.RUNTIME).touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(linked.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(linked, "_driver", lambda: driver)
    found = linked.dsl_runtime.__wrapped__()
    assert found == (None if major is None else (major, tmp_path / f"cu{major}/lib" / linked.RUNTIME))


def test_without_the_dsl_there_is_no_runtime(monkeypatch):
    monkeypatch.setattr(linked.importlib.util, "find_spec", lambda name: None)
    assert linked.dsl_runtime.__wrapped__() is None
