"""Keys of compiled kernels: what they depend on, and what they refuse."""

import pickle
from dataclasses import replace

import pytest

from cute_kernels.runtime import keys, packages
from cute_kernels.runtime.cache import KernelCache
from cute_kernels.runtime.compile import export_object

from .cache_fixtures import Facts, build_fixture, environment_fixture  # noqa: F401 (fixtures are used by name)


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
    def key(facts=Facts(), sources="sources", versions=VERSIONS):  # noqa: B008 (frozen)
        return keys.entry_key(facts, sources, versions)

    keyed, found = Keyed("a"), {key(), key(versions=dict(reversed(VERSIONS.items())))}
    assert len(found) == 1 and keys.facts_text(pickle.loads(pickle.dumps(Facts()))) == keys.facts_text(Facts())
    found |= {key(Facts("sm_89")), key(Facts(tile=64)), key(Facts(options="--generate-line-info"))}
    found |= {key(sources="others"), key(versions=VERSIONS | {"cuda": "cu12.9"}), key(keyed)}
    found |= {key(versions=VERSIONS | {"nvidia-cutlass-dsl": "4.8.2"})}
    keyed.arch = "sm_90a"
    found.add(key(keyed))
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert len(found | {key()}) == 10
    name = keys.function_name(key())
    assert name.isascii() and name.isidentifier()


def test_what_is_refused():
    with pytest.raises(ValueError, match="C identifier"):
        export_object(None, "kernel.o", "not-one")
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
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    monkeypatch.setattr(packages, "PACKAGES", ("some_kernels", "no_such_package_anywhere"))

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
    for name, changed in (
        ("versions", keys.versions),
        ("source_fingerprint", lambda: "x"),
        ("versions", lambda: VERSIONS),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(keys, name, changed)
            KernelCache(tmp_path).get(Facts(), build(Facts()))
    assert len(build.built) == 3
    KernelCache(tmp_path).get(Facts(), build(Facts()))
    assert len(build.built) == 3


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
