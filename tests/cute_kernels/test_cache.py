"""The cache of compiled kernels: where a kernel is found, how often it is compiled, and what may go wrong."""

import errno
import json
import logging
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cute_kernels.runtime import cache as cache_module
from cute_kernels.runtime import keys
from cute_kernels.runtime.cache import KernelCache, default_cache
from cute_kernels.runtime.disk_store import sha256, write_atomically

from . import tiny_kernels
from .cache_fixtures import Builder, Facts, build_fixture, corrupt, environment_fixture, is_function, objects, truncate  # noqa: F401


def test_memory_then_disk(tmp_path, build):
    cache = KernelCache(tmp_path)
    function = cache.get(Facts(), build(Facts()))
    assert is_function(function) and cache.get(Facts(), build(Facts())) is function
    stats = cache.stats()
    assert (stats.compiles, stats.memory_hits, stats.disk_hits) == (1, 1, 0) and stats.compile_seconds > 0

    later = KernelCache(tmp_path)  # as another process would have it
    assert is_function(later.get(Facts(), build(Facts()))) and len(build.built) == 1
    stats = later.stats()
    assert (stats.compiles, stats.memory_hits, stats.disk_hits) == (0, 0, 1)
    assert cache.metadata(Facts()) == later.metadata(Facts()) == {"tile": 128}


def test_every_architecture_in_one_process(tmp_path, build):
    cache = KernelCache(tmp_path)
    functions = {id(cache.get(Facts(arch), build(Facts(arch)))) for arch in tiny_kernels.ARCHS}
    assert len(functions) == len(objects(tmp_path)) == len(tiny_kernels.ARCHS)


def test_the_sidecar_tells_what_the_object_is(tmp_path, build):
    path = kept(tmp_path, build)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    assert "tile=128" in sidecar.pop("facts")
    expected = {"arch": "sm_90a", "size": path.stat().st_size, "versions": dict(keys.versions())}
    assert sidecar | expected | {"metadata": {"tile": 128}} == sidecar
    assert {file.suffix for file in path.parent.iterdir()} <= {".o", ".so", ".json", ".lock"}, "a file was left over"


def test_the_directory_comes_from_the_environment(tmp_path, build, monkeypatch):
    monkeypatch.setattr(cache_module, "_DEFAULT", None)
    assert default_cache() is default_cache()
    default_cache().get(Facts(), build(Facts()))
    assert len(objects(tmp_path / "from_environment")) == 1


def test_first_calls_of_many_threads_share_one_cache(monkeypatch):
    made, together = [], threading.Barrier(8)

    class Slow(KernelCache):
        def __init__(self):
            made.append(self)
            time.sleep(0.1)
            super().__init__()

    monkeypatch.setattr(cache_module, "_DEFAULT", None)
    monkeypatch.setattr(cache_module, "KernelCache", Slow)
    with ThreadPoolExecutor(8) as pool:
        caches = list(pool.map(lambda _: together.wait() >= 0 and default_cache(), range(8)))
    assert len(made) == 1 and set(map(id, caches)) == {id(made[0])}


@pytest.mark.parametrize("value", ["0", "off"])
def test_disk_can_be_switched_off(tmp_path, build, monkeypatch, value):
    monkeypatch.setenv("CUTE_KERNELS_CACHE", value)
    cache = KernelCache(tmp_path / "unused")
    assert all(is_function(cache.get(Facts(), build(Facts()))) for _ in range(2))
    assert len(build.built) == 1 and not (tmp_path / "unused").exists()


def test_clear_forgets_memory_and_disk_and_nothing_else(tmp_path, build):
    (tmp_path / "notes").mkdir()
    (tmp_path / "0123456789abcdef").mkdir()  # of an older version
    cache = KernelCache(tmp_path)
    cache.get(Facts(), build(Facts()))
    cache.clear(disk=False)
    cache.get(Facts(), build(Facts()))
    assert cache.stats().disk_hits == 1
    cache.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    cache.get(Facts(), build(Facts()))
    assert len(build.built) == 2


# What may go wrong


