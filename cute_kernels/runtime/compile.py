"""One way to call the compiler.

Every kernel of the project is compiled through `compile_for`, for three reasons. The architecture is named in
each call, so one process compiles for several, whatever GPU happens to be present: with neither a GPU nor an
architecture named, CuTe DSL would silently compile for sm_100a. The calling convention is always TVM-FFI, at
a tenth of the host cost of the DSL's own. And the compiler is not thread-safe, so the lock stands here.
"""

from __future__ import annotations

import shlex
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPILE_LOCK = threading.RLock()  # re-entrant: build_object holds it around a whole build
_LOAD_LOCK = threading.Lock()  # its own, so that loading does not wait for another thread's compilation


class MissingCompiler(ImportError):
    """CuTe DSL, or the TVM-FFI runtime it is called through, is not installed."""


@dataclass(frozen=True)
class Built:
    """What a cache's `build` may return in place of the compiled function: the function with remarks.

    The metadata is stored beside the object, so it must be JSON; dynamic shared memory, known only after
    tracing, is an example.
    """

    compiled: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)


def import_cutlass() -> Any:
    """The `cutlass` package of CuTe DSL, or `MissingCompiler` with the command that installs it.

    Imported on first use: it takes half a second, and looking at facts or a bundle should not.
    """
    try:
        import cutlass
        import cutlass.cute
        import tvm_ffi  # noqa: F401  (the DSL would miss it only in the middle of a compilation)
    except ModuleNotFoundError as error:
        if error.name not in ("cutlass", "cutlass.cute", "tvm_ffi"):
            raise
        raise MissingCompiler(
            f"compiling and loading kernels needs CuTe DSL and TVM-FFI ({error.name!r} was not found): "
            "pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi",
            name=error.name,
        ) from error
    return cutlass


def compile_options(arch: str, *, keep_cubin: bool = False, extra: str = "") -> str:
    """The options string of one compilation; the optimisation level stays at the DSL's default of 3."""
    if not arch:
        raise ValueError("name the architecture to compile for, such as 'sm_90a'")
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

    `options` are further compiler options, such as "--generate-line-info"; `kwargs` are `fn`'s own. No GPU is
    needed. The result is to be exported, as the cache does, or made callable with `load_compiled`. With
    `runnable` the DSL itself also links it into the process: that is a second pass of code generation, and it
    happens only if `arch` is the one the DSL sees (the GPU's, or `CUTE_DSL_ARCH`).

    With `keep_cubin`, `cubin_of` gives the machine code, and `artifacts.PTX` the PTX. The DSL hands them over as files,
    which go to a folder of their own: their names leave out constexpr state, so two configurations would overwrite each
    other.
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
    """The cubin of what `compile_for(..., keep_cubin=True)` returned."""
    cubin = getattr(getattr(compiled, "artifacts", None), "CUBIN", None)
    if not isinstance(cubin, bytes):
        raise ValueError("no cubin was kept: compile with keep_cubin=True, and with a kernel launch in it")
    return cubin


def export_object(compiled: Any, path: str | Path, name: str) -> None:
    """Write `compiled` as an object file whose function is `name`, a C identifier.

    The host code in it may use any instruction that this machine's CPU has: see `keys.host_cpu`.
    """
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"{name!r} is not a C identifier")
    with COMPILE_LOCK:
        compiled.export_to_c(object_file_path=str(path), function_name=name)


def load_object(path: str | Path, name: str) -> Any:
    """The raw TVM-FFI function `name` of an object file: the calling form with the least overhead.

    The file is read at once and may be deleted afterwards; the code lives as long as the function does. No
    GPU is needed until the call. Nothing lighter than the whole DSL can load an object, because the linker is
    part of its MLIR extension module.
    """
    import_cutlass()
    from cutlass.cute.runtime import load_module

    with _LOAD_LOCK:
        return getattr(load_module(str(path), enable_tvm_ffi=True), name)


def load_bytes(data: bytes, name: str) -> Any:
    """`load_object` for an object that is not, or cannot be, kept in a file."""
    with tempfile.TemporaryDirectory(prefix="cute-kernels-") as folder:
        path = Path(folder, "kernel.o")
        path.write_bytes(data)
        return load_object(path, name)


def build_object(build: Callable[[], Any], name: str) -> tuple[bytes, dict[str, Any]]:
    """Run `build` and export what it compiled: the object's bytes, and the metadata of a `Built`."""
    with COMPILE_LOCK:
        built = build()
        if not isinstance(built, Built):
            built = Built(built)
        with tempfile.TemporaryDirectory(prefix="cute-kernels-") as folder:
            path = Path(folder, "kernel.o")
            export_object(built.compiled, path, name)
            return path.read_bytes(), dict(built.metadata)


def load_compiled(compiled: Any, name: str = "kernel") -> Any:
    """The raw TVM-FFI function of what `compile_for` returned, past any cache."""
    return load_bytes(build_object(lambda: compiled, name)[0], name)
