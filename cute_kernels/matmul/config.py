"""What a kernel is compiled from: plain, picklable facts. Shapes, strides and patterns are not among them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from ..arch import ArchSpec, arch_named
from ..tile.element import BYTES, Element, element_of
from ..traced.program import Program

CHUNK_COLUMNS = 64  # of the sm_90 store, at most: whose scales 32 lanes have, two each
BARRIER_BYTES = 1024  # mbarriers, and what aligning the operand buffers to 1024 bytes may cost


@dataclass(frozen=True)
class GemmConfig:
    """Tile and schedule of one kernel of a dense product, or of a block-sparse one with the same kernel.

    `warps_m` x `warps_n` is how the tile is split among its consumers: warps on sm_80, warpgroups on sm_90.
    A cluster (sm_90 only) of `cluster_m` x `cluster_n` CTAs multicasts B down its M side and A along its N side.
    `consumer_groups` (sm_90 only): 1 is a cooperative kernel, 2 ping-pong: two groups of consumers work
    on alternate tiles, so that one multiplies while the other stores. `ring` is the depth of each consumer's ring of
    store buffers, each 64 rows by `store_row` bytes.
    `rings` (sm_90): 1, or for two consumer groups that wait for each product 2: each has a ring of `stages` stages,
    a producer warp and work tiles of its own, and none waits for the other.
    `split` (cooperative sm_90 kernels, no other cluster): how many CTAs share a tile's K-tiles, and add up
    their sums through each other's shared memory (split_k_sm90).
    """

    # Whether sm_90's kernel has a producer warp with TMA and consumers with WGMMA; else all warps use mma.sync.
    warp_specialised: ClassVar[bool] = True
    boxes_b: ClassVar[int] = 1  # parts of a tile of B, side by side, whose places a source names one by one
    panels: ClassVar[bool] = True  # whether work tiles come in panels, so many columns wide as the launch says
    waits: ClassVar[bool] = False  # whether sm_90's kernel waits for a K-tile's products before it starts the next
    stored: ClassVar[int] = 1  # of so many columns of A one is stored
    converts: ClassVar[bool] = False  # whether 8-bit floats are multiplied as fp16 numbers, which hold each of them
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

    @property
    def cluster(self) -> int:
        """CTAs that take work tiles together."""
        return self.cluster_m * self.cluster_n * self.split

    @property
    def split_k_bytes(self) -> int:
        """Shared memory for the sums (fp32) that the other CTAs of a split send."""
        return (self.split - 1) * self.tile_m * self.tile_n // self.split * 4

    @property
    def stage_elements(self) -> int:
        """In shared memory: one stage of A and B."""
        return (self.tile_m + self.tile_n) * self.tile_k

    @property
    def operand_elements(self) -> int:
        """In shared memory: the rings of A and B."""
        return self.stage_elements * self.stages * self.rings

    @property
    def short(self) -> str:
        """Tile/stages, warps or warpgroups, and what is not 1; "k/4" says that 4 CTAs share K."""
        text = f"{self.tile_m}x{self.tile_n}x{self.tile_k}/{self.stages} {self.warps_m}x{self.warps_n}"
        text += f" k/{self.split}" if self.split > 1 else ""
        text += f" c{self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        return text + ("" if self.consumer_groups == 1 else " own" if self.rings > 1 else " pp")

    def __str__(self) -> str:
        text = f"{self.tile_m}x{self.tile_n}x{self.tile_k} stages {self.stages} split {self.warps_m}x{self.warps_n}"
        text += "" if self.consumer_groups == 1 else " rings of their own" if self.rings > 1 else " ping-pong"
        text += f" cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        return text + (f" K among {self.split} CTAs" if self.split > 1 else "")


@dataclass(frozen=True)
class BlockFacts:
    """Block shape and index width of a BSR operand: of A, or of D, of which then only such blocks are computed.

    `batch` says how a batch of items is stored: "values", one pattern and values for each item, or "patterns", a
    pattern for each; None for a single matrix. `run` is for a grouped product: so many columns of B in a row multiply
    one item, and the next run another; 0 for a product that is not grouped.
    """

    bm: int
    bk: int
    index_dtype: str
    batch: str | None = None
    run: int = 0
    operand: str = "a"  # or "d"
    permuted: bool = False  # a transposed view: stored blocks are (bk, bm), in an order that a table tells
    scaled: bool = False  # of 8-bit floats: each stored block has a scale, which multiplies its promoted sums


@dataclass(frozen=True)
class EpilogueSpec:
    """Which terms an epilogue has. The order they apply in is fixed:

    x = acc * s_m * s_n             scale_m: "tensor" (one value) or "row" (one for each row of A), scale_n: "tensor" or
                                    "column" (of B). "1x128" of A and "128x128" of B, a value for each block of so many
                                    rows and columns, multiply the sums of 128 of K instead, in the mainloop
    x = alpha * x                   scale
    x = x + bias                    bias: "row" (one value per row of D as the kernel sees it) or "col";
                                    with `bias_items` each item of a batch of A has its own
    x = x + beta * residual         residual: its contiguous mode, "n", "m" or "any"
    z = x                           stores_z: what backward needs is stored, too, as D is
    x = activation(x)               a name in functions.ACTIVATIONS
    x = function(x)                 the user's own, traced
    x = x * u                       gated: of A's rows 64 make x, then 64 make u, and so on; D has half as many
    amax = max |x|                  amax: of all of D, of 8 bits alone
    x = x * s_out                   scale_out: of a D of 8 bits alone
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
        """Whether it takes few registers: nothing to load but scales, and at most a ReLU and a maximum."""
        relu = "relu" if self.activation == "relu" else None
        scales = {"scale_m": self.scale_m, "scale_n": self.scale_n, "scale_out": self.scale_out}
        return self == EpilogueSpec(self.scale, activation=relu, **scales, amax=self.amax)

    @property
    def scales_each(self) -> bool:
        """Whether each row or each column has a scale of its own."""
        return self.scale_m == "row" or self.scale_n == "column"

    @property
    def scales_blocks(self) -> bool:
        """Whether A or B has scales that differ along K."""
        return self.scale_m == "1x128" or self.scale_n == "128x128"

    @property
    def scales_operands(self) -> bool:
        """Whether a or b has a scale."""
        return self.scale_m is not None or self.scale_n is not None


