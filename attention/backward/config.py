"""What the kernels of attention's backward are compiled from."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from cute_kernels.arch import ArchSpec, arch_named
from cute_kernels.tile.element import BYTES, Element, element_of

from ..forward.config import BlockKind, WindowKind
from ..score_mod import Read, ScoreMod
from .warps import Warps, warps_of

FP32 = BYTES["float32"]
ALIGN = 1024  # of operands in shared memory, bytes
PREPARE_WARPS = 4  # of a CTA of the kernel before
QUEUE_BYTES = 80  # of forward/tile_queue: barriers and fields of its slots


@dataclass(frozen=True)
class BackwardConfig:
    """Tile and schedule of one kernel: what all mainloops have. Each of them has a subclass.

    A CTA computes dK and dV of `tile_n` rows of K and V, and visits Q and dO `tile_m` rows at a time, which have rings
    of `stages` stages each. `groups` are consumer warpgroups, on sm_80 warps.
    """

    query_tiles = 1  # of a step

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
        """Those of `groups` that share a query tile's dQ."""
        return self.groups // self.query_tiles

    @property
    def step_rows(self) -> int:
        """Query rows of a step."""
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
    """mainloop_sm80: `groups` warps share products as warps.py says. dO has one stage where P' stays in registers."""

    def warps(self, head_dim: int, head_dim_v: int) -> Warps:
        """How warps share the products."""
        return warps_of(self, head_dim, head_dim_v)

    def ring_do(self, head_dim: int, head_dim_v: int) -> int:
        return 1 if self.warps(head_dim, head_dim_v).in_registers else self.stages

    def smem_bytes(self, facts: "BackwardFacts") -> int:
        """Shared memory: operands and rows, dS, and P' where it does not stay in registers."""
        in_registers = self.warps(facts.head_dim, facts.head_dim_v).in_registers
        elements = self.kv_elements(facts) + self.tile_m * self.tile_n * (2 - in_registers)
        return elements * facts.element.width + self.tile_m * 2 * self.ring_q * FP32


