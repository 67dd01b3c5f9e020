"""Fixtures of all tests: a kernel cache of their own, seeds, and which tests this machine can run."""

import collections
import contextlib
import ctypes
import gc
import importlib.util
import os
import shutil
import tempfile
from functools import partial

import pytest
import torch

import cute_kernels
from cute_kernels.runtime.parallel import worker_pool
from cute_kernels.testing import reference

from . import compiled, host_emulation, selection
from .sass import attempt, remembered

CACHE = "CUTE_KERNELS_CACHE_DIR"


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", dest="all_tests", help="run all tests, not the selection")
    text = "besides the selection, run a share of the other tests that TEXT picks (a commit's hash)"
    parser.addoption("--share", metavar="TEXT", help=text)
    text = "besides the selection, run tests of kernel families whose sources have changed since COMMIT"
    parser.addoption("--changed-since", metavar="COMMIT", help=text)
    parser.addoption(
        "--every-kernel", action="store_true", help="compile all of the catalogue, not a part of it; all tests"
    )
    text = "run kernels on the emulator where torch stands in their place (docs/notes/emulator.md)"
    parser.addoption("--emulator", action="store_true", help=text)
    if importlib.util.find_spec("pytest_timeout") is None:  # its setting in pyproject.toml is no mistake then
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")


def keep_freed_memory():
    """glibc's malloc gives no memory back to the system.

    A compilation frees hundreds of megabytes and the next one asks for them again: 4 % of its time goes to new pages.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of malloc.h
        for parameter, size in ((trim_threshold, 1 << 30), (top_pad, 64 << 20), (mmap_threshold, 32 << 20)):
            mallopt(parameter, size)


def pytest_configure(config):
    keep_freed_memory()
    # torch.compile would start a pool of processes in each process of tests; one of them once never came back.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)  # CPU tensors here are small: threads only wait for each other, 5x on a busy machine
    everything = config.option.all_tests or config.option.every_kernel
    if not everything and selection.is_whole_suite(config):
        config.pluginmanager.register(selection.Selection(config), "selection")
    if not os.environ.get(CACHE):  # processes that share the tests (pytest-xdist) inherit it, and share the folder
        folder = tempfile.mkdtemp(prefix="cute-kernels-tests-")
        os.environ[CACHE], os.environ[compiled.FOLDER] = folder, os.path.join(folder, "compiled")

        def remove():
            os.environ.pop(CACHE, None)
            os.environ.pop(compiled.FOLDER, None)
            shutil.rmtree(folder, ignore_errors=True)

        config.add_cleanup(remove)


def pytest_collection_modifyitems(items):
    available = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if available else (0, 0)
    for item in items:
        if "gpu" not in item.keywords:
            continue
        if not available:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
        for name, needed in (("sm_89", (8, 9)), ("sm_90", (9, 0))):
            if available and name in item.keywords and capability != needed:
                item.add_marker(
                    pytest.mark.skip(reason=f"runs on {name}; this GPU is sm_{capability[0]}{capability[1]}")
                )


def pytest_collection_finish():
    gc.freeze()  # modules and ten thousand tests stay; walking them again and again took a sixth of each compilation


def pytest_terminal_summary(terminalreporter):
    """One line for each reason to skip, not for each place."""
    skipped = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")]
    for reason, count in collections.Counter(skipped).most_common():
        terminalreporter.write_line(f"skipped {count} tests: {reason}")


@pytest.fixture(autouse=True)
def seeded(request):
    """Every test draws numbers of its own, the same in each run."""
    reference.seed(request.node.nodeid)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Device of an op test: the GPU; and the CPU, with torch in the kernels' place (see host_emulation.py)."""
    with contextlib.nullcontext() if request.param == "cuda" else host_emulation.without_gpu(request, monkeypatch):
        yield "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """`device`, and CPU tensors as users have them."""
    emulated = request.param == "emulated"
    with host_emulation.without_gpu(request, monkeypatch) if emulated else contextlib.nullcontext():
        yield "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture(scope="module")
def outcome_of(request, tmp_path_factory):
    """outcome_of(inspect, facts): what became of a kernel that a test compiles to inspect it.

    One process of tests compiles, in a process for each CPU, the kernels of all selected tests of the file, and each
    test waits for its own. Where several share the tests (pytest-xdist), each test compiles its own, where it is, and
    finds what another one has found of the same kernel.
    """
    if hasattr(request.config, "workerinput"):
        of_the_run = tmp_path_factory.getbasetemp().parent  # that of one process is in it
        yield partial(remembered, of_the_run / "outcomes")
        return
    selected = [item for item in request.session.items if item.module is request.module]
    selected = [item.callspec.params["facts"] for item in selected if "outcome_of" in item.fixturenames]
    pool = worker_pool(os.cpu_count() or 1)
    futures = {}

    def outcome(inspect, facts):
        if not futures:
            futures.update((each, pool.submit(attempt, inspect, each)) for each in selected)
        return futures[facts].result()

    yield outcome
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def emulated(monkeypatch):
    """CPU tensors are planned as on an sm_90 GPU."""
    host_emulation.install(monkeypatch)


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("sm_80", "sm_90")])
def path(request):
    """A family of kernels, forced for the whole test."""
    with cute_kernels.path(request.param):
        yield request.param
