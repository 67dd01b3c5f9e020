"""Configurations of GEMM kernels with a 2:4 sparse A: candidates, legality, cost, catalogue."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..arch import ArchSpec
from ..matmul import catalogue, cost, legality
from ..matmul.candidates import with_stages
from ..matmul.config import EpilogueSpec, GemmConfig, GemmFacts
from ..matmul.problem import Problem
from ..tile.element import Element, element_of
from .format import SLAB, SPAN, WORDS

STORED = 2  # columns per stored column
SMEM_BYTES_PER_CLOCK = 128  # read by WGMMA
MMA_BYTES = 64  # of B along K per sparse WGMMA
PROMOTED_COLUMNS = 128  # of one WGMMA under promoted accumulation, at most
PROMOTED_WAIT = 40  # clocks per such WGMMA in which tensor cores idle: an estimate


@dataclass(frozen=True)
class Sparse24Config(GemmConfig):
    """GemmConfig with a 2:4 sparse A; `tile_k` counts columns of the whole A, half of which are stored."""

    family: ClassVar[str] = "sparse24"
    waits: ClassVar[bool] = True
    stored: ClassVar[int] = STORED
    element_bytes: ClassVar[int] = 2  # of operands

    @property
    def metadata_bytes(self) -> int:
        """Bytes of metadata per stage."""
        return self.tile_m // SLAB * (self.tile_k // SPAN) * WORDS * 4

    @property
    def stage_elements(self) -> int:
        """Elements of A, B and metadata per stage."""
        metadata = self.metadata_bytes // self.element_bytes
        return self.tile_m * self.tile_k // STORED + self.tile_n * self.tile_k + metadata

    @property
    def short(self) -> str:
        return super().short + " 2:4"

    def __str__(self) -> str:
        return super().__str__() + " 2:4"


@dataclass(frozen=True)
class Sparse24Float8Config(Sparse24Config):
    """FP8 configurations. Promoted accumulation adds one partial sum per K-tile."""

    element_bytes: ClassVar[int] = 1


@dataclass(frozen=True)
class Sparse24Sm80Config(Sparse24Config):
    """Configurations of the mma.sync path, which loads metadata from global memory to registers."""

    @property
    def metadata_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Sparse24Float8Sm80Config(Sparse24Sm80Config):
    """FP8 configurations of sm_89."""

    element_bytes: ClassVar[int] = 1


def candidates_sm80(spec: ArchSpec, element: Element) -> list[Sparse24Sm80Config]:
    """Configurations of the mma.sync path, best first; the architecture's shared memory bounds their stages.

    An MMA step needs twice as many registers for B as a dense one, so a warp's part has 64 accumulators per thread.
    """
    shapes = [(128, 128, 2, 4), (128, 64, 2, 2), (64, 128, 1, 4), (64, 64, 2, 2)]
    kind, k = (Sparse24Float8Sm80Config, 2 * SPAN) if element.width == 1 else (Sparse24Sm80Config, SPAN)
    tiles = [kind(m, n, k, 0, warps_m, warps_n) for m, n, warps_m, warps_n in shapes]
    return [with_stages(tile, spec, element, 0, 4) for tile in tiles]


def candidates(spec: ArchSpec, element: Element) -> list[Sparse24Config]:
    """Configurations worth trying; among equal costs the first one is taken.

    In the model of `clocks`, WGMMAs of 256 columns read the fewest bytes of shared memory per multiplication, and a
    cluster that shares B reads the fewest bytes from L2.
    """
    shapes = [
        # tile_m, tile_n, tile_k, warps_m, warps_n, cluster_m, cluster_n, consumer_groups, ring
        (128, 256, 64, 2, 1, 2, 1, 1, 1),
        (256, 192, 64, 2, 1, 2, 1, 1, 1),
        (128, 256, 64, 2, 1, 1, 1, 1, 1),
        (128, 192, 64, 1, 1, 2, 1, 2, 1),
        (256, 128, 64, 2, 1, 1, 2, 1, 1),
        (128, 128, 64, 1, 1, 2, 1, 2, 2),
        (128, 128, 64, 2, 1, 1, 1, 1, 2),
        (64, 256, 64, 1, 2, 1, 1, 1, 2),
        (128, 64, 128, 2, 1, 1, 1, 1, 1),
        (64, 128, 128, 1, 2, 1, 1, 1, 1),
        (64, 64, 128, 1, 2, 1, 1, 1, 1),
    ]
    own = [(128, 192, 64, 1, 1, 2, 1, 2, 1), (128, 128, 64, 1, 1, 2, 1, 2, 1)]
    if element.width == 1:
        return float8_candidates(shapes, own, spec, element)
    return [of_shape(Sparse24Config, shape, spec, element) for shape in shapes] + [
        of_shape(Sparse24Config, shape, spec, element, rings=2) for shape in own
    ]


def float8_candidates(shapes: list, own: list, spec: ArchSpec, element: Element) -> list[Sparse24Config]:
    """FP8 configurations: the shapes of 16-bit elements with as many bytes of K.

    Promoted accumulation also has 128x128 with K-tiles of 256 columns, of which four stages fit: half as many
    additions and waits.
    """
    long = (128, 128, 128, 2, 1, 2, 1, 1, 1)
    rings = [(shape, 1) for shape in (*shapes, long)] + [(shape, 2) for shape in own]
    of_bytes = [((m, n, 2 * k, *rest), count) for (m, n, k, *rest), count in rings]
    return [of_shape(Sparse24Float8Config, shape, spec, element, rings=count) for shape, count in of_bytes]


def of_shape(kind: type, shape: tuple, spec: ArchSpec, element: Element, rings: int = 1) -> Sparse24Config:
    """A configuration with as many stages as fit; shape: its other counts in the order of `candidates`."""
    m, n, k, warps_m, warps_n, cluster_m, cluster_n, groups, ring = shape
    cfg = kind(m, n, k, 0, warps_m, warps_n, cluster_m, cluster_n, groups, ring, rings=rings)
    return with_stages(cfg, spec, element, ring * warps_m * warps_n * groups * 64 * 128)


def clocks(cfg: Sparse24Config, problem: Problem, sms: int, l2_bytes_per_clock: float) -> float:
    """Estimated clocks, like cost.cost with the K-tiles of `k_tile_clocks`."""
    k_tile = k_tile_clocks(cfg, problem.width, l2_bytes_per_clock, problem.promotes)
    loop = max(1.0, problem.extents.K / cfg.tile_k) * max(k_tile)
    return cost.persistent(cfg, problem, sms, cost.row_tiles(cfg, problem.extents, None), loop)


def k_tile_clocks(
    cfg: Sparse24Config, width: int, l2_bytes_per_clock: float, promoted: bool = False
) -> tuple[float, float]:
    """Clocks of one K-tile: (WGMMA, loads). Sparse WGMMA is twice as fast as dense, or as fast as shared memory feeds
    it.

    WGMMA reads B once per 64 rows of A: for 64 x n x 32 elements of 16 bits, or x 64 of FP8, it reads 32 bytes of each
    row of A and 64 of each column of B. Tensor cores take n / 2 clocks for that, shared memory at 128 bytes a clock
    n / 2 + 16. Promoted WGMMAs have at most 128 columns, and each reads A; the other warpgroup hides most of the wait
    for one. The rest is an estimate.
    """
    if isinstance(cfg, Sparse24Sm80Config):
        mma, loads = cost.k_tile_clocks(cfg, width, l2_bytes_per_clock)
        return mma / STORED, loads
    rows, columns = cfg.tile_m // SLAB, cfg.tile_n // cfg.warps_n
    parts = -(-columns // PROMOTED_COLUMNS) if promoted else 1
    reads = cfg.tile_k * width / MMA_BYTES * rows * cfg.warps_n * (SLAB // 2 * parts + columns) * MMA_BYTES
    waits = PROMOTED_WAIT * rows * cfg.warps_n * parts if promoted else 0
    mma, _ = cost.k_tile_clocks(cfg, width, l2_bytes_per_clock)
    a, b = cfg.tile_m * cfg.tile_k // STORED / cfg.cluster_n, cfg.tile_n * cfg.tile_k / cfg.cluster_m
    loads = ((a + b) * width + cfg.metadata_bytes) / l2_bytes_per_clock
    loads = loads / cost.L2_OF_8_BITS if width == 1 else loads
    return max(mma / STORED, reads / SMEM_BYTES_PER_CLOCK) + waits, loads


def unsupported(facts: GemmFacts) -> str:
    """The reason why these facts are not supported, or an empty string: of a 2:4 sparse A, then of its path."""
    if reason := legality.general(facts):
        return reason
    if facts.majors[0] != "k" or facts.ranks != (2, 2, 2) or facts.block is not None:
        return "with a 2:4 sparse A, all operands must be single matrices, and A contiguous along K"
    return of_stored_halves(facts)


def of_stored_halves(facts: GemmFacts) -> str:
    """`unsupported` for any A of which half is stored, on both paths."""
    cfg, spec = facts.config, facts.epilogue
    if spec.stores_z or spec.gated:
        return "a 2:4 sparse A does not support a second result or a gate in the epilogue"
    if spec.scales_blocks:
        return "a 2:4 sparse A does not support scales of 1x128 or 128x128; use one per tensor, row or column"
    if facts.element.width != cfg.element_bytes:
        return f"tile {cfg}: a configuration for {8 * cfg.element_bytes}-bit operands"
    if facts.element.width == 1 and facts.path == "sm_80" and min(facts.aligns[:2]) < 4:
        return (
            f"rows and addresses of {facts.dtype} operands must be multiples of 4 bytes, the least that cp.async "
            "copies; K must be a multiple of 8 (pad W and b with zeros)"
        )
    line = 2 * SPAN // facts.element.width
    if cfg.tile_k not in (line, 2 * line) or cfg.tile_m % SLAB or cfg.split > 1:
        return f"tile {cfg}: needs multiples of {SLAB} rows, {line} or {2 * line} columns of K, and no split-K"
    if (facts.path == "sm_80") != isinstance(cfg, Sparse24Sm80Config):
        return f"tile {cfg}: a configuration for the other path"
    if facts.path == "sm_90":
        sums = cfg.tile_m * cfg.tile_n // (cfg.warps_m * cfg.warps_n * 128)
        direct = sums == 128 and cfg.tile_m > SLAB * cfg.warps_m and not facts.tma_store
        if (sums > 128 or direct) and spec.scales_each and not spec.is_light:  # compiled: 8 to 192 bytes of stack
            return f"{sums} accumulators per thread leave no registers for row or column scales with this epilogue"
        return legality.tma_operands(facts) or legality.sm90(facts)
    span_m, span_n, threads = cfg.tile_m // cfg.warps_m, cfg.tile_n // cfg.warps_n, 32 * cfg.warps_m * cfg.warps_n
    accumulators = span_m * span_n // 32
    fragments = 2 * (span_m // 16 * 4 + span_n // 8 * 4) + 2 * cfg.tile_k // SPAN * span_m // 16  # and metadata
    registers = min(255, 65_536 // threads)
    if accumulators + fragments + legality.SM80_OTHER_REGISTERS > registers:
        return f"{accumulators} accumulators and {fragments} operand registers per thread exceed {registers}"
    return legality.sm80(facts)


def judge(facts: GemmFacts, resources, problems: list[str]) -> list[str]:
    """Add to `problems`: another number of MMAs than the steps of a K-tile need, FP8 operands that are multiplied with
    16 bits, promoted accumulation with too few additions.

    A loop whose first K-tile is peeled has the MMAs of a K-tile twice; a promoted one has them once per 128 columns.
    """
    cfg, codes, found = facts.config, resources.opcodes, list(problems)
    rows = cfg.tile_m // (64 * cfg.warps_m)
    if facts.element.width > 1:
        if facts.warp_specialised and resources.hgmma != (steps := 2 * rows * cfg.tile_k // 32):
            found.append(f"{resources.hgmma} HGMMA for {steps} MMA steps")
        return found
    if wide := codes.get("HMMA", 0) + codes.get("HGMMA", 0):
        found.append(f"{wide} 16-bit MMAs in a kernel for {facts.dtype}")
    name, threads = ("QGMMA", 128) if facts.warp_specialised else ("QMMA", 32)
    mmas, steps = codes.get(name, 0), max(1, rows) * cfg.tile_k // MMA_BYTES
    if facts.warp_specialised:
        steps *= -(-cfg.tile_n // cfg.warps_n // PROMOTED_COLUMNS) if facts.promotes else 2
    if mmas < steps or facts.warp_specialised and mmas > steps:
        found.append(f"{mmas} {name} for {steps} MMA steps")
    sums = cfg.tile_m * cfg.tile_n // (cfg.warps_m * cfg.warps_n * threads)
    added = "FFMA" if facts.block is not None and facts.block.scaled else "FADD"
    if facts.promotes and codes.get(added, 0) < sums:
        found.append(f"{codes.get(added, 0)} {added} for {sums} accumulators per thread: not promoted to FP32")
    return found


def float8_kernels(family, spec: ArchSpec, quick: bool) -> Iterator[GemmFacts]:
    """FP8 kernels: each configuration with promoted and fast accumulation, plain and with scales and the most expensive
    epilogue; other variations with one configuration."""
    if quick or not spec.float8:
        return
    element = element_of("float8_e4m3fn")
    each: dict[str, Any] = {"scale_m": "row", "scale_n": "column"}
    wide: dict[str, Any] = {"aligns": (element.vector,) * 2 + (8,), "majors": ("k", "k", "n"), "dtype": "float8_e4m3fn"}
    fp32, direct = {"out_dtype": "float32", "aligns": (16, 16, 4)}, {"aligns": (16, 16, 1)}
    changes: list[dict[str, Any]] = [
        {"dtype": "float8_e5m2"},
        {"epilogue": EpilogueSpec(scale_m="tensor", scale_n="tensor")},
        {"epilogue": EpilogueSpec(**each), "majors": ("k", "k", "m")},
        {"epilogue": EpilogueSpec(scale_m="row")},
        {"epilogue": replace(catalogue.full(), **each)},
        {"out_dtype": "float16", "epilogue": replace(catalogue.ROW, **each)},
        {**fp32, "epilogue": replace(catalogue.full(), **each)},
        {**direct, "epilogue": replace(catalogue.COL, **each)},
    ]
    for fast in (False, True):
        terms = wide | {"use_fast_accum": fast}
        for config in family.candidates(spec.path, None, spec, element):
            yield catalogue.dense(spec, spec.path, config, **terms)
            loaded = replace(catalogue.COL, **each)
            if fast:  # with 192 accumulators a residual is not supported
                loaded = replace(loaded, residual=None)
            yield catalogue.dense(spec, spec.path, config, **terms, epilogue=loaded)
        for change in changes:
            configs = family.candidates(spec.path, None, spec, element)
            facts = (catalogue.dense(spec, spec.path, config, **terms | change) for config in configs)
            yield from catalogue.buildable(family, facts)[:1]


def kernels(family, spec: ArchSpec, element: Element, quick: bool) -> Iterator[GemmFacts]:
    """The catalogue: each configuration plain and with the most expensive epilogue; other variations with one."""
    usual, path = {"aligns": (element.vector,) * 3}, spec.path
    fp32, direct = {"out_dtype": "float32", "aligns": (8, 8, 4)}, {"aligns": (8, 8, 1)}
    configs = family.candidates(path, None, spec, element)
    for config in configs[:1] if quick else configs:
        yield catalogue.dense(spec, path, config, **usual)
        if not quick:
            yield catalogue.dense(spec, path, config, **usual, epilogue=catalogue.COL)
            yield catalogue.dense(spec, path, config, **usual, majors=("k", "k", "n"))
    if quick:
        return
    changes: list[dict[str, Any]] = [
        {"dtype": "float16", "out_dtype": "float16"},
        {"majors": ("k", "k", "m")},
        {"epilogue": catalogue.LIGHT},
        {"epilogue": catalogue.ROW},
        {"epilogue": catalogue.LINEAR, "majors": ("k", "k", "m")},
        {"epilogue": catalogue.full()},
        {"epilogue": EpilogueSpec(bias="col", bias_dtype="float16", activation="silu"), "dtype": "float16"},
        fp32,
        {**fp32, "epilogue": catalogue.full()},
        direct,
        {**direct, "epilogue": catalogue.COL},
    ]
    if path == "sm_80":
        changes += [{"aligns": (4, 1, 1)}, {"aligns": (8, 1, 8), "majors": ("k", "any", "n")}]
    for change in changes:
        yield from catalogue.first(family, catalogue.dense, spec, path, None, **usual | change)
    if path == "sm_90":  # where TMA cannot read b
        yield from catalogue.first(family, catalogue.dense, spec, "sm_80", None, **usual)
        yield from catalogue.first(family, catalogue.dense, spec, "sm_80", None, aligns=(8, 1, 1))
