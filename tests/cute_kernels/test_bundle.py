"""Kernels compiled ahead of time: written, found, and refused where they do not belong; and which folders are trusted.

Compiled objects are loaded only from folders that no other user can write.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.__main__ import main
from cute_kernels.runtime import bundle as bundle_module
from cute_kernels.runtime import keys
from cute_kernels.runtime.bundle import Bundle, BundleError
from cute_kernels.runtime.cache import KernelCache, UntrustedFolder, write_bundle
from cute_kernels.runtime.trust import insist_on_trust
from cute_kernels.runtime.wheel import write_wheel

from .cache_fixtures import (  # noqa: F401
    Facts,
    build_fixture,
    corrupt,
    environment_fixture,
    is_function,
    kernels,
    objects,
    truncate,
)


@pytest.fixture
def bundle(tmp_path, build):
    """A bundle of two kernels, one of them given twice."""
    folder, seen = tmp_path / "bundle", []
    entries = ((facts, build(facts)) for facts in (Facts(), Facts("sm_80"), Facts()))
    manifest = write_bundle(folder, entries, progress=lambda done, facts: seen.append((done, facts.arch)))
    assert manifest == folder / "manifest.json" and len(build.built) == 2
    assert seen == [(1, "sm_90a"), (2, "sm_80"), (3, "sm_90a")]
    build.built.clear()
    return folder


def test_a_bundle_is_found_before_the_disk(tmp_path, bundle, build):
    cache = KernelCache(tmp_path / "cache")
    cache.add_bundle(bundle)
    for facts in (Facts(), Facts("sm_80")):
        assert is_function(cache.get(facts, build(facts))) and cache.metadata(facts) == {"tile": 128}
    assert cache.stats().bundle_hits == 2 and not build.built and not objects(tmp_path / "cache")
    cache.get(Facts("sm_89"), build(Facts("sm_89")))
    assert len(build.built) == 1


def test_bundles_from_the_environment(tmp_path, bundle, build, monkeypatch, caplog):
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", os.pathsep.join([str(tmp_path / "nowhere"), str(bundle)]))
    cache = KernelCache(disk=False)
    cache.get(Facts(), build(Facts()))
    assert cache.stats().bundle_hits == 1 and "is not a bundle" in caplog.text


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
    assert len(build.built) == 1 and "CUTE_KERNELS_BUNDLE" in caplog.text


def test_a_damaged_kernel_of_a_bundle_is_compiled(bundle, build, caplog):
    for path in kernels(bundle):
        corrupt(path)
    cache = KernelCache(disk=False)
    cache.add_bundle(bundle)
    assert is_function(cache.get(Facts(), build(Facts())))
    assert len(build.built) == 1 and "is not used" in caplog.text


def test_a_bundle_written_over_another_keeps_nothing_of_it(bundle, build):
    write_bundle(bundle, [(Facts("sm_89"), build(Facts("sm_89")))])
    assert len(kernels(bundle)) == len(Bundle(bundle).entries) == 1


@pytest.fixture
def installed(tmp_path, bundle, monkeypatch):
    """The folder where a wheel of the bundle is installed."""
    site = tmp_path / "site"
    wheel = write_wheel(bundle, tmp_path / "dist", "0.1.0")
    options = "-q", "--no-deps", "--no-index", "--target"
    subprocess.run([sys.executable, "-m", "pip", "install", *options, site, wheel], check=True, stdout=sys.stderr)
    monkeypatch.syspath_prepend(site)
    return site / "cute_kernels_prebuilt"


def test_an_installed_wheel_is_found(tmp_path, installed, build, caplog):
    cache = KernelCache(tmp_path / "cache")
    assert is_function(cache.get(Facts(), build(Facts()))) and is_function(cache.get(Facts("sm_80"), build(Facts())))
    assert cache.stats().bundle_hits == 2 and not build.built and not caplog.text
    [metadata] = installed.parent.glob("*.dist-info/METADATA")
    required = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist")]
    versions = {name: number for name, number in sorted(keys.versions().items()) if name != "cuda"}
    assert required == [f"Requires-Dist: {name}=={n}" for name, n in {"cute-kernels": "0.1.0", **versions}.items()]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (change(sources="0" * 64), "other kernel sources"),
        (change(versions={"nvidia-cutlass-dsl": "4.7.0"}), "nvidia-cutlass-dsl 4.7.0 instead of"),
    ],
)
def test_an_installed_wheel_that_does_not_fit_is_named_in_one_warning(installed, build, caplog, edit, reason):
    edit(installed)
    cache = KernelCache(disk=False)
    for facts in (Facts(), Facts("sm_80")):
        assert is_function(cache.get(facts, build(facts)))
    assert len(build.built) == 2 and caplog.text.count("cute-kernels-prebuilt 0.1.0 are not used") == 1
    assert reason in caplog.text


def test_damaged_entry_points_are_passed_over(monkeypatch):
    values = "no_such_package.bundle", "no_such_package", "no such name", ""
    points = [importlib.metadata.EntryPoint("prebuilt", value, bundle_module.GROUP) for value in values]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
    assert bundle_module.installed_bundles() == {}


def test_only_a_bundle_becomes_a_wheel(tmp_path, capsys):
    assert main(["wheel", str(tmp_path), "--out", str(tmp_path / "dist")]) == 2
    assert "is not a bundle" in capsys.readouterr().err and not (tmp_path / "dist").exists()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without users")
class TestTrust:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "open" / "own"
        folder.mkdir(parents=True)
        return folder

    @pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
    def test_a_folder_of_ones_own_is_trusted(self, folder, mode):
        folder.chmod(mode)
        insist_on_trust(folder)
        insist_on_trust(folder / "not" / "there")

    @pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
    def test_a_folder_that_others_can_write_is_refused(self, folder, mode):
        folder.chmod(mode)
        with pytest.raises(UntrustedFolder, match="can be written by others"):
            insist_on_trust(folder)
        with pytest.raises(BundleError, match="can be written by others"):
            Bundle(folder)

    def test_a_folder_below_one_that_everybody_can_write_is_refused(self, folder):
        folder.parent.chmod(0o777)
        with pytest.raises(UntrustedFolder, match="can be written by everybody"):
            insist_on_trust(folder)
        folder.parent.chmod(0o1777)  # as /tmp: others cannot rename what is not theirs
        insist_on_trust(folder)

    def test_a_folder_of_another_user_is_refused(self, folder, monkeypatch):
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        if not folder.stat().st_uid:
            insist_on_trust(folder)  # root's
            return
        with pytest.raises(UntrustedFolder, match="belongs to user"):
            insist_on_trust(folder)

    def test_the_cache_warns_once_and_does_without_a_folder_of_another_user(self, folder, build, caplog, monkeypatch):
        """As in containers that share a home folder. Neither are its kernels loaded nor others written to it."""
        KernelCache(folder).get(Facts(), build(Facts()))
        before = sorted(folder.rglob("*"))
        (made,) = folder.iterdir()
        if os.getuid() == 0:
            os.chown(made, 4242, -1)
        else:
            monkeypatch.setattr(os, "getuid", lambda: made.stat().st_uid + 1)
        owner = made.stat().st_uid
        cache = KernelCache(folder)
        assert all(is_function(cache.get(facts, build(facts))) for facts in (Facts(), Facts(tile=64)))
        assert cache.stats().disk_hits == 0 and cache.stats().compiles == 2 and sorted(folder.rglob("*")) == before
        assert caplog.text.count("cannot be cached") == caplog.text.count(f"belongs to user {owner}") == 1

    def test_the_cache_does_without_a_folder_that_others_can_write(self, folder, build, caplog):
        KernelCache(folder).get(Facts(), build(Facts()))
        (made,) = folder.iterdir()
        made.chmod(0o777)
        cache = KernelCache(folder)
        assert is_function(cache.get(Facts(), build(Facts()))) and cache.stats().disk_hits == 0
        assert caplog.text.count("chmod go-w") == 1

    def test_a_folder_that_another_user_makes_first_is_not_used(self, folder, build, caplog, monkeypatch):
        """Between the check and the first kernel."""
        mkdir = Path.mkdir

        def theirs(self, mode=0o777, **options):
            mkdir(self, **options)
            self.chmod(0o777)

        monkeypatch.setattr(Path, "mkdir", theirs)
        cache = KernelCache(folder / "cache")
        assert is_function(cache.get(Facts(), build(Facts())))
        assert "can be written by others" in caplog.text and not list(folder.rglob("*.o"))

    def test_without_a_home_folder_none_is_made_here(self, folder, build, caplog, monkeypatch):
        """A user without a name, as `docker run --user 4242` has it: the cache folder begins with ~ then."""
        monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
        monkeypatch.chdir(folder)
        assert is_function(KernelCache().get(Facts(), build(Facts())))
        assert not list(folder.iterdir()) and caplog.text.count("home folder of this user is unknown") == 1
