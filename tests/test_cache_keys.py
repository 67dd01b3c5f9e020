"""Keys of compiled kernels: what they depend on, and what they refuse."""

import pickle
from dataclasses import replace

import pytest

from cute_kernels.runtime import keys
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.compile import export_object
from tests.cache_fixtures import (  # noqa: F401 (fixtures are used by name)
    Facts,
    build_fixture,
    environment_fixture,
)


class Keyed:
    """Facts that name themselves; equal only to themselves, and not hashable if told so."""

    arch = "sm_80"

    def __init__(self, name):
        self.name = name

    def key(self):
        return self.name


class Unhashable(Keyed):
    __hash__ = None


@pytest.mark.parametrize("cls", [Keyed, Unhashable])
def test_facts_with_a_key_of_their_own(cls, build):
    cache = KernelCache(disk=False)
    first = cache.get(cls("a"), build(Facts("sm_80")))
    assert cache.get(cls("a"), build(Facts("sm_80"))) is first
    assert cache.get(cls("b"), build(Facts("sm_80"))) is not first
    assert cache.stats().memory_hits == 1
    assert not cache._memory, "facts without equality would pile up"


VERSIONS = {"nvidia-cutlass-dsl": "4.8.1", "cuda": "cu13.4"}


def test_the_key_depends_on_everything(monkeypatch):
    reference = keys.entry_key(Facts(), "sources", VERSIONS)
    assert keys.entry_key(Facts(), "sources", dict(reversed(VERSIONS.items()))) == reference
    others = {
        keys.entry_key(Facts("sm_89"), "sources", VERSIONS),
        keys.entry_key(Facts(tile=64), "sources", VERSIONS),
        keys.entry_key(Facts(options="--generate-line-info"), "sources", VERSIONS),
        keys.entry_key(Facts(), "other sources", VERSIONS),
        keys.entry_key(Facts(), "sources", VERSIONS | {"cuda": "cu12.9"}),
        keys.entry_key(Facts(), "sources", VERSIONS | {"nvidia-cutlass-dsl": "4.8.2"}),
    }
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    others.add(keys.entry_key(Facts(), "sources", VERSIONS))
    assert len(others - {reference}) == 7


def test_the_key_of_an_object_depends_on_its_arch_too():
    keyed = Keyed("a")
    reference = keys.entry_key(keyed, "sources", VERSIONS)
    keyed.arch = "sm_90a"
    assert keys.entry_key(keyed, "sources", VERSIONS) != reference


def test_facts_without_arch_or_a_stable_text_are_refused():
    with pytest.raises(TypeError, match="architecture"):
        keys.entry_key(replace(Facts(), arch=""), "sources", VERSIONS)
    for unstable in (lambda x: x, object(), [len, object()]):
        with pytest.raises(TypeError, match="no stable key"):
            keys.facts_text(replace(Facts(), tile=unstable))


def test_the_fingerprint_follows_the_sources(tmp_path, monkeypatch):
    package = tmp_path / "some_kernels"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (package / "inner" / "gemm.py").write_text("tile = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def fingerprint():
        keys.source_fingerprint.cache_clear()
        return keys.source_fingerprint(("some_kernels", "no_such_package_anywhere"))

    try:
        before = fingerprint()
        (package / "notes.txt").write_text("not a source")
        assert fingerprint() == before
        (package / "inner" / "gemm.py").write_text("tile = 2\n")
        changed = fingerprint()
        (package / "inner" / "gemm.py").rename(package / "inner" / "moved.py")
        assert len({before, changed, fingerprint()}) == 3
    finally:
        keys.source_fingerprint.cache_clear()


def test_changed_sources_and_versions_miss_the_disk(tmp_path, build, monkeypatch):
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    with monkeypatch.context() as patched:
        patched.setattr(keys, "source_fingerprint", lambda: "changed")
        KernelCache(tmp_path).get(Facts(), build(Facts()))
    with monkeypatch.context() as patched:
        patched.setattr(keys, "versions", lambda: VERSIONS)
        KernelCache(tmp_path).get(Facts(), build(Facts()))
    assert len(build.built) == 3
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    assert len(build.built) == 3


def test_function_names_are_c_identifiers():
    name = keys.function_name(keys.entry_key(Facts(), "sources", VERSIONS))
    assert name.isascii()
    assert name.isidentifier()
    with pytest.raises(ValueError, match="C identifier"):
        export_object(None, "kernel.o", "not-one")


@pytest.mark.parametrize(
    ("host", "built_on", "able"),
    [
        ("x86_64-v4", "x86_64-v3", True),
        ("x86_64-v3", "x86_64-v4", False),
        ("x86_64-v3", "x86_64-v3", True),
        ("x86_64-v3", "aarch64", False),
        ("aarch64", "aarch64", True),
    ],
)
def test_which_cpu_can_run_an_object(monkeypatch, host, built_on, able):
    monkeypatch.setattr(keys, "host_cpu", lambda: host)
    assert keys.host_can_run(built_on) is able


def test_facts_survive_pickling_with_their_key():
    assert keys.facts_text(pickle.loads(pickle.dumps(Facts()))) == keys.facts_text(Facts())
