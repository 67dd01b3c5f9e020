"""What a kernel is compiled from: plain, picklable facts. Shapes, strides and patterns are not among them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from .arch import MMA_K, ArchSpec, arch_named

ELEMENT = 2  # bytes of a bf16 or fp16 operand element
BARRIER_BYTES = 1024  # mbarriers, and what aligning the operand buffers to 1024 bytes may cost


@dataclass(frozen=True)
class GemmConfig:
    """Tile and schedule of one kernel.

    `warps_m` x `warps_n` is how the tile is split among its consumers: warps on sm_80, warpgroups on sm_90.
    A cluster (sm_90 only) of `cluster_m` x `cluster_n` CTAs multicasts B down its M side and A along its N side.
    `teams` (sm_90 only): 1 is a cooperative kernel, 2 ping-pong: two teams of consumers work on alternate tiles,
    so that one multiplies while the other stores. `ring` is the depth of each consumer's ring of store buffers.
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

    def __str__(self) -> str:
        cluster = f" cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k} stages {self.stages} "
            f"split {self.warps_m}x{self.warps_n}{' ping-pong' if self.teams == 2 else ''}{cluster}"
        )


@dataclass(frozen=True)
class BlockFacts:
    """Block shape and index width of a BSR operand A."""

    bm: int
    bk: int
    index_dtype: str


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
    x = x + bias                    bias: "row" (one value per row of D as the kernel sees it) or "col"
    x = x + beta * residual         residual: its contiguous mode, "n", "m" or "any"
    x = activation(x)               a name in functions.ACTIVATIONS
    x = function(x)                 the user's own
    """

    scale: bool = False
    bias: str | None = None
    bias_dtype: str | None = None
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
    `transposed` says that b and d are handed over as (N, K) and (N, M): a linear layer's input and output.
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
        return self.path == "sm_90" and self.majors[2] != "any" and self.aligns[2] * self.out_bytes % 16 == 0

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
        """Shared memory of the A and B rings."""
        cfg = self.config
        return (cfg.tile_m + cfg.tile_n) * cfg.tile_k * ELEMENT * cfg.stages

    @property
    def store_bytes(self) -> int:
        """Shared memory of the sm_90 store rings: `ring` chunks of 64 rows x 128 bytes for each warpgroup."""
        cfg = self.config
        return cfg.ring * cfg.warps_m * cfg.warps_n * cfg.teams * 64 * 128 if self.tma_store else 0


def unsupported(facts: GemmFacts) -> str:
    """Why no kernel can be built from these facts; "" if one can. Ops, tools and tests all ask this one."""
    cfg, spec = facts.config, facts.spec
    if facts.dtype not in ("bfloat16", "float16"):
        return f"operands of {facts.dtype}: the kernels multiply bfloat16 and float16"
    if facts.block and (facts.block.bm % MMA_K or facts.block.bk % MMA_K):
        return f"blocks of {facts.block.bm}x{facts.block.bk}: both sides must be multiples of {MMA_K}"
    if facts.path == "sm_80":
        if cfg.cluster_m * cfg.cluster_n * cfg.teams > 1:
            return "clusters and ping-pong teams exist on the sm_90 path only"
        if cfg.stages < 3:
            return f"{cfg.stages} stages; the cp.async pipeline needs 3"
        if any(n & (n - 1) for n in (cfg.tile_m, cfg.tile_n, cfg.tile_k, cfg.warps_m, cfg.warps_n)):
            return f"tile {cfg}: its sides and warps must be powers of two, which the swizzle needs"
        if facts.operand_bytes > spec.smem:
            return f"{facts.operand_bytes} bytes of shared memory; {spec.name} has {spec.smem} a block"
        return ""
    if spec.path != "sm_90":
        return f"{spec.name} has neither TMA nor WGMMA; its kernels are those of the sm_80 path"
    for name, align in zip("AB", facts.aligns, strict=False):
        if align < 8:
            return f"{name}'s address or strides are not multiples of 16 bytes, which TMA needs"
    if "any" in facts.majors[:2]:
        return "an operand has no contiguous mode, which TMA needs"
    accumulators = cfg.tile_m * cfg.tile_n // (cfg.warps_m * cfg.warps_n * 128)
    if accumulators > 128 and not (facts.epilogue.is_light and facts.tma_store):
        return (
            f"{accumulators} accumulators a thread leave no registers for an epilogue that loads or calls functions, "
            "nor for a store element by element"
        )
    needed = facts.operand_bytes + facts.store_bytes + 2 * BARRIER_BYTES
    if needed > spec.smem:
        return f"{needed} bytes of shared memory; {spec.name} has {spec.smem} a block"
    if facts.block and cfg.cluster_m > 1 and -(-facts.block.bm // cfg.tile_m) % cfg.cluster_m:
        return f"a cluster of {cfg.cluster_m} row tiles would span two block rows of {facts.block.bm}"
    return ""
