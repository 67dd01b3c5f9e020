"""Facts, builds and a clean environment for the tests of the cache; to be imported, fixtures too."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from cute_kernels.runtime import keys
from cute_kernels.runtime.cache import Built
from cute_kernels.runtime.compile import compile_for
from tests.cute_kernels import tiny_kernels


@dataclass(frozen=True)
class Facts:
    arch: str = "sm_90a"
    tile: int = 128
    options: str = ""


class Builder:
    """A `build` for each facts that counts how often it ran."""

    def __init__(self):
        self.built = []

    def __call__(self, facts):
        def build():
            self.built.append(facts)
            compiled = compile_for(facts.arch, tiny_kernels.add, *tiny_kernels.fake_arguments(), options=facts.options)
            return Built(compiled, {"tile": facts.tile})

        return build


@pytest.fixture(name="build")
def build_fixture():
    return Builder()


@pytest.fixture(autouse=True, name="clean_environment")
def environment_fixture(monkeypatch, tmp_path):
    """No test may touch the user's cache, or listen to the settings that the tests were started with."""
    for name in ("CUTE_KERNELS_CACHE", "CUTE_KERNELS_BUNDLE", *keys.COMPILER_ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "from_environment"))


def objects(directory):
    return sorted(Path(directory).glob("*/*.o"))


def kernels(bundle):
    """The files of a bundle's kernels: shared libraries, or object files without a C compiler."""
    return [path for path in Path(bundle).iterdir() if path.suffix in (".so", ".o")]


def is_function(function):
    return type(function).__name__ == "Function" and callable(function)


def corrupt(path):
    """Turn one byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def truncate(path):
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
