"""The text to train on, which every Python ships: its help topics and the docstrings of its standard library."""

import ast
import hashlib
import re
import sysconfig
import textwrap
import warnings
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

HELD_OUT = 10  # one document in so many
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def docstrings(source: bytes) -> str:
    """The docstrings of a module in turn; "" of a file that this Python cannot parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    return "\n\n".join(filter(None, found))


@cache
def documents() -> dict[str, str]:
    """Text by name: of each help topic, and of each module of the standard library that has docstrings."""
    library = Path(sysconfig.get_path("stdlib"))
    found = {f"topic {name}": textwrap.dedent(text) for name, text in topics.items()}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not NOT_LIBRARY.intersection(parts):
            found["/".join(parts)] = docstrings(path.read_bytes())
    return {name: text for name, text in found.items() if text}


def split() -> tuple[list[str], list[str]]:
    """(documents to train on, documents held out). Names decide, so every version of Python splits alike."""
    kept: tuple[list[str], list[str]] = [], []
    digests = {name: hashlib.sha256(name.encode()).digest() for name in documents()}
    for name in sorted(digests, key=digests.get):
        kept[digests[name][-1] % HELD_OUT == 0].append(documents()[name])
    return kept


def as_bytes(texts: list[str]) -> Tensor:
    """(n,) uint8, documents one after another."""
    return torch.from_numpy(np.frombuffer("\n\n".join(texts).encode(), np.uint8).copy())


def sentences(texts: list[str]) -> list[str]:
    """Each once: those of 5 words or more, with few signs that are no letters."""
    found = {}
    for paragraph in re.split(r"\n\s*\n", "\n\n".join(texts)):
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z])", " ".join(paragraph.split())):
            letters = sum(c.isalpha() or c == " " for c in sentence)
            if len(sentence.split()) >= 5 and letters >= 0.9 * len(sentence):
                found[sentence] = None
    return list(found)
