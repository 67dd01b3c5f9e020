"""Modules whose contents stay as they are, told by where they lie: a user's file may share the name of a library."""

import functools
import importlib.metadata
import math
import operator
import os
import sys
import sysconfig
import types
from pathlib import Path

import torch

from ..runtime.packages import PACKAGES, folder_of, top_of

LIBRARIES = ("torch", "math", "numpy", "operator", "builtins", *PACKAGES)
_STANDARD_FOLDER = sysconfig.get_path("stdlib")
_STANDARD = {m.__name__: getattr(m, "__file__", None) for m in (math, operator)}  # their folder holds site-packages


def library(name) -> types.ModuleType | None:
    """The imported module of this name, if it is one of LIBRARIES or a part of one."""
    if not isinstance(name, str) or (top := top_of(name)) not in LIBRARIES:
        return None
    module = sys.modules.get(name)
    if module is None or not _lies_in_library(top, getattr(module, "__file__", None)):
        return None
    return module


@functools.lru_cache(maxsize=4096)
def _lies_in_library(name: str, file: str | None) -> bool:
    """True if a file is of the library; None, as built-in and generated modules have, is of each."""
    if file is None:
        return name != "operator" and folder_of(name) is None
    home: str | Path | None
    if name in PACKAGES:
        home = folder_of(name)
    elif name in ("torch", "numpy"):
        home = _distribution_folder(name)
    else:
        home = _STANDARD.get(name)
    return home is not None and Path(os.path.realpath(file)).is_relative_to(os.path.realpath(home))


def _distribution_folder(name: str) -> str | None:
    if name == "torch":
        return os.path.dirname(torch.__file__)
    try:
        return str(importlib.metadata.distribution(name).locate_file(name))
    except importlib.metadata.PackageNotFoundError:
        return None


def library_module(module: types.ModuleType) -> bool:
    """True if it is the library's own, and no other module of that name. torch.ops.aten is reached by attributes."""
    name = module.__name__
    if library(name) is module:
        return True
    top = top_of(name)
    reached = library(top)
    parts = filter(None, name[len(top) + 1 :].split("."))
    for part in parts if reached is not None else ():
        reached = getattr(reached, part, None)
    return reached is module


def library_scope(scope: dict) -> bool:
    """True if the globals of a function are a library's."""
    module = library(scope.get("__name__"))
    return module is not None and vars(module) is scope


@functools.lru_cache(maxsize=4096)
def standard_library(name) -> bool:
    """True if the imported module of this name is Python's own, as argparse and enum."""
    if not isinstance(name, str) or name.partition(".")[0] not in sys.stdlib_module_names or name not in sys.modules:
        return False
    file = getattr(sys.modules[name], "__file__", None)
    return file is None or Path(file).is_relative_to(_STANDARD_FOLDER) and "site-packages" not in file


def library_class(value: type) -> bool:
    """True if a library defines the class at its top level."""
    found = library(value.__module__)
    for part in value.__qualname__.split(".") if found is not None else ():
        found = getattr(found, part, None)
    return found is value
