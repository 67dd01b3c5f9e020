"""Kernels compiled once for all tests of a run: their machine code, and what the emulator runs.

Where CUTE_KERNELS_COMPILED names a folder, as in every run of the tests (conftest.py), processes share it. Tests that
change how kernels are compiled take that name away.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from cute_kernels.runtime.compile import cubin_of, export_object, ptx_of
from cute_kernels.runtime.families import compile_kernel
from cute_kernels.runtime.keys import entry_key, source_fingerprint, versions
from cute_kernels.runtime.parallel import Report, report_of

FOLDER = "CUTE_KERNELS_COMPILED"


def export_host_code(compiled: Any, path: Path) -> None:
    """The object file of the host code, whose function is `kernel`; it runs once or twice, so is not optimized."""
    from cutlass.cutlass_dsl.tvm_ffi_provider import _aot_support

    export = _aot_support.export_module_to_bytes
    quickly = mock.patch.object(
        _aot_support, "export_module_to_bytes", lambda *args, **kwargs: export(*args, **(kwargs | {"opt_level": 0}))
    )
    with quickly:
        export_object(compiled, path, "kernel")


def compile_into(folder: Path, facts: Any) -> None:
    """Write kernel.cubin, kernel.ptx, kernel.o and kernel.json, the metadata."""
    built = compile_kernel(facts, keep_cubin=True)
    (folder / "kernel.cubin").write_bytes(cubin_of(built.compiled))
    (folder / "kernel.ptx").write_text(ptx_of(built.compiled))
    (folder / "kernel.json").write_text(json.dumps(built.metadata))
    export_host_code(built.compiled, folder / "kernel.o")


@contextlib.contextmanager
def compiled(facts: Any) -> Iterator[Path]:
    """The folder of a kernel of a registered family, compiled by this or by another process."""
    shared = os.environ.get(FOLDER)
    if not shared:
        with tempfile.TemporaryDirectory() as folder:
            compile_into(Path(folder), facts)
            yield Path(folder)
        return
    folder = Path(shared, entry_key(facts, source_fingerprint(), versions()))
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as part:
            whole = Path(part, "whole")
            whole.mkdir()
            compile_into(whole, facts)
            with contextlib.suppress(OSError):  # another process was first
                whole.rename(folder)
    yield folder


def cubin(facts: Any) -> bytes:
    """The machine code of a kernel of a registered family."""
    with compiled(facts) as folder:
        return (folder / "kernel.cubin").read_bytes()


def inspect_compiled(facts: Any) -> Report:
    """`parallel.inspect_kernel` of the shared kernel."""
    with compiled(facts) as folder:
        smem = json.loads((folder / "kernel.json").read_text())["smem"]
        return report_of(facts, (folder / "kernel.cubin").read_bytes(), int(smem))
