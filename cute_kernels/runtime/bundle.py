"""Ahead-of-time bundles: a folder of compiled kernels with a manifest, for machines that should not compile.

A bundle belongs to one state of the sources and one set of compiler versions, since its keys contain both. Opening a
bundle that does not match raises an error with the reason, instead of silently never being used.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import keys
from .compile import build_object
from .disk_store import CorruptEntry, sha256, write_atomically
from .linked import link, suffix_of
from .trust import UntrustedFolder, insist_on_trust

FORMAT = 1
MANIFEST = "manifest.json"
GROUP = "cute_kernels.bundles"  # entry points: packages whose folder is a bundle


class BundleError(ValueError):
    """The folder is not a bundle, or was made for other sources, versions or CPUs."""


class Bundle:
    """An opened bundle; opening it checks that its kernels are the ones this process would compile."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        try:
            insist_on_trust(self.folder)
            manifest = json.loads(path.read_bytes())
            self._check(manifest)
            self.entries: Mapping[str, Mapping[str, Any]] = manifest["entries"]
        except UntrustedFolder as error:
            raise BundleError(str(error)) from error
        except OSError as error:
            raise BundleError(f"{self.folder} is not a bundle of compiled kernels: {error}") from error
        except BundleError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{path} is damaged ({type(error).__name__}: {error})") from error

    def _check(self, manifest: Mapping[str, Any]) -> None:
        if manifest["format"] != FORMAT:
            raise BundleError(f"{self.folder} has format {manifest['format']}; this version reads {FORMAT}")
        expected = keys.versions()
        differing = [
            f"{name} {manifest['versions'].get(name, 'none')} instead of {expected.get(name, 'none')}"
            for name in sorted({*expected, *manifest["versions"]})
            if manifest["versions"].get(name) != expected.get(name)
        ]
        if differing:
            raise BundleError(f"{self.folder} was compiled with {', '.join(differing)}; compile it again")
        if manifest["sources"] != keys.source_fingerprint():
            raise BundleError(f"{self.folder} was compiled from other kernel sources; compile it again")
        if not keys.host_can_run(manifest["host"]):
            raise BundleError(
                f"{self.folder} was compiled on {manifest['host']} and may use instructions that this CPU "
                f"({keys.host_cpu()}) does not support; compile it on the oldest CPU that it should run on"
            )

    def find(self, key: str) -> tuple[Path, Mapping[str, Any]] | None:
        """The file of an entry and its part of the manifest, None if it has none, or `CorruptEntry`."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        try:
            path = self.folder / Path(entry["file"]).name
            if sha256(path.read_bytes()) != entry["sha256"]:
                raise CorruptEntry("its checksum differs")
        except (OSError, KeyError, TypeError) as error:
            raise CorruptEntry(f"{type(error).__name__}: {error}") from error
        return path, entry


def installed_bundles() -> dict[str, Path]:
    """The bundles that installed distributions contain: name and version of the distribution -> folder."""
    found = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            package, distribution = importlib.util.find_spec(point.value), point.dist
        except (ImportError, ValueError):  # no such package: the distribution is damaged
            continue
        name = point.name if distribution is None else f"{distribution.name} {distribution.version}"
        if package is not None and package.submodule_search_locations:
            found[name] = Path(package.submodule_search_locations[0])
    return found


class BundleWriter:
    """Writer of a bundle; kernels may be compiled in other processes.

    `finish` writes the manifest last, so a folder left by an interrupted run is not a bundle.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / MANIFEST).unlink(missing_ok=True)
        self._sources, self._versions = keys.source_fingerprint(), keys.versions()
        self._written: dict[str, dict[str, Any]] = {}

    def key(self, facts: Any) -> str:
        """Name of an entry; its function must have the name `keys.function_name(key)`."""
        return keys.entry_key(facts, self._sources, self._versions)

    def add(self, facts: Any, data: bytes, metadata: Mapping[str, Any]) -> None:
        """Add one kernel: the bytes of its shared library or object file, and its metadata."""
        key = self.key(facts)
        file = key + suffix_of(data)
        write_atomically(self.folder / file, data)
        self._written[key] = {
            "file": file,
            "sha256": sha256(data),
            "facts": keys.facts_text(facts),
            "arch": keys.target_of(facts),
            "metadata": dict(metadata),
        }

    def has(self, facts: Any) -> bool:
        return self.key(facts) in self._written

    def finish(self) -> Path:
        """Write the manifest and return its path; removes an earlier bundle's kernels from the folder."""
        written = {entry["file"] for entry in self._written.values()}
        for path in self.folder.iterdir():
            if re.fullmatch(r"[0-9a-f]{64}\.s?o", path.name) and path.name not in written:
                path.unlink()
        manifest = {
            "format": FORMAT,
            "sources": self._sources,
            "versions": dict(self._versions),
            "host": keys.host_cpu(),
            "entries": self._written,
        }
        path = self.folder / MANIFEST
        write_atomically(path, json.dumps(manifest, indent=1).encode())
        return path


def write_bundle(
    folder: str | os.PathLike[str],
    entries: Iterable[tuple[Any, Callable[[], Any]]],
    progress: Callable[[int, Any], None] | None = None,
) -> Path:
    """Compile `entries`, pairs of facts and `build` as `KernelCache.get` takes them, into a bundle.

    `progress(done, facts)` is called after each one. Returns the manifest's path.
    """
    writer = BundleWriter(folder)
    for done, (facts, build) in enumerate(entries, start=1):
        if not writer.has(facts):
            data, metadata = build_object(build, keys.function_name(writer.key(facts)))
            writer.add(facts, link(data), metadata)
        if progress is not None:
            progress(done, facts)
    return writer.finish()
