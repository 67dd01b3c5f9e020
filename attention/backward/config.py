"""Configurations and facts that the attention backward kernels are compiled from."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.tile.element import BYTES, Element, element_of

from ..forward.config import BlockKind, WindowKind
from ..masks.element_mask import ElementMask, MemberKind
from ..masks.score_mod import Read, ScoreMod
from .warps import Warps, warps_of

FP32 = BYTES["float32"]
ALIGN = 1024  # of operands in shared memory, bytes
PREPARE_WARPS = 4  # warps per CTA of the prepare kernel
QUEUE_BYTES = 80  # of forward/tile_queue: barriers and fields of its slots


@dataclass(frozen=True)
class BackwardConfig:
    """Tile and schedule of one kernel, common to all mainloops. Each mainloop has a subclass.

    A CTA computes dK and dV of `tile_n` rows of K and V. It loads Q and dO `tile_m` rows at a time, into rings of
    `stages` stages each. `groups` is the number of consumer warpgroups, on sm_80 of warps.
    """

    query_tiles = 1  # per step

    tile_m: int
    tile_n: int
    stages: int
    groups: int
    ctas: int = 1  # sm_90: CTAs that share an SM

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n} stages {self.stages} groups {self.groups}"

    @property
    def ring_q(self) -> int:
        """Stages of Q's ring."""
        return self.stages

    def ring_do(self, head_dim: int, head_dim_v: int) -> int:
        """Stages of dO's ring."""
        return self.stages

    @property
    def dq_groups(self) -> int:
        """Number of `groups` that split a query tile's dQ."""
        return self.groups // self.query_tiles

    @property
    def step_rows(self) -> int:
        """Query rows per step."""
        return self.tile_m * self.query_tiles

    def kv_elements(self, facts: "BackwardFacts") -> int:
        """Elements of K, V, and the rings of Q and dO in shared memory."""
        rows = facts.head_dim, facts.head_dim_v
        return self.tile_n * sum(rows) + self.step_rows * (self.ring_q * rows[0] + self.ring_do(*rows) * rows[1])

    def barrier_bytes(self, facts: "BackwardFacts") -> int:
        """sm_90: mbarriers and the queue of tiles."""
        return 16 * (2 + self.ring_q + self.ring_do(facts.head_dim, facts.head_dim_v)) + QUEUE_BYTES


@dataclass(frozen=True)
class Sm80Config(BackwardConfig):
    """mainloop_sm80: `groups` warps split each matmul (warps.py). dO has one stage if P' stays in registers."""

    def warps(self, head_dim: int, head_dim_v: int) -> Warps:
        """Split of the matmuls across warps."""
        return warps_of(self, head_dim, head_dim_v)

    def ring_do(self, head_dim: int, head_dim_v: int) -> int:
        return 1 if self.warps(head_dim, head_dim_v).in_registers else self.stages

    def smem_bytes(self, facts: "BackwardFacts") -> int:
        """Bytes of shared memory: operands and rows, dS, and P' unless it stays in registers."""
        in_registers = self.warps(facts.head_dim, facts.head_dim_v).in_registers
        elements = self.kv_elements(facts) + self.tile_m * self.tile_n * (2 - in_registers)
        return elements * facts.element.width + self.tile_m * 2 * self.ring_q * FP32


