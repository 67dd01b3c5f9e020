"""Which kernels there are for products with a 2:4 sparse A, what they ask, and what they cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ..arch import ArchSpec
from ..matmul import catalogue, cost, legality
from ..matmul.candidates import with_stages
from ..matmul.config import EpilogueSpec, GemmConfig, GemmFacts
from ..matmul.problem import Problem
from ..tile.element import Element, element_of
from .format import SLAB, SPAN, WORDS

STORED = 2  # of so many columns one is stored
SMEM_BYTES_PER_CLOCK = 128  # that WGMMA reads
MMA_BYTES = 64  # of K of a sparse WGMMA, of B
PROMOTED_COLUMNS = 128  # of a product whose sums are promoted, at most
PROMOTED_WAIT = 40  # clocks for each of them that the tensor cores are idle: an estimate


@dataclass(frozen=True)
class Sparse24Config(GemmConfig):
    """GemmConfig of a product with a 2:4 sparse A; `tile_k` counts columns of the whole A, half of which are stored."""

    family: ClassVar[str] = "sparse24"
    waits: ClassVar[bool] = True
    stored: ClassVar[int] = STORED
    element_bytes: ClassVar[int] = 2  # of operands

    @property
    def metadata_bytes(self) -> int:
        """Of a stage."""
        return self.tile_m // SLAB * (self.tile_k // SPAN) * WORDS * 4

    @property
    def stage_elements(self) -> int:
        """A, B and metadata."""
        metadata = self.metadata_bytes // self.element_bytes
        return self.tile_m * self.tile_k // STORED + self.tile_n * self.tile_k + metadata

    @property
    def short(self) -> str:
        return super().short + " 2:4"

    def __str__(self) -> str:
        return super().__str__() + " 2:4"


@dataclass(frozen=True)
class Sparse24Float8Config(Sparse24Config):
    """Those of 8-bit floats. Promoted sums are those of a K-tile."""

    element_bytes: ClassVar[int] = 1


@dataclass(frozen=True)
class Sparse24Sm80Config(Sparse24Config):
    """Those of the mma.sync path, whose metadata go from global memory to registers."""

    @property
    def metadata_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Sparse24Float8Sm80Config(Sparse24Sm80Config):
    """Those of 8-bit floats, on sm_89."""

    element_bytes: ClassVar[int] = 1


def candidates_sm80(spec: ArchSpec, element: Element) -> list[Sparse24Sm80Config]:
    """Configurations of the mma.sync path, best first; stages are bounded by the architecture's shared memory.

    An MMA step takes twice a dense one's registers of B, so a warp's part has 64 accumulators a thread.
    """
    shapes = [(128, 128, 2, 4), (128, 64, 2, 2), (64, 128, 1, 4), (64, 64, 2, 2)]
    kind, k = (Sparse24Float8Sm80Config, 2 * SPAN) if element.width == 1 else (Sparse24Sm80Config, SPAN)
    tiles = [kind(m, n, k, 0, warps_m, warps_n) for m, n, warps_m, warps_n in shapes]
    return [with_stages(tile, spec, element, 0, 4) for tile in tiles]


def candidates(spec: ArchSpec, element: Element) -> list[Sparse24Config]:
    """Configurations worth trying, best first among equals.

    By the model of `clocks`: those with products of 256 columns read the fewest bytes of shared memory for each
    multiplication, and a cluster that shares B the fewest from L2.
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


def float8_candidates(shapes: list, own: list, spec: ArchSpec, element: Element) -> list[Sparse24Float8Config]:
    """Those of 8-bit floats, of the shapes of 16-bit elements: as many bytes of K.

    For promoted sums there is 128x128 with K-tiles of 256 columns, of which four stages fit: half as many additions,
    and waits.
    """
    long = (128, 128, 128, 2, 1, 2, 1, 1, 1)
    rings = [(shape, 1) for shape in (*shapes, long)] + [(shape, 2) for shape in own]
    of_bytes = [((m, n, 2 * k, *rest), count) for (m, n, k, *rest), count in rings]
    return [of_shape(Sparse24Float8Config, shape, spec, element, rings=count) for shape, count in of_bytes]


