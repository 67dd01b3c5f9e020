"""Compiled objects are loaded only from folders that nobody else can write."""

import os

import pytest

from cute_kernels.runtime.bundle import Bundle, BundleError
from cute_kernels.runtime.cache import KernelCache, UntrustedFolder
from cute_kernels.runtime.trust import insist_on_trust

from .cache_fixtures import Facts, build_fixture, environment_fixture  # noqa: F401 (fixtures are used by name)

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without users")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_a_folder_of_ones_own_is_trusted(tmp_path, mode):
    folder = tmp_path / "own"
    folder.mkdir()
    folder.chmod(mode)
    insist_on_trust(folder)
    insist_on_trust(folder / "not" / "there")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(UntrustedFolder, match="can be written by others"):
        insist_on_trust(folder)
    with pytest.raises(BundleError, match="can be written by others"):
        Bundle(folder)


def test_a_folder_below_one_that_everybody_can_write_is_refused(tmp_path):
    folder = tmp_path / "open" / "own"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    with pytest.raises(UntrustedFolder, match="can be written by everybody"):
        insist_on_trust(folder)
    folder.parent.chmod(0o1777)  # as /tmp: others cannot rename what is not theirs
    insist_on_trust(folder)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid:
        with pytest.raises(UntrustedFolder, match="belongs to user"):
            insist_on_trust(tmp_path)
    else:
        insist_on_trust(tmp_path)  # root's


def test_the_cache_refuses_a_folder_before_it_loads(tmp_path, build):
    KernelCache(tmp_path / "cache").get(Facts(), build(Facts()))
    (folder,) = (tmp_path / "cache").iterdir()
    folder.chmod(0o777)
    with pytest.raises(UntrustedFolder, match="chmod go-w"):
        KernelCache(tmp_path / "cache").get(Facts(), build(Facts()))
