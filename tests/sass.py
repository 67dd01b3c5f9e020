"""SASS of kernels, without a run of nvdisasm for each of them.

nvdisasm takes 0.3 s to start, a third of what a kernel takes to compile, and there are a thousand kernels. But the low
12 bits of an instruction's 16 bytes name its opcode, always the same one. So nvdisasm is asked only about kernels that
have an instruction not met before (about one in fifty), and each answer is held against everything remembered: a
pattern of bits that named two opcodes would fail the test. test_inspect.py compares the two ways.
"""

import gc
import hashlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from cute_kernels.runtime import inspect, parallel

OPCODE = 0xFFF
WARPGROUP = 0x9C5  # the one whose operands tell, too: which products a WARPGROUP.DEPBAR waits for
FIELDS = (1 << 105) - 1  # without the bits for the scheduling

nvdisasm = inspect.disassemble
_known: dict[tuple[bytes, int], str] = {}  # (architecture, bits) -> an instruction's text, of operands only WARPGROUP's


def disassemble(cubin: bytes) -> str:
    """As `inspect.disassemble`, with nothing but what kernels are judged by: the opcodes, less their modifiers."""
    arch = cubin[48:52]  # the ELF file's flags
    code = code_of(cubin)
    if any((arch, bits) not in _known for data in code.values() for bits in _instructions(data)):
        _learn(arch, code, nvdisasm(cubin))
    lines = []
    for name, data in code.items():
        lines.append(f"\t.section\t{name}")
        lines += (f"        /*{16 * i:04x}*/ {_known[arch, bits]} ;" for i, bits in enumerate(_instructions(data)))
    return "\n".join(lines)


def code_of(cubin: bytes) -> dict[str, bytes]:
    """The code of each kernel, by the name of its section."""
    return {section.name: section.data for section in inspect.sections(cubin) if section.name.startswith(".text.")}


def attempt(function: Callable[[Any], Any], item: Any) -> parallel.Outcome:
    """`parallel.attempt` of a function that inspects a kernel, without garbage collections: they take 4 % of it."""
    gc.disable()
    try:
        with mock.patch.object(inspect, "disassemble", disassemble):
            return parallel.attempt(function, item)
    finally:
        gc.enable()


def remembered(folder: Path, function: Callable[[Any], Any], item: Any) -> parallel.Outcome:
    """The same, from a folder that several processes share, where one of them has put it there."""
    name = hashlib.sha256(f"{function.__qualname__} {item!r}".encode()).hexdigest()
    path = folder / f"{name}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    outcome = attempt(function, item)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.{os.getpid()}"
    part.write_bytes(pickle.dumps(outcome))
    part.replace(path)
    return outcome


def _instructions(data: bytes) -> Iterator[int]:
    """The bits that tell each instruction from others."""
    for at in range(0, len(data), 16):
        bits = int.from_bytes(data[at : at + 2], "little") & OPCODE
        yield bits if bits != WARPGROUP else int.from_bytes(data[at : at + 16], "little") & FIELDS


def _learn(arch: bytes, code: dict[str, bytes], sass: str) -> None:
    """Remember what nvdisasm said of the kernels in `code`; AssertionError where that is not what it said before."""
    for part in re.split(r"^\s*\.section\s+(?=\.text\.)", sass, flags=re.MULTILINE)[1:]:
        name = re.match(r"[^\s,]+", part)[0]
        texts = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)(.*?)\s*;", part, re.MULTILINE)
        for bits, (opcode, rest) in zip(_instructions(code[name]), texts, strict=True):
            text = opcode if bits <= OPCODE else opcode + rest
            known = _known.setdefault((arch, bits), text)
            assert known == text, f"{bits:#x} is {known}, and {text}"
