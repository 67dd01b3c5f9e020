"""A folder of compiled kernels that several processes may share: `<key>.o` and its sidecar `<key>.json`, and with a C
compiler `<key>.so`, which is loaded without CuTe DSL.

An entry exists once its sidecar does, which is written last; files are written atomically, by renaming. An entry that
does not match its checksum is compiled again. A folder that cannot be written only logs a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import filelock

LOG = logging.getLogger("cute_kernels.cache")


class CorruptEntry(ValueError):
    """An entry exists but is damaged."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` atomically: other processes see the old file or the new one, even after a crash."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def warn_of_no_disk(folder: Path | None, error: Exception) -> None:
    """Warn that kernels are cached in memory only."""
    LOG.warning(
        "compiled kernels cannot be cached in %s (%s) and will be compiled again by the next process. "
        "Set CUTE_KERNELS_CACHE_DIR to a writable folder, or CUTE_KERNELS_CACHE=0.",
        folder,
        error,
    )


class Store:
    """One folder of entries. With `None` as the folder, the store is always empty."""

    def __init__(self, folder: Path | None, lock_timeout: float = 300.0) -> None:
        self.folder = folder
        self._lock_timeout = lock_timeout
        self._writable = folder is not None

    def path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.o"

    def find(self, key: str) -> Mapping[str, Any] | None:
        """The sidecar of an entry, or None if there is none; raises CorruptEntry if it is damaged."""
        if self.folder is None:
            return None
        path = self.path(key)
        try:
            text = path.with_suffix(".json").read_bytes()
        except OSError:
            return None
        try:
            sidecar = json.loads(text)
            if sidecar["key"] != key:
                raise CorruptEntry("its sidecar belongs to another key")
            if sha256(path.read_bytes()) != sidecar["sha256"]:
                raise CorruptEntry("its checksum differs")
        except CorruptEntry:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptEntry(f"{type(error).__name__}: {error}") from error
        return sidecar

    def library(self, key: str, sidecar: Mapping[str, Any]) -> Path | None:
        """The shared library of an entry that `find` has found; None if it has none, or a damaged one."""
        path = self.path(key).with_suffix(".so")
        try:
            return path if sha256(path.read_bytes()) == sidecar.get("library_sha256") else None
        except OSError:
            return None

    def save(
        self, key: str, data: bytes, sidecar: Mapping[str, Any], link: Callable[[bytes], bytes | None] | None = None
    ) -> bool:
        """Save an entry; returns False if that fails, and then disables saving. link: makes a shared library of it."""
        if not self._writable:
            return False
        path = self.path(key)
        sidecar = {"key": key, "sha256": sha256(data), "size": len(data), **sidecar}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if link is not None and (library := link(data)) is not None:
                write_atomically(path.with_suffix(".so"), library)
                sidecar["library_sha256"] = sha256(library)
            write_atomically(path, data)
            write_atomically(path.with_suffix(".json"), json.dumps(sidecar, indent=1).encode())
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def remove(self, key: str) -> None:
        """Remove an entry, if the folder's permissions allow it."""
        path = self.path(key)
        for file in (path.with_suffix(".json"), path, path.with_suffix(".so")):
            with contextlib.suppress(OSError):
                file.unlink()

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Keep other processes from compiling the same entry. If locking fails, or without filelock, they may, and the
        last one wins."""
        lock = self._acquire(key)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _acquire(self, key: str) -> filelock.BaseFileLock | None:
        if not self._writable:
            return None
        try:
            import filelock  # 15 ms, for processes that compile
        except ModuleNotFoundError:
            return None
        path = self.path(key).with_suffix(".lock")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = filelock.FileLock(path)
            lock.acquire(timeout=self._lock_timeout)
            return lock
        except filelock.Timeout:
            LOG.warning(
                "another process has held the lock %s for %g s; compiling the kernel here as well. If no process is "
                "compiling, delete that file.",
                path,
                self._lock_timeout,
            )
        except (OSError, NotImplementedError) as error:
            self._give_up(error)
        return None

    def _give_up(self, error: Exception) -> None:
        if self._writable:
            self._writable = False
            warn_of_no_disk(self.folder, error)
