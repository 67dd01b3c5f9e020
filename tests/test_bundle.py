"""Kernels compiled ahead of time: written, found, and refused where they do not belong."""

import json
import os

import pytest

from cute_kernels.runtime.cache import Bundle, BundleError, KernelCache, write_bundle
from tests.cache_fixtures import (  # noqa: F401 (fixtures are used by name)
    Facts,
    build_fixture,
    corrupt,
    environment_fixture,
    is_function,
    objects,
    truncate,
)


@pytest.fixture
def bundle(tmp_path, build):
    """A bundle of two kernels, one of them given twice."""
    folder = tmp_path / "bundle"
    seen = []
    entries = ((facts, build(facts)) for facts in (Facts(), Facts("sm_80"), Facts()))
    manifest = write_bundle(folder, entries, progress=lambda done, facts: seen.append((done, facts.arch)))
    assert manifest == folder / "manifest.json"
    assert seen == [(1, "sm_90a"), (2, "sm_80"), (3, "sm_90a")]
    assert len(build.built) == 2
    build.built.clear()
    return folder


def test_a_bundle_is_found_before_the_disk(tmp_path, bundle, build):
    cache = KernelCache(tmp_path / "cache")
    cache.add_bundle(bundle)
    for facts in (Facts(), Facts("sm_80")):
        assert is_function(cache.get(facts, build(facts)))
        assert cache.metadata(facts) == {"tile": 128}
    assert cache.stats().bundle_hits == 2
    assert not build.built
    assert not objects(tmp_path / "cache")
    cache.get(Facts("sm_89"), build(Facts("sm_89")))
    assert len(build.built) == 1


def test_bundles_from_the_environment(tmp_path, bundle, build, monkeypatch, caplog):
    names = [str(tmp_path / "nowhere"), str(bundle)]
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", os.pathsep.join(names))
    cache = KernelCache(disk=False)
    cache.get(Facts(), build(Facts()))
    assert cache.stats().bundle_hits == 1
    assert "is not a bundle" in caplog.text


def change(**fields):
    def edit(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (change(sources="0" * 64), "other kernel sources"),
        (change(versions={"cuda": "cu12.9"}), r"cu12\.9 instead of cu13"),
        (change(format=0), "format 0"),
        (change(host="x86_64-v9"), "x86_64-v9"),
        (change(versions=None), "damaged"),
        (lambda folder: truncate(folder / "manifest.json"), "damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), "is not a bundle"),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused(bundle, build, monkeypatch, caplog, edit, reason):
    edit(bundle)
    with pytest.raises(BundleError, match=reason):
        KernelCache(disk=False).add_bundle(bundle)
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(bundle))
    KernelCache(disk=False).get(Facts(), build(Facts()))
    assert len(build.built) == 1
    assert "CUTE_KERNELS_BUNDLE" in caplog.text


def test_a_damaged_kernel_of_a_bundle_is_compiled(bundle, build, caplog):
    for path in bundle.glob("*.o"):
        corrupt(path)
    cache = KernelCache(disk=False)
    cache.add_bundle(bundle)
    assert is_function(cache.get(Facts(), build(Facts())))
    assert len(build.built) == 1
    assert "is not used" in caplog.text


def test_a_bundle_written_over_another_keeps_nothing_of_it(bundle, build):
    write_bundle(bundle, [(Facts("sm_89"), build(Facts("sm_89")))])
    assert len(list(bundle.glob("*.o"))) == len(Bundle(bundle).entries) == 1