@dataclass(frozen=True)
class StepConfig(BackwardConfig):
    """mainloop_sm90: each of `groups` consumer warpgroups owns 64 rows of K, and has a warp that stores its dQ."""

    sums: int = 1  # shared memory buffers of dQ: 1, or as many as stages

    def __str__(self) -> str:
        return super().__str__() + f" sums {self.sums}" * (self.sums > 1)

    @property
    def storing_warps(self) -> int:
        """Number of producer warps that accumulate dQ in global memory."""
        return self.groups

    @property
    def in_turn(self) -> bool:
        """True if WGMMAs are issued one after the other. A warpgroup with all columns of dQ has no registers for
        overlap; the other CTA of the SM keeps the tensor cores busy."""
        return self.groups == 1

    @property
    def ds_buffers(self) -> int:
        """Number of dS buffers. A single warpgroup needs one, since it reads dS before it writes it again."""
        return 1 if self.in_turn else 2

    def variants(self, deterministic: bool) -> "Iterator[StepConfig]":
        """Configurations to try, the most promising first. Deterministic kernels may have several dQ buffers: one waits
        for its semaphore while the next is filled (heuristics.two_buffers_pay)."""
        if deterministic and self.groups > 1:
            yield replace(self, sums=self.stages)
        yield self

    def smem_bytes(self, facts: "BackwardFacts") -> int:
        """Bytes of shared memory: barriers, rows and dQ, padding for alignment, operands and dS."""
        elements = self.kv_elements(facts) + self.tile_m * self.tile_n * self.ds_buffers
        dq = self.tile_m * facts.head_dim * self.sums
        first = -(-self.barrier_bytes(facts) // 128) * 128 + (self.tile_m * 2 * self.ring_q + dq) * FP32
        return elements * facts.element.width + -(-first // ALIGN) * ALIGN


@dataclass(frozen=True)
class AheadConfig(StepConfig):
    """ahead_sm90: scores are prefetched in units of 64 query rows."""

    stages_q: int = 0  # stages of Q's ring; 0: as many as dO's
    one_ds: bool = False  # dS has one buffer

    def __str__(self) -> str:
        text = f"{super().__str__()} ahead" + f" stages of Q {self.stages_q}" * (self.stages_q > 0)
        return text + " one dS" * self.one_ds

    @property
    def ring_q(self) -> int:
        return self.stages_q or self.stages

    @property
    def ds_buffers(self) -> int:
        return 1 if self.one_ds else super().ds_buffers

    def variants(self, deterministic: bool) -> "Iterator[AheadConfig]":
        if deterministic:
            yield replace(self, sums=self.stages, one_ds=True)
            yield replace(self, sums=self.stages, stages_q=0)
        yield self


@dataclass(frozen=True)
class SharedColumnsConfig(BackwardConfig):
    """split_head_dim_sm90: each of two warpgroups owns all rows of K and half of the columns of dK and dV."""

    storing_warps: ClassVar[int] = 0

    query_tiles: int = 1  # per step: 1, or one per warpgroup
    dq_parts: int = 1  # consecutive parts in which a warpgroup's dQ is stored
    one_do: bool = False  # dO's ring has one stage
    direct: bool = False  # dQ is accumulated in memory from registers, not through shared memory

    def __str__(self) -> str:
        return f"{super().__str__()} ahead{' direct' * self.direct} of columns, {self.query_tiles} query tiles"

    def ring_do(self, head_dim: int, head_dim_v: int) -> int:
        return 1 if self.one_do else self.stages

    def variants(self, deterministic: bool) -> "Iterator[SharedColumnsConfig]":
        """Configurations to try. Accumulation from registers (`direct`) is nondeterministic."""
        if not deterministic:
            yield self
            if not self.direct:
                return
        copied = replace(self, direct=False)
        yield copied
        if self.dq_parts > 1:
            yield replace(copied, one_do=True)

    def smem_bytes(self, facts: "BackwardFacts") -> int:
        """Bytes of shared memory: barriers and rows, padded to 1024 bytes, operands, P, dS, and parts of dQ."""
        rows = self.step_rows
        elements = self.kv_elements(facts) + 2 * self.tile_n * rows
        dq = 0 if self.direct else rows * facts.head_dim // self.dq_parts
        first = self.barrier_bytes(facts) + 2 * self.stages * rows * FP32
        return elements * facts.element.width + dq * FP32 + -(-first // ALIGN) * ALIGN


@dataclass(frozen=True)
class BackwardFacts:
    """Everything that selects one compiled kernel for dK, dV and dq_accum."""

    family: ClassVar[str] = "flash backward"
    arch: str  # the compiler's target
    path: str
    config: Any  # the configuration of a mainloop; None until one is picked
    dtype: str = "bfloat16"
    head_dim: int = 128  # of q and k
    head_dim_v: int = 128  # of v and of the output
    window: WindowKind = WindowKind()
    softcap: bool = False
    packed: bool = False  # variable-length sequences, with cu_seqlens read on the GPU
    blocks: BlockKind | None = None  # block-sparse attention, without a window
    deterministic: bool = False  # True if KV tiles accumulate dQ in a fixed order (semaphores.py)
    score: ScoreMod | None = None  # score_mod; excludes a softcap
    score_sums: tuple[int, ...] = ()  # indices of score_mod's captured tensors that need a gradient
    offsets: bool = False  # True if q_offset and k_offset are arguments; see FlashFacts
    grad_dtype: str | None = None  # of dK and dV; None: the operands'
    packed_heads: int = 1  # query heads of a KV head whose rows are interleaved, with a mask of these rows; sm_90
    ranges: bool = False  # True if a KV tile has work items for ranges of query rows (ranges.py)
    split_heads: bool = False  # True if a KV tile has work items for some of its query heads each (items.py)

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @cached_property
    def element(self) -> Element:
        """Element type of Q, K, V, O and their gradients."""
        return element_of(self.dtype)

    @property
    def shared_kv(self) -> bool:
        """True if several work items have parts of dK and dV of a KV tile, in FP32."""
        return self.ranges or self.split_heads

    @property
    def element_mask(self) -> ElementMask | None:
        """The mask_mod of the block mask; None without a block mask, too."""
        return None if self.blocks is None else self.blocks.mask

    @cached_property
    def members(self) -> MemberKind | None:
        """Facts of a mask of selected KV blocks that sm_90's mainloops evaluate by members.py."""
        mask = self.element_mask
        special = self.path == "sm_90" and self.score is None and not self.offsets
        return mask.members if mask is not None and special else None

    @cached_property
    def score_reads(self) -> list[Read]:
        """The score_mod's reads of the tensors in `score_sums`."""
        return [] if self.score is None else self.score.reads(self.score_sums)

    @cached_property
    def keeps_scores(self) -> bool:
        """True if scores are kept for dS, which recomputes P from them; False if P times d score_mod / d score is kept.
        Scores are kept if the gradients of captured tensors need the scores, or P by itself."""
        if self.score is None or not self.score_reads:
            return False
        return not self.score.adds or any(r.needs_score for r in self.score_reads)

    @property
    def stages_do(self) -> int:
        """Stages of dO's ring."""
        return self.config.ring_do(self.head_dim, self.head_dim_v)

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory per CTA."""
        return self.config.smem_bytes(self)


def overlaps(arch: str) -> bool:
    """True if the architecture has programmatic dependent launch: a secondary kernel starts before the primary ends."""
    return arch_named(arch).path == "sm_90"


@dataclass(frozen=True)
class PrepareFacts:
    """Traits of the prepare kernel: LSE and delta of each row, and zeros for dq_accum and the semaphores."""

    family: ClassVar[str] = "backward prepare"
    arch: str
    dtype: str
    tile_m: int  # BackwardConfig's
    head_dim: int
    head_dim_v: int
    lse_gradient: bool  # True if LSE has a gradient
    packed: bool
    sinks: str | None = None  # dtype of sinks that need a gradient; None: no such sinks
    parts: int = 0  # semaphores per query tile; 0 unless deterministic
    packed_heads: int = 1  # BackwardFacts'


@dataclass(frozen=True)
class ConvertFacts:
    """Traits of the convert kernel, which computes dQ from dq_accum."""

    family: ClassVar[str] = "backward dQ"
    arch: str
    path: str
    dtype: str
    config: BackwardConfig
    head_dim: int
    packed: bool
    grad_dtype: str | None = None  # of dQ; None: the operands'
    packed_heads: int = 1  # BackwardFacts'


@dataclass(frozen=True)
class CombineFacts:
    """Traits of the kernel that adds parts of dK and dV (combine.py)."""

    family: ClassVar[str] = "backward combine"
    arch: str
    dtype: str  # of dK and dV
    head_dim: int
    head_dim_v: int
    packed: bool
