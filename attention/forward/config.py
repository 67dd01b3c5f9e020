"""Facts that select an attention kernel: plain, picklable values. Lengths, strides and patterns are not part of
them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.tile.element import Element, element_of

from ..masks.element_mask import ElementMask
from ..masks.score_mod import ScoreMod

ACC_PAD = 16  # FP32 values after a row of O in shared memory, so that neighboring rows are in different banks
BARRIER_BYTES = 2048  # mbarriers, and the padding that aligns operand buffers to 1024 bytes
HALF_SMEM = 233472 // 2 - 1024  # shared memory of a CTA on sm_90 if two share an SM
STAGING_STAGES = 2  # of the FP8 V ring that the forward kernel converts from (fp8/values_inside)
SCALE_TOKENS = 128  # FP8: tokens (rows of Q, K or V) per scale with one scale per block of tokens


@dataclass(frozen=True)
class FlashConfig:
    """Tile and schedule of one kernel.

    A CTA computes `tile_m` rows of Q and visits K and V `tile_n` rows at a time; K and V have rings of `stages` stages
    each. sm_90: each of `groups` consumer warpgroups has 64 rows. sm_80: each of `groups` warps has 16 or 32 rows. With
    more groups than rows, several groups split the head dimension of the same rows (FlashFacts.sharers). `dynamic`:
    CTAs fetch their tile indices from a counter (tile_queue); sm_90 only.
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
    """Bounds of a window: row i attends to columns i + offset - left to i + offset + right.

    `left` and `right` are True if there is such a bound; their sizes and SeqlenInfo.offset are arguments.
    """

    left: bool = False
    right: bool = False


@dataclass(frozen=True)
class BlockKind:
    """A block mask: the sides of its blocks, and the element mask of partial blocks, None if they are unmasked."""

    block_q: int
    block_k: int
    mask: ElementMask | None = None


