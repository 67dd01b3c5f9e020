"""Recording of a program's kernels in a file, to compile them ahead of time.

With CUTE_KERNELS_RECORD=FILE a program appends the facts of each kernel that its cache returns for the first time, one
line of JSON each; several processes may share the file. Lines hold plain values and names of types. Reading creates
only frozen dataclasses and named tuples of the given packages, and runs no other code.
"""

import dataclasses
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .packages import import_module

VARIABLE = "CUTE_KERNELS_RECORD"
PLAIN = (str, int, float, bool, type(None))


class RecordError(ValueError):
    """The file is not a record of kernels, or was recorded with other sources."""


def note(facts: Any) -> None:
    """Append a line with these facts, if recording is enabled by the environment."""
    if path := os.environ.get(VARIABLE):
        line = (json.dumps(encoded(facts)) + "\n").encode()
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line)  # in one call, since other processes may append too
        finally:
            os.close(file)


def read(path: str | os.PathLike[str], packages: Collection[str]) -> list:
    """Read the facts in a file, without duplicates; raises RecordError with the line that cannot be read.

    packages: the packages that define the types of facts; their modules may be imported.
    """
    found: dict[Any, None] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            found[decoded(json.loads(line), packages)] = None
        except Exception as error:
            raise RecordError(f"{path}, line {number}: {error}; record it again with {VARIABLE}={path}") from None
    return list(found)


def encoded(value: Any) -> Any:
    """Facts as JSON: plain values, lists for tuples, and {"type", "fields"} for dataclasses and named tuples."""
    if isinstance(value, PLAIN):
        return value
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields = value._asdict()
    elif isinstance(value, tuple):
        return [encoded(item) for item in value]
    else:
        raise TypeError(f"facts hold a {type(value).__name__}, which cannot be recorded: {value!r}")
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    return {"type": name, "fields": {field: encoded(item) for field, item in fields.items()}}


def decoded(value: Any, packages: Collection[str]) -> Any:
    """The inverse of `encoded`."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list):
        return tuple(decoded(item, packages) for item in value)
    kind = type_named(value["type"], packages)
    return kind(**{name: decoded(field, packages) for name, field in value["fields"].items()})


def type_named(name: str, packages: Collection[str]) -> type:
    """A frozen dataclass or named tuple by "module:name"; raises ValueError otherwise."""
    module, _, qualname = name.partition(":")
    if module.partition(".")[0] not in packages:
        raise ValueError(f"{name} is not in a package with kernel families ({', '.join(sorted(packages))})")
    found = getattr(import_module(module), qualname, None)
    frozen = getattr(getattr(found, "__dataclass_params__", None), "frozen", False)
    if not isinstance(found, type) or not (frozen or issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ValueError(f"there is no frozen dataclass {name}")
    return found
