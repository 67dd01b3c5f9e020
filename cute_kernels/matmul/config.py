"""Kernel parameters: the plain, picklable facts a kernel is compiled for. Shapes, strides and patterns are runtime
arguments."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from ..arch import ArchSpec, arch_named
from ..tile.element import BYTES, Element, element_of
from ..traced.program import Program

CHUNK_COLUMNS = 64  # of the sm_90 store, at most: 32 lanes hold two of their scales each
OVERLAP_STORE = "overlap_store"  # GemmConfig.schedule
BARRIER_BYTES = 1024  # mbarriers, or the padding that aligns the operand buffers to 1024 bytes


@dataclass(frozen=True)
class GemmConfig:
    """Tile and schedule of a dense GEMM kernel, or of a block-sparse one with the same mainloop.

    warps_m, warps_n: the tile is divided among warps_m x warps_n consumers: warps on sm_80, warpgroups on sm_90.
    cluster_m, cluster_n (sm_90): a cluster multicasts B along its M side and A along its N side.
    consumer_groups (sm_90): 1 is a cooperative kernel. 2 is ping-pong: two consumer groups work on alternate tiles, so
        that one multiplies while the other stores.
    ring: depth of each consumer's ring of store buffers, each 64 rows by `store_row` bytes.
    rings (sm_90): 1, or 2 for two consumer groups that wait for each WGMMA. Each group then has a ring of `stages`
        stages, a producer warp and work tiles of its own, and neither group waits for the other.
    split (cooperative sm_90 kernels without another cluster): split-K factor. CTAs of a cluster share a tile's K-tiles
        and reduce their accumulators through distributed shared memory (schedules/split_k).
    schedule (sm_90): "", selected by the counts above and the facts, or "overlap_store" to require it.
    """

    # True if the sm_90 kernel has a TMA producer warp and WGMMA consumers; otherwise all warps use mma.sync.
    warp_specialised: ClassVar[bool] = True
    boxes_b: ClassVar[int] = 1  # TMA boxes per tile of B, side by side; the source gives the coordinates of each
    panels: ClassVar[bool] = True  # work tiles are rasterized in panels; the launch passes their width
    waits: ClassVar[bool] = False  # the sm_90 kernel waits for a K-tile's WGMMAs before it starts the next one's
    stored: ClassVar[int] = 1  # columns of A per stored column
    converts: ClassVar[bool] = False  # FP8 operands are multiplied as FP16, which represents them exactly
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps_m: int
    warps_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    consumer_groups: int = 1
    ring: int = 2
    store_row: int = 128
    split: int = 1
    rings: int = 1
    schedule: str = ""

    @property
    def cluster(self) -> int:
        """CTAs per cluster."""
        return self.cluster_m * self.cluster_n * self.split

    @property
    def split_k_bytes(self) -> int:
        """Shared memory for the partial accumulators (FP32) that the other CTAs of a split-K cluster send."""
        return (self.split - 1) * self.tile_m * self.tile_n // self.split * 4

    @property
    def stage_elements(self) -> int:
        """Elements of one stage of A and B in shared memory."""
        return (self.tile_m + self.tile_n) * self.tile_k

    @property
    def operand_elements(self) -> int:
        """Elements of the rings of A and B in shared memory."""
        return self.stage_elements * self.stages * self.rings

    @property
    def short(self) -> str:
        """Tile/stages, warps or warpgroups, and the counts that are not 1; "k/4" is split-K among 4 CTAs."""
        text = f"{self.tile_m}x{self.tile_n}x{self.tile_k}/{self.stages} {self.warps_m}x{self.warps_n}"
        text += f" k/{self.split}" if self.split > 1 else ""
        text += f" c{self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        text += "" if self.consumer_groups == 1 else " own" if self.rings > 1 else " pp"
        return text + (f" {self.schedule}" if self.schedule else "")

    def __str__(self) -> str:
        text = f"{self.tile_m}x{self.tile_n}x{self.tile_k} stages {self.stages} split {self.warps_m}x{self.warps_n}"
        text += "" if self.consumer_groups == 1 else " rings of their own" if self.rings > 1 else " ping-pong"
        text += f" cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        text += f" K among {self.split} CTAs" if self.split > 1 else ""
        return text + (f" {self.schedule}" if self.schedule else "")


@dataclass(frozen=True)
class BlockFacts:
    """Block shape and index dtype of a BSR operand: A, or in an SDDMM D, whose stored blocks alone are computed.

    batch: None for a single matrix; "values" if a batch shares one pattern, "patterns" if each matrix has its own.
    run: in a grouped GEMM, the number of consecutive columns of B that multiply the same matrix; 0 otherwise.
    """

    bm: int
    bk: int
    index_dtype: str
    batch: str | None = None
    run: int = 0
    operand: str = "a"  # or "d"
    permuted: bool = False  # a transposed view: stored blocks are (bk, bm), in an order given by a table
    scaled: bool = False  # FP8: each stored block has a scale, which multiplies its promoted partial sums


@dataclass(frozen=True)
class EpilogueSpec:
    """Terms of an epilogue, applied in this order:

    x = acc * s_m * s_n             scale_m: "tensor" (one value) or "row" (one per row of A); scale_n: "tensor" or
                                    "column" (one per column of B). Block scales, "1x128" of A and "128x128" of B, are
                                    applied in the mainloop instead, to the partial sums of every 128 elements of K
    x = alpha * x                   scale
    x = x + bias                    bias: "row" (one value per row of D as the kernel sees it) or "col";
                                    with `bias_items` each matrix of a batch of A has its own
    x = x + beta * residual         residual: its contiguous mode, "n", "m" or "any"
    z = x                           stores_z: the activation's input is also stored, like D, for the backward pass
    x = activation(x)               a name in functions.ACTIVATIONS
    x = function(x)                 the user's function, traced
    x = x * u                       gated: A's rows alternate, 64 for x and 64 for u; D has half as many rows
    amax = max |x|                  amax: over all of D; FP8 output only
    x = x * s_out                   scale_out: FP8 output only
    """

    scale: bool = False
    bias: str | None = None
    bias_dtype: str | None = None
    bias_items: bool = False
    residual: str | None = None
    activation: str | None = None
    function: Program | None = None
    stores_z: bool = False
    gated: bool = False
    scale_m: str | None = None
    scale_n: str | None = None
    scale_out: bool = False
    amax: bool = False

    @property
    def is_light(self) -> bool:
        """True if it needs few registers: it loads only scales and computes at most a ReLU and an amax."""
        relu = "relu" if self.activation == "relu" else None
        scales: dict[str, Any] = {"scale_m": self.scale_m, "scale_n": self.scale_n, "scale_out": self.scale_out}
        return self == EpilogueSpec(self.scale, activation=relu, **scales, amax=self.amax)

    @property
    def scales_each(self) -> bool:
        """True if scales are per row of A or per column of B."""
        return self.scale_m == "row" or self.scale_n == "column"

    @property
    def scales_blocks(self) -> bool:
        """True if A or B has block scales, which differ along K."""
        return self.scale_m == "1x128" or self.scale_n == "128x128"

    @property
    def scales_operands(self) -> bool:
        """True if A or B has a dequantization scale."""
        return self.scale_m is not None or self.scale_n is not None


@dataclass(frozen=True)
class GemmFacts:
    """Everything that selects one compiled kernel.

    majors: the contiguous modes as the kernel sees them: A is "k" or "m", B "k" or "n", D "n" or "m"; "any" is a tensor
        without a contiguous mode.
    aligns: alignments in elements, at most 16 bytes, of base pointer and strides; on the sm_80 path, and for D on both
        paths, of the contiguous extent as well.
    ranks: the ranks of the torch tensors a, b and d.
    transposed: b and d are passed as (N, K) and (N, M), the input and output of a linear layer.
    ordered: a table orders the work tiles of a block-sparse GEMM, whose rows differ in length.
    use_fast_accum (FP8): fast accumulation. Partial sums stay in the tensor cores' accumulators, which are less precise
        than FP32.
    acc_dtype: accumulator of the tensor cores; float16 needs half the registers and has 11 bits of mantissa.
    promoted (FP32 operands, in TF32 parts): partial sums are promoted to FP32, as for FP8.
    chained: the secondary kernel of a programmatic dependent launch; the primary writes B and its scales. See
        tile/dependent_launch.py.
    """

    arch: str  # the compiler's target
    path: str
    config: Any  # a family's
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    majors: tuple[str, str, str] = ("k", "k", "n")
    aligns: tuple[int, int, int] = (8, 8, 8)
    ranks: tuple[int, int, int] = (2, 2, 2)
    transposed: bool = False
    block: Any = None  # BlockFacts of a BSR operand
    ordered: bool = False
    epilogue: EpilogueSpec = field(default_factory=EpilogueSpec)
    use_fast_accum: bool = False
    acc_dtype: str = "float32"
    promoted: bool = False
    chained: bool = False
    source: Any = None  # KTileSource of gemm's source argument

    @property
    def multiplies_tile_numbers(self) -> bool:
        """True if tile indices are divided by multiplication (TileScheduler.with_divisors), which needs registers.

        Dense GEMMs gain nothing from it, since their tiles have more K-tiles. Kernels with heavy epilogues, FP32
        operands or blocks that are not whole K-tiles wide, and SDDMM kernels, which address more TMA boxes, would
        spill.
        """
        rows = self.family in ("bsr", "bsr24")
        light = (self.epilogue.is_light or self.gate_apart) and self.element.width <= 2
        return self.path == "sm_90" and rows and light and self.block.bk % min(self.config.tile_k, self.block.bk) == 0

    @property
    def family(self) -> str:
        """Name of the kernel family; see runtime.families."""
        if type(self.config) is GemmConfig:
            return "dense" if self.block is None else "bsr"
        return self.config.family

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @property
    def tma_store(self) -> bool:
        """True if D's strides and contiguous extent are aligned for TMA; otherwise the store is element by element."""
        aligned = self.majors[2] != "any" and self.aligns[2] * self.out_bytes % 16 == 0
        return self.warp_specialised and aligned

    @property
    def warp_specialised(self) -> bool:
        """True if a producer warp loads by TMA and consumers use WGMMA; otherwise all warps use mma.sync."""
        return self.path == "sm_90" and self.config.warp_specialised

    def counts(self, group, max_ctas) -> tuple:
        """(group, max_ctas) for the kernel: group is None without panels, max_ctas with one CTA per work tile."""
        return group if self.config.panels else None, max_ctas if self.warp_specialised else None

    @cached_property
    def element(self) -> Element:
        """Element type of the operands."""
        return element_of(self.dtype)

    @property
    def promotes(self) -> bool:
        """True for promoted accumulation: partial sums are added up in FP32 (promoted_sm90, mainloop_sm80)."""
        return self.promoted or self.element.width == 1 and not self.converts and not self.use_fast_accum

    @property
    def converts(self) -> bool:
        """True if FP8 operands are converted to FP16 in registers. Their products are exact in the FP32 accumulator."""
        return self.element.width == 1 and self.config.converts

    @property
    def takes_turns(self) -> bool:
        """True if a warpgroup starts a WGMMA before it has added the previous one (promoted_sm90). Only then may scales
        differ along K. The warpgroup has 64 rows, and registers for two such WGMMAs."""
        cfg = self.config
        if not self.promotes or self.path != "sm_90" or cfg.waits:
            return False
        if cfg.tile_m != 64 * cfg.warps_m or len(self.k_blocks) > 1:
            return False
        if cfg.tile_n <= 128 * cfg.warps_n:
            return self.k_blocks[0] <= 4
        line = cfg.tile_k * self.element.width == 128 and self.k_blocks == (4,)  # MMA steps of a K-tile
        return line and cfg.warps_n == 1 and cfg.tile_n % 128 == 0

    @property
    def block_factors(self) -> bool:
        """True if partial sums are multiplied by the scale of their stored block."""
        return self.block is not None and self.block.scaled

    @property
    def grouped(self) -> bool:
        """True for a grouped GEMM, whose producer needs registers for group indices."""
        return self.block is not None and self.block.run > 0

    @property
    def a_in_registers(self) -> bool:
        """True if a warpgroup loads its 64 rows of A into registers once per K-tile of 128 bytes, by ldmatrix
        (mainloops/issue_rs_sm90), since it issues several WGMMAs of 64 columns."""
        return self.takes_turns and self.config.tile_n > 128 * self.config.warps_n

    @property
    def overlaps_store(self) -> bool:
        """True if a work tile's store overlaps the next tile's first WGMMAs (schedules/overlap_store): for stored
        blocks with a scale each, whose tiles have few K-tiles. Gated kernels were as fast without it. With a heavy
        epilogue, without an epilogue scale, or with blocks of several K-tiles, registers would spill or the WGMMAs be
        serialized. D must be BF16 or FP16: a chunk of the store then has the columns of one WGMMA."""
        if self.config.schedule:
            return self.config.schedule == OVERLAP_STORE
        spec = self.epilogue
        return self.may_overlap_store and spec.is_light and bool(spec.scale_m or spec.scale_n)

    @property
    def may_overlap_store(self) -> bool:
        """True if the first K-tile may accumulate in place, and a chunk of the store has the columns of one WGMMA."""
        cfg = self.config
        alone = cfg.split == cfg.consumer_groups == 1 and self.out_bytes == 2 and cfg.store_row == 128
        return self.a_in_registers and self.block_factors and alone and self.k_tiles_per_block == 1

    @property
    def epilogue_tensors(self) -> tuple[str, ...]:
        """Names of the epilogue's tensors, fields of EpilogueArgs, in the order of the kernel's arguments.

        W's block scales, which the mainloop applies, are passed as scale_m, too.
        """
        spec, blocks = self.epilogue, self.block is not None and self.block.scaled
        present = {
            "bias": spec.bias, "residual": spec.residual, "scale_m": spec.scale_m or blocks, "scale_n": spec.scale_n,
            "scale_out": spec.scale_out, "amax": spec.amax, "z": spec.stores_z,
        }  # fmt: skip
        return tuple(name for name, there in present.items() if there)

    @property
    def gate_apart(self) -> bool:
        """True if one warpgroup has the gate's rows and another the rows that they multiply (gated_store_sm90)."""
        return self.epilogue.gated and self.config.warps_m > 1

    @property
    def out_bytes(self) -> int:
        return BYTES[self.out_dtype]

    def acc_registers(self, accumulators: int) -> int:
        """Registers of this many accumulators."""
        return accumulators * BYTES[self.acc_dtype] // 4

    @property
    def narrow(self) -> bool:
        """True if D is FP8."""
        return self.out_bytes == 1

    @property
    def operand_bytes(self) -> int:
        """Shared memory of the rings of A and B."""
        return self.config.operand_elements * self.element.width

    @property
    def k_blocks(self) -> tuple[int, ...]:
        """MMA steps of each K-tile in one period; see k_tiles."""
        full = self.config.tile_k // self.element.mma_k
        if not self.blocks_along_k:
            return (full,)
        tiles, rest = divmod(self.block.bk, self.config.tile_k)
        if rest == 0:
            return (full,)
        period = (full,) * tiles + (rest // self.element.mma_k,)
        # The period is unrolled in code. Past 8 K-tiles, padding the last one with zeros costs at most 1/9 instead.
        return period if len(period) <= 8 else (full,)

    @property
    def blocks_along_k(self) -> bool:
        """True if each K-tile lies in one stored block; otherwise K is dense."""
        return self.block is not None and self.block.operand == "a"

    @property
    def k_tiles_per_block(self) -> int:
        return -(-self.block.bk // self.config.tile_k)

    @property
    def clips_k(self) -> bool:
        """True if an MMA step may reach past the extent of mode K, where it must read zeros."""
        if not self.blocks_along_k:
            return True
        periods = self.k_tiles_per_block // len(self.k_blocks)
        return sum(self.k_blocks) * self.element.mma_k * periods > self.block.bk

    def chunk_columns(self, columns: int) -> int:
        """Columns that a warpgroup of the sm_90 kernel stores at a time, out of `columns`."""
        return min(columns, CHUNK_COLUMNS, self.config.store_row // self.out_bytes)

    @property
    def store_bytes(self) -> int:
        """Shared memory of all warpgroups' store rings on sm_90."""
        cfg = self.config
        return cfg.ring * cfg.warps_m * cfg.warps_n * cfg.consumer_groups * 64 * cfg.store_row if self.tma_store else 0
