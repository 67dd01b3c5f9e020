"""One row per architecture: what a kernel may use there, and the name the compiler knows it by."""

from dataclasses import dataclass

MMA_M = 16  # rows of one step of mma.sync; the sides of stored blocks are multiples of it


@dataclass(frozen=True)
class ArchSpec:
    """Limits of one GPU architecture, as its programming guide gives them.

    `smem` is the shared memory one block may ask for (bytes), `path` the family of kernels that runs there by
    default, `target` the compiler's name, `tensor_core` the SASS instruction that kernels of that family contain.
    `float8` is the path whose instruction multiplies 8-bit floats: Ampere has none, Hopper's WGMMA alone does.
    `fp16_sums_rate` is how many times as fast tensor cores multiply fp16 numbers where their sums are fp16, too.
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
    """The row of an architecture by either of its names ("sm_90" and "sm_90a" are one row)."""
    for spec in ARCHS.values():
        if name in (spec.name, spec.target):
            return spec
    raise ValueError(f"unknown architecture {name!r}; known are {', '.join(ARCHS)}")


def arch_of(capability: tuple[int, int]) -> ArchSpec:
    """The row for a device's compute capability; sm_87 (Orin) shares sm_80's.

    Raises RuntimeError for devices older than sm_80, and for those newer than sm_90, which have no row yet: machine
    code of one major version does not run on the next.
    """
    if capability < (8, 0):
        raise RuntimeError(
            f"compute capability {capability[0]}.{capability[1]} is below 8.0: the kernels need cp.async and "
            "mma.sync.m16n8k16 (Ampere and newer)"
        )
    for spec in ARCHS.values():
        if spec.capability == capability:
            return spec
    if capability == (8, 7):
        return ARCHS["sm_80"]
    raise RuntimeError(
        f"no kernels for compute capability {capability[0]}.{capability[1]}; supported are 8.0, 8.6, 8.7, 8.9 and 9.0"
    )