def kept(folder, build) -> Path:
    """The object of a kernel that was compiled into a folder."""
    KernelCache(folder).get(Facts(), build(Facts()))
    (path,) = objects(folder)
    return path


def truncate_sidecar(path):
    truncate(path.with_suffix(".json"))


def claim_a_broken_object(path):
    """A checksum that fits an object that the linker will not take, and no library."""
    path.with_suffix(".so").unlink(missing_ok=True)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    truncate(path)
    path.with_suffix(".json").write_text(json.dumps(sidecar | {"sha256": sha256(path.read_bytes())}))


def unlink_sidecar(path):
    path.with_suffix(".json").unlink()


@pytest.mark.parametrize(
    "damage", [corrupt, truncate, truncate_sidecar, Path.unlink, claim_a_broken_object, unlink_sidecar]
)
def test_a_damaged_entry_is_compiled_again(tmp_path, build, caplog, damage):
    damage(kept(tmp_path, build))
    with caplog.at_level(logging.WARNING, "cute_kernels.cache"):
        assert is_function(KernelCache(tmp_path).get(Facts(), build(Facts())))
    assert "compiled again" in caplog.text or damage is unlink_sidecar, "without its sidecar it is no entry"
    assert len(build.built) == 2
    caplog.clear()
    assert is_function(KernelCache(tmp_path).get(Facts(), build(Facts())))
    assert len(build.built) == 2 and not caplog.text


def test_a_folder_that_cannot_be_made_is_logged_once(tmp_path, build, caplog):
    (tmp_path / "file").write_text("")
    cache = KernelCache(tmp_path / "file" / "cache")
    assert all(is_function(cache.get(facts, build(facts))) for facts in (Facts(), Facts(tile=64)))
    assert caplog.text.count("cannot be cached") == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_still_read(tmp_path, build, caplog, monkeypatch, code):
    kept(tmp_path, build)

    def refuse(*args, **kwargs):
        raise OSError(code, "no")

    monkeypatch.setattr("cute_kernels.runtime.disk_store.write_atomically", refuse)
    cache = KernelCache(tmp_path)
    assert all(is_function(cache.get(Facts(tile=tile), build(Facts(tile=tile)))) for tile in (128, 32, 64))
    assert (cache.stats().disk_hits, cache.stats().compiles) == (1, 2)
    assert caplog.text.count("cannot be cached") == 1 and len(objects(tmp_path)) == 1


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(tmp_path / "x.o", b"data")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_never_released_only_warns(tmp_path, build, caplog):
    cache = KernelCache(tmp_path, lock_timeout=0.1)
    with cache._set_up().lock(cache.key(Facts())):
        assert is_function(KernelCache(tmp_path, lock_timeout=0.1).get(Facts(), build(Facts())))
    assert "another process has held" in caplog.text


def test_a_failing_build_is_raised_and_may_be_tried_again(tmp_path, build):
    def fail():
        raise RuntimeError("no such tile")

    cache = KernelCache(tmp_path)
    with pytest.raises(RuntimeError, match="no such tile") as caught:
        cache.get(Facts(), fail)
    assert caught.value.__context__ is None
    assert is_function(cache.get(Facts(), build(Facts())))


# Races


def test_threads_compile_once(tmp_path, build):
    cache, start, found = KernelCache(tmp_path), threading.Barrier(8), []

    def call(i):
        start.wait()
        found.append(cache.get(Facts(tile=i % 2), build(Facts(tile=i % 2))))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(function) for function in found}) == 2
    assert sorted(facts.tile for facts in build.built) == [0, 1]


def race(directory, barrier, answers):
    """One of two processes that want the same kernel at the same time."""
    build, cache = Builder(), KernelCache(directory)
    cache.key(Facts())  # imports the compiler, so that both start compiling together
    barrier.wait()
    function = cache.get(Facts(), build(Facts()))
    answers.put((len(build.built), cache.stats().disk_hits, is_function(function)))


def test_processes_compile_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    processes = [context.Process(target=race, args=(tmp_path, barrier, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(found) == [(0, 1, True), (1, 0, True)] and len(objects(tmp_path)) == 1
