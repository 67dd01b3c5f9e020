"""The project's packages, identified by their location.

A name is not sufficient: if a user's script is next to a module `attention`, Python imports that one under the name of
the package.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]  # the folder of the three packages, such as site-packages
PREFIX = __name__.removesuffix("cute_kernels.runtime.packages")  # "PACKAGE." if they are parts of a package, as in hub/
PACKAGES = tuple(PREFIX + name for name in ("cute_kernels", "sparse_collective", "attention"))


class PackageError(ImportError):
    """A package of kernel families cannot be used: another module has its name, or it registers no family."""


def top_of(module: str) -> str:
    """The top-level package of a module's name: the one of PACKAGES that it belongs to, or the first part."""
    prefix = PREFIX if module.startswith(PREFIX) else ""
    return prefix + module[len(prefix) :].partition(".")[0]


def folder_of(package: str) -> Path | None:
    """The folder of one of PACKAGES, or of a package in it; None if it is not installed. Imports nothing."""
    folder = ROOT.joinpath(*package.removeprefix(PREFIX).split("."))
    return folder if top_of(package) in PACKAGES and (folder / "__init__.py").is_file() else None


def is_own(module: ModuleType | None) -> bool:
    """True if an imported module belongs to PACKAGES."""
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str) or (top := top_of(module.__name__)) not in PACKAGES:
        return False
    return Path(os.path.realpath(file)).is_relative_to(ROOT / top.removeprefix(PREFIX))


def import_module(name: str) -> ModuleType:
    """importlib.import_module that finds PACKAGES at their location before the current folder.

    Raises:
        PackageError: another module of that name is already imported.
    """
    package = top_of(name)
    folder = folder_of(package)
    if folder is None:
        return importlib.import_module(name)
    imported, file = sys.modules.get(package), folder / "__init__.py"
    if imported is None and not _is_found_at(package, file):
        spec = importlib.util.spec_from_file_location(package, file, submodule_search_locations=[str(folder)])
        assert spec is not None and spec.loader is not None
        module = sys.modules[package] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[package]
            raise
    elif imported is not None and not is_own(imported):
        raise PackageError(
            f"{package} in {folder} cannot be imported: {getattr(imported, '__file__', imported)} was imported under "
            f"that name. Rename that file, or run `python -m cute_kernels` from another folder"
        )
    return importlib.import_module(name)


def _is_found_at(package: str, file: Path) -> bool:
    """True if `import package` would run this file."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == str(file)