@dataclass(frozen=True)
class StepConfig(BackwardConfig):
    """mainloop_sm90: each of `groups` consumer warpgroups has 64 of the rows of K, and a warp that stores its dQ."""

    sums: int = 1  # buffers of dQ on their way to memory: 1, or as many as stages

    def __str__(self) -> str:
        return super().__str__() + f" sums {self.sums}" * (self.sums > 1)

    @property
    def storing_warps(self) -> int:
        """Those that add dQ to memory."""
        return self.groups

    @property
    def in_turn(self) -> bool:
        """True if products are issued one after the other. A warpgroup that has all columns of dQ has no registers for
        more; the CTA beside it then has the tensor cores."""
        return self.groups == 1

    @property
    def ds_buffers(self) -> int:
        """Buffers of dS; one warpgroup alone has read it before it writes to it again."""
        return 1 if self.in_turn else 2

    def variants(self, deterministic: bool) -> "Iterator[StepConfig]":
        """Configurations to try, the most promising first. In one order buffers of dQ that wait for their turn while
        the next ones are made are worth their shared memory."""
        if deterministic and self.groups > 1:
            yield replace(self, sums=self.stages)
        yield self

    def smem_bytes(self, facts: "BackwardFacts") -> int:
        """Shared memory: barriers, rows and dQ, with what aligns the others, and operands and dS."""
        elements = self.kv_elements(facts) + self.tile_m * self.tile_n * self.ds_buffers
        dq = self.tile_m * facts.head_dim * self.sums
        first = -(-self.barrier_bytes(facts) // 128) * 128 + (self.tile_m * 2 * self.ring_q + dq) * FP32
        return elements * facts.element.width + -(-first // ALIGN) * ALIGN


@dataclass(frozen=True)
class AheadConfig(StepConfig):
    """ahead_sm90: scores are computed ahead, by units of 64 query rows."""

    stages_q: int = 0  # of Q's ring; 0: as many as dO's
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
    """shared_columns_sm90: each of two warpgroups has all rows of K and half of the columns of dK and dV."""

    storing_warps: ClassVar[int] = 0

    query_tiles: int = 1  # of a step: 1, or one a warpgroup
    dq_parts: int = 1  # in how many parts, one after the other, a warpgroup's dQ goes to memory
    one_do: bool = False  # dO's ring has one stage
    direct: bool = False  # dQ is added to memory from registers, not through shared memory

    def __str__(self) -> str:
        return f"{super().__str__()} ahead{' direct' * self.direct} of columns, {self.query_tiles} query tiles"

    def ring_do(self, head_dim: int, head_dim_v: int) -> int:
        return 1 if self.one_do else self.stages

    def variants(self, deterministic: bool) -> "Iterator[SharedColumnsConfig]":
        """Configurations to try; what is added from registers has no order."""
        if not deterministic:
            yield self
            if not self.direct:
                return
        copied = replace(self, direct=False)
        yield copied
        if self.dq_parts > 1:
            yield replace(copied, one_do=True)

    def smem_bytes(self, facts: "BackwardFacts") -> int:
        """Shared memory: barriers and rows, which fill multiples of 1024 bytes, operands, P, dS, and parts of dQ."""
        rows = self.step_rows
        elements = self.kv_elements(facts) + 2 * self.tile_n * rows
        dq = 0 if self.direct else rows * facts.head_dim // self.dq_parts
        first = self.barrier_bytes(facts) + 2 * self.stages * rows * FP32
        return elements * facts.element.width + dq * FP32 + -(-first // ALIGN) * ALIGN


@dataclass(frozen=True)
class BackwardFacts:
    """Everything that selects one compiled kernel of dK, dV and of dQ's sums."""

    family: ClassVar[str] = "flash backward"
    arch: str  # the compiler's target
    path: str
    config: BackwardConfig | None  # None until one is picked
    dtype: str = "bfloat16"
    head_dim: int = 128  # of q and k
    head_dim_v: int = 128  # of v and of the output
    window: WindowKind = WindowKind()
    softcap: bool = False
    packed: bool = False  # sequences one after another, of lengths that the GPU reads
    blocks: BlockKind | None = None  # of block-sparse attention, which has no window
    deterministic: bool = False  # whether the sums of dQ are added up in the order of K's tiles (turns.py)
    score: ScoreMod | None = None  # what becomes of the scores; then there is no softcap
    score_sums: tuple[int, ...] = ()  # the tensors that it captures, by number, whose gradients are computed
    offsets: bool = False  # True if q_offset and k_offset are arguments; see FlashFacts
    grad_dtype: str | None = None  # of dQ, dK and dV; None: the operands'

    def key(self) -> str:
        """A text that is the same in every process."""
        return repr(self)

    @cached_property
    def spec(self) -> ArchSpec:
        return arch_named(self.arch)

    @cached_property
    def element(self) -> Element:
        """Of Q, K, V, O and their gradients."""
        return element_of(self.dtype)

    @cached_property
    def score_reads(self) -> list[Read]:
        """What the score_mod reads of these tensors."""
        return self.score.reads(self.score_sums)

    @cached_property
    def keeps_scores(self) -> bool:
        """Whether dS is computed of the scores, and P once more, and not of P times d score_mod / d score: where what
        captured tensors get needs the scores, or P alone."""
        return bool(self.score_reads) and not (self.score.adds and not any(r.needs_score for r in self.score_reads))

    @property
    def stages_do(self) -> int:
        """Of dO's ring."""
        return self.config.ring_do(self.head_dim, self.head_dim_v)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.config.smem_bytes(self)


def overlaps(arch: str) -> bool:
    """Whether a launch may begin before the one that it depends on has ended (programmatic dependent launch)."""
    return arch_named(arch).path == "sm_90"


@dataclass(frozen=True)
class PrepareFacts:
    """Traits of the kernel before: LSE and delta of each row, and zeros for dq_accum and the semaphores of turns.py."""

    family: ClassVar[str] = "backward prepare"
    arch: str
    dtype: str
    tile_m: int  # BackwardConfig's
    head_dim: int
    head_dim_v: int
    lse_gradient: bool  # whether there is a gradient of LSE, too
    packed: bool
    sinks: str | None = None  # dtype of the sinks, of which a gradient is wanted; None: of none
    parts: int = 0  # semaphores of a query tile; 0 unless deterministic

    def key(self) -> str:
        return repr(self)


@dataclass(frozen=True)
class ConvertFacts:
    """Of the kernel after: dQ from its sums."""

    family: ClassVar[str] = "backward dQ"
    arch: str
    path: str
    dtype: str
    config: BackwardConfig
    head_dim: int
    packed: bool
    grad_dtype: str | None = None  # of dQ; None: the operands'

    def key(self) -> str:
        return repr(self)
