"""What an attention kernel is compiled from: plain, picklable facts; not lengths, strides and patterns."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.tile.element import Element, element_of

from ..masks.element_mask import ElementMask
from ..score_mod import ScoreMod

SUMS_PAD = 16  # fp32 values after a row of O in shared memory, so that neighbouring rows are in different banks
BARRIER_BYTES = 2048  # mbarriers, and what aligning the operand buffers to 1024 bytes may cost
HALF_SMEM = 233472 // 2 - 1024  # of sm_90's shared memory: what a block may have if two share an SM
STAGING_STAGES = 2  # of the ring of FP8 V that the forward kernel converts (fp8/values_inside)
SCALE_TOKENS = 128  # of 8 bits: rows of Q, and of K and V, that share a scale where scales are of blocks of tokens


@dataclass(frozen=True)
class FlashConfig:
    """Tile and schedule of one kernel.

    A CTA computes `tile_m` rows of Q and visits K and V `tile_n` rows at a time; K and V have rings of `stages` stages
    each. sm_90: each of `groups` consumer warpgroups has 64 of the rows. sm_80: each of `groups` warps has 16 of the
    rows, or 32. With more groups than that makes, several share their rows (FlashFacts.sharers). `dynamic`: CTAs fetch
    the numbers of their tiles from a counter (tile_queue); sm_90 only.
    """

    tile_m: int
    tile_n: int
    stages: int
    groups: int
    dynamic: bool = False
    ctas: int = 1  # sm_90: CTAs that share an SM

    def __str__(self) -> str:
        return (
            f"{self.tile_m}x{self.tile_n} stages {self.stages} groups {self.groups}{' dynamic' if self.dynamic else ''}"
        )


@dataclass(frozen=True)
class WindowKind:
    """Which columns row i of a query tile sees: from i + offset - left to i + offset + right, where those exist.

    `left` and `right` say whether there is such a bound; their sizes and SeqlenInfo.offset are arguments.
    """

    left: bool = False
    right: bool = False


@dataclass(frozen=True)
class BlockKind:
    """A block mask: its blocks' sides, and which elements of partial blocks are seen, None for all."""

    block_q: int
    block_k: int
    mask: ElementMask | None = None


