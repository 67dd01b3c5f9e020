"""Supported GPU architectures: their limits and the compiler's targets."""

from dataclasses import dataclass

MMA_M = 16  # rows of one step of mma.sync; the sides of stored blocks are multiples of it


@dataclass(frozen=True)
class ArchSpec:
    """Limits of one GPU architecture, from its programming guide.

    smem: maximal shared memory per CTA, in bytes.
    path: default kernel path.
    target: the compiler's name.
    tensor_core: SASS instruction that kernels of that path contain.
    float8: path with an FP8 MMA; none on Ampere, only WGMMA on Hopper.
    fp16_sums_rate: speedup of FP16 MMAs with FP16 instead of FP32 accumulators.
    """

    name: str
    target: str
    capability: tuple[int, int]
    smem: int
    path: str
    tensor_core: str
    float8: str = ""
    fp16_sums_rate: float = 1.0


ARCHS = {
    spec.name: spec
    for spec in (
        ArchSpec("sm_80", "sm_80", (8, 0), 166_912, "sm_80", "HMMA"),
        ArchSpec("sm_86", "sm_86", (8, 6), 101_376, "sm_80", "HMMA", fp16_sums_rate=2.0),
        ArchSpec("sm_89", "sm_89", (8, 9), 101_376, "sm_80", "HMMA", "sm_80", 2.0),
        ArchSpec("sm_90", "sm_90a", (9, 0), 232_448, "sm_90", "HGMMA", "sm_90"),
    )
}
PATHS = ("sm_80", "sm_90")


def arch_named(name: str) -> ArchSpec:
    """Look up an architecture by name or target ("sm_90" or "sm_90a")."""
    for spec in ARCHS.values():
        if name in (spec.name, spec.target):
            return spec
    raise ValueError(f"unknown architecture {name!r}; known are {', '.join(ARCHS)}")


def arch_of(capability: tuple[int, int]) -> ArchSpec:
    """Look up the architecture of a compute capability; sm_87 (Orin) uses sm_80's.

    Raises RuntimeError for devices older than sm_80 or newer than sm_90: machine code of one major version does not run
    on the next.
    """
    if capability < (8, 0):
        raise RuntimeError(
            f"compute capability {capability[0]}.{capability[1]} is below 8.0: the kernels require cp.async and "
            "mma.sync.m16n8k16 (Ampere or newer)"
        )
    for spec in ARCHS.values():
        if spec.capability == capability:
            return spec
    if capability == (8, 7):
        return ARCHS["sm_80"]
    raise RuntimeError(
        f"no kernels for compute capability {capability[0]}.{capability[1]}; supported are 8.0, 8.6, 8.7, 8.9 and 9.0"
    )
