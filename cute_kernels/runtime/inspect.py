"""Resources of a compiled kernel, read from its cubin: registers, stack, spills, shared memory, instructions.

A kernel that spills, or whose WGMMAs the compiler has serialized, returns correct results at a fraction of its speed,
without a warning. Both are visible in the machine code, without a GPU, so tests check every configuration. Registers
and stack are in the ELF file's `.nv.info`; the rest needs a disassembler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"

EM_CUDA = 190
# Attributes of .nv.info with a payload of two u32, a symbol and a value.
EIATTR_FRAME_SIZE, EIATTR_MIN_STACK_SIZE, EIATTR_REGCOUNT = 0x11, 0x12, 0x2F
EIFMT_SVAL = 4  # the only format with a payload after its header of four bytes

WGMMA_OPCODES = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")  # BF16/FP16 and TF32, FP8, INT8, binary

# Bytes that ptxas adds to `.nv.shared.*` from sm_90 on for the system; the limit per CTA excludes them.
RESERVED_SMEM = 1024

# The fields of Resources that count the opcode of their name.
_COUNTED = "stl ldl hgmma hmma ldgsts ldsm stsm utmaldg utmastg usetmaxreg bar".split()


class MissingDisassembler(RuntimeError):
    """No `nvdisasm` could be found."""


@dataclass(frozen=True)
class Frame:
    """Resources in a cubin's ELF file, without a disassembler; fields as in `Resources`."""

    arch: str
    registers: int
    stack: int
    static_smem: int


@dataclass(frozen=True)
class Resources:
    """Resources of one cubin. If it has several kernels, sizes are maxima and counts are sums."""

    arch: str
    registers: int  # per thread at launch, before setmaxnreg
    stack: int  # bytes per thread; more than 0 means a spill or an array indexed at run time
    static_smem: int  # bytes per CTA; dynamic shared memory is set by the launch, and not in the cubin
    stl: int  # stores to local memory
    ldl: int  # loads from local memory
    hgmma: int
    hmma: int
    ldgsts: int  # cp.async
    ldsm: int
    stsm: int
    utmaldg: int  # TMA loads
    utmastg: int  # TMA stores
    usetmaxreg: int
    wgmma_waits: int  # wgmma.wait_group 0: waits that leave no WGMMA in flight
    bar: int  # BAR: named barriers and __syncthreads, both waits and arrivals
    instructions: int  # without NOPs, which are padding
    opcodes: Mapping[str, int] = field(repr=False, compare=False)  # base opcode -> count, for all instructions

    @property
    def wgmmas(self) -> int:
        """Number of WGMMAs of every type (HGMMA, QGMMA for FP8, IGMMA for INT8)."""
        return sum(self.opcodes.get(name, 0) for name in WGMMA_OPCODES)


def resources(cubin: bytes, arch: str) -> Resources:
    """Read `cubin`, which must have been compiled for `arch`, such as "sm_90a"."""
    found = frame(cubin, arch)
    opcodes = Counter[str]()
    sass = disassemble(cubin)
    for opcode in instructions(sass):
        opcodes[opcode.partition(".")[0]] += 1
    return Resources(
        arch=arch,
        registers=found.registers,
        stack=found.stack,
        static_smem=found.static_smem,
        wgmma_waits=len(_DRAIN.findall(sass)),
        instructions=opcodes.total() - opcodes["NOP"],
        opcodes=dict(opcodes),
        **{name: opcodes[name.upper()] for name in _COUNTED},
    )


def frame(cubin: bytes, arch: str) -> Frame:
    """Read the ELF file of `cubin`, which must have been compiled for `arch`."""
    elf = list(sections(cubin))
    number, built = _arch_number(arch), _elf_arch(cubin)
    if number != built:
        raise ValueError(f"the cubin was compiled for sm_{built}, not for {arch}")

    info: Counter[int] = Counter()
    for section in elf:
        if section.name == ".nv.info":
            for attribute, value in _info_values(section.data):
                info[attribute] = max(info[attribute], value)
    shared = [s.size for s in elf if re.match(r"\.nv\.shared\.(?!reserved\.)", s.name)]
    reserved = RESERVED_SMEM if number >= 90 else 0
    return Frame(
        arch=arch,
        registers=info[EIATTR_REGCOUNT],
        stack=max(info[EIATTR_FRAME_SIZE], info[EIATTR_MIN_STACK_SIZE]),
        static_smem=max(0, max(shared, default=0) - reserved),
    )


def problems(
    resources: Resources,
    *,
    tensor_core: str | None,
    dynamic_smem: int,
    smem_limit: int,
    warp_specialised: bool,
    overlaps_wgmmas: bool = True,
) -> list[str]:
    """Reasons not to ship this kernel; an empty list if there are none.

    tensor_core: the instruction that it must contain: "HGMMA" or "HMMA" ("QGMMA" for FP8, "IGMMA" for INT8), or None.
    overlaps_wgmmas: False if it waits for each WGMMA by design.
    """
    r = resources
    found = stack_problems(r)
    if r.stl or r.ldl:
        found.append(f"{r.stl} stores to and {r.ldl} loads from local memory (STL, LDL)")
    found += smem_problems(r, dynamic_smem, smem_limit)
    if tensor_core and not r.opcodes.get(tensor_core):
        found.append(f"no {tensor_core}: tensor cores are not used as intended")
    if warp_specialised and r.usetmaxreg < 2:
        found.append(f"{r.usetmaxreg} USETMAXREG instead of 2, for producer and consumers: setmaxnreg was dropped")
    if overlaps_wgmmas and r.wgmmas and r.wgmma_waits >= r.wgmmas:
        found.append(f"{r.wgmma_waits} waits for {r.wgmmas} WGMMAs: the compiler serialized them")
    return found


