"""Compilation of kernels; all of them are compiled by `compile_for`.

- Each call names the architecture, so one process can compile for several, independent of its GPU. Without a GPU and an
  architecture, CuTe DSL would silently compile for sm_100a.
- The calling convention is always TVM-FFI, which has a tenth of the host overhead of the DSL's own.
- The compiler is not thread-safe; calls are serialized by a lock.
"""

from __future__ import annotations

import shlex
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .linked import load_library

COMPILE_LOCK = threading.RLock()  # re-entrant: build_object holds it around a whole build
_LOAD_LOCK = threading.Lock()  # separate, so that loading does not wait for another thread's compilation


class MissingCompiler(ImportError):
    """CuTe DSL, or the TVM-FFI runtime it is called through, is not installed."""


@dataclass(frozen=True)
class Built:
    """Result of a cache's `build`: the compiled function with metadata.

    The metadata is stored with the object, so it must be JSON. It holds e.g. the dynamic shared memory, which is known
    only after tracing.
    """

    compiled: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)


def import_cutlass() -> Any:
    """Import and return the `cutlass` package of CuTe DSL; raises MissingCompiler with the command that installs it.

    The import takes half a second, so it is deferred to the first use.
    """
    try:
        import cutlass
        import cutlass.cute
        import tvm_ffi  # noqa: F401  (otherwise the DSL fails in the middle of a compilation)
    except ModuleNotFoundError as error:
        if error.name not in ("cutlass", "cutlass.cute", "tvm_ffi"):
            raise
        raise MissingCompiler(
            f"compiling and loading kernels requires CuTe DSL and TVM-FFI ({error.name!r} was not found); run "
            "pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi",
            name=error.name,
        ) from error
    return cutlass


def compile_options(arch: str, *, keep_cubin: bool = False, extra: str = "") -> str:
    """Options string of one compilation; the optimization level is the DSL's default of 3."""
    if not arch:
        raise ValueError("arch must name the architecture to compile for, such as 'sm_90a'")
    options = ["--enable-tvm-ffi", "--gpu-arch", shlex.quote(arch)]
    if keep_cubin:
        options.append("--keep-cubin --keep-ptx")
    if extra:
        options.append(extra)
    return " ".join(options)


def compile_for(
    arch: str,
    fn: Any,
    *args: Any,
    keep_cubin: bool = False,
    options: str = "",
    runnable: bool = False,
    **kwargs: Any,
) -> Any:
    """Compile `fn`, a `@cute.jit` callable, for `arch` and the fake arguments that describe its call.

    No GPU is needed. The result can be exported, as the cache does, or made callable with `load_compiled`.

    Args:
        options: further compiler options, such as "--generate-line-info".
        kwargs: keyword arguments of `fn`.
        runnable: also let the DSL link the kernel into the process. This is a second pass of code generation, and
            requires that `arch` is the DSL's (that of the GPU, or `CUTE_DSL_ARCH`).
        keep_cubin: make the machine code available by `cubin_of`, and the PTX by `ptx_of`. The DSL writes both
            to files. Each compilation has its own folder, since file names omit constexpr state, and configurations
            would overwrite each other.
    """
    cutlass = import_cutlass()
    if not runnable:
        kwargs["no_jit_engine"] = True
    with COMPILE_LOCK:
        if not keep_cubin:
            return cutlass.cute.compile(fn, *args, options=compile_options(arch, extra=options), **kwargs)
        with tempfile.TemporaryDirectory(prefix="cute-kernels-") as folder:
            extra = f"--dump-dir {shlex.quote(folder)} {options}".rstrip()
            kept = compile_options(arch, keep_cubin=True, extra=extra)
            return cutlass.cute.compile(fn, *args, options=kept, **kwargs)


def cubin_of(compiled: Any) -> bytes:
    """The cubin of a result of `compile_for(..., keep_cubin=True)`."""
    cubin = getattr(getattr(compiled, "artifacts", None), "CUBIN", None)
    if not isinstance(cubin, bytes):
        raise ValueError("there is no cubin; compile with keep_cubin=True a function that launches a kernel")
    return cubin


def ptx_of(compiled: Any) -> str:
    """The PTX of a result of `compile_for(..., keep_cubin=True)`."""
    return compiled.artifacts.PTX.rstrip("\0")


def export_object(compiled: Any, path: str | Path, name: str) -> None:
    """Write `compiled` to an object file with a function `name`, a C identifier.

    Its host code may use any instruction of this machine's CPU: see `keys.host_cpu`.
    """
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"{name!r} is not a C identifier")
    with COMPILE_LOCK:
        compiled.export_to_c(object_file_path=str(path), function_name=name)


def load_object(path: str | Path, name: str) -> Any:
    """Load the raw TVM-FFI function `name` of a compiled kernel, the calling form with the least overhead.

    The file is read at once and may be deleted afterwards. No GPU is needed until the call. An object file's code lives
    as long as the function; loading it requires the whole DSL, because the linker is part of its MLIR extension module.
    A shared library (.so) requires TVM-FFI alone.
    """
    if Path(path).suffix == ".so":
        with _LOAD_LOCK:
            return load_library(path, name)
    import_cutlass()
    from cutlass.cute.runtime import load_module

    with _LOAD_LOCK:
        return getattr(load_module(str(path), enable_tvm_ffi=True), name)


def load_bytes(data: bytes, name: str) -> Any:
    """`load_object` for an object in memory."""
    with tempfile.TemporaryDirectory(prefix="cute-kernels-") as folder:
        path = Path(folder, "kernel.o")
        path.write_bytes(data)
        return load_object(path, name)


def build_object(build: Callable[[], Any], name: str) -> tuple[bytes, dict[str, Any]]:
    """Run `build` and export its result: the object's bytes, and the metadata of a `Built`."""
    with COMPILE_LOCK:
        built = build()
        if not isinstance(built, Built):
            built = Built(built)
        with tempfile.TemporaryDirectory(prefix="cute-kernels-") as folder:
            path = Path(folder, "kernel.o")
            export_object(built.compiled, path, name)
            return path.read_bytes(), dict(built.metadata)


def load_compiled(compiled: Any, name: str = "kernel") -> Any:
    """The raw TVM-FFI function of a result of `compile_for`, without a cache."""
    return load_bytes(build_object(lambda: compiled, name)[0], name)
