"""The report of `inspect` on one compiled kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .runtime.compile import cubin_of, ptx_of
from .runtime.families import compile_kernel, family_of
from .runtime.inspect import disassemble
from .runtime.parallel import report_of

COUNTED = ("hgmma", "hmma", "ldgsts", "ldsm", "utmaldg")


@dataclass(frozen=True, repr=False)
class KernelReport:
    """Resources of one compiled kernel; str() formats them."""

    name: str
    arch: str  # the compiler's target
    registers: int  # per thread at launch, before setmaxnreg
    stack: int  # bytes per thread; more than 0 means spills
    spills: int  # loads from and stores to local memory in the code
    shared_memory: int  # bytes per CTA, static and dynamic
    shared_memory_limit: int
    instructions: int
    opcodes: Mapping[str, int]  # number of occurrences of each instruction in the code
    problems: tuple[str, ...]  # reasons not to ship the kernel
    facts: Any  # kernel parameters
    cubin: bytes = field(compare=False)  # the machine code, an ELF file
    ptx: str = field(compare=False)

    @property
    def sass(self) -> str:
        """The machine code as text, by nvdisasm."""
        return disassemble(self.cubin)

    def __str__(self) -> str:
        counted = {name: self.opcodes.get(name.upper(), 0) for name in (*COUNTED, "ldg", "stg")}
        lines = [
            f"{self.arch}: {self.name}",
            f"registers {self.registers}, spills {self.spills}, stack {self.stack} bytes, "
            f"shared memory {self.shared_memory} of {self.shared_memory_limit} bytes",
            f"instructions {self.instructions}: "
            + ", ".join(f"{name.upper()} {count}" for name, count in counted.items() if count),
            *(f"problem: {problem}" for problem in self.problems),
        ]
        return "\n  ".join(lines)

    __repr__ = __str__


def report_of_kernel(facts: Any) -> KernelReport:
    """Compile the kernel with these facts, of any family, and read its machine code."""
    built, family = compile_kernel(facts, keep_cubin=True), family_of(facts)
    cubin = cubin_of(built.compiled)
    report = report_of(facts, cubin, int(built.metadata["smem"]))
    r = report.resources
    return KernelReport(
        name=family.title(facts),
        arch=facts.arch,
        registers=r.registers,
        stack=r.stack,
        spills=r.stl + r.ldl,
        shared_memory=r.static_smem + report.dynamic_smem,
        shared_memory_limit=family.smem_limit(facts),
        instructions=r.instructions,
        opcodes=r.opcodes,
        problems=report.problems,
        facts=facts,
        cubin=cubin,
        ptx=ptx_of(built.compiled),
    )
