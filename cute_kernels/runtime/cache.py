"""Cache of compiled kernels: in memory, in ahead-of-time bundles, on disk; otherwise kernels are compiled.

`KernelCache.get` is on the hot path, so a hit is one dictionary look-up without a lock. Its functions are always loaded
from an exported object, even right after compilation, so that the first run and later ones execute the same code.

    CUTE_KERNELS_CACHE_DIR   folder of the cache (default: cute-kernels in the user's cache folder)
    CUTE_KERNELS_CACHE=0     disable the disk cache
    CUTE_KERNELS_BUNDLE      bundles to search first, separated as in PATH
    CUTE_KERNELS_RECORD      file to which requested kernels are appended (record.py)
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import keys, record
from .bundle import Bundle, BundleError, installed_bundles, write_bundle
from .compile import Built, build_object, load_bytes, load_object
from .device import assumed
from .disk_store import LOG, CorruptEntry, Store, warn_of_no_disk
from .linked import linked_if_possible
from .trust import UntrustedFolder, insist_on_trust

__all__ = [
    "Built",
    "Bundle",
    "BundleError",
    "CacheStats",
    "KernelCache",
    "UntrustedFolder",
    "default_cache",
    "write_bundle",
]

DIRECTORY_VARIABLE = "CUTE_KERNELS_CACHE_DIR"
ENABLED_VARIABLE = "CUTE_KERNELS_CACHE"
BUNDLE_VARIABLE = "CUTE_KERNELS_BUNDLE"


@dataclass(frozen=True)
class CacheStats:
    """Counts of hits by source since the cache was created. Concurrent memory hits may be lost."""

    memory_hits: int = 0
    bundle_hits: int = 0
    disk_hits: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0  # with the export
    load_seconds: float = 0.0


def cache_directory() -> Path:
    """The folder named by the environment, or cute-kernels in the user's cache folder (XDG)."""
    if named := os.environ.get(DIRECTORY_VARIABLE):
        return Path(os.path.expanduser(named))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "cute-kernels")


