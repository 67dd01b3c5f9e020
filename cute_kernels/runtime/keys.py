"""Cache keys of compiled kernels: facts, the project's sources, the compiler's versions, the CPU.

A stale kernel is worse than a slow start, so keys are conservative: one changed byte in any source file of the project
changes the key of every kernel.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .compile import import_cutlass
from .linked import dsl_runtime
from .packages import PACKAGES, folder_of

# Environment variables of the DSL that change the generated code, besides the options string.
COMPILER_ENVIRONMENT = tuple(
    f"CUTE_DSL_{name}" for name in ("COMPILER_OPT", "DEBUG", "ENABLE_ASSERTIONS", "ENABLE_PYIR", "LINEINFO")
)

# repr() of a function, or of an object without __repr__, contains an address, which is not stable across processes.
# (The order of a set is not stable either, but only costs a compilation.)
_UNSTABLE = re.compile(r" at 0x[0-9a-fA-F]+>")

_X86_LEVELS = {
    "v2": {"cx16", "popcnt", "sse4_1", "sse4_2", "ssse3"},
    "v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


def facts_text(facts: Any) -> str:
    """`facts` as text that is stable across processes: the type with its `key()`, or its `repr`."""
    own = getattr(facts, "key", None)
    text = own() if callable(own) else repr(facts)
    if found := _UNSTABLE.search(text):
        raise TypeError(
            f"{type(facts).__name__} has no stable key ({found[0]!r} in {text!r}); define a key() that represents "
            "functions, and objects without a repr, by their contents"
        )
    return f"{type(facts).__module__}.{type(facts).__qualname__}:{text}"


def target_of(facts: Any) -> str:
    """Architecture of `facts`. It is required, since different GPUs may share a cache folder."""
    arch = getattr(facts, "arch", None)
    if not arch:
        raise TypeError(f"{type(facts).__name__} must have an attribute `arch`, the architecture to compile for")
    return str(arch)


@functools.cache
def source_fingerprint(packages: tuple[str, ...] = PACKAGES) -> str:
    """Hash of all Python files of the installed ones of `packages`; computed once, without importing them."""
    folders = {package: folder_of(package) for package in packages}
    return _hash_of({package: [folder] for package, folder in folders.items() if folder is not None})


def _hash_of(folders: Mapping[str, list]) -> str:
    """Hash of all Python files in the folders of packages."""
    digest = hashlib.sha256()
    for package, places in folders.items():
        for folder in sorted(map(str, places)):  # strings: pathlib would take as long as reading the files
            walk = ((at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(".py"))
            for path in sorted(os.path.join(at, name) for at, name in walk):
                with open(path, "rb", buffering=0) as file:
                    content = file.read().replace(b"\r\n", b"\n")
                name = f"{package}{path[len(folder) :]}".replace(os.sep, "/")
                digest.update(f"{name}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()


OUTSIDE: dict[str, str] = {}  # families of other packages, and the modules that define them


@functools.cache
def sources_of(module: str) -> str:
    """Hash of the package of an imported module, or of its file if it is not in a package."""
    if package := module.rpartition(".")[0]:
        return _hash_of({package: list(getattr(sys.modules.get(package), "__path__", ()))})
    path = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of the compiler and linked libraries, without importing the DSL, which takes up to two seconds.

    The DSL's version determines the minor CUDA version, the driver selects the major one.
    """
    found = dsl_runtime()
    try:
        numbers = {name: importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")}
    except importlib.metadata.PackageNotFoundError:
        import_cutlass()  # raises with the command that installs them
        raise
    return numbers | {"cuda": f"cu{found[0] if found else import_cutlass().CUDA_VERSION.major}"}


@functools.cache
def host_cpu() -> str:
    """The machine type, for x86-64 with its level: the DSL compiles host code for all features of the CPU.

    An object compiled on a CPU with AVX-512 uses it, and crashes with SIGILL on a CPU without. So this determines where
    an object may be loaded, but is not part of the kernel's key.
    """
    machine = platform.machine()
    if machine != "x86_64":
        return machine
    flags: set[str] = set()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            flags = next((set(line.split()) for line in lines if line.startswith("flags")), flags)
    except OSError:
        pass
    level = "v1"
    for name, needed in _X86_LEVELS.items():
        if not needed <= flags:
            break
        level = name
    return f"{machine}-{level}"


def host_can_run(built_on: str) -> bool:
    """True if this CPU has all features that an object built on `built_on` may use."""
    mine, mine_level = _split_level(host_cpu())
    other, other_level = _split_level(built_on)
    return mine == other and mine_level >= other_level


def _split_level(host: str) -> tuple[str, int]:
    machine, _, level = host.partition("-v")
    return machine, int(level or 0)


def environment() -> Mapping[str, str]:
    """The DSL's settings in the process's environment that change the generated code."""
    return {name: os.environ[name] for name in COMPILER_ENVIRONMENT if name in os.environ}


def entry_key(facts: Any, sources: str, versions: Mapping[str, str]) -> str:
    """Key of one compiled kernel: 64 hexadecimal digits."""
    parts = [
        facts_text(facts),
        target_of(facts),
        str(getattr(facts, "options", "")),
        sources,
        sources_of(OUTSIDE[family]) if (family := getattr(facts, "family", None)) in OUTSIDE else "",
        sorted(versions.items()),
        sorted(environment().items()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def folder_name(sources: str, versions: Mapping[str, str]) -> str:
    """Folder of all kernels of one state of the sources, the compiler and the CPU."""
    parts = [sources, sorted(versions.items()), host_cpu()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def function_name(key: str) -> str:
    """C identifier of an entry's function; unique, since many objects are loaded into one process."""
    return f"ck_{key[:24]}"
