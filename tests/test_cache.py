"""The cache of compiled kernels: where a kernel is found, how often it is compiled, and what may go wrong."""

import errno
import json
import logging
import multiprocessing
import threading
from pathlib import Path

import pytest

from cute_kernels.runtime import keys
from cute_kernels.runtime.cache import KernelCache, default_cache
from cute_kernels.runtime.disk_store import sha256, write_atomically
from tests import tiny_kernels
from tests.cache_fixtures import (  # noqa: F401 (fixtures are used by name)
    Builder,
    Facts,
    build_fixture,
    corrupt,
    environment_fixture,
    is_function,
    objects,
    truncate,
)


def test_memory_then_disk(tmp_path, build):
    cache = KernelCache(tmp_path)
    function = cache.get(Facts(), build(Facts()))
    assert is_function(function)
    assert cache.get(Facts(), build(Facts())) is function
    stats = cache.stats()
    assert (stats.compiles, stats.memory_hits, stats.disk_hits) == (1, 1, 0)
    assert stats.compile_seconds > 0

    later = KernelCache(tmp_path)  # as another process would have it
    assert is_function(later.get(Facts(), build(Facts())))
    stats = later.stats()
    assert (stats.compiles, stats.memory_hits, stats.disk_hits) == (0, 0, 1)
    assert len(build.built) == 1
    assert cache.metadata(Facts()) == later.metadata(Facts()) == {"tile": 128}


def test_every_architecture_in_one_process(tmp_path, build):
    cache = KernelCache(tmp_path)
    functions = {arch: cache.get(Facts(arch), build(Facts(arch))) for arch in tiny_kernels.ARCHS}
    assert len({id(function) for function in functions.values()}) == len(tiny_kernels.ARCHS)
    assert len(objects(tmp_path)) == len(tiny_kernels.ARCHS)


def test_the_sidecar_tells_what_the_object_is(tmp_path, build):
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    (path,) = objects(tmp_path)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    assert "tile=128" in sidecar["facts"]
    assert sidecar["arch"] == "sm_90a"
    assert sidecar["size"] == path.stat().st_size
    assert sidecar["versions"] == dict(keys.versions())
    assert sidecar["metadata"] == {"tile": 128}
    assert {file.suffix for file in path.parent.iterdir()} <= {".o", ".json", ".lock"}, "a file was left over"


def test_the_directory_comes_from_the_environment(tmp_path, build):
    default_cache.cache_clear()
    try:
        assert default_cache() is default_cache()
        default_cache().get(Facts(), build(Facts()))
    finally:
        default_cache.cache_clear()
    assert len(objects(tmp_path / "from_environment")) == 1


@pytest.mark.parametrize("value", ["0", "off"])
def test_disk_can_be_switched_off(tmp_path, build, monkeypatch, value):
    monkeypatch.setenv("CUTE_KERNELS_CACHE", value)
    cache = KernelCache(tmp_path / "unused")
    assert is_function(cache.get(Facts(), build(Facts())))
    assert cache.get(Facts(), build(Facts())) is not None
    assert len(build.built) == 1
    assert not (tmp_path / "unused").exists()


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


# -- what may go wrong


def truncate_sidecar(path):
    truncate(path.with_suffix(".json"))


def claim_a_broken_object(path):
    """A checksum that fits an object that the linker will not take."""
    sidecar = json.loads(path.with_suffix(".json").read_text())
    truncate(path)
    sidecar["sha256"] = sha256(path.read_bytes())
    path.with_suffix(".json").write_text(json.dumps(sidecar))


@pytest.mark.parametrize("damage", [corrupt, truncate, truncate_sidecar, Path.unlink, claim_a_broken_object])
def test_a_damaged_entry_is_compiled_again(tmp_path, build, caplog, damage):
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    (path,) = objects(tmp_path)
    damage(path)
    with caplog.at_level(logging.WARNING, "cute_kernels.cache"):
        cache = KernelCache(tmp_path)
        assert is_function(cache.get(Facts(), build(Facts())))
    assert "compiled again" in caplog.text
    assert len(build.built) == 2

    caplog.clear()
    assert is_function(KernelCache(tmp_path).get(Facts(), build(Facts())))
    assert len(build.built) == 2
    assert not caplog.text


def test_an_entry_without_its_sidecar_is_no_entry(tmp_path, build):
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    (path,) = objects(tmp_path)
    path.with_suffix(".json").unlink()
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    assert len(build.built) == 2


def test_a_folder_that_cannot_be_made_is_logged_once(tmp_path, build, caplog):
    (tmp_path / "file").write_text("")
    cache = KernelCache(tmp_path / "file" / "cache")
    for facts in (Facts(), Facts(tile=64)):
        assert is_function(cache.get(facts, build(facts)))
    assert caplog.text.count("cannot be kept") == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_still_read(tmp_path, build, caplog, monkeypatch, code):
    KernelCache(tmp_path).get(Facts(), build(Facts()))

    def refuse(*args, **kwargs):
        raise OSError(code, "no")

    monkeypatch.setattr("cute_kernels.runtime.disk_store.write_atomically", refuse)
    cache = KernelCache(tmp_path)
    cache.get(Facts(), build(Facts()))
    assert cache.stats().disk_hits == 1
    for tile in (32, 64):
        assert is_function(cache.get(Facts(tile=tile), build(Facts(tile=tile))))
    assert cache.stats().compiles == 2
    assert caplog.text.count("cannot be kept") == 1
    assert len(objects(tmp_path)) == 1


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(tmp_path / "x.o", b"data")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_never_released_only_warns(tmp_path, build, caplog):
    cache = KernelCache(tmp_path, lock_timeout=0.1)
    store = cache._set_up()
    with store.lock(cache.key(Facts())):
        other = KernelCache(tmp_path, lock_timeout=0.1)
        assert is_function(other.get(Facts(), build(Facts())))
    assert "another process has held" in caplog.text


def test_a_failing_build_is_raised_and_may_be_tried_again(tmp_path, build):
    cache = KernelCache(tmp_path)

    def fail():
        raise RuntimeError("no such tile")

    with pytest.raises(RuntimeError, match="no such tile") as caught:
        cache.get(Facts(), fail)
    assert caught.value.__context__ is None
    assert is_function(cache.get(Facts(), build(Facts())))


# -- races


def test_threads_compile_once(tmp_path, build):
    cache = KernelCache(tmp_path)
    start = threading.Barrier(8)
    found = []

    def call(i):
        start.wait()
        found.append(cache.get(Facts(tile=i % 2), build(Facts(tile=i % 2))))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert sorted(facts.tile for facts in build.built) == [0, 1]
    assert len({id(function) for function in found}) == 2


def race(directory, barrier, answers):
    """One of two processes that want the same kernel at the same time."""
    build = Builder()
    cache = KernelCache(directory)
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
    assert sorted(found) == [(0, 1, True), (1, 0, True)]
    assert len(objects(tmp_path)) == 1