@dataclass(frozen=True)
class GemmFacts:
    """Everything that selects one compiled kernel.

    Majors name the contiguous mode as the kernel sees it: A is "k" or "m", B "k" or "n", D "n" or "m"; "any" is a
    tensor with no contiguous mode. Alignments are in elements: what base pointer and strides are multiples of, at
    most 16 bytes; on the sm_80 path, and of D on both, the contiguous extent as well. `ranks` are those of the torch
    tensors a, b and d. `transposed` says that b and d are handed over as (N, K) and (N, M): a linear layer's input and
    output. `ordered` says that a table orders the work tiles of a sparse product, whose rows differ in length.
    `use_fast_accum` (of 8-bit floats): sums stay in the tensor cores' accumulators, which round more than fp32 does.
    `acc_dtype`: what tensor cores keep sums in; float16 takes half the registers, and has 11 bits.
    `promoted` (of fp32 operands, in TF32 parts): short sums are added up in fp32, as those of 8-bit floats are.
    `chained`: the kernel follows another, which makes B and its scales, and leads; see tile/chain.py.
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
    block: BlockFacts | None = None
    ordered: bool = False
    epilogue: EpilogueSpec = field(default_factory=EpilogueSpec)
    use_fast_accum: bool = False
    acc_dtype: str = "float32"
    promoted: bool = False
    chained: bool = False

    @property
    def multiplies_tile_numbers(self) -> bool:
        """Whether tile numbers are divided by multiplications (TileScheduler.with_divisors), which take registers.

        Dense products gain nothing by it: their tiles have more K-tiles. Heavy epilogues, operands of fp32, blocks that
        are no whole K-tiles wide, and sampled products, which have more boxes to address, would spill.
        """
        rows = self.family in ("bsr", "bsr24")
        light = (self.epilogue.is_light or self.gate_apart) and self.element.width <= 2
        return self.path == "sm_90" and rows and light and self.block.bk % min(self.config.tile_k, self.block.bk) == 0

    @property
    def family(self) -> str:
        """Name of the family of kernels; see runtime.families."""
        if type(self.config) is GemmConfig:
            return "dense" if self.block is None else "bsr"
        return self.config.family

    def key(self) -> str:
        """A text that is the same in every process; a user's function enters by what it computes."""
        return repr(self)

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @property
    def tma_store(self) -> bool:
        """Whether D's strides and contiguous extent meet TMA's rule; elsewhere the store goes element by element."""
        aligned = self.majors[2] != "any" and self.aligns[2] * self.out_bytes % 16 == 0
        return self.warp_specialised and aligned

    @property
    def warp_specialised(self) -> bool:
        """Whether some warps load by TMA and others multiply by WGMMA; elsewhere all warps use mma.sync."""
        return self.path == "sm_90" and self.config.warp_specialised

    def counts(self, group, max_ctas) -> tuple:
        """(group, max_ctas) as the kernel takes them: None of one that has no panels, or a CTA for each work tile."""
        return group if self.config.panels else None, max_ctas if self.warp_specialised else None

    @cached_property
    def element(self) -> Element:
        """Of the operands."""
        return element_of(self.dtype)

    @property
    def promotes(self) -> bool:
        """Whether short sums of the tensor cores are added up in fp32 (promoted_sm90, mainloop_sm80)."""
        return self.promoted or self.element.width == 1 and not self.converts and not self.use_fast_accum

    @property
    def converts(self) -> bool:
        """Whether operands of 8-bit floats become fp16 in registers. Their products are exact in fp32, where they are
        added up."""
        return self.element.width == 1 and self.config.converts

    @property
    def takes_turns(self) -> bool:
        """Whether a warpgroup starts a product before it has added the one before (promoted_sm90), so that scales may
        differ along K: it has 64 rows, and registers for two such products."""
        cfg = self.config
        if not self.promotes or self.path != "sm_90" or cfg.tile_m != 64 * cfg.warps_m or len(self.k_blocks) > 1:
            return False
        if cfg.tile_n <= 128 * cfg.warps_n:
            return self.k_blocks[0] <= 4
        line = cfg.tile_k * self.element.width == 128 and self.k_blocks == (4,)  # MMA steps of a K-tile
        return line and cfg.warps_n == 1 and cfg.tile_n % 128 == 0

    @property
    def a_in_registers(self) -> bool:
        """Whether a warpgroup reads its 64 rows of A once a K-tile of 128 bytes, by ldmatrix (promoted_sm90), since it
        has several products of 64 columns."""
        return self.takes_turns and self.config.tile_n > 128 * self.config.warps_n

    @property
    def begins_ahead(self) -> bool:
        """Whether a work tile begins while the tile before is stored (ahead_sm90): of stored blocks that have a scale
        each, whose tiles have few K-tiles. Gates were as fast without. Heavy epilogues, those without a scale, and
        blocks of several K-tiles would spill, or their products be serialised. D is of 16 bits: then a chunk of the
        store has the columns of a product."""
        cfg, spec = self.config, self.epilogue
        scaled = self.block is not None and self.block.scaled and spec.is_light and bool(spec.scale_m or spec.scale_n)
        alone = cfg.split == cfg.consumer_groups == 1 and self.out_bytes == 2 and cfg.store_row == 128
        return self.a_in_registers and scaled and alone and self.k_tiles_per_block == 1

    @property
    def gate_apart(self) -> bool:
        """Whether a gate's rows are one warpgroup's, and what they multiply the other's (gated_store_sm90)."""
        return self.epilogue.gated and self.config.warps_m > 1

    @property
    def out_bytes(self) -> int:
        return BYTES[self.out_dtype]

    def acc_registers(self, accumulators: int) -> int:
        """Of so many accumulators."""
        return accumulators * BYTES[self.acc_dtype] // 4

    @property
    def narrow(self) -> bool:
        """Whether D is of 8-bit floats, so that the entry takes a scale for it and a place for its amax."""
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
        # A long period is unrolled code; past 8 K-tiles the padding costs at most 1/9 and zeros do as well.
        return period if len(period) <= 8 else (full,)

    @property
    def blocks_along_k(self) -> bool:
        """Whether a K-tile lies in one stored block; else K is whole."""
        return self.block is not None and self.block.operand == "a"

    @property
    def k_tiles_per_block(self) -> int:
        return -(-self.block.bk // self.config.tile_k)

    @property
    def clips_k(self) -> bool:
        """Whether an MMA step may reach past the extent of mode K and must find zeros there."""
        if not self.blocks_along_k:
            return True
        periods = self.k_tiles_per_block // len(self.k_blocks)
        return sum(self.k_blocks) * self.element.mma_k * periods > self.block.bk

    def chunk_columns(self, columns: int) -> int:
        """Columns that a warpgroup of the sm_90 kernel stores at a time, of so many that it has."""
        return min(columns, CHUNK_COLUMNS, self.config.store_row // self.out_bytes)

    @property
    def store_bytes(self) -> int:
        """Shared memory of the sm_90 store rings, of all warpgroups."""
        cfg = self.config
        return cfg.ring * cfg.warps_m * cfg.warps_n * cfg.consumer_groups * 64 * cfg.store_row if self.tma_store else 0