def of_shape(kind: type, shape: tuple, spec: ArchSpec, element: Element, rings: int = 1) -> Sparse24Config:
    """A configuration with as many stages as fit; shape: its counts but for them, in the order of `candidates`."""
    m, n, k, warps_m, warps_n, cluster_m, cluster_n, groups, ring = shape
    cfg = kind(m, n, k, 0, warps_m, warps_n, cluster_m, cluster_n, groups, ring, rings=rings)
    return with_stages(cfg, spec, element, ring * warps_m * warps_n * groups * 64 * 128)


def clocks(cfg: Sparse24Config, problem: Problem, sms: int, l2_bytes_per_clock: float) -> float:
    """As cost.cost, with K-tiles of `k_tile_clocks`."""
    k_tile = k_tile_clocks(cfg, problem.width, l2_bytes_per_clock, promotes(problem))
    loop = max(1.0, problem.extents.K / cfg.tile_k) * max(k_tile)
    return cost.persistent(cfg, problem, sms, cost.row_tiles(cfg, problem.extents, None), loop)


def promotes(problem: Problem) -> bool:
    """Whether sums of K-tiles are added up in fp32."""
    return problem.width == 1 and not problem.use_fast_accum


def k_tile_clocks(
    cfg: Sparse24Config, width: int, l2_bytes_per_clock: float, promoted: bool = False
) -> tuple[float, float]:
    """Of one K-tile: (products, loads). Products are twice as fast as dense ones, or as fast as shared memory feeds
    them.

    WGMMA reads B once for every 64 rows of A: of a product of 64 x n x 32 of 16 bits, or x 64 of 8, it reads 32 bytes
    of each row of A and 64 of each column of B. The tensor cores take n / 2 clocks for that, and 128 bytes a clock
    n / 2 + 16. Promoted products have at most 128 columns, and each reads A; a wait for one is hidden by the other
    warpgroup's, but for a part: an estimate.
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
    """What a 2:4 sparse A asks, and then what all kernels of its path do."""
    if reason := legality.general(facts):
        return reason
    if facts.majors[0] != "k" or facts.ranks != (2, 2, 2) or facts.block is not None:
        return "a 2:4 sparse A is one matrix, contiguous along K, and so are b and the result single matrices"
    return of_stored_halves(facts)


def of_stored_halves(facts: GemmFacts) -> str:
    """What the kernels of both paths ask of products with an A of which half is stored."""
    cfg, spec = facts.config, facts.epilogue
    if spec.stores_z or spec.gated:
        return "a 2:4 sparse A with a second result or a gate in the epilogue: there is none yet"
    if spec.scales_blocks:
        return "a 2:4 sparse A with scales of 1x128 or 128x128; one value, or one for each row or column, can be had"
    if facts.element.width != cfg.element_bytes:
        return f"tile {cfg}: a configuration of operands of {8 * cfg.element_bytes} bits"
    if facts.element.width == 1 and facts.path == "sm_80" and min(facts.aligns[:2]) < 4:
        return (
            f"rows or addresses of {facts.dtype} operands that are no multiples of 4 bytes, the least that cp.async "
            "copies: K is to be a multiple of 8 (pad W and b with zeros)"
        )
    line = 2 * SPAN // facts.element.width
    if cfg.tile_k not in (line, 2 * line) or cfg.tile_m % SLAB or cfg.split > 1:
        return f"tile {cfg}: metadata are those of {SLAB} rows and {line} or {2 * line} columns; K is not split"
    if (facts.path == "sm_80") != isinstance(cfg, Sparse24Sm80Config):
        return f"tile {cfg}: a configuration of the other path"
    if facts.path == "sm_90":
        sums = cfg.tile_m * cfg.tile_n // (cfg.warps_m * cfg.warps_n * 128)
        direct = sums == 128 and cfg.tile_m > SLAB * cfg.warps_m and not facts.tma_store
        if (sums > 128 or direct) and spec.scales_each and not spec.is_light:  # compiled: 8 to 192 bytes of stack
            return f"{sums} accumulators a thread leave no registers for scales of rows or columns and such an epilogue"
        return legality.tma_operands(facts) or legality.sm90(facts)
    span_m, span_n, threads = cfg.tile_m // cfg.warps_m, cfg.tile_n // cfg.warps_n, 32 * cfg.warps_m * cfg.warps_n
    accumulators = span_m * span_n // 32
    fragments = 2 * (span_m // 16 * 4 + span_n // 8 * 4) + 2 * cfg.tile_k // SPAN * span_m // 16  # and metadata
    registers = min(255, 65_536 // threads)
    if accumulators + fragments + legality.SM80_OTHER_REGISTERS > registers:
        return f"{accumulators} accumulators and {fragments} operand registers a thread, of {registers}"
    return legality.sm80(facts)


def judge(facts: GemmFacts, resources, problems: list[str]) -> list[str]:
    """Add problems: too few products for the steps of a K-tile, FP8 operands that are not multiplied as such, promoted
    accumulators that are not added."""
    cfg, codes, found = facts.config, resources.opcodes, list(problems)
    rows = cfg.tile_m // (64 * cfg.warps_m)
    if facts.element.width > 1:
        if facts.warp_specialised and resources.hgmma < (steps := rows * cfg.tile_k // 32):
            found.append(f"{resources.hgmma} HGMMA for {steps} steps of a K-tile")
        return found
    if wide := codes.get("HMMA", 0) + codes.get("HGMMA", 0):
        found.append(f"{wide} products of 16 bits in a kernel of {facts.dtype}")
    name, threads = ("QGMMA", 128) if facts.warp_specialised else ("QMMA", 32)
    if (products := codes.get(name, 0)) < (steps := max(1, rows) * cfg.tile_k // MMA_BYTES):
        found.append(f"{products} {name} for {steps} steps of a K-tile")
    sums = cfg.tile_m * cfg.tile_n // (cfg.warps_m * cfg.warps_n * threads)
    added = "FFMA" if facts.block is not None and facts.block.scaled else "FADD"
    if facts.promotes and codes.get(added, 0) < sums:
        found.append(f"{codes.get(added, 0)} {added} for {sums} sums a thread: they are not promoted to fp32")
    return found


def float8_kernels(family, spec: ArchSpec, quick: bool) -> Iterator[GemmFacts]:
    """Of 8-bit floats: each configuration with sums of both kinds, plain and with scales and the heaviest epilogue; one
    with what else varies."""
    if quick or not spec.float8:
        return
    element, each = element_of("float8_e4m3fn"), {"scale_m": "row", "scale_n": "column"}
    wide = {"aligns": (element.vector,) * 2 + (8,), "majors": ("k", "k", "n"), "dtype": "float8_e4m3fn"}
    fp32, direct = {"out_dtype": "float32", "aligns": (16, 16, 4)}, {"aligns": (16, 16, 1)}
    changes = [
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
            if fast:  # with 192 sums there is no residual
                loaded = replace(loaded, residual=None)
            yield catalogue.dense(spec, spec.path, config, **terms, epilogue=loaded)
        for change in changes:
            configs = family.candidates(spec.path, None, spec, element)
            facts = (catalogue.dense(spec, spec.path, config, **terms | change) for config in configs)
            yield from catalogue.buildable(family, facts)[:1]


def kernels(family, spec: ArchSpec, element: Element, quick: bool) -> Iterator[GemmFacts]:
    """The catalogue: each configuration plain and with the heaviest epilogue; one with what else varies."""
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
    changes = [
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
