"""What a kernel is compiled from: plain, picklable facts. Shapes, strides and patterns are not among them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from .arch import MMA_K, ArchSpec, arch_named
from .sweep_tile import CHUNK, CONSUMERS, ROWS, Geometry

ELEMENT = 2  # bytes of a bf16 or fp16 operand element
PAIRED_ROWS = 64  # height of the blocks of which two rows are one tile
COUNTER_WORDS = 32  # of a warpgroup's slot in an atomic split's workspace: its counter, on a line of its own
FEW_VECTOR = 8  # K elements that a lane of the kernel for few columns loads at a time: 16 bytes
FEW_PAD = 4  # floats between the columns of a warp's sums there, so that its lanes write to 32 banks
BARRIER_BYTES = 1024  # mbarriers, and what aligning the operand buffers to 1024 bytes may cost
# What a kernel for few columns needs besides what few_registers counts, where B is loaded in vectors, and by element:
# with these none spills, compiled for all architectures with every epilogue.
FEW_OTHER_REGISTERS = {"vectors": 28, "elements": 48}
# What an sm_80 kernel needs besides accumulators and fragments. Compiled with 16 warps: 64 of those take 98 registers,
# and 112 spill out of 128; with 4 warps, 208 of them fit into 255.
SM80_OTHER_REGISTERS = 40
MOST_ATOMIC = 16  # CTAs that an atomic split has
NO_COUNTS = ("lag", "sweep", "pairs", "atomic", "few")  # fields of GemmConfig that may be 0


@dataclass(frozen=True)
class GemmConfig:
    """Tile and schedule of one kernel.

    `warps_m` x `warps_n` is how the tile is split among its consumers: warps on sm_80, warpgroups on sm_90.
    A cluster (sm_90 only) of `cluster_m` x `cluster_n` CTAs multicasts B down its M side and A along its N side.
    `teams` (sm_90 only): 1 is a cooperative kernel, 2 ping-pong: two teams of consumers work on alternate tiles,
    so that one multiplies while the other stores. `ring` is the depth of each consumer's ring of store buffers, each
    64 rows by `store_row` bytes.
    `lag` (cooperative sm_90 kernels): by how many stages the second warpgroup starts after the first, and stays behind:
    one then stores while the other still multiplies. `sweep` (sm_90, block-sparse only) is the kernel for low blocks:
    sparse_collective.sweep_sm90. Its rings of A hold `chunks` full chunks; the more, the earlier blocks are loaded.
    `pairs` (sm_90, blocks 64 high only): a tile of 128 rows is two block rows, which share the blocks of B that both
    need: mainloop_pairs_sm90.
    `split` (cooperative sm_90 kernels, no other cluster): how many CTAs share a tile's K-tiles, and add up
    their sums through each other's shared memory (exchange_sm90). With `atomic` they are no cluster: each adds its sums
    to the tile's in memory, in whatever order they come (atomic_sm90).
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
    lag: int = 0
    sweep: bool = False
    chunks: int = 2
    pairs: bool = False
    split: int = 1
    atomic: bool = False
    few: bool = False

    @property
    def cluster(self) -> int:
        """CTAs that take work tiles together: those of a cluster, or of an atomic split."""
        return self.cluster_m * self.cluster_n * self.split

    @property
    def slot(self) -> int:
        """fp32 words of an atomic split's workspace that a tile takes."""
        return self.tile_m * self.tile_n + self.warps_m * self.warps_n * COUNTER_WORDS

    @property
    def exchange_bytes(self) -> int:
        """Shared memory for the sums (fp32) that the other CTAs of a split send."""
        return 0 if self.atomic else (self.split - 1) * self.tile_m * self.tile_n // self.split * 4

    def __str__(self) -> str:
        cluster = f" cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        kind = " ping-pong" if self.teams == 2 else f" sweep of {self.chunks} chunks" if self.sweep else ""
        kind = " few columns" if self.few else kind
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k} stages {self.stages}"
        lag = f" lag {self.lag}" if self.lag else ""
        pairs = " pairs" if self.pairs else ""
        shared = f" K among {self.split} CTAs{', atomically' if self.atomic else ''}" if self.split > 1 else ""
        return f"{tile} split {self.warps_m}x{self.warps_n}{kind}{pairs}{lag}{cluster}{shared}"


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
class UserFunction:
    """A user's epilogue function, equal to another if its code and what it captures are the same."""

    key: str  # function_key(fn)
    fn: Callable = field(compare=False, repr=False)

    def __call__(self, x):
        return self.fn(x)


