"""What a kernel is compiled from: plain, picklable facts. Shapes, strides and patterns are not among them."""

from dataclasses import dataclass, field
from functools import cached_property

from .arch import MMA_K, ArchSpec, arch_named
from .traced.program import Program

ELEMENT = 2  # bytes of a bf16 or fp16 operand element
PAIRED_ROWS = 64  # height of the blocks of which two rows are one tile
FEW_VECTOR = 8  # K elements that a lane of the kernel for few columns loads at a time: 16 bytes
FEW_PAD = 4  # floats between the columns of a warp's sums there, so that its lanes write to 32 banks
BARRIER_BYTES = 1024  # mbarriers, and what aligning the operand buffers to 1024 bytes may cost
# What a kernel for few columns needs besides what few_registers counts, where B is loaded in vectors, and by element:
# with these none spills, compiled for all architectures with every epilogue.
FEW_OTHER_REGISTERS = {"vectors": 28, "elements": 48}
NO_COUNTS = ("sweep", "pairs", "few")  # fields of GemmConfig that may be 0


@dataclass(frozen=True)
class GemmConfig:
    """Tile and schedule of one kernel.

    `warps_m` x `warps_n` is how the tile is split among its consumers: warps on sm_80, warpgroups on sm_90.
    A cluster (sm_90 only) of `cluster_m` x `cluster_n` CTAs multicasts B down its M side and A along its N side.
    `teams` (sm_90 only): 1 is a cooperative kernel, 2 ping-pong: two teams of consumers work on alternate tiles,
    so that one multiplies while the other stores. `ring` is the depth of each consumer's ring of store buffers, each
    64 rows by `store_row` bytes.
    `sweep` (sm_90, block-sparse only) is the kernel for low blocks:
    sparse_collective.sweep_sm90. Its rings of A hold `chunks` full chunks; the more, the earlier blocks are loaded.
    `pairs` (sm_90, blocks 64 high only): a tile of 128 rows is two block rows, which share the blocks of B that both
    need: mainloop_pairs_sm90.
    `split` (cooperative sm_90 kernels, no other cluster): how many CTAs share a tile's K-tiles, and add up
    their sums through each other's shared memory (exchange_sm90).
    `few` (both paths, block-sparse only) is the kernel for 16 columns or fewer: sparse_collective.few_columns. Its
    warps_m warps each sum all of the tile, over pieces of K that are `stages` times 4 K-tiles of 8.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps_m: int
    warps_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    teams: int = 1
    ring: int = 2
    store_row: int = 128
    sweep: bool = False
    chunks: int = 2
    pairs: bool = False
    split: int = 1
    few: bool = False

    @property
    def cluster(self) -> int:
        """CTAs that take work tiles together."""
        return self.cluster_m * self.cluster_n * self.split

    @property
    def exchange_bytes(self) -> int:
        """Shared memory for the sums (fp32) that the other CTAs of a split send."""
        return (self.split - 1) * self.tile_m * self.tile_n // self.split * 4

    def __str__(self) -> str:
        cluster = f" cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        kind = " ping-pong" if self.teams == 2 else f" sweep of {self.chunks} chunks" if self.sweep else ""
        kind = " few columns" if self.few else kind
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k} stages {self.stages}"
        pairs = " pairs" if self.pairs else ""
        shared = f" K among {self.split} CTAs" if self.split > 1 else ""
        return f"{tile} split {self.warps_m}x{self.warps_n}{kind}{pairs}{cluster}{shared}"


@dataclass(frozen=True)
class BlockFacts:
    """Block shape and index width of a BSR operand A.

    `batch` says how a batch of items is stored: "values", one pattern and values for each item, or "patterns", a
    pattern for each; None for a single matrix. `run` is for a grouped product: so many columns of B in a row multiply
    one item, and the next run another; 0 for a product that is not grouped.
    """

    bm: int
    bk: int
    index_dtype: str
    batch: str | None = None
    run: int = 0


@dataclass(frozen=True)
class EpilogueSpec:
    """Which terms an epilogue has. The order they apply in is fixed:

    x = alpha * acc                 scale
    x = x + bias                    bias: "row" (one value per row of D as the kernel sees it) or "col";
                                    with `bias_items` each item of a batch of A has its own
    x = x + beta * residual         residual: its contiguous mode, "n", "m" or "any"
    x = activation(x)               a name in functions.ACTIVATIONS
    x = function(x)                 the user's own, traced
    """

    scale: bool = False
    bias: str | None = None
    bias_dtype: str | None = None
    bias_items: bool = False
    residual: str | None = None
    activation: str | None = None
    function: Program | None = None

    @property
    def is_light(self) -> bool:
        """Whether it takes next to no registers: nothing to load and at most a ReLU."""
        return self == EpilogueSpec(scale=self.scale, activation="relu" if self.activation == "relu" else None)


@dataclass(frozen=True)
class GemmFacts:
    """Everything that selects one compiled kernel.

    Majors name the contiguous mode as the kernel sees it: A is "k" or "m", B "k" or "n", D "n" or "m"; "any" is a
    tensor with no contiguous mode. Alignments are in elements: what base pointer and strides are multiples of, at
    most 8; on the sm_80 path, and of D on both, the contiguous extent as well. `ranks` are those of the torch tensors
    a, b and d. `transposed` says that b and d are handed over as (N, K) and (N, M): a linear layer's input and output.
    `ordered` says that a table orders the work tiles of a sparse product, whose rows differ in length.
    """

    arch: str  # the compiler's target
    path: str
    config: GemmConfig
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    majors: tuple[str, str, str] = ("k", "k", "n")
    aligns: tuple[int, int, int] = (8, 8, 8)
    ranks: tuple[int, int, int] = (2, 2, 2)
    transposed: bool = False
    block: BlockFacts | None = None
    ordered: bool = False
    epilogue: EpilogueSpec = field(default_factory=EpilogueSpec)

    def key(self) -> str:
        """A text that is the same in every process; a user's function enters by what it computes."""
        return repr(self)

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @property
    def tma_store(self) -> bool:
        """Whether D's strides and contiguous extent meet TMA's rule; elsewhere the store goes element by element."""
        return (
            self.path == "sm_90"
            and not self.config.few
            and self.majors[2] != "any"
            and self.aligns[2] * self.out_bytes % 16 == 0
        )

    @property
    def warp_specialised(self) -> bool:
        """Whether some warps load by TMA and others multiply by WGMMA; elsewhere all warps use mma.sync."""
        return self.path == "sm_90" and not self.config.few

    @property
    def few_vectors(self) -> bool:
        """Whether a kernel for few columns loads B as it loads W, and not element by element."""
        return self.majors[1] == "k" and self.aligns[1] == FEW_VECTOR

    @property
    def few_registers(self) -> int:
        """Registers of a thread of a kernel for few columns: what it has loaded of W and B, its sums, all the rest."""
        mmas_m, mmas_n = self.config.tile_m // 16, self.config.tile_n // 8
        loaded = (8 * mmas_m + 4 * mmas_n) * self.config.stages
        rest = FEW_OTHER_REGISTERS["vectors" if self.few_vectors else "elements"]
        return -(-(loaded + 4 * mmas_m * mmas_n + rest) // 8) * 8

    @property
    def out_bytes(self) -> int:
        return 4 if self.out_dtype == "float32" else 2

    @property
    def k_blocks(self) -> tuple[int, ...]:
        """MMA steps of each K-tile in one period; see k_tiles."""
        full = self.config.tile_k // MMA_K
        if self.block is None:
            return (full,)
        tiles, rest = divmod(self.block.bk, self.config.tile_k)
        if rest == 0:
            return (full,)
        period = (full,) * tiles + (rest // MMA_K,)
        # A long period is unrolled code; past 8 K-tiles the padding costs at most 1/9 and zeros do as well.
        return period if len(period) <= 8 else (full,)

    @property
    def k_tiles_per_block(self) -> int:
        return -(-self.block.bk // self.config.tile_k)

    @property
    def clips_k(self) -> bool:
        """Whether an MMA step may reach past the extent of mode K and must find zeros there."""
        if self.block is None:
            return True
        periods = self.k_tiles_per_block // len(self.k_blocks)
        return sum(self.k_blocks) * MMA_K * periods > self.block.bk

    @property
    def operand_bytes(self) -> int:
        """Shared memory of the A and B rings; of a sweep only B has stages."""
        cfg = self.config
        if cfg.few:
            return 0
        if cfg.sweep:
            return (cfg.tile_n * cfg.stages + cfg.chunks * cfg.tile_m) * cfg.tile_k * ELEMENT
        return (cfg.tile_m + cfg.tile_n) * cfg.tile_k * ELEMENT * cfg.stages

    @property
    def store_bytes(self) -> int:
        """Shared memory of the sm_90 store rings, of all warpgroups."""
        cfg = self.config
        return cfg.ring * cfg.warps_m * cfg.warps_n * cfg.teams * 64 * cfg.store_row if self.tma_store else 0
