"""Kernels as shared libraries: linked for a bundle or the disk cache, and loaded without importing CuTe DSL.

Loading an object file takes the linker in CuTe DSL's extension module, whose import takes 0.5 to 2 s. TVM-FFI loads a
shared library by itself. Such a library needs two others: TVM-FFI's, and the runtime of CuTe DSL, which is no Python
module. The GPU's code is loaded by the first call, as that of an object file.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

LOG = logging.getLogger("cute_kernels.cache")
COMPILER_VARIABLE = "CC"  # a C compiler, which finds the linker; empty: bundles of object files
RUNTIME = "libcute_dsl_runtime.so"


def _driver() -> int | None:
    """The driver's CUDA version, such as 13010; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


@functools.cache
def dsl_runtime() -> tuple[int, Path] | None:
    """Major CUDA version that importing CuTe DSL would select, and the path of the runtime library for it.

    CuTe DSL selects the newest of its installed CUDA versions that the driver supports, or the newest without a driver.
    None if CuTe DSL is missing, supports no installed driver, or has other folders: importing it then has the answer.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = spec.submodule_search_locations if spec is not None else None
    found = {int(p.parts[-3][2:]): p for f in folders or () for p in Path(f).glob(f"cu[0-9][0-9]/lib/{RUNTIME}")}
    driver = _driver()
    return max(((n, p) for n, p in found.items() if driver is None or n <= driver // 1000), default=None)


def compiler() -> list[str]:
    """The command of the C compiler; empty if there is none."""
    command = shlex.split(os.environ.get(COMPILER_VARIABLE, "cc"))
    return command if command and shutil.which(command[0]) else []


def link(data: bytes) -> bytes:
    """Link an object file to a shared library; without a C compiler return the object file.

    Raises:
        RuntimeError: linking failed.
    """
    command, found = compiler(), dsl_runtime()
    if not command or found is None:
        return data
    from tvm_ffi.libinfo import find_libtvm_ffi

    with tempfile.TemporaryDirectory(prefix="cute-kernels-") as folder:
        source, library = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        source.write_bytes(data)
        command += ["-shared", "-nostdlib", "-Wl,-z,defs", str(source), "-o", str(library)]
        for path in found[1], Path(find_libtvm_ffi()):
            command += [f"-L{path.parent}", f"-l{path.stem.removeprefix('lib')}"]  # by name, not by path
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"a kernel could not be linked by {command[0]} ({done.stderr.strip()[-500:]}); set "
                f"{COMPILER_VARIABLE} to a C compiler, or to an empty string for a bundle of object files"
            )
        return library.read_bytes()


def linked_if_possible(data: bytes) -> bytes | None:
    """The shared library of an object file; None without a C compiler, or if linking fails."""
    try:
        library = link(data)
    except (RuntimeError, OSError) as error:
        LOG.info("a kernel is cached as an object file alone: %s", error)
        return None
    return library if suffix_of(library) == ".so" else None


def suffix_of(data: bytes) -> str:
    """Suffix of the file of a kernel: ".so" for a shared library, ".o" for an object file."""
    return ".so" if data[:4] == b"\x7fELF" and data[16:18] == b"\3\0" else ".o"  # e_type, in the ELF header


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    """Load the library that kernels need by its name."""
    found = dsl_runtime()
    if found is None:
        raise RuntimeError(f"{RUNTIME} of CuTe DSL was not found")
    return ctypes.CDLL(str(found[1]))


def load_library(path: str | Path, name: str) -> Any:
    """Load the raw TVM-FFI function `name` of a shared library, which stays loaded until the process ends.

    Raises:
        RuntimeError: the file is not a shared library with this function, or cannot be loaded.
    """
    import tvm_ffi

    _load_runtime()
    try:
        return getattr(tvm_ffi.load_module(str(path)), name)
    except (AttributeError, RuntimeError) as error:
        raise RuntimeError(f"{path} cannot be loaded: {error}") from error