@dataclass(frozen=True)
class EpilogueSpec:
    """Which terms an epilogue has. The order they apply in is fixed:

    x = alpha * acc                 scale
    x = x + bias                    bias: "row" (one value per row of D as the kernel sees it) or "col";
                                    with `bias_items` each item of a batch of A has its own
    x = x + beta * residual         residual: its contiguous mode, "n", "m" or "any"
    x = activation(x)               a name in functions.ACTIVATIONS
    x = function(x)                 the user's own
    """

    scale: bool = False
    bias: str | None = None
    bias_dtype: str | None = None
    bias_items: bool = False
    residual: str | None = None
    activation: str | None = None
    function: UserFunction | None = None

    @property
    def is_light(self) -> bool:
        """Whether it takes next to no registers: nothing to load and at most a ReLU."""
        return self == EpilogueSpec(scale=self.scale, activation="relu" if self.activation == "relu" else None)


@dataclass(frozen=True)
class GemmFacts:
    """Everything that selects one compiled kernel.

    Majors name the contiguous mode as the kernel sees it: A is "k" or "m", B "k" or "n", D "n" or "m"; "any" is a
    tensor with no contiguous mode. Alignments are in elements: what base pointer, strides and, on the sm_80 path,
    the contiguous extent are multiples of, at most 8. `ranks` are those of the torch tensors a, b and d.
    `transposed` says that b and d are handed over as (N, K) and (N, M): a linear layer's input and output. `ordered`
    says that a table orders the work tiles of a sparse product, whose rows differ in length.
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
        """A text that is the same in every process; a user's function enters by the hash of its code."""
        return repr(self)

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @property
    def tma_store(self) -> bool:
        """Whether D's strides meet TMA's rule; elsewhere the store goes element by element."""
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


def unsupported(facts: GemmFacts) -> str:
    """Why no kernel can be built from these facts; "" if one can. Ops, the tuner, tools and tests all ask this one.

    What passes compiles, and computes what it should. Whether the compiler spills registers is not predicted in every
    case: runtime.inspect.problems says so of the compiled kernel.
    """
    cfg, block = facts.config, facts.block
    if facts.dtype not in ("bfloat16", "float16"):
        return f"operands of {facts.dtype}: the kernels multiply bfloat16 and float16"
    if block and (block.bm % MMA_K or block.bk % MMA_K):
        return f"blocks of {block.bm}x{block.bk}: both sides must be multiples of {MMA_K}"
    if any(n < 1 for name, n in vars(cfg).items() if name not in NO_COUNTS) or cfg.lag < 0:
        return f"{cfg}: every count must be at least 1"
    if cfg.atomic and cfg.split == 1:
        return "one CTA a tile has nothing to add atomically"
    if block and block.run and block.run % (cfg.tile_n * cfg.cluster_n):
        return (
            f"{cfg.tile_n * cfg.cluster_n} columns of a tile or cluster multiply one item of W, but runs are "
            f"{block.run} long: the columns must divide it"
        )
    return _unsupported_sm80(facts) if facts.path == "sm_80" else _unsupported_sm90(facts)


