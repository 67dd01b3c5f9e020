"""Packages: the wheel and the source archive contain what the library needs, and work outside of a checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_{}(sys.argv[1]))"


@pytest.fixture(name="built", scope="module")
def built_fixture(tmp_path_factory):
    """(source archive, wheel), built from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("build")
    archive = subprocess.run(["git", "stash", "create"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    tree = subprocess.run(["git", "archive", archive or "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    (folder / "source").mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder / "source")], input=tree, check=True)
    found = []
    for kind in ("sdist", "wheel"):
        command = [sys.executable, "-c", BUILD.format(kind), str(folder)]
        done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(folder / done.stdout.split()[-1])
    return tuple(found)


def test_contents(built):
    sdist, wheel = built
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"cute_kernels", "sparse_collective", "attention"} <= tops and len(tops) == 4  # and the metadata
    assert {f"{package}/py.typed" for package in ("cute_kernels", "sparse_collective", "attention")} <= set(names)
    in_tree = {str(path.relative_to(ROOT)) for path in ROOT.glob("attention/**/*.py")}
    assert in_tree <= set(names)
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/README.md") for name in archive.getnames())


def test_installed_wheel(built, tmp_path):
    """In a folder of its own, before any checkout on the path."""
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    command += ["--target", str(target)]
    done = subprocess.run([*command, str(built[1])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = (
        "import torch, cute_kernels, sparse_collective.nn, attention.integrations.transformers\n"
        f"assert cute_kernels.__file__.startswith({str(target)!r}), cute_kernels.__file__\n"
        "print(cute_kernels.gemm(torch.ones(2, 3), torch.ones(3, 4)).sum().item())"
    )
    environment = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "24.0", done.stdout + done.stderr
    script = [sys.executable, str(target / "bin/cute-kernels")]
    for option in ("--version", "--help"):
        done = subprocess.run([*script, option], cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and "cute-kernels" in done.stdout and not done.stderr, done.stdout + done.stderr