class KernelCache:
    """A map from facts to compiled functions. Threads may share it, and processes may share its folder."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        disk: bool | None = None,
        lock_timeout: float = 300.0,
    ) -> None:
        """`directory`, and `disk` (True to use it), default to the environment if None."""
        if disk is None:
            disk = os.environ.get(ENABLED_VARIABLE, "1").lower() not in ("0", "false", "off")
        self.directory = (Path(directory) if directory else cache_directory()) if disk else None
        self._lock_timeout = lock_timeout
        self._memory: dict[Any, Any] = {}  # facts -> function, for hits
        self._functions: dict[str, Any] = {}  # key -> function: facts that compare unequal may share a key
        self._metadata: dict[str, Mapping[str, Any]] = {}
        self._bundles: list[Bundle] = []
        self._store: Store | None = None
        self._guard = threading.RLock()  # protects the fields below and setup; never held during compilation
        self._key_locks: dict[str, threading.Lock] = {}
        self._memory_hits = 0
        self._stats = CacheStats()

    def get(self, facts: Any, build: Callable[[], Any]) -> Any:
        """The compiled function for `facts`: the raw TVM-FFI function, to be called with tensors.

        `facts` determine the kernel. They have `arch`, and a `key()` or a `repr` that is stable across processes. A hit
        is cheap if they are hashable by value, like a frozen dataclass; facts that compare equal (like 1, 1.0 and True)
        are the same kernel. `build` compiles the kernel with `compile_for` and returns the result or a `Built`. It runs
        under the compile lock, so it must not call `get`.
        """
        try:
            function = self._memory.get(facts)
        except TypeError:  # not hashable
            function = None
        if function is None:
            return self._miss(facts, build)
        self._memory_hits += 1
        return function

    def has(self, facts: Any) -> bool:
        """Load the kernel from a bundle or the disk if it is not in memory; False if it must be compiled."""
        key = self.key(facts)
        store, key_lock = self._store_and_lock(key)
        with key_lock:
            function = self._found(store, key)
            if function is not None:
                self._remember(key, facts, function)
        return function is not None

    def add(self, facts: Any, data: bytes, metadata: Mapping[str, Any], seconds: float) -> None:
        """Add a kernel that another process compiled in so many seconds: an object with the function
        `keys.function_name(key)`, and its metadata."""
        key = self.key(facts)
        store, key_lock = self._store_and_lock(key)
        with key_lock, store.lock(key):
            self._remember(key, facts, self._save(store, key, facts, data, metadata, seconds))

    def metadata(self, facts: Any) -> Mapping[str, Any]:
        """Metadata returned by `build` for a kernel that `get` has returned, even if another process built it."""
        return self._metadata[self.key(facts)]

    def key(self, facts: Any) -> str:
        """Name of the entry of `facts`, on disk and in bundles."""
        return keys.entry_key(facts, keys.source_fingerprint(), keys.versions())

    def add_bundle(self, folder: str | os.PathLike[str]) -> None:
        """Search this bundle before the disk and after earlier bundles; raises BundleError if it does not match."""
        bundle = Bundle(folder)
        with self._guard:
            self._set_up()
            self._bundles.append(bundle)

    def clear(self, *, disk: bool = True) -> None:
        """Drop all kernels, and delete those on disk, including those of older sources and versions. Bundles remain."""
        with self._guard:
            self._memory.clear()
            self._functions.clear()
            self._metadata.clear()
        if disk and self.directory is not None and self.directory.is_dir():
            for folder in self.directory.iterdir():
                if folder.is_dir() and re.fullmatch("[0-9a-f]{16}", folder.name):
                    shutil.rmtree(folder, ignore_errors=True)

    def stats(self) -> CacheStats:
        with self._guard:
            return replace(self._stats, memory_hits=self._memory_hits)

    # -- off the hit path ----------------------------------------------------------------------------------

    def _miss(self, facts: Any, build: Callable[[], Any]) -> Any:
        if assumed() is not None:
            return _not_compiled
        key = self.key(facts)
        store, key_lock = self._store_and_lock(key)
        with key_lock:
            function = self._found(store, key)
            if function is None:
                function = self._compile(store, key, facts, build)
            self._remember(key, facts, function)
        return function

    def _store_and_lock(self, key: str) -> tuple[Store, threading.Lock]:
        """The store, and the lock to hold while the entry is loaded or compiled."""
        with self._guard:
            return self._set_up(), self._key_locks.setdefault(key, threading.Lock())

    def _found(self, store: Store, key: str) -> Any:
        """The function of a kernel that is in memory, in a bundle or on disk, otherwise None."""
        function = self._functions.get(key)
        if function is not None:
            self._memory_hits += 1
            return function
        function = self._from_bundles(key)
        return self._from_disk(store, key) if function is None else function

    def _remember(self, key: str, facts: Any, function: Any) -> None:
        self._functions[key] = function
        if _compares_by_value(facts):
            self._memory[facts] = function
        record.note(facts)

    def _set_up(self) -> Store:
        """Find the folder, and the environment's and installed bundles, at the first miss: this hashes all sources."""
        if self._store is None:
            self._store = Store(self._folder(), self._lock_timeout)
            for named in filter(None, os.environ.get(BUNDLE_VARIABLE, "").split(os.pathsep)):
                try:
                    self._bundles.append(Bundle(named))
                except BundleError as error:
                    LOG.warning("%s: %s", BUNDLE_VARIABLE, error)
            for name, folder in installed_bundles().items():
                try:
                    self._bundles.append(Bundle(folder))
                except BundleError as error:
                    LOG.warning("the kernels of %s are not used: %s, or uninstall it", name, error)
        return self._store

    def _folder(self) -> Path | None:
        """The folder for this state of the sources, created if missing; None, with a warning, if it cannot be used.

        It is checked after it was created: otherwise another user could create it between the check and the creation.
        """
        if self.directory is None:
            return None
        folder = self.directory / keys.folder_name(keys.source_fingerprint(), keys.versions())
        try:
            if folder.parts[0].startswith("~"):
                raise FileNotFoundError("the home folder of this user is unknown")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            insist_on_trust(folder)
        except OSError as error:
            warn_of_no_disk(folder, error)
            return None
        return folder.resolve()

    def _from_bundles(self, key: str) -> Any:
        for bundle in self._bundles:
            try:
                if found := bundle.find(key):
                    path, entry = found
                    return self._load(key, path, entry, "bundle_hits")
            except Exception as error:
                LOG.warning("kernel %s of bundle %s is not used: %s", key[:16], bundle.folder, error)
        return None

    def _from_disk(self, store: Store, key: str, *, locked: bool = False) -> Any:
        """Load an entry; None if it is missing or corrupt. A corrupt one is removed only if `locked`, since otherwise
        another process may be writing it."""
        try:
            sidecar = store.find(key)
            if sidecar is None:
                return None
            if (library := store.library(key, sidecar)) is not None:
                try:
                    return self._load(key, library, sidecar, "disk_hits")
                except Exception as error:  # as on a file system that is mounted with noexec
                    LOG.info("%s cannot be loaded, and CuTe DSL links its object file: %s", library, error)
            return self._load(key, store.path(key), sidecar, "disk_hits")
        except Exception as error:  # any error of the linker on a damaged file
            if locked:
                kind = "corrupt" if isinstance(error, CorruptEntry) else "unusable"
                LOG.warning("kernel %s in %s is %s and compiled again: %s", key[:16], store.folder, kind, error)
                store.remove(key)
            return None

    def _compile(self, store: Store, key: str, facts: Any, build: Callable[[], Any]) -> Any:
        with store.lock(key):
            function = self._from_disk(store, key, locked=True)  # another process was faster
            if function is not None:
                return function
            start = time.perf_counter()
            data, metadata = build_object(build, keys.function_name(key))
            return self._save(store, key, facts, data, metadata, time.perf_counter() - start)

    def _save(self, store: Store, key: str, facts: Any, data: bytes, metadata: Mapping, seconds: float) -> Any:
        """Write a compiled kernel to the disk, and load it."""
        self._count(compiles=1, compile_seconds=seconds)
        sidecar = {
            "facts": keys.facts_text(facts),
            "arch": keys.target_of(facts),
            "versions": dict(keys.versions()),
            "host": keys.host_cpu(),
            "metadata": metadata,
        }
        store.save(key, data, sidecar, linked_if_possible)
        self._metadata[key] = metadata
        return load_bytes(data, keys.function_name(key))

    def _load(self, key: str, path: Path, entry: Mapping[str, Any], counter: str) -> Any:
        start = time.perf_counter()
        function = load_object(path, keys.function_name(key))
        self._metadata[key] = entry.get("metadata", {})
        self._count(**{counter: 1, "load_seconds": time.perf_counter() - start})
        return function

    def _count(self, **increments: float) -> None:
        with self._guard:
            now = self._stats
            self._stats = replace(now, **{name: getattr(now, name) + by for name, by in increments.items()})


def _compares_by_value(facts: Any) -> bool:
    """True if facts hash by value; with identity hashes, each call would add an entry."""
    cls = type(facts)
    return cls.__hash__ is not None and cls.__hash__ is not object.__hash__


def _not_compiled(*_args):
    """Placeholder for the kernel of a plan for an assumed GPU."""
    raise RuntimeError("this plan was made for an assumed GPU (arch=...): its kernel was not compiled")


_DEFAULT: KernelCache | None = None
_DEFAULT_GUARD = threading.Lock()


def default_cache() -> KernelCache:
    """The process's cache, configured by the environment."""
    global _DEFAULT
    if _DEFAULT is None:
        with _DEFAULT_GUARD:
            if _DEFAULT is None:
                _DEFAULT = KernelCache()
    return _DEFAULT