@dataclass(frozen=True)
class FlashFacts:
    """Everything that selects one compiled kernel."""

    family: ClassVar[str] = "flash forward"
    gathers: ClassVar[bool] = False  # True if KV tiles are gathered from listed blocks (GatherFacts)
    arch: str  # the compiler's target
    path: str
    config: Any  # FlashConfig; None until one is picked
    dtype: str = "bfloat16"
    head_dim: int = 128  # of q and k
    head_dim_v: int = 128  # of v and of the output
    window: WindowKind = WindowKind()
    softcap: bool = False
    lse: bool = False
    packed: bool = False  # packed sequences, whose cu_seqlens the GPU reads
    blocks: BlockKind | None = None  # block-sparse attention; excludes a window
    score: ScoreMod | None = None  # score_mod; excludes a softcap
    sinks: str | None = None  # dtype of the sinks, one logit per head that joins a row's sum; None without sinks
    offsets: bool = False  # True if q_offset and k_offset are arguments; else the last row is at the last column
    out_dtype: str | None = None  # dtype of O, that of Q or "float32"; None for that of Q

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @cached_property
    def element(self) -> Element:
        """Element type of Q and K, and of V and O unless these have their own."""
        return element_of(self.dtype)

    @property
    def stored_dtype(self) -> str:
        """Dtype of O in global memory."""
        return self.out_dtype or self.dtype

    @property
    def values_dtype(self) -> str:
        """Dtype of P and V."""
        return self.dtype

    @property
    def loaded_v(self) -> str:
        """Dtype of V in global memory."""
        return self.values_dtype

    @property
    def values_element(self) -> Element:
        return element_of(self.values_dtype)

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of a row of K plus those of a row of V in global memory."""
        return self.head_dim * self.element.width + self.head_dim_v * element_of(self.loaded_v).width

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory for Q, the rings of K and V, and barriers."""
        cfg = self.config
        kv = cfg.tile_n * (self.head_dim + self.head_dim_v) * cfg.stages
        barriers = BARRIER_BYTES if self.path == "sm_90" else 0
        return (cfg.tile_m * self.head_dim + kv) * self.element.width + self.exchange_bytes + barriers

    @property
    def sharers(self) -> int:
        """Number of warps (sm_80) or warpgroups (sm_90) that split the head dimension of the same rows: 1, 2 or 4.

        Each multiplies a part of the head dimension of Q and K, all reduce these partial scores through shared memory,
        and each has a part of O's columns. At head dimension 512 O does not fit in registers otherwise.
        """
        return max((64 if self.path == "sm_90" else 16) * self.config.groups // self.config.tile_m, 1)

    @property
    def exchange_bytes(self) -> int:
        """Bytes of shared memory for the FP32 partial scores that warps or warpgroups with the same rows exchange."""
        return self.config.tile_m * self.config.tile_n * 4 * self.sharers if self.sharers > 1 else 0

    @property
    def ordered(self) -> bool:
        """sm_90: True if an ordered barrier makes warpgroups issue their WGMMAs one after the other (ping-pong)."""
        return self.config.groups > self.sharers

    @property
    def skips_max(self) -> bool:
        """sm_90: True if the softmax of full tiles first tries to skip its row maxima (step_without_max).

        It does not help at head dimension 256, where a step waits for the tensor cores. Three warpgroups have no
        registers for it with 128 columns, or with a window that has a left bound. A score_mod excludes it, since it
        would be compiled in two places, and so do gathered blocks, all of whose tiles are masked.
        """
        tight = self.config.groups == 3 and (self.config.tile_n == 128 or self.window.left)
        return max(self.head_dim, self.head_dim_v) < 256 and not tight and self.score is None and not self.gathers

    @property
    def rescale_threshold(self) -> float:
        """sm_90: a row is rescaled when its maximum has grown by more than this many powers of 2 (step_lazily).

        With a threshold of 0 the p of a row's maximum is exact, and on normal data O's RMS error is 3 % smaller. A
        threshold of 1/8 has nearly all of that. It costs 9 to 12 % of the time, but 1 % at head dimension 256.
        """
        return 8.0 if max(self.head_dim, self.head_dim_v) < 256 else 0.125

    @property
    def adds_row_sums(self) -> bool:
        """sm_80: True if row sums of P use additions instead of an MMA with ones; block masks then spill less."""
        return self.lse or self.blocks is not None

    @property
    def q_in_registers(self) -> bool:
        """sm_80: True if Q's fragments stay in registers, at most 32 per thread; a block mask needs registers, too."""
        if self.blocks is not None and self.head_dim == 96:
            return False
        return self.head_dim * self.config.tile_m <= 64 * 32 * self.config.groups


@dataclass(frozen=True)
class GatherFacts(FlashFacts):
    """Facts of a kernel whose KV tiles are gathered from the union of its tokens' lists of KV blocks (gather/); sm_90
    only. Rows of Q are tokens times the query heads that share a list.

    block_size: keys of a KV block, a power of two up to tile_n.
    causal: True if a token attends to keys up to its position, the last token being at the last key.
    """

    gathers: ClassVar[bool] = True
    block_size: int = 64
    causal: bool = False

    @property
    def per_tile(self) -> int:
        """Blocks of a KV tile."""
        return self.config.tile_n // self.block_size

    @property
    def boxes(self) -> bool:
        """True if TMA loads each block of K and V, as one box of all its keys; False if cp.async copies their rows."""
        return self.block_size >= 64

    @property
    def skips_max(self) -> bool:
        """As FlashFacts.skips_max. Where rows of Q have all blocks of a step, the step has no mask."""
        return self.boxes and self.head_dim < 256


@dataclass(frozen=True)
class Float8Facts(FlashFacts):
    """Facts of a kernel with FP8 Q and K (fp8/).

    By default P and V are FP16: another kernel converts V first, this kernel does (`converts`), or V is 16-bit already.
    With `fast` they are FP8, and the other kernel transposes V. A row's fast P is at most 2 ** HEADROOM when its
    maximum is new, and at most 2 ** (HEADROOM + rescale_threshold) until it is rescaled, just below 448, the largest
    E4M3 value.
    """

    dtype: str = "float8_e4m3fn"  # of Q and K
    given_v: str = "float8_e4m3fn"  # dtype of the caller's V, before another kernel converts it
    fast: bool = False
    out_dtype: str = "bfloat16"
    q_descale: bool = False  # True if Q has dequantization scales
    k_descale: bool = False
    v_descale: bool = False
    tokens: bool = False  # one scale per block of tokens instead of one per head (fp8/scales)
    converts: bool = False  # this kernel converts V to FP16 (fp8/values_inside), and no kernel runs before it

    @property
    def loaded_v(self) -> str:
        """Dtype of V in global memory."""
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
        """Bytes of shared memory for Q, the rings of K and V, and barriers."""
        cfg = self.config
        values = cfg.tile_n * self.head_dim_v * cfg.stages * self.values_element.width
        staging = cfg.tile_n * self.head_dim_v * STAGING_STAGES if self.converts else 0
        return (cfg.tile_m + cfg.tile_n * cfg.stages) * self.head_dim + values + staging + BARRIER_BYTES


@dataclass(frozen=True)
class ValuesFacts:
    """Facts of the kernel that converts FP8 V to FP16 (fp8/converted_values), or transposes it
    (fp8/transposed_values)."""

    family: ClassVar[str] = "FP8 values"
    arch: str
    head_dim: int
    tile: int = 0  # keys per tile of the forward kernel; 0: V is not transposed
    packed: bool = False  # packed sequences, each of which begins at a tile boundary


@dataclass(frozen=True)
class DecodeFacts(FlashFacts):
    """Facts of a decode kernel (decode/): short Q, long K and V."""

    family: ClassVar[str] = "decode"
    seqlens: bool = False  # each sequence has its own length
    spans: bool = False  # each sequence also has a first row; then the window has a left bound
    page_size: int = 0  # tokens per page of the KV cache; 0 without pages
    split: bool = False  # split-KV: a sequence's tiles are split among CTAs, and a second kernel combines the results
    cache: str | None = None  # dtype of an FP8 K and V, None for 16-bit; with FP8 each warp has its own tiles
    k_descale: bool = False  # FP8 K has dequantization scales; v_descale: FP8 V
    v_descale: bool = False

    @property
    def box(self) -> int:
        """Rows of K and V per TMA load."""
        return min(self.page_size or self.config.tile_n, self.config.tile_n)

    @property
    def columns(self) -> int:
        """Columns of K and V that a CTA computes per step."""
        return self.config.tile_n * (self.config.groups if self.cache else 1)

    @property
    def by_bits(self) -> bool:
        """FP8 caches: True if E4M3 is converted to FP16 by bit arithmetic, on GPUs without an instruction for it."""
        return self.cache == "float8_e4m3fn" and self.spec.capability < (8, 9)

    @property
    def early(self) -> bool:
        """FP8 caches: True if kernels use programmatic dependent launch."""
        return self.spec.name == "sm_90"

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory for Q and the rings of K and V; with an FP8 cache, for all warps' rings or their
        accumulators."""
        if self.cache is None:
            return super().smem_bytes
        cfg = self.config
        rings = cfg.groups * cfg.stages * cfg.tile_n * (self.head_dim + self.head_dim_v)
        accumulators = cfg.groups * cfg.tile_m * (self.head_dim_v + ACC_PAD) * 4
        return self.softmax_bytes + self.q_bytes + max(rings, accumulators)

    @property
    def q_in_registers(self) -> bool:
        """FP8 caches: True if Q's fragments stay in registers next to O."""
        return super().q_in_registers if self.cache is None else max(self.head_dim, self.head_dim_v) <= 128

    @property
    def q_bytes(self) -> int:
        """FP8 caches: bytes of shared memory for Q's fragments if they are not in registers."""
        return 0 if self.q_in_registers else self.config.tile_m * self.head_dim * 2

    @property
    def softmax_bytes(self) -> int:
        """FP8 caches: bytes of shared memory for the row maxima and row sums of all warps."""
        return self.config.groups * self.config.tile_m * 2 * 4