def _few(facts: GemmFacts) -> str:
    """What the kernel for few columns asks, which both paths have: no strides or alignments of its own."""
    cfg, block = facts.config, facts.block
    if block is None:
        return "a dense product: the kernel for few columns is for block-sparse ones"
    plain = (cfg.tile_k, cfg.warps_n, cfg.cluster, cfg.teams, cfg.lag, cfg.sweep, cfg.pairs)
    if plain != (FEW_VECTOR, 1, 1, 1, 0, False, False) or cfg.tile_m not in (16, 32) or cfg.tile_n not in (8, 16):
        return (
            f"tile {cfg}: few columns take 16 or 32 rows by 8 or 16 columns, K-tiles of {FEW_VECTOR} and one row of "
            "warps, without clusters, teams, lags, sweeps and pairs"
        )
    if block.bm % cfg.tile_m:
        return f"{cfg.tile_m} rows for blocks {block.bm} high: a strip lies in one block"
    if facts.ordered:
        return "an order of work tiles: the kernel for few columns takes block rows as they come"
    if cfg.warps_m > 32:
        return f"{cfg.warps_m} warps; a block of threads has at most 32"
    registers = min(255, 65_536 // (32 * cfg.warps_m))
    if facts.few_registers > registers:
        return f"{facts.few_registers} registers a thread, of {registers}"
    needed = (cfg.tile_m + FEW_PAD) * cfg.tile_n * cfg.warps_m * 4
    return (
        f"{needed} bytes of shared memory; {facts.spec.name} has {facts.spec.smem}" if needed > facts.spec.smem else ""
    )


def _unsupported_sm80(facts: GemmFacts) -> str:
    cfg, spec = facts.config, facts.spec
    if cfg.few:
        return _few(facts)
    if cfg.cluster * cfg.teams > 1 or cfg.lag or cfg.pairs:
        return "clusters, ping-pong teams, lags, a split K and pairs of block rows exist on the sm_90 path only"
    if cfg.stages < 3:
        return f"{cfg.stages} stages; the cp.async pipeline needs 3"
    if any(n & (n - 1) for n in (cfg.tile_m, cfg.tile_n, cfg.tile_k, cfg.warps_m, cfg.warps_n)):
        return f"tile {cfg}: its sides and warps must be powers of two, which the swizzle needs"
    span_m, span_n = cfg.tile_m // cfg.warps_m, cfg.tile_n // cfg.warps_n
    if span_m < 16 or span_n < 16 or cfg.tile_k < MMA_K:
        return f"a warp's part of {span_m}x{span_n}x{cfg.tile_k}: ldmatrix reads 16 rows of 16 elements"
    threads = 32 * cfg.warps_m * cfg.warps_n
    line_a = cfg.tile_m if facts.majors[0] == "m" else cfg.tile_k
    line_b = cfg.tile_n if facts.majors[1] == "n" else cfg.tile_k
    longest = max(line_a, line_b)
    if longest > 8 * threads:
        return f"a line of {longest} elements of an operand; {threads} threads copy {8 * threads} at once"
    n_major, vector = facts.majors[2] == "n", 16 // facts.out_bytes
    line = span_n if n_major else span_m
    if line > 32 * vector:
        return f"a warp's store of {line} elements a line; its 32 lanes store {32 * vector} at once"
    accumulators = span_m * span_n // 32
    fragments = 2 * (span_m // 16 * 4 + span_n // 8 * 2)  # of A and B, double-buffered
    registers = min(255, 65_536 // threads)
    if accumulators + fragments + SM80_OTHER_REGISTERS > registers:
        return f"{accumulators} accumulators and {fragments} operand registers a thread, of {registers}"
    block, steps = facts.block, facts.k_blocks
    if (
        block
        and accumulators > 64
        and block.bm > cfg.tile_m
        and len(steps) > 2
        and sum(steps) % 2
        and facts.ranks[1] > 2
    ):
        # compiled: 8 and 24 bytes of stack
        return f"a loop over {2 * len(steps)} K-tiles of a block {block.bk} wide leaves a batch no registers"
    pitch = line * facts.out_bytes + (8 * facts.out_bytes if n_major else 16)
    store = 2 * 16 * pitch * cfg.warps_m * cfg.warps_n
    needed = max(facts.operand_bytes, store)
    if needed > spec.smem:
        return f"{needed} bytes of shared memory; {spec.name} has {spec.smem} a block"
    return ""


def _unsupported_sm90(facts: GemmFacts) -> str:
    if facts.spec.path != "sm_90":
        return f"{facts.spec.name} has neither TMA nor WGMMA; its kernels are those of the sm_80 path"
    for name, align in zip("AB", facts.aligns, strict=False):
        if align < 8:
            return f"{name}'s address or strides are not multiples of 16 bytes, which TMA needs"
    if "any" in facts.majors[:2]:
        return "an operand has no contiguous mode, which TMA needs"
    if facts.config.few:  # which needs no TMA; but where the path's other kernels do not serve, all of sm_80's compete
        return _few(facts)
    if facts.config.store_row not in (32, 64, 128) or facts.config.store_row < 16 * facts.out_bytes:
        return f"store buffers of {facts.config.store_row} bytes a row: 128, 64 and 32, of at least 16 elements"
    if facts.config.pairs and (reason := _pairs(facts)):
        return reason
    return _sweep(facts) if facts.config.sweep else _tile_sm90(facts) or _schedule_sm90(facts)


def _pairs(facts: GemmFacts) -> str:
    """What a tile of two block rows asks."""
    cfg, block = facts.config, facts.block
    if block is None:
        return "a dense product: only rows of blocks are paired"
    if block.bm != PAIRED_ROWS:
        return f"blocks {block.bm} high: a pair is of blocks {PAIRED_ROWS} high, each the rows of a WGMMA"
    if block.batch == "patterns" or block.run:
        return "a pattern for each item, or runs of columns with an item each: pairs of rows are those of one pattern"
    if block.bk % 64:
        return f"blocks {block.bk} wide: pairs take multiples of 64, whole K-tiles"
    tile = (cfg.tile_m, cfg.tile_k, cfg.warps_m, cfg.cluster_m, cfg.lag, cfg.sweep, cfg.split)
    if tile != (128, 64, 1, 1, 0, False, 1):
        return (
            f"tile {cfg}: a pair is 128 rows by K-tiles of 64 that each warpgroup has whole, without lag and split; "
            "other rows have other K-tiles, so a cluster shares A alone"
        )
    if facts.epilogue.residual:  # compiled: 8 to 120 bytes of stack
        return "the loops of a pair leave no registers for a residual; the kernels with a block row a tile have them"
    if (
        facts.epilogue.bias == "row" and facts.majors[2] == "n" and cfg.tile_n // cfg.warps_n > 128
    ):  # as well, with GELU
        return "more than 128 accumulators a thread leave no registers for a bias that each row has its own of"
    return ""


def _sweep(facts: GemmFacts) -> str:
    """What the sweep kernel asks: it has one tile, and swaps the operands."""
    cfg = facts.config
    if facts.block is None:
        return "a dense product: only block-sparse ones are swept"
    if facts.block.batch == "patterns" or facts.block.run:
        return "a pattern for each item, or runs of columns with an item each: a sweep's plan is that of one pattern"
    if reason := Geometry.refuse(facts.block.bm, facts.block.bk):
        return reason
    tile = (cfg.tile_m, cfg.tile_k, cfg.warps_m, cfg.warps_n, cfg.teams, cfg.cluster_n, cfg.lag, cfg.split)
    if tile != (ROWS * CONSUMERS, CHUNK, CONSUMERS, 1, 1, 1, 0, 1) or cfg.tile_n not in (128, 256) or cfg.cluster_m > 2:
        return f"tile {cfg}: a sweep's is {ROWS * CONSUMERS} rows by 128 or 256 columns, in clusters of 1 or 2 rows"
    if cfg.stages < 2 or cfg.chunks < 2 or cfg.chunks & (cfg.chunks - 1):
        return f"{cfg}: a chunk is released when the next one has been issued, and rings wrap at powers of two"
    heavy = facts.epilogue.residual or facts.epilogue.function or not facts.tma_store
    if cfg.tile_n > 128 and heavy:  # compiled: 32 to 456 bytes of stack with a residual
        return "128 accumulators of 160 registers a thread leave none for this epilogue; 128 columns have room for it"
    return _smem_sm90(facts)


def _smem_sm90(facts: GemmFacts) -> str:
    needed = facts.operand_bytes + facts.store_bytes + facts.config.exchange_bytes + 2 * BARRIER_BYTES
    spec = facts.spec
    return f"{needed} bytes of shared memory; {spec.name} has {spec.smem} a block" if needed > spec.smem else ""


def _tile_sm90(facts: GemmFacts) -> str:
    """What WGMMA, the swizzles and the store ask of a tile."""
    cfg = facts.config
    if facts.block and cfg.tile_m >= facts.block.bm * (2 if cfg.pairs else 1) + 64:
        return f"{cfg.tile_m} rows for blocks {facts.block.bm} high: slabs of 64 rows would hold none of the block"
    if cfg.tile_m % (64 * cfg.warps_m):
        return f"{cfg.tile_m} rows among {cfg.warps_m} warpgroups: each takes a multiple of WGMMA's 64"
    group_n, rest = divmod(cfg.tile_n, cfg.warps_n)
    if rest or group_n % 16:
        return f"{cfg.tile_n} columns among {cfg.warps_n} warpgroups: each takes a multiple of stmatrix's 16"
    if max(cfg.tile_m, cfg.tile_n, cfg.tile_k) > 256:
        return f"tile {cfg}: a TMA box, and a WGMMA, has at most 256 a side"
    if cfg.tile_k not in (16, 32) and cfg.tile_k % 64:
        return f"a K-tile of {cfg.tile_k}: 16, 32 or multiples of 64 elements fill a swizzle row"
    atom = next(columns for columns in (64, 32, 16) if cfg.tile_n % columns == 0)
    if facts.majors[1] == "n" and group_n % atom:
        return f"{group_n} columns a warpgroup cut B's swizzle atom of {atom}"
    chunk = min(group_n, cfg.store_row // facts.out_bytes)
    if group_n % chunk:
        return f"{group_n} columns a warpgroup are no whole chunks of the store's {chunk}"
    accumulators = cfg.tile_m * group_n // (cfg.warps_m * 128)
    if accumulators > 192:
        return f"{accumulators} accumulators a thread; 192 fit into its 240 registers"
    if accumulators > 128 and (facts.epilogue.residual or facts.epilogue.function or not facts.tma_store):
        return (
            f"{accumulators} accumulators a thread leave no registers for a residual, a user's function, or a store "
            "element by element"
        )
    return ""


def _schedule_sm90(facts: GemmFacts) -> str:
    """What the teams, the pipeline and the cluster ask, and whether shared memory holds it all."""
    cfg = facts.config
    if cfg.teams > 2:
        return f"{cfg.teams} teams: two take turns"
    if cfg.warps_m * cfg.warps_n * cfg.teams != 2:
        return (
            f"{cfg.warps_m * cfg.warps_n * cfg.teams} consumer warpgroups: the register budgets, and the barrier of "
            "two teams, are made for exactly two"
        )
    if cfg.stages < 2:
        return "one stage: a K-tile is released when the next one has been issued"
    if cfg.lag and (cfg.teams > 1 or cfg.lag > cfg.stages - 2):
        return f"a lag of {cfg.lag}: it is for cooperative kernels, and leaves at least two stages to load ahead"
    if reason := _split(facts):
        return reason
    if 16 * cfg.stages + 8 > BARRIER_BYTES:
        return f"{cfg.stages} stages: their barriers take more than {BARRIER_BYTES} bytes"
    if cfg.cluster_m * cfg.cluster_n > 2:
        return f"a cluster of {cfg.cluster_m}x{cfg.cluster_n}: above two CTAs it measured half as fast, and is not kept"
    if (cfg.cluster_m > 1 and cfg.tile_n < 64) or (cfg.cluster_n > 1 and cfg.tile_m < 64):
        return f"tile {cfg}: a multicast operand has at least 64 rows, of which each CTA fetches its share"
    if reason := _smem_sm90(facts):
        return reason
    if facts.block and cfg.cluster_m > 1 and -(-facts.block.bm // cfg.tile_m) % cfg.cluster_m:
        return f"a cluster of {cfg.cluster_m} row tiles would span two block rows of {facts.block.bm}"
    return ""


def _split(facts: GemmFacts) -> str:
    """What sharing K among the CTAs of a cluster asks."""
    cfg = facts.config
    if cfg.split == 1:
        return ""
    if not cfg.atomic and cfg.split not in (2, 4):
        return f"K among {cfg.split} CTAs: 1, 2 or 4 of them share it"
    if cfg.split > MOST_ATOMIC:
        return f"K among {cfg.split} CTAs: at most {MOST_ATOMIC} of them add to a tile"
    if cfg.cluster_m * cfg.cluster_n > 1 or cfg.teams > 1 or cfg.lag:
        return f"{cfg}: K is split in cooperative kernels, without a lag or a cluster that shares operands"
    if cfg.atomic:
        return ""
    group_n = cfg.tile_n // cfg.warps_n
    chunks = cfg.tile_m // (64 * cfg.warps_m) * (group_n // min(group_n, cfg.store_row // facts.out_bytes))
    if chunks % cfg.split:
        return f"{chunks} chunks of a warpgroup's store among {cfg.split} CTAs: each stores as many (see store_row)"
    if cfg.split == 2 and cfg.tile_m * cfg.tile_n >= 128 * 256 and facts.epilogue.residual:  # 8 to 128 bytes of stack
        return "64 sums of 128 accumulators a thread leave no registers for a residual"
    return ""