def stack_problems(frame: Frame | Resources) -> list[str]:
    """Report a stack frame as a problem."""
    if frame.stack == 0:
        return []
    return [f"a stack frame of {frame.stack} bytes per thread: spills, or an array indexed at run time"]


def smem_problems(frame: Frame | Resources, dynamic_smem: int, smem_limit: int) -> list[str]:
    """Report shared memory beyond the limit per CTA as a problem; all in bytes."""
    smem = frame.static_smem + dynamic_smem
    if smem <= smem_limit:
        return []
    parts = f"{frame.static_smem} static, {dynamic_smem} dynamic"
    return [f"{smem} bytes of shared memory ({parts}), above the limit of {smem_limit}"]


# -- the ELF file --------------------------------------------------------------------------------------------


class Section(NamedTuple):
    name: str
    size: int
    data: bytes  # empty for a section without bytes in the file


def sections(elf: bytes) -> Iterator[Section]:
    """Sections of a 64-bit little-endian ELF file, such as a cubin."""
    if elf[:6] != b"\x7fELF\x02\x01" or len(elf) < 64 or struct.unpack_from("<H", elf, 18)[0] != EM_CUDA:
        raise ValueError("not a cubin")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<3H", elf, 58)
    headers = []
    for i in range(count):
        name, kind, _flags, _address, offset, size = struct.unpack_from("<2I4Q", elf, table + i * entry_size)
        headers.append((name, kind, offset, size))
    names_at = headers[names_index][2]
    for name, kind, offset, size in headers:
        start = names_at + name
        nobits = kind == 8
        data = b"" if nobits else elf[offset : offset + size]
        yield Section(elf[start : elf.index(b"\0", start)].decode(), size, data)


def code_hash(elf: bytes) -> str:
    """Hash of a cubin's instructions (.text sections), independent of the kernel's name."""
    code = [section.data for section in sections(elf) if section.name.startswith(".text.")]
    return hashlib.sha256(b"".join(code)).hexdigest()[:16]


def _info_values(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) for each attribute of `.nv.info` with a symbol and a value."""
    position = 0
    while position + 4 <= len(info):
        fmt, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if fmt != EIFMT_SVAL:
            continue
        if size == 8:
            yield attribute, struct.unpack_from("<2I", info, position)[1]
        position += size


def _elf_arch(elf: bytes) -> int:
    """Architecture number in the ELF flags; CUDA 13 (ABI version 8) has moved it up by a byte."""
    (flags,) = struct.unpack_from("<I", elf, 48)
    return (flags >> 8) & 0xFF if elf[8] >= 8 else flags & 0xFF


def _arch_number(arch: str) -> int:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if not match:
        raise ValueError(f"{arch!r} does not name an architecture, such as 'sm_90a'")
    return int(match[1])


# -- the instructions ----------------------------------------------------------------------------------------


@functools.cache
def find_nvdisasm() -> str:
    """Find nvdisasm: the wheel's, which is as new as the compiler, otherwise the one in PATH, which may be older."""
    try:
        files = importlib.metadata.files(NVDISASM_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nvdisasm", "nvdisasm.exe") and (path := Path(file.locate())).is_file():
            return str(path)
    if found := shutil.which("nvdisasm"):
        return found
    raise MissingDisassembler(f"nvdisasm was not found: pip install '{NVDISASM_PACKAGE}>=13.4'")


def disassemble(cubin: bytes) -> str:
    """Disassemble the code sections of `cubin` to SASS."""
    nvdisasm = find_nvdisasm()
    with tempfile.TemporaryDirectory(prefix="cute-kernels-") as folder:
        path = Path(folder, "kernel.cubin")  # nvdisasm cannot read from a pipe
        path.write_bytes(cubin)
        # Without the dataflow analysis, which only labels indirect jumps and takes most of the time.
        done = subprocess.run([nvdisasm, "-c", "-ndf", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{nvdisasm} could not read the cubin, perhaps because it is older than the compiler "
            f"(pip install -U {NVDISASM_PACKAGE}): {done.stderr.strip()}"
        )
    return done.stdout


# An instruction follows its offset and an optional predicate:  /*0060*/  @!P0 EXIT ;
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)

# A pipelined mainloop waits for all but one WGMMA; a serialized one waits for every WGMMA.
_DRAIN = re.compile(r"\bWARPGROUP\.DEPBAR\.LE\s+gsb0,\s*0x0\b")

# ptxas emits the commit of an empty group as an HGMMA that is never executed, for all dtypes.
_EMPTY_GROUP = re.compile(r"\bHGMMA(?=\.\S+\s+RZ,\s*gdesc\[URZ\],\s*RZ,\s*!UPT\b)")


def instructions(sass: str) -> Iterator[str]:
    """Opcode with modifiers of each instruction, in code order; WARPGROUP.COMMIT for an empty group."""
    return (match[1] for match in _INSTRUCTION.finditer(_EMPTY_GROUP.sub("WARPGROUP.COMMIT", sass)))