@dataclass(frozen=True)
class FlashFacts:
    """Everything that selects one compiled kernel."""

    family: ClassVar[str] = "flash forward"
    arch: str  # the compiler's target
    path: str
    config: FlashConfig | None  # None until one is picked
    dtype: str = "bfloat16"
    head_dim: int = 128  # of q and k
    head_dim_v: int = 128  # of v and of the output
    window: WindowKind = WindowKind()
    softcap: bool = False
    lse: bool = False
    packed: bool = False  # sequences one after another, of lengths that the GPU reads
    blocks: BlockKind | None = None  # of block-sparse attention, which has no window
    score: ScoreMod | None = None  # what becomes of the scores; then there is no softcap
    sinks: str | None = None  # dtype of the sinks, a logit for each head that joins a row's sum; None: there are none
    offsets: bool = False  # True if q_offset and k_offset are arguments; else the last row is at the last column

    def key(self) -> str:
        """A text that is the same in every process."""
        return repr(self)

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @cached_property
    def element(self) -> Element:
        """Of Q and K, and of V and O where these have no other."""
        return element_of(self.dtype)

    @property
    def values_dtype(self) -> str:
        """Of P and V."""
        return self.dtype

    @property
    def loaded_v(self) -> str:
        """Of V in global memory."""
        return self.values_dtype

    @property
    def values_element(self) -> Element:
        return element_of(self.values_dtype)

    @property
    def kv_row_bytes(self) -> int:
        """Of a row of K and the same of V in global memory."""
        return self.head_dim * self.element.width + self.head_dim_v * element_of(self.loaded_v).width

    @property
    def smem_bytes(self) -> int:
        """Shared memory of Q and of the rings of K and V, with barriers."""
        cfg = self.config
        kv = cfg.tile_n * (self.head_dim + self.head_dim_v) * cfg.stages
        barriers = BARRIER_BYTES if self.path == "sm_90" else 0
        return (cfg.tile_m * self.head_dim + kv) * self.element.width + self.exchange_bytes + barriers

    @property
    def sharers(self) -> int:
        """How many warps, or on sm_90 warpgroups, share their rows: 1, 2 or 4.

        Each of them multiplies a part of the head dimension of Q and K, all add up these parts of the scores through
        shared memory, and each has a part of O's columns. At head dimension 512 O does not fit in registers otherwise.
        """
        return max((64 if self.path == "sm_90" else 16) * self.config.groups // self.config.tile_m, 1)

    @property
    def exchange_bytes(self) -> int:
        """Shared memory in which those that share rows exchange their parts of a tile of scores, in fp32."""
        return self.config.tile_m * self.config.tile_n * 4 * self.sharers if self.sharers > 1 else 0

    @property
    def ordered(self) -> bool:
        """sm_90: whether warpgroups issue their products one after the other, by an ordered barrier."""
        return self.config.groups > self.sharers

    @property
    def skips_max(self) -> bool:
        """sm_90: whether the softmax of full tiles first tries to do without their row maxima (step_without_max).

        Not at head dimension 256, where a step waits for the tensor cores and nothing is gained. Three warpgroups have
        no registers for it with 128 columns, or with a window that has a left bound. Nor with a score_mod, which would
        be computed in two places.
        """
        tight = self.config.groups == 3 and (self.config.tile_n == 128 or self.window.left)
        return max(self.head_dim, self.head_dim_v) < 256 and not tight and self.score is None

    @property
    def rescale_threshold(self) -> float:
        """sm_90: a row is rescaled when its maximum has grown by more than so many powers of 2 (step_lazily).

        With a threshold of 0 the p of a row's maximum is exact, and on normal data O's rms error is 3 % smaller. A
        threshold of an eighth has nearly all of that. It costs 9 to 12 % of the time, but 1 % at head dimension 256.
        """
        return 8.0 if max(self.head_dim, self.head_dim_v) < 256 else 0.125

    @property
    def adds_row_sums(self) -> bool:
        """sm_80: whether sums of P are added up instead of multiplied by ones; block masks then spill less."""
        return self.lse or self.blocks is not None

    @property
    def q_in_registers(self) -> bool:
        """sm_80: whether Q's fragments stay in registers, at most 32 a thread; a block mask needs registers, too."""
        if self.blocks is not None and self.head_dim == 96:
            return False
        return self.head_dim * self.config.tile_m <= 64 * 32 * self.config.groups


@dataclass(frozen=True)
class Float8Facts(FlashFacts):
    """Facts of a kernel whose Q and K are 8-bit floats (fp8/).

    P and V are fp16, to which another kernel converts V before or this one does (`converts`), or V has 16 bits already.
    With `fast` they are of 8 bits, and the other kernel transposes V. A row's fast P is at most 2 ** HEADROOM when its
    maximum is new, and 2 ** (HEADROOM + rescale_threshold) until it is rescaled, just below the largest number of e4m3,
    448.
    """

    dtype: str = "float8_e4m3fn"  # of Q and K
    given_v: str = "float8_e4m3fn"  # dtype of V before another kernel makes it what this one reads
    fast: bool = False
    out_dtype: str = "bfloat16"
    q_descale: bool = False  # whether Q has scales
    k_descale: bool = False
    v_descale: bool = False
    tokens: bool = False  # whether those that there are, are of blocks of tokens, not of heads (fp8/scales)
    converts: bool = False  # whether this kernel itself makes V fp16 (fp8/values_inside), and none runs before it

    @property
    def loaded_v(self) -> str:
        """Of V in global memory."""
        return self.given_v if self.converts else self.values_dtype

    @property
    def values_dtype(self) -> str:
        if self.given_v == self.dtype:
            return self.dtype if self.fast else "float16"
        return self.given_v

    @property
    def rescale_threshold(self) -> float:
        return 5.75 if self.fast else super().rescale_threshold

    @property
    def smem_bytes(self) -> int:
        """Shared memory of Q and of the rings of K and V, with barriers."""
        cfg = self.config
        values = cfg.tile_n * self.head_dim_v * cfg.stages * self.values_element.width
        given = cfg.tile_n * self.head_dim_v * STAGING_STAGES if self.converts else 0
        return (cfg.tile_m + cfg.tile_n * cfg.stages) * self.head_dim + values + given + BARRIER_BYTES


@dataclass(frozen=True)
class ValuesFacts:
    """Facts of the kernel that converts FP8 V to FP16 (fp8/converted_values), or transposes it."""

    family: ClassVar[str] = "values of 8 bits"
    arch: str
    head_dim: int
    tile: int = 0  # keys of the forward kernel's tiles; 0: V stays in the order that it has
    packed: bool = False  # sequences, each of which begins with a tile

    def key(self) -> str:
        """A text that is the same in every process."""
        return repr(self)


@dataclass(frozen=True)
class DecodeFacts(FlashFacts):
    """Facts of a kernel for few queries and long K and V (decode/)."""

    family: ClassVar[str] = "decode"
    seqlens: bool = False  # whether each item has a length of its own
    spans: bool = False  # whether it has a first row, too; then the window has a left bound
    page_size: int = 0  # rows of a page of K and V; 0 without pages
    split: bool = False  # whether an item's tiles are split among CTAs; a second kernel then combines their results
    cache: str | None = None  # dtype of K and V where they are of 8 bits; then each warp has tiles of its own
    k_descale: bool = False  # whether such a K has scales, and V
    v_descale: bool = False

    @property
    def box(self) -> int:
        """Rows of K and V that one TMA load brings."""
        return min(self.page_size or self.config.tile_n, self.config.tile_n)

    @property
    def columns(self) -> int:
        """Of K and V, that a CTA computes at a time."""
        return self.config.tile_n * (self.config.groups if self.cache else 1)

    @property
    def by_bits(self) -> bool:
        """Of 8-bit caches: whether e4m3 is made fp16 by arithmetic on bits, where there is no instruction for it."""
        return self.cache == "float8_e4m3fn" and self.spec.capability < (8, 9)

    @property
    def early(self) -> bool:
        """Of 8-bit caches: whether kernels may be launched before the ones before them have ended."""
        return self.spec.name == "sm_90"

    @property
    def smem_bytes(self) -> int:
        """Shared memory of Q and of the rings of K and V; of 8-bit caches, of all warps' rings, or of their sums."""
        if self.cache is None:
            return super().smem_bytes
        cfg = self.config
        rings = cfg.groups * cfg.stages * cfg.tile_n * (self.head_dim + self.head_dim_v)
        sums = cfg.groups * cfg.tile_m * (self.head_dim_v + SUMS_PAD) * 4
        return self.softmax_bytes + self.q_bytes + max(rings, sums)

    @property
    def q_in_registers(self) -> bool:
        """Of 8-bit caches: whether Q's fragments stay in registers, beside O."""
        return super().q_in_registers if self.cache is None else max(self.head_dim, self.head_dim_v) <= 128

    @property
    def q_bytes(self) -> int:
        """Of 8-bit caches: shared memory of Q's fragments where they do not."""
        return 0 if self.q_in_registers else self.config.tile_m * self.head_dim * 2

    @property
    def softmax_bytes(self) -> int:
        """Of 8-bit caches: shared memory of all warps' largest scores and sums of their rows."""
        return self.config.groups * self.config.tile_m * 2 * 4
